"""The public interface as plain data: names, parameters and command-line options; incompatible changes to it."""

import argparse
import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin
from unittest import mock

from tests.cli.command import run_here

Interface = dict[str, Any]
"""Properties by name as a user writes it, e.g. ``MegatronStrategy(tp)`` or ``convert --tp``."""

MEMBERS = {
    "MegatronStrategy": (
        "global_batch_size",
        "data_parallel_size",
        "data_parallel_group",
        "is_last_stage",
    ),
    "MegatronModule": ("generate", "generate_with_scores", "logits", "save_pretrained"),
    "TrainStep": (
        "get_batch",
        "forward_step",
        "loss_func",
        "loss_terms",
        "metrics",
        "update_metrics",
    ),
    "MegatronDataModule": ("has_split", "check", "lengths", "open"),
}
"""Members that users call or override, by class."""
COMMANDS = (
    "train-tokenizer",
    "preprocess",
    "convert-dataset",
    "merge",
    "inspect",
    "convert",
    "generate",
    "doctor",
)
TRAINER_COMMANDS = ("fit", "validate", "test", "predict")
_FIT = "--trainer.strategy=MegatronStrategy --data=IndexedDataModule --print_config"
_CALLBACKS = ("LossCurve", "PerplexityReport", "SampleText", "lightning_megatron.ThroughputMonitor")
_ABSENT = "no default"


def interface() -> Interface:
    """The current interface; needs no imports in the calling process."""
    return {
        **_names(),
        **_commands(),
        **_trainer_commands(),
        **_strategies(),
    }


def incompatibilities(old: Interface, new: Interface) -> dict[str, str]:
    """Entries of ``old`` that are gone or incompatible, and new required parameters, with the difference."""
    changes = {
        name: difference
        for name, was in old.items()
        if (difference := _difference(was, new.get(name)))
    }
    owners = {_owner(name) for name in old}
    for name, now in new.items():
        if (
            name not in old
            and _owner(name) in owners
            and isinstance(now, dict)
            and _is_required(now)
        ):
            changes[name] = "is new and required"
    return changes


def _owner(name: str) -> str:
    """Function or command of a parameter."""
    return name.partition("(")[0].partition(" ")[0]


def _is_required(parameter: Mapping[str, Any]) -> bool:
    is_variable = parameter.get("kind", "").startswith("VAR")
    return bool(parameter.get("required")) or (parameter["default"] == _ABSENT and not is_variable)


def _difference(was: Any, now: Any) -> str | None:
    if now is None:
        return "is gone"
    if isinstance(was, list):
        kept = [
            name for name in was if name in now
        ]  # a parameter that is gone is reported under its own name
        return None if now[: len(kept)] == kept else f"was {was} and is {now}"
    if not isinstance(was, dict):
        return None if now == was else f"was {was!r} and is {now!r}"
    for key, value in was.items():
        if key == "accepts":
            lost = sorted(set(value) - set(now[key])) if "Any" not in now[key] else []
            if lost:
                return f"no longer takes {', '.join(lost)}"
        elif now[key] != value and (key, value) not in (("default", _ABSENT), ("required", True)):
            return f"has {key}={now[key]!r}, was {value!r}"
    return None


# ---- Python ---------------------------------------------------------------------------------------------------------


def _names() -> Interface:
    import lightning_megatron

    names: Interface = {}
    for name in lightning_megatron.__all__:
        value = getattr(lightning_megatron, name)
        if not inspect.isclass(value):
            names |= {name: "function", **_parameters(name, value)}
            continue
        names[name] = "error" if issubclass(value, Exception) else "class"
        if names[name] == "class":
            names |= _parameters(name, value.__init__)
        for member in MEMBERS.get(name, ()):
            attribute = getattr(value, member, None)
            if inspect.isfunction(attribute):
                names |= {
                    f"{name}.{member}": "method",
                    **_parameters(f"{name}.{member}", attribute),
                }
            elif attribute is not None or any(
                member in vars(base).get("__annotations__", ()) for base in value.__mro__
            ):
                names[f"{name}.{member}"] = "attribute"
    return names


def _parameters(name: str, function: Callable[..., Any]) -> Interface:
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]
    properties: Interface = {
        f"{name}({parameter.name})": {
            "kind": parameter.kind.name,
            "default": _ABSENT
            if parameter.default is parameter.empty
            else _format(parameter.default),
            "accepts": sorted(set(_alternatives(_evaluate(parameter.annotation, function)))),
        }
        for parameter in parameters
    }
    return {
        **properties,
        f"{name}(*)": [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD],
    }


def _evaluate(annotation: Any, function: Callable[..., Any]) -> Any:
    try:
        return (
            eval(annotation, inspect.unwrap(function).__globals__)
            if isinstance(annotation, str)
            else annotation
        )
    except NameError:  # imported only for type checkers
        return annotation


def _format(default: Any) -> str:
    """Default as in the source; the fields of a dataclass are separate entries."""
    if dataclasses.is_dataclass(default) and default == type(default)():  # type: ignore[misc]
        return f"{type(default).__name__}()"
    return repr(default)


def _alternatives(hint: Any) -> Iterator[str]:
    """Members of a union and values of a ``Literal``."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _alternatives(argument)
    elif origin is Literal:
        yield from map(repr, arguments)
    elif origin is not None:
        parts = [
            "|".join(sorted(_alternatives(argument)))
            for argument in arguments
            if not isinstance(argument, list)
        ]
        yield f"{getattr(origin, '__name__', origin)}[{', '.join(parts)}]"
    elif hint is None or hint is type(None):
        yield "None"
    elif isinstance(hint, str):
        yield from (name.strip().rpartition(".")[2] for name in hint.split("|"))
    else:
        yield getattr(hint, "__name__", str(hint))


# ---- the command line -----------------------------------------------------------------------------------------------


def _commands() -> Interface:
    options: Interface = {}
    for command in COMMANDS:
        with mock.patch.object(argparse.ArgumentParser, "print_help", autospec=True) as print_help:
            _run(command, "--help")
        parser: argparse.ArgumentParser = print_help.call_args.args[0]
        for action in parser._actions:
            for flag in action.option_strings or [action.metavar or action.dest]:  # type: ignore[list-item]
                options[f"{command} {flag}"] = {
                    "required": action.required,
                    "values": "none"
                    if action.nargs == 0
                    else "several"
                    if action.nargs == "+"
                    else "one",
                    "default": None
                    if action.default == argparse.SUPPRESS
                    else _plain(action.default),
                    "accepts": sorted(map(str, action.choices or ["Any"])),
                }
    return options


def _trainer_commands() -> Interface:
    """Options in the help of the Trainer commands, and the defaults of a complete configuration."""
    import yaml

    options: Interface = {}
    for command in TRAINER_COMMANDS:
        flags = re.findall(r"--[a-z]\w*(?:\.[a-z]\w*)*", _run(command, "--help"))
        options |= {f"{command} {flag}": "option" for flag in flags}
    callbacks = [f"--trainer.callbacks+={name}" for name in _CALLBACKS]
    config = yaml.safe_load(_run("fit", "--model.model=config.json", *callbacks, *_FIT.split()))
    config["trainer"] = {name: config["trainer"][name] for name in ("strategy", "callbacks")}
    return {
        **options,
        **{f"fit YAML {path}": value for path, value in _leaves(config)},
    }


def _run(*arguments: str) -> str:
    ((code, out, err),) = run_here(".", [list(arguments)])
    assert code == 0, f"{arguments}: {err}"
    return out


def _plain(value: Any) -> Any:
    return (
        value
        if isinstance(
            value,
            (str, int, float, bool, list, type(None)),
        )
        else str(value)
    )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Plain values of a nested configuration by path; classes by their last name."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{index}")
    else:
        yield path, str(value).rpartition(".")[2] if path.endswith("class_path") else repr(value)


def _strategies() -> Interface:
    from lightning.pytorch.strategies import StrategyRegistry

    return {
        f"strategy={name!r}": "name"
        for name in sorted(StrategyRegistry)
        if name.startswith("megatron")
    }
