"""The commands ``fit``, ``validate``, ``test`` and ``predict``: LightningCLI with readable errors."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import shlex
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentError, Namespace, get_loader, set_loader, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

import lightning_megatron
from lightning_megatron import ProgressLine
from lightning_megatron.checkpoint.find import check_writable
from lightning_megatron.cli.doctor import check_accelerator
from lightning_megatron.cli.option_errors import explain
from lightning_megatron.errors import (
    LARGEST_WORLD,
    MOST_PROCESSES,
    ConfigError,
    user_error,
)
from lightning_megatron.module import MegatronModule
from lightning_megatron.registration import STRATEGY_SIZES
from lightning_megatron.storage.yaml_limits import load_yaml
from lightning_megatron.strategy import MegatronStrategy

_PUBLIC = [getattr(lightning_megatron, name) for name in lightning_megatron.__all__]
"""Imported here: a configuration may name imported classes without their module."""
_DATA_MODULES = [
    cls
    for cls in filter(inspect.isclass, _PUBLIC)
    if issubclass(cls, LightningDataModule) and not inspect.isabstract(cls)
]
DEFAULT_SEED = 1234
_load = get_loader("yaml")


def run(arguments: Sequence[str]) -> None:
    """Parse the arguments of one command and run it.

    Raises:
        ConfigError: If an argument or a setting is wrong.
    """
    asks_for_help = any(word.endswith("help") for word in arguments)
    # Docstrings below the fields of LRSchedule and others are slow to parse.
    set_parsing_settings(docstring_parse_attribute_docstrings=asks_for_help)
    MegatronCLI(list(arguments))


def show_all_options(command: str) -> None:
    """Print every option of a command, and every argument of the classes that have short names.

    Args:
        command: ``fit`` or another command of LightningCLI.
    """
    pages = [
        ["--help"],
        ["--model.help", MegatronModule.__name__],
        ["--trainer.strategy.help", MegatronStrategy.__name__],
    ]
    pages += [["--data.help", cls.__name__] for cls in _DATA_MODULES]
    for page in pages:
        with contextlib.suppress(SystemExit):
            run([command, *page])


class _RunConfig(SaveConfigCallback):
    """Saves the configuration beside the logs: overwrites that of an earlier run, but not the user's own file."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save the configuration, as ``run_config.yaml`` if its usual path is that of the user's own file."""
        folder = Path(trainer.log_dir or "")
        given = self.config.get("config") or ()
        own = [Path(file).resolve() for file in given]
        if Path(folder, self.config_filename).resolve() in own:
            self.config_filename = f"run_{self.config_filename}"
        target = Path(folder, self.config_filename)
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

    def __init__(
        self,
        args: list[str],
        run: bool = True,
    ) -> None:
        self._user_errors: list[Exception] = []
        parser_kwargs: dict[str, Any] = {
            name: {"exit_on_error": False} for name in self.subcommands()
        }
        parser_kwargs["exit_on_error"] = False  # but raise, instead of printing the usage
        with defer_messages() as self._show_messages:
            super().__init__(
                args=args,
                run=run,
                parser_kwargs=parser_kwargs,
                auto_configure_optimizers=False,
                save_config_callback=_RunConfig,
                save_config_kwargs={"overwrite": True},
                seed_everything_default=DEFAULT_SEED,
            )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Make ``MegatronModule`` the default class of ``model``."""
        class_path = f"{MegatronModule.__module__}.{MegatronModule.__qualname__}"
        parser.set_defaults({"model": {"class_path": class_path}})

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
            subcommand = str(self.config.get("subcommand"))
            settings = self.config.get(subcommand, self.config)
            if not isinstance(settings.trainer, Namespace):
                message = f'Parser key "trainer": Unexpected config: {settings.trainer or ""}'
                raise ArgumentError(None, message)
        except (ArgumentError, UnicodeDecodeError) as error:
            parsers = getattr(self, "_subcommand_parsers", {})  # none with run=False
            used = parsers.get("".join(args[:1]), parser)
            options = [name for action in used._actions for name in action.option_strings]
            raise ConfigError(explain(error, args, options)) from error
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
        own = config.callbacks
        if not isinstance(own, list):
            own = [own]
        has_bar = any(isinstance(each, ProgressBar) for each in own)
        if config.enable_progress_bar is not False and not has_bar:
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
                sizes = ", ".join(map(str, STRATEGY_SIZES))
                message = (
                    f"strategy={config.strategy}: expected MegatronStrategy, megatron, megatron_tpN, megatron_ppN, "
                    f"megatron_tpN_ppN with N of {sizes}, or one of Lightning's"
                )
            raise ConfigError(message) from error

    def _instantiate(
        self,
        class_type: type,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a constructor and record its user error, which jsonargparse buries for options of several types."""
        try:
            return class_type(*args, **kwargs)
        except (ConfigError, MisconfigurationException) as error:
            self._user_errors.append(error)
            raise
        except ModuleNotFoundError as error:  # of a logger, for example
            text = str(error)
            quoted = re.search("'(.+?)'", text)
            package = shlex.quote(quoted[1] if quoted else text)
            message = f"{class_type.__name__}: expected the package {package}, got none; pip install {package}"
            self._user_errors.append(ConfigError(message))
            raise

    def before_fit(self) -> None:
        """Run all checks that are possible before processes are launched."""
        model: LightningModule = self.model
        datamodule: LightningDataModule | None = self.datamodule
        stages = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
        loaders = f"{stages[str(self.subcommand)]}_dataloader"
        if datamodule is None and not is_overridden(loaders, model, LightningModule):
            raise ConfigError(
                "data: expected a data module, or a model with data loaders, got none; give --data"
            )
        # As Trainer.fit does next: modules are checked against their Trainer.
        model.trainer = self.trainer
        self.trainer.state.fn = TrainerFn(self.subcommand)
        strategy = self.trainer.strategy
        if isinstance(model, MegatronModule):
            strategy = model.megatron  # raises for another strategy
        if isinstance(strategy, MegatronStrategy):
            if datamodule is not None:
                datamodule.trainer = self.trainer  # as well
            strategy.connect(model)  # as well; data is checked against the model
            strategy.check_run(self.trainer, model, datamodule)
            ckpt_path = self._get(self.config_init, "ckpt_path")
            strategy.checkpointing.resolve_ckpt_path(self.trainer, ckpt_path)
        folders = [logger.save_dir for logger in self.trainer.loggers]
        for folder in folders or [self.trainer.default_root_dir]:
            if folder and "://" not in str(folder):
                check_writable([Path(folder)])
        self._show_messages()

    before_validate = before_test = before_predict = before_fit


def _check_num_processes(config: Any) -> None:
    """Refuse numbers of processes that no host can have: Lightning takes any, and starts as many.

    Raises:
        ConfigError: For the first one found.
    """
    for name, at_most in (("devices", MOST_PROCESSES), ("num_nodes", LARGEST_WORLD)):
        value = str(getattr(config, name, ""))
        if value.isdecimal() and int(value) > at_most:
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

        for name in ("", "lightning", "lightning.fabric", "lightning.pytorch", "transformers"):
            for handler in logging.getLogger(name).handlers:
                log_filter = partial(defer, handler.handle)
                handler.addFilter(log_filter)
                undo.callback(handler.removeFilter, log_filter)
        warn = warnings.showwarning
        undo.callback(setattr, warnings, "showwarning", warn)

        def defer_warning(*args: Any, **keywords: Any) -> None:
            deferred.append(partial(warn, *args, **keywords))

        warnings.showwarning = defer_warning
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
            (pickle,) = (each for each in archive.infolist() if each.filename.endswith("/data.pkl"))
            if pickle.compress_type == zipfile.ZIP_STORED:
                archive.read(pickle)  # compares its checksum
                return
    except (OSError, ValueError, NotImplementedError, RuntimeError, zipfile.BadZipFile):
        pass
    raise ConfigError(
        f"ckpt_path={path}: expected a checkpoint directory, got another file; give the path of a *.ckpt"
    )


def _load_checked(text: str, path: str = "") -> Any:
    """Load YAML with limits on its expanded size and depth.

    jsonargparse passes the path of a file to loaders with a parameter ``path``.
    """
    name = path or text[:40]
    return load_yaml(text, name, _load)
