"""The public interface as plain data: names, parameters, and the options of each command; what of it is gone."""

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
"""By what a user writes, e.g. ``MegatronStrategy(tp)`` or ``convert --tp``: what is known of it."""

MEMBERS = {
    "MegatronStrategy": ("global_batch_size", "data_parallel_size", "data_parallel_group", "is_last_stage"),
    "MegatronModule": ("generate", "generate_with_scores", "logits", "save_pretrained"),
    "TrainStep": ("get_batch", "forward_step", "loss_func", "loss_terms", "metrics", "update_metrics"),
    "MegatronDataModule": ("has_split", "check", "lengths", "open"),
}
"""What users call and override, by the design's section 4 and the docs."""
COMMANDS = ("train-tokenizer", "preprocess", "convert-dataset", "merge", "inspect", "convert", "generate", "doctor")
TRAINER_COMMANDS = ("fit", "validate", "test", "predict")
_FIT = "--trainer.strategy=MegatronStrategy --data=IndexedDataModule --print_config"
_CALLBACKS = ("LossCurve", "PerplexityReport", "SampleText", "lightning_megatron.ThroughputMonitor")
_ABSENT = "no default"


def interface() -> Interface:
    """Today's interface; takes a process in which nothing need be imported yet."""
    return {**_names(), **_commands(), **_trainer_commands(), **_strategies()}


def broken(old: Interface, new: Interface) -> dict[str, str]:
    """What of ``old`` a user can no longer rely on, and how it differs."""
    found = {name: difference for name, was in old.items() if (difference := _difference(was, new.get(name)))}
    homes = {_home(name) for name in old}
    for name, now in new.items():
        if name not in old and _home(name) in homes and isinstance(now, dict) and _is_demanded(now):
            found[name] = "is new and required"
    return found


def _home(name: str) -> str:
    """The function or the command of a parameter."""
    return name.partition("(")[0].partition(" ")[0]


def _is_demanded(parameter: Mapping[str, Any]) -> bool:
    is_variable = parameter.get("kind", "").startswith("VAR")
    return bool(parameter.get("required")) or (parameter["default"] == _ABSENT and not is_variable)


def _difference(was: Any, now: Any) -> str | None:
    if now is None:
        return "is gone"
    if isinstance(was, list):
        kept = [name for name in was if name in now]  # what is gone has a name of its own
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

    found: Interface = {}
    for name in lightning_megatron.__all__:
        value = getattr(lightning_megatron, name)
        if not inspect.isclass(value):
            found |= {name: "function", **_parameters(name, value)}
            continue
        found[name] = "error" if issubclass(value, Exception) else "class"
        if found[name] == "class":
            found |= _parameters(name, value.__init__)
        for member in MEMBERS.get(name, ()):
            attribute = getattr(value, member, None)
            if inspect.isfunction(attribute):
                found |= {f"{name}.{member}": "method", **_parameters(f"{name}.{member}", attribute)}
            elif attribute is not None or any(
                member in vars(each).get("__annotations__", ()) for each in value.__mro__
            ):
                found[f"{name}.{member}"] = "attribute"
    return found


def _parameters(name: str, function: Callable[..., Any]) -> Interface:
    parameters = {key: each for key, each in inspect.signature(function).parameters.items() if key != "self"}
    found: Interface = {
        f"{name}({key})": {
            "kind": each.kind.name,
            "default": _ABSENT if each.default is each.empty else _shown(each.default),
            "accepts": sorted(set(_alternatives(_evaluated(each.annotation, function)))),
        }
        for key, each in parameters.items()
    }
    found[f"{name}(*)"] = [key for key, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    return found


def _evaluated(annotation: Any, function: Callable[..., Any]) -> Any:
    try:
        return eval(annotation, inspect.unwrap(function).__globals__) if isinstance(annotation, str) else annotation
    except NameError:  # of what only type checkers import
        return annotation


def _shown(default: Any) -> str:
    """As in the source; the options of a dataclass have lines of their own."""
    if dataclasses.is_dataclass(default) and default == type(default)():  # type: ignore[operator]
        return f"{type(default).__name__}()"
    return repr(default)


def _alternatives(hint: Any) -> Iterator[str]:
    """The types of a union, and the values of a ``Literal``, one by one."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for each in arguments:
            yield from _alternatives(each)
    elif origin is Literal:
        yield from map(repr, arguments)
    elif origin is not None:
        parts = ["|".join(sorted(_alternatives(each))) for each in arguments if not isinstance(each, list)]
        yield f"{getattr(origin, '__name__', origin)}[{', '.join(parts)}]"
    elif hint is None or hint is type(None):
        yield "None"
    elif isinstance(hint, str):
        yield from (each.strip().rpartition(".")[2] for each in hint.split("|"))
    else:
        yield getattr(hint, "__name__", str(hint))


# ---- the command line -----------------------------------------------------------------------------------------------


def _commands() -> Interface:
    found: Interface = {}
    for command in COMMANDS:
        with mock.patch.object(argparse.ArgumentParser, "print_help", autospec=True) as print_help:
            _run(command, "--help")
        parser: argparse.ArgumentParser = print_help.call_args.args[0]
        for action in parser._actions:
            for flag in action.option_strings or [action.metavar or action.dest]:
                found[f"{command} {flag}"] = {
                    "required": action.required,
                    "values": "none" if action.nargs == 0 else "several" if action.nargs == "+" else "one",
                    "default": None if action.default == argparse.SUPPRESS else _plain(action.default),
                    "accepts": sorted(map(str, action.choices or ["Any"])),
                }
    return found


def _trainer_commands() -> Interface:
    """The options that help names, and the defaults of a whole configuration."""
    import yaml

    found: Interface = {}
    for command in TRAINER_COMMANDS:
        found |= {
            f"{command} {flag}": "option" for flag in re.findall(r"--[a-z]\w*(?:\.[a-z]\w*)*", _run(command, "--help"))
        }
    callbacks = [f"--trainer.callbacks+={name}" for name in _CALLBACKS]
    config = yaml.safe_load(_run("fit", "--model.model=config.json", *callbacks, *_FIT.split()))
    config["trainer"] = {name: config["trainer"][name] for name in ("strategy", "callbacks")}
    return {**found, **{f"fit YAML {path}": value for path, value in _leaves(config)}}


def _run(*arguments: str) -> str:
    ((code, out, err),) = run_here(".", [list(arguments)])
    assert code == 0, f"{arguments}: {err}"
    return out


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, list, type(None))) else str(value)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each plain value of a nested configuration; classes by their last names."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _leaves(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, each in enumerate(value):
            yield from _leaves(each, f"{path}.{index}")
    else:
        yield path, str(value).rpartition(".")[2] if path.endswith("class_path") else repr(value)


def _strategies() -> Interface:
    from lightning.pytorch.strategies import StrategyRegistry

    return {f"strategy={name!r}": "name" for name in sorted(StrategyRegistry) if name.startswith("megatron")}
