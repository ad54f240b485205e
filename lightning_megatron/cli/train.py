"""The commands ``fit``, ``validate``, ``test`` and ``predict``: LightningCLI with readable errors."""

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
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    callbacks,
    loggers,
)
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

import lightning_megatron
from lightning_megatron import ProgressLine
from lightning_megatron.checkpoint.find import check_writable
from lightning_megatron.cli.config import PRECISIONS
from lightning_megatron.cli.doctor import check_accelerator
from lightning_megatron.cli.yaml_limits import check_yaml_size
from lightning_megatron.errors import (
    LARGEST_WORLD,
    MOST_PROCESSES,
    ConfigError,
    one_line,
    user_error,
)
from lightning_megatron.foreign_names import suggest_option
from lightning_megatron.module import MegatronModule
from lightning_megatron.precision import PrecisionName
from lightning_megatron.registration import STRATEGY_SIZES
from lightning_megatron.strategy import MegatronStrategy

SHORT_NAMES: list[type] = [
    cls
    for cls in map(partial(getattr, lightning_megatron), lightning_megatron.__all__)
    if inspect.isclass(cls)
    and issubclass(cls, (LightningModule, LightningDataModule, Strategy, Callback))
]
"""Classes that a configuration may name without their module; LightningCLI finds imported classes."""
DATA_MODULES = [
    cls
    for cls in SHORT_NAMES
    if issubclass(cls, LightningDataModule) and not inspect.isabstract(cls)
]
DEFAULT_SEED = 1234
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
"""Negative numbers as argparse recognizes them; it takes any other word with a dash for an option, also -1e-3."""
_load = get_loader("yaml")
_NO_OBJECT = re.compile("expected the name of a class, or its import path, got (.*)")
"""Something else than an object of options, where null is allowed, too."""
_UNKNOWN_NAME = re.compile(r"(?:[Oo]ption '|arguments: (?:--)?|its import path, got )([\w./-]+)")
"""Unknown option or class in a message of jsonargparse."""
_NOISE = re.compile(
    r"^ *(- )?(Does not validate|Subtypes:|Errors:|Given value|Not a valid|Subclass types|a class path|a dict with|"
    r"Not of|Expected a (path|<class)|argument of type).*|Parser key \"\S+\":|\. Got value:.*| in"
    r" \"<\w+ string>\", line .*",
    flags=re.MULTILINE,
)
"""Parts of jsonargparse's messages to remove: types that it tried, and types that the user did not mean."""
_WORDINGS = {
    r"Unexpected config:$": "expected keys and values, got nothing",
    r"(?:Unexpected config:|Unable to load config) (['\"]?)(.+)\1$": r"expected keys and values, got \2",
    r"Expected a typing\.Literal\[(.*?)\]": r"expected one of \1",
    r"Expected a dot import path string: ": "expected the name of a class, or its import path, got ",
}
"""Replacements for phrases of jsonargparse's messages."""


def run(arguments: Sequence[str]) -> None:
    """Parse the arguments of one command and run it.

    Raises:
        ConfigError: If an argument or a setting is wrong.
    """
    # Docstrings below the fields of LRSchedule and others are slow to parse, and needed for help only.
    set_parsing_settings(
        docstring_parse_attribute_docstrings=any(word.endswith("help") for word in arguments)
    )
    MegatronCLI(list(arguments))


def show_all_options(command: str) -> None:
    """Print every option of a command, and every argument of the classes that have short names.

    Args:
        command: ``fit`` or another command of LightningCLI.
    """
    classes = (
        ("model", (MegatronModule,)),
        ("trainer.strategy", (MegatronStrategy,)),
        ("data", DATA_MODULES),
    )
    for arguments in (
        ["--help"],
        *([f"--{key}.help", cls.__name__] for key, group in classes for cls in group),
    ):
        with contextlib.suppress(SystemExit):
            run([command, *arguments])


class _RunConfig(SaveConfigCallback):
    """Saves the configuration beside the logs: overwrites that of an earlier run, but not the user's own file."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save the configuration, as ``run_config.yaml`` if its usual path is that of the user's own file."""
        own = [Path(file).resolve() for file in self.config.get("config") or ()]
        if Path(trainer.log_dir or "", self.config_filename).resolve() in own:
            self.config_filename = f"run_{self.config_filename}"
        target = Path(trainer.log_dir or "", self.config_filename)
        if trainer.is_global_zero and target.is_symlink():
            target.unlink()  # not written through
        super().setup(trainer, pl_module, stage)


class MegatronCLI(LightningCLI):
    """LightningCLI for any LightningModule and LightningDataModule; the model defaults to ``MegatronModule``.

    Optimizers are not options of the command line: ``configure_optimizers`` builds them over the shards, whereas
    LightningCLI would build one before the weights exist.

    Args:
        args: Arguments after the program's name.
        run: Whether to run the sub-command in the first argument; otherwise the objects are only instantiated.
    """

    def __init__(self, args: list[str], run: bool = True) -> None:
        self._user_errors: list[Exception] = []
        raises = {"exit_on_error": False}  # instead of printing the usage and exiting
        with defer_messages() as self._show_messages:
            super().__init__(
                args=args,
                run=run,
                parser_kwargs={**raises, **{name: {**raises} for name in self.subcommands()}},
                auto_configure_optimizers=False,
                save_config_callback=_RunConfig,
                save_config_kwargs={"overwrite": True},
                seed_everything_default=DEFAULT_SEED,
            )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Make ``MegatronModule`` the default class of ``model``."""
        parser.set_defaults(
            {"model": {"class_path": f"{MegatronModule.__module__}.{MegatronModule.__qualname__}"}}
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse without Lightning's warning for ``args`` beside ``sys.argv``, of which they are a part.

        Raises:
            ConfigError: If an argument is invalid, or ``ckpt_path`` is a file that is not a checkpoint.
        """
        assert isinstance(args, list)
        set_loader("yaml", _load_checked, (yaml.YAMLError,))
        try:
            self.config = parser.parse_args(args)
            settings = self.config.get(str(self.config.get("subcommand")), self.config)
            if not isinstance(settings.trainer, Namespace):
                raise ArgumentError(
                    None, f'Parser key "trainer":\n  Unexpected config: {settings.trainer or ""}'
                )
        except (ArgumentError, UnicodeDecodeError) as error:
            command = getattr(self, "_subcommand_parsers", {}).get(
                args[0] if args else None, parser
            )  # none: run=False
            options = [name for action in command._actions for name in action.option_strings]
            raise ConfigError(_explain(error, args, options)) from error
        seed = settings.seed_everything  # used before anything is instantiated
        if not isinstance(seed, bool) and not 0 <= seed < 2**32:
            raise ConfigError(
                f"seed_everything={seed}: expected a number from 0 to {2**32 - 1}; choose another"
            )
        _check_checkpoint_file(Path(settings.get("ckpt_path") or "."))

    @override
    def _parse_ckpt_path(self) -> None:
        """Take no settings from a checkpoint: the command line and its YAML files alone describe the model.

        lightning 2.6.6 merges the ``hyper_parameters`` of a ``ckpt_path`` that is a file into the configuration, with
        the ``class_path`` that it names: parsing imports that class, and running would call it.
        """

    @override
    def instantiate_classes(self) -> None:
        """Instantiate model, data module and Trainer.

        Raises:
            ConfigError: If a constructor raised a user error.
        """
        self.parser.add_instantiator(self._instantiate, object)
        try:
            super().instantiate_classes()
        except Exception as error:
            if self._user_errors:
                raise ConfigError(str(self._user_errors[-1])) from error
            raise

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Instantiate the Trainer, by default with ``ProgressLine`` instead of Lightning's progress bar.

        Raises:
            ConfigError: If it refuses a value, or something that a value names is not available.
        """
        config: Any = self._get(self.config_init, "trainer")
        check_accelerator(config.accelerator)
        _check_num_processes(config)
        own = config.callbacks if isinstance(config.callbacks, list) else [config.callbacks]
        if config.enable_progress_bar is not False and not any(
            isinstance(each, ProgressBar) for each in own
        ):
            self.trainer_defaults = {"callbacks": ProgressLine()}
        try:
            return super().instantiate_trainer(**kwargs)
        except (
            TypeError,
            ValueError,
            RuntimeError,
            ModuleNotFoundError,
            MisconfigurationException,
        ) as error:
            message = str(error)
            if "`devices`" in message:
                message = f"devices={config.devices}: expected a number of processes of at least 1; give one, e.g. 4"
            elif "invalid strategy name" in message:
                message = f"strategy={config.strategy}: expected MegatronStrategy, megatron, megatron_tpN, megatron_ppN"
                message += f", megatron_tpN_ppN with N of {', '.join(map(str, STRATEGY_SIZES))}, or one of Lightning's"
            raise ConfigError(message) from error

    def _instantiate(self, class_type: type, *args: Any, **kwargs: Any) -> Any:
        """Call a constructor and record its user error, which jsonargparse buries for options of several types."""
        try:
            return class_type(*args, **kwargs)
        except (ConfigError, MisconfigurationException) as error:
            self._user_errors.append(error)
            raise
        except (
            ModuleNotFoundError
        ) as error:  # of a logger, for example; the package is first in quotes
            package = shlex.quote(re.split("'", f"{error}'")[1] or str(error))
            message = f"{class_type.__name__}: expected the package {package}, got none; pip install {package}"
            self._user_errors.append(ConfigError(message))
            raise

    def before_fit(self) -> None:
        """Run all checks that are possible before processes are launched."""
        model: LightningModule = self.model
        datamodule: LightningDataModule | None = self.datamodule
        stage = {"fit": "train", "validate": "val"}.get(str(self.subcommand), self.subcommand)
        if datamodule is None and not is_overridden(f"{stage}_dataloader", model, LightningModule):
            raise ConfigError(
                "data: expected a data module, or a model with data loaders, got none; give --data"
            )
        # As Trainer.fit does next: modules are checked against their Trainer.
        model.trainer, self.trainer.state.fn = self.trainer, TrainerFn(self.subcommand)
        strategy = model.megatron if isinstance(model, MegatronModule) else self.trainer.strategy
        if isinstance(strategy, MegatronStrategy):
            if datamodule is not None:
                datamodule.trainer = self.trainer  # as well
            strategy.connect(model)  # as well; data is checked against the model
            strategy.check_run(self.trainer, model, datamodule)
            strategy.checkpointing.resolve_ckpt_path(
                self.trainer, self._get(self.config_init, "ckpt_path")
            )
        folders = [logger.save_dir for logger in self.trainer.loggers] or [
            self.trainer.default_root_dir
        ]
        check_writable(Path(folder) for folder in folders if folder and "://" not in str(folder))
        self._show_messages()

    before_validate = before_test = before_predict = before_fit


def _check_num_processes(config: Any) -> None:
    """Refuse numbers of processes that no host can have: Lightning takes any, and starts as many.

    Raises:
        ConfigError: For the first one found.
    """
    for name, at_most in (("devices", MOST_PROCESSES), ("num_nodes", LARGEST_WORLD)):
        value: Any = getattr(config, name, None)
        is_number = isinstance(value, int) or (isinstance(value, str) and value.isdecimal())
        if is_number and int(value) > at_most:
            raise ConfigError(f"{name}={value} must be at most {at_most}; correct {name}")


@contextlib.contextmanager
def defer_messages() -> Iterator[Callable[[], None]]:
    """Defer log records and warnings until the yielded function is called; a user error discards them.

    A user error is then one line, although Lightning logs seeds and devices before the error is found.
    """
    deferred: list[Callable[[], object]] = []

    def defer(handle: Callable[[logging.LogRecord], object], record: logging.LogRecord) -> bool:
        deferred.append(partial(handle, record))
        return False

    with contextlib.ExitStack() as undo:

        def show() -> None:
            undo.close()
            while deferred:
                deferred.pop(0)()

        names = ("", "lightning", "lightning.fabric", "lightning.pytorch", "transformers")
        for handler in (handler for name in names for handler in logging.getLogger(name).handlers):
            handler.addFilter(log_filter := partial(defer, handler.handle))
            undo.callback(handler.removeFilter, log_filter)
        undo.callback(setattr, warnings, "showwarning", warn := warnings.showwarning)
        warnings.showwarning = lambda *args, **keywords: deferred.append(
            partial(warn, *args, **keywords)
        )
        try:
            yield show
        except BaseException as error:
            if user_error(error) is not None:
                deferred.clear()
            raise
        finally:
            show()


def _check_checkpoint_file(path: Path) -> None:
    """Refuse a file that ``torch.save`` cannot have written, before Lightning's own strategies read it.

    MegatronStrategy's checkpoints are directories, and it refuses every file.

    Raises:
        ConfigError: If it is a file, but no zip archive with an intact pickle.
    """
    if not path.is_file():
        return
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [each for each in archive.infolist() if each.filename.endswith("/data.pkl")]
            is_intact = len(pickles) == 1 and pickles[0].compress_type == zipfile.ZIP_STORED
            if is_intact:
                archive.read(pickles[0])  # compares its checksum
    except (OSError, ValueError, NotImplementedError, RuntimeError, zipfile.BadZipFile):
        is_intact = False
    if not is_intact:
        raise ConfigError(
            f"ckpt_path={path}: expected a checkpoint directory, got another file; give the path of a *.ckpt"
        )


# ---- errors in options and YAML -------------------------------------------------------------------------------------


def _load_checked(text: str, path: str = "") -> Any:
    """Load YAML with limits on its expanded size and depth.

    jsonargparse passes the path of a file to loaders with a parameter ``path``.
    """
    check_yaml_size(text, path or text[:40])
    try:
        return _load(text)
    except ValueError as error:  # a number with thousands of digits
        raise ConfigError(f"{path or text[:40]}: {error}; correct it") from error


def _explain(error: Exception, arguments: Sequence[str], options: Iterable[str]) -> str:
    """Rewrite an error of jsonargparse, with file and line, and a suggestion.

    Args:
        error: The exception.
        arguments: The typed arguments.
        options: All options of the command.
    """
    typed = [word for argument in arguments for word in argument.split("=", 1)]
    files = [
        Path(value)
        for name, value in pairwise(typed)
        if name in ("-c", "--config") and Path(value).is_file()
    ]
    for file in filter(_is_of_accelerate, files):
        fix = f"convert it with lightning-megatron config --from-accelerate {file}"
        return f"--config {file} is a configuration of Accelerate; {fix}"
    if isinstance(error, UnicodeDecodeError):
        return f"--config {', '.join(map(str, files))} is not UTF-8 text ({error.reason}); give a YAML file"
    if explanation := user_error(error):
        return explanation
    message = _shorten(str(error))
    path, hint = message.partition(":")[0], ""
    if not files and "arguments are required" in message:
        return f"{message}; give --config FILE, or model and data as options: see --help"
    if "'lightning.LightningDataModule'" in message:
        return "data: expected a class, got only options of one; give its name first, e.g. --data IndexedDataModule"
    if message.endswith("expected one argument") and (
        explanation := _explain_missing_value(arguments)
    ):
        return explanation
    if path == "trainer.precision":
        got = message.rpartition(", got ")[2] if ", got " in message else "another"
        message = f"{path}: expected one of {', '.join(get_args(PrecisionName))}, got {got}"
        if meant := PRECISIONS.get(got.strip("'")):
            hint = f"did you mean {meant}?"
    elif (match := _NO_OBJECT.search(message)) and (keys := _keys_of(path)):
        hint = f"give it {', '.join(keys)}, e.g. with --{path}.{keys[0]}, or null"
        message = f"{path}: expected keys and values, got {match[1]}"
    elif "expected keys and values, got" in message and (keys := _keys_of(path)):
        hint = f"give it {', '.join(keys)}, e.g. with --{path}.{keys[0]}"
    elif match := _UNKNOWN_NAME.search(message):
        wrong, known = match[1], options
        if Path(wrong).suffix in (".yaml", ".yml"):
            return f"{wrong}: expected an option; did you mean --config {wrong}?"
        if of_class := re.search(
            r"class_path '([\w.]+)\.(\w+)': (?:Group '(\w+)'|Option|unrecognized)", message
        ):
            module, name, group = of_class.groups()
            wrong = f"{group}.{wrong}" if group else wrong
            path, known = (
                f"{path}.{wrong}",
                _options_of(getattr(importlib.import_module(module), name)),
            )
        elif "its import path" in message:
            known = (*(cls.__name__ for cls in SHORT_NAMES), *callbacks.__all__, *loggers.__all__)
        else:
            path, wrong = wrong, f"--{wrong}"
        hint = suggest_option(match[1].rpartition(".")[2], typed=True) or _suggest(
            wrong, list(known)
        )
    is_typed = any(word.startswith(f"--{path}") for word in typed)
    return ("" if is_typed else _locate(path, files)) + message + (hint and f"; {hint}")


def _is_of_accelerate(file: Path) -> bool:
    """Whether a YAML file is a configuration of Accelerate."""
    text = file.read_text(errors="replace")
    return (
        re.search(r"""^\s*["']?distributed_type["']?\s*:""", text, flags=re.MULTILINE) is not None
    )


def _explain_missing_value(arguments: Sequence[str]) -> str:
    """Which option has no value; jsonargparse names --model if --model.lr has none."""
    for name, value in pairwise([*arguments, "--"]):
        are_options = name.startswith("-") and value.startswith("-")
        is_number = any(map(_NEGATIVE.fullmatch, (name, value)))
        if are_options and "=" not in name and not is_number:
            fix = f"; write {name}={value}" if value[1:2].isdigit() else ""
            return f"argument {name}: expected a value{fix}"
    return ""


def _shorten(text: str) -> str:
    """Shorten a message of jsonargparse to ``option: expected X, got Y``.

    For an option of type A or B, jsonargparse reports why the value is neither. A reason that is more than the name of
    a type is that of the type that the user meant.
    """
    text = re.sub(r"Problem with given class_path \S+\s+(?=Parser key)", "", text)
    option = ".".join(dict.fromkeys(re.findall(r'Parser key "(\S+)":', text)))
    kinds = re.findall(
        r"^( *)(?:- )?(?:Expected a <class '(\w+)'>|Not a valid subclass of (\w+))",
        text,
        re.MULTILINE,
    )
    types = dict.fromkeys(
        one + other for indent, one, other in kinds if indent == max(kinds)[0]
    )  # the innermost
    value = re.search(r"(?:Given|Got) value: ?(.*)", text)
    reasons = [
        " ".join(reason.split())
        for reason in re.split(r"^ *- ", _NOISE.sub("", text), flags=re.MULTILINE)
    ]
    for theirs, ours in _WORDINGS.items():
        reasons = [re.sub(theirs, ours, reason) for reason in reasons]
    message = "; ".join(dict.fromkeys(filter(None, reasons)))
    got = (value[1][:80] or "nothing") if value else ""
    if message and (
        got.startswith(("{", "[", "Namespace(", "NestedArg(")) or f"got {got}" in message
    ):
        got = ""  # the reasons include it, or the relevant part
    message = message or f"expected {' or '.join(types).replace('NoneType', 'null')}"
    return one_line(f"{option and option + ': '}{message}{got and f', got {got}'}")


def _options_of(cls: type) -> Iterator[str]:
    """Options of a constructor, and ``option.field`` for those that are dataclasses."""
    hints = get_type_hints(cls.__init__)  # type: ignore[misc]
    for name in inspect.signature(cls).parameters:
        yield name
        for kind in filter(is_dataclass, (hints[name], *get_args(hints[name]))):
            yield from (f"{name}.{field.name}" for field in fields(kind))


def _keys_of(path: str) -> list[str]:
    """Fields of the class of options that ``path`` names, such as ``model.lr_schedule``; none for other options."""
    option = path.rpartition(".")[2]
    dotted = (
        name
        for cls in (MegatronModule, MegatronStrategy, *DATA_MODULES)
        for name in _options_of(cls)
    )
    keys = [name.partition(".")[2] for name in dotted if name.startswith(f"{option}.")]
    return list(dict.fromkeys(keys))


def _suggest(wrong: str, known: Collection[str]) -> str:
    """Suggest the closest known name; for a dotted name one in the same section, or else the section."""
    sections, section = {name.partition(".")[0] for name in known}, wrong.partition(".")[0]
    close = difflib.get_close_matches(
        *((wrong, known) if section in sections else (section, sections)), n=1
    )
    return f"did you mean {close[0]}?" if close and close[0] != wrong else ""


def _locate(path: str, files: list[Path]) -> str:
    """``FILE:LINE: `` of invalid YAML, or of the key that matches most of the dotted ``path``."""
    matches: list[tuple[int, str]] = [(0, "")]
    for file in files:
        try:
            node = yaml.compose(file.read_text(), Loader=yaml.CSafeLoader)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            return f"{file}:{mark.line + 1 if mark else 1}: "
        if not isinstance(node, yaml.MappingNode):
            return f"{file}:1: "
        depth, line = _find_key(node, path.split("."))
        matches.insert(0, (depth, f"{file}:{line}: " if depth else ""))  # a later file overrides
    return max(matches, key=lambda match: match[0])[1]


def _find_key(node: Any, names: list[str]) -> tuple[int, int]:
    """Number of ``names`` found, also below ``init_args`` and in items of lists, and the line of the last one."""
    if isinstance(node, yaml.SequenceNode):
        return max((_find_key(item, names) for item in node.value), default=(0, 0))
    best = (0, 0)
    for key, value in node.value if names and isinstance(node, yaml.MappingNode) else ():
        if key.value == names[0]:
            depth, line = _find_key(value, names[1:])
            best = max(best, (1 + depth, line or key.start_mark.line + 1))
        elif key.value == "init_args":
            best = max(best, _find_key(value, names))
    return best
