"""The commands ``fit``, ``validate``, ``test`` and ``predict``: LightningCLI with errors that people can read."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import logging
import re
import shlex
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentError, Namespace, get_loader, set_loader, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, callbacks, loggers
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

import lightning_megatron
from lightning_megatron import ProgressLine
from lightning_megatron.checkpoint.files import check_writable
from lightning_megatron.cli.doctor import check_accelerator
from lightning_megatron.errors import ConfigError, one_line, user_error
from lightning_megatron.foreign_names import advice
from lightning_megatron.module import MegatronModule
from lightning_megatron.precision import PrecisionName
from lightning_megatron.startup import STRATEGY_SIZES
from lightning_megatron.strategy import MegatronStrategy

SHORT_NAMES: list[type] = [
    each
    for each in map(partial(getattr, lightning_megatron), lightning_megatron.__all__)
    if inspect.isclass(each) and issubclass(each, (LightningModule, LightningDataModule, Strategy, Callback))
]
"""Classes that a configuration may name without their module, because they are imported here."""
DATA_MODULES = [each for each in SHORT_NAMES if issubclass(each, LightningDataModule) and not inspect.isabstract(each)]
DEFAULT_SEED = 1234
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
"""What argparse takes for a negative number; any other word with a dash is an option to it, -1e-3 as well."""
_MOST_VALUES, _DEEPEST = 100_000, 100
_load = get_loader("yaml")
_REFUSED = re.compile(r"(?:[Oo]ption '|arguments: (?:--)?|its import path, got )([\w./-]+)")
"""How jsonargparse names an option or a class that there is not."""
_NOISE = re.compile(
    r"^ *(- )?(Does not validate|Subtypes:|Errors:|Given value|Not a valid|Subclass types|a class path|a dict with|"
    r"Not of|Expected a (path|<class)|argument of type).*|Parser key \"\S+\":|\. Got value:.*| in"
    r" \"<\w+ string>\", line .*",
    flags=re.MULTILINE,
)
"""What is left out of what it says: what it has tried, and what of it the user did not mean."""
_WORDINGS = {
    r"Unexpected config:$": "expected keys and values, got nothing",
    r"(?:Unexpected config:|Unable to load config) (['\"]?)(.+)\1$": r"expected keys and values, got \2",
    r"Expected a typing\.Literal\[(.*?)\]": r"expected one of \1",
    r"Expected a dot import path string: ": "expected the name of a class, or its import path, got ",
}
"""What replaces phrases of its."""


def run(arguments: Sequence[str]) -> None:
    """Parse the arguments of one command and run it.

    Raises:
        ConfigError: If an argument or a setting is wrong.
    """
    # Help of the fields of LRSchedule and others stands below them; reading it takes time, so it is for help alone.
    set_parsing_settings(docstring_parse_attribute_docstrings=any(each.endswith("help") for each in arguments))
    MegatronCLI(list(arguments))


def show_all_options(command: str) -> None:
    """Print every option of a command, and every argument of the classes that have short names.

    Args:
        command: ``fit`` or another one that LightningCLI runs.
    """
    classes = (("model", (MegatronModule,)), ("trainer.strategy", (MegatronStrategy,)), ("data", DATA_MODULES))
    for arguments in (["--help"], *([f"--{key}.help", each.__name__] for key, found in classes for each in found)):
        with contextlib.suppress(SystemExit):
            run([command, *arguments])


class _RunConfig(SaveConfigCallback):
    """Saves the settings of a run beside its logs: over those of an earlier run, but not over the user's own file."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save them, as ``run_config.yaml`` where the user's own file has the usual place and name."""
        own = [Path(each).resolve() for each in self.config.get("config") or ()]
        if Path(trainer.log_dir or "", self.config_filename).resolve() in own:
            self.config_filename = f"run_{self.config_filename}"
        super().setup(trainer, pl_module, stage)


class MegatronCLI(LightningCLI):
    """LightningCLI for any LightningModule and LightningDataModule; the model defaults to ``MegatronModule``.

    Optimizers are not options of the command line: they are built over the shards by ``configure_optimizers``, and
    LightningCLI would build one before any weight exists.

    Args:
        args: Arguments after the program's name.
        run: Whether the first argument is a sub-command to run; otherwise the objects are only made.
    """

    def __init__(self, args: list[str], run: bool = True) -> None:
        self._mistakes: list[Exception] = []
        raising = {"exit_on_error": False}  # instead of printing its usage and exiting
        with held_messages() as self._show_messages:
            super().__init__(
                args=args,
                run=run,
                parser_kwargs={**raising, **{name: {**raising} for name in self.subcommands()}},
                auto_configure_optimizers=False,
                save_config_callback=_RunConfig,
                save_config_kwargs={"overwrite": True},
                seed_everything_default=DEFAULT_SEED,
            )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Let ``model`` without a class be a ``MegatronModule``."""
        parser.set_defaults({"model": {"class_path": f"{MegatronModule.__module__}.{MegatronModule.__qualname__}"}})

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse without the warning that both ``args`` and ``sys.argv`` are there: one is the other's tail.

        Raises:
            ConfigError: If something is wrong, ``seed_everything`` out of range, or ``ckpt_path`` a file of others.
        """
        assert isinstance(args, list)
        set_loader("yaml", _load_checked, (yaml.YAMLError,))
        try:
            self.config = parser.parse_args(args)
            settings = self.config.get(str(self.config.get("subcommand")), self.config)
            if not isinstance(settings.trainer, Namespace):
                raise ArgumentError(None, f'Parser key "trainer":\n  Unexpected config: {settings.trainer or ""}')
        except (ArgumentError, UnicodeDecodeError) as error:
            command = getattr(self, "_subcommand_parsers", {}).get(args[0] if args else None, parser)  # none: run=False
            options = [name for action in command._actions for name in action.option_strings]
            raise ConfigError(_explained(error, args, options)) from error
        # What Lightning uses before it makes any object; it loads settings from a ckpt_path that is a file.
        seed, path = settings.seed_everything, Path(settings.get("ckpt_path") or ".")
        if not isinstance(seed, bool) and not 0 <= seed < 2**32:
            raise ConfigError(f"seed_everything={seed}: expected a number from 0 to {2**32 - 1}; choose another")
        if path.is_file() and not zipfile.is_zipfile(path):
            what = "expected a checkpoint, which is a folder, got another file; give the path of a *.ckpt"
            raise ConfigError(f"ckpt_path={path}: {what}")

    @override
    def instantiate_classes(self) -> None:
        """Make model, data and Trainer.

        Raises:
            ConfigError: If a constructor found a mistake of the user's.
        """
        self.parser.add_instantiator(self._make, object)
        try:
            super().instantiate_classes()
        except Exception as error:
            if self._mistakes:
                raise ConfigError(str(self._mistakes[-1])) from error
            raise

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Make the Trainer, with a line of progress in place of Lightning's bar, unless there is another one.

        Raises:
            ConfigError: If it does not accept a value, or what the value names is not there.
        """
        given: Any = self._get(self.config_init, "trainer")
        check_accelerator(given.accelerator)
        own = given.callbacks if isinstance(given.callbacks, list) else [given.callbacks]
        if given.enable_progress_bar is not False and not any(isinstance(each, ProgressBar) for each in own):
            self.trainer_defaults = {"callbacks": ProgressLine()}
        try:
            return super().instantiate_trainer(**kwargs)
        except (TypeError, ValueError, RuntimeError, ModuleNotFoundError, MisconfigurationException) as error:
            message = str(error)
            if "`devices`" in message:
                message = f"devices={given.devices}: expected a number of processes from 1 on, got none; give one, as 4"
            elif "invalid strategy name" in message:
                message = f"strategy={given.strategy}: expected MegatronStrategy, megatron, megatron_tpN, megatron_ppN,"
                message += f" megatron_tpN_ppN with N of {', '.join(map(str, STRATEGY_SIZES))}, or one of Lightning's"
            raise ConfigError(message) from error

    def _make(self, class_type: type, *args: Any, **kwargs: Any) -> Any:
        """Call a constructor and remember what it says: jsonargparse buries it where an option has several types."""
        try:
            return class_type(*args, **kwargs)
        except (ConfigError, MisconfigurationException) as error:
            self._mistakes.append(error)
            raise
        except ModuleNotFoundError as error:  # of a logger, say; the name is the first thing in quotes
            package = shlex.quote(re.split("'", f"{error}'")[1] or str(error))
            what = f"{class_type.__name__}: expected the package {package}, got none; pip install {package}"
            self._mistakes.append(ConfigError(what))
            raise

    def before_fit(self) -> None:
        """Check everything that can be checked before processes are launched."""
        model: LightningModule = self.model
        datamodule: LightningDataModule | None = self.datamodule
        stage = {"fit": "train", "validate": "val"}.get(str(self.subcommand), self.subcommand)
        if datamodule is None and not is_overridden(f"{stage}_dataloader", model, LightningModule):
            raise ConfigError("data: expected a data module, or a model with loaders of its own, got none; give --data")
        # As Trainer.fit does next: a module checks itself against its Trainer.
        model.trainer, self.trainer.state.fn = self.trainer, TrainerFn(self.subcommand)
        strategy = model.megatron if isinstance(model, MegatronModule) else self.trainer.strategy
        if isinstance(strategy, MegatronStrategy):
            strategy._lightning_module = model  # likewise, and data are checked against the model
            if datamodule is not None:
                datamodule.trainer = self.trainer  # likewise
            strategy.check_run(self.trainer, model, datamodule)
            strategy.checkpointing.resolve_ckpt_path(self.trainer, self._get(self.config_init, "ckpt_path"))
        folders = [each.save_dir for each in self.trainer.loggers] or [self.trainer.default_root_dir]
        check_writable(Path(each) for each in folders if each and "://" not in str(each))
        self._show_messages()

    before_validate = before_test = before_predict = before_fit


@contextlib.contextmanager
def held_messages() -> Iterator[Callable[[], None]]:
    """Hold back log records and warnings until the function is called that this gives; a user's mistake drops them.

    So a wrong setting is one line, though Lightning has told of seeds and devices before it is found.
    """
    waiting: list[Callable[[], object]] = []

    def hold(handle: Callable[[logging.LogRecord], object], record: logging.LogRecord) -> bool:
        waiting.append(partial(handle, record))
        return False

    with contextlib.ExitStack() as undo:

        def show() -> None:
            undo.close()
            while waiting:
                waiting.pop(0)()

        names = ("", "lightning", "lightning.fabric", "lightning.pytorch", "transformers")
        for handler in (each for name in names for each in logging.getLogger(name).handlers):
            handler.addFilter(held := partial(hold, handler.handle))
            undo.callback(handler.removeFilter, held)
        undo.callback(setattr, warnings, "showwarning", warn := warnings.showwarning)
        warnings.showwarning = lambda *args, **keywords: waiting.append(partial(warn, *args, **keywords))
        try:
            yield show
        except BaseException as error:
            if user_error(error) is not None:
                waiting.clear()
            raise
        finally:
            show()


# ---- mistakes in options and YAML -----------------------------------------------------------------------------------


def _load_checked(text: str, path: str = "") -> Any:
    """Load YAML unless it expands to more, or is deeper, than any configuration.

    jsonargparse gives the path, if there is one, to a loader that has a parameter of this name.
    """
    sizes: dict[str | None, float] = {}
    above: list[tuple[str | None, float]] = []
    size = 0.0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            sizes[event.anchor] = _MOST_VALUES  # if it contains itself
            above.append((event.anchor, size))
            size = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = above.pop()
            sizes[anchor] = size
            size += before
        elif isinstance(event, yaml.NodeEvent):
            size += sizes.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
        if size > _MOST_VALUES or len(above) > _DEEPEST:
            raise ConfigError(
                f"{path or text[:40]}: expected at most {_MOST_VALUES:,} values, {_DEEPEST} in each other, got more "
                "(aliases are counted as what they stand for); write out what is meant"
            )
    try:
        return _load(text)
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{path or text[:40]}: {error}; write out what is meant") from error


def _explained(error: Exception, arguments: Sequence[str], options: Iterable[str]) -> str:
    """What jsonargparse says of a mistake, with the file and line of it, and what may have been meant.

    Args:
        error: That it raised.
        arguments: What was typed.
        options: All options of the command.
    """
    typed = [word for each in arguments for word in each.split("=", 1)]
    files = [Path(value) for name, value in pairwise(typed) if name in ("-c", "--config") and Path(value).is_file()]
    for file in files:
        if re.search(r"""^\s*["']?distributed_type["']?\s*:""", file.read_text(errors="replace"), flags=re.MULTILINE):
            make = f"make one of ours with lightning-megatron config --from-accelerate {file}"
            return f"--config {file} is a configuration of accelerate's; {make}"
    if isinstance(error, UnicodeDecodeError):
        return f"--config {', '.join(map(str, files))} is no text in UTF-8 ({error.reason}); give a YAML file"
    if told := user_error(error):
        return told
    message = _without_parser_noise(str(error))
    path, hint = message.partition(":")[0], ""
    if not files and "arguments are required" in message:
        return f"{message}; give --config FILE, or model and data as options: see --help"
    if message.endswith("expected one argument"):  # which is said of --model where --model.lr has none
        for name, value in pairwise([*arguments, "--"]):
            if name[:1] == value[:1] == "-" and "=" not in name and not any(map(_NUMBER.fullmatch, (name, value))):
                return f"argument {name}: expected a value" + f"; write {name}={value}" * value[1:2].isdigit()
    if path == "trainer.precision":
        message = f"{path}: expected one of {', '.join(get_args(PrecisionName))}"
    elif match := _REFUSED.search(message):
        wrong, known = match[1], options
        if Path(wrong).suffix in (".yaml", ".yml"):
            return f"{wrong} stands alone; did you mean --config {wrong}?"
        if of_class := re.search(r"class_path '([\w.]+)\.(\w+)': (?:Group '(\w+)'|Option|unrecognized)", message):
            module, name, group = of_class.groups()
            wrong = f"{group}.{wrong}" if group else wrong
            path, known = f"{path}.{wrong}", _options_of(getattr(importlib.import_module(module), name))
        elif "its import path" in message:
            known = (*(each.__name__ for each in SHORT_NAMES), *callbacks.__all__, *loggers.__all__)
        else:
            path, wrong = wrong, f"--{wrong}"
        hint = advice(match[1].rpartition(".")[2], typed=True) or _meant(wrong, list(known))
    is_typed = any(each.startswith(f"--{path}") for each in typed)
    return ("" if is_typed else _where(path, files)) + message + (hint and f"; {hint}")


def _without_parser_noise(text: str) -> str:
    """The message of jsonargparse as ``option: expected X, got Y``, without all that it has tried.

    An option of type A or B that fits neither is reported with the reason for each. Where one says more than the name
    of a type, the user meant that.
    """
    text = re.sub(r"Problem with given class_path \S+\s+(?=Parser key)", "", text)
    place = ".".join(dict.fromkeys(re.findall(r'Parser key "(\S+)":', text)))
    kinds = re.findall(r"^( *)(?:- )?(?:Expected a <class '(\w+)'>|Not a valid subclass of (\w+))", text, re.MULTILINE)
    types = dict.fromkeys(one + other for indent, one, other in kinds if indent == max(kinds)[0])  # of the innermost
    given = re.search(r"(?:Given|Got) value: ?(.*)", text)
    reasons = [" ".join(each.split()) for each in re.split(r"^ *- ", _NOISE.sub("", text), flags=re.MULTILINE)]
    for theirs, ours in _WORDINGS.items():
        reasons = [re.sub(theirs, ours, each) for each in reasons]
    told = "; ".join(dict.fromkeys(filter(None, reasons)))
    got = (given[1][:80] or "nothing") if given else ""
    if told and (got.startswith(("{", "[", "Namespace(", "NestedArg(")) or f"got {got}" in told):
        got = ""  # the reasons name it, or the part of it that is meant
    told = told or f"expected {' or '.join(types).replace('NoneType', 'null')}"
    return one_line(f"{place and place + ': '}{told}{got and f', got {got}'}")


def _options_of(cls: type) -> Iterator[str]:
    """What a constructor takes, and ``option.field`` for what is grouped."""
    hints = get_type_hints(cls.__init__)  # type: ignore[misc]
    for name in inspect.signature(cls).parameters:
        yield name
        for kind in filter(is_dataclass, (hints[name], *get_args(hints[name]))):
            yield from (f"{name}.{field.name}" for field in fields(kind))


def _meant(wrong: str, known: Collection[str]) -> str:
    """The known name that is nearest; of names with dots the one of the same section, or else the section."""
    sections, section = {each.partition(".")[0] for each in known}, wrong.partition(".")[0]
    close = difflib.get_close_matches(*((wrong, known) if section in sections else (section, sections)), n=1)
    return f"did you mean {close[0]}?" if close and close[0] != wrong else ""


def _where(path: str, files: list[Path]) -> str:
    """``FILE:LINE: `` of what is no YAML or no configuration, else of the key that ``path`` leads to farthest."""
    found: list[tuple[int, str]] = [(0, "")]
    for file in files:
        try:
            node = yaml.compose(file.read_text(), Loader=yaml.CSafeLoader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            return f"{file}:{mark.line + 1 if mark else 1}: "
        if not isinstance(node, yaml.MappingNode):
            return f"{file}:1: "
        depth, line = _place(node, path.split("."))
        found.insert(0, (depth, f"{file}:{line}: " if depth else ""))  # a later file overrides
    return max(found, key=lambda each: each[0])[1]


def _place(node: Any, names: list[str]) -> tuple[int, int]:
    """How many of ``names`` lead into it, through ``init_args`` and items of lists, and the line of the last one."""
    if isinstance(node, yaml.SequenceNode):
        return max((_place(each, names) for each in node.value), default=(0, 0))
    best = (0, 0)
    for key, value in node.value if names and isinstance(node, yaml.MappingNode) else ():
        if key.value == names[0]:
            depth, line = _place(value, names[1:])
            best = max(best, (1 + depth, line or key.start_mark.line + 1))
        elif key.value == "init_args":
            best = max(best, _place(value, names))
    return best
