"""How do ``fit``, ``validate``, ``test`` and ``predict`` run? By LightningCLI, with errors that people can read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentError, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, callbacks, loggers
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from typing_extensions import override

from lightning_megatron.callbacks import LossCurve, PerplexityReport, ProgressLine, SampleText, ThroughputMonitor
from lightning_megatron.ckpt_path import check_writable
from lightning_megatron.cli.config_files import explained, refuse_yaml_without_end
from lightning_megatron.cli.failure import UsageError
from lightning_megatron.cli.messages import HeldMessages
from lightning_megatron.datamodules.sources import (
    DatasetDataModule,
    IndexedDataModule,
    InstructionDataModule,
    TextEvaluationDataModule,
)
from lightning_megatron.errors import ConfigError
from lightning_megatron.module import MegatronModule
from lightning_megatron.registration import SIZES
from lightning_megatron.strategy import MegatronStrategy, preflight

DATA_MODULES = (IndexedDataModule, InstructionDataModule, DatasetDataModule, TextEvaluationDataModule)
SHORT_NAMES = (
    *(MegatronModule, MegatronStrategy, *DATA_MODULES),
    *(ThroughputMonitor, LossCurve, PerplexityReport, ProgressLine, SampleText),
)
"""Classes that a configuration may name without their module, because they are imported here."""
DEFAULT_SEED = 1234
_CHECKPOINT_WORDS = ("last", "best", "hpc")


class MegatronCLI(LightningCLI):
    """LightningCLI for any LightningModule and LightningDataModule; the model defaults to ``MegatronModule``.

    Optimizers are not options of the command line: they are built over the shards by ``configure_optimizers``, and
    LightningCLI would build one before any weight exists.

    Args:
        args: Arguments after the program's name, or a configuration; ``sys.argv[1:]`` if None.
        run: Whether the first argument is a sub-command to run; otherwise the objects are only made.
    """

    def __init__(self, args: ArgsType = None, run: bool = True) -> None:
        self._mistakes: list[Exception] = []
        self._messages = HeldMessages()
        with self._messages:
            super().__init__(
                args=args,
                run=run,
                auto_configure_optimizers=False,
                save_config_kwargs={"overwrite": True},
                seed_everything_default=DEFAULT_SEED,
            )

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser that raises instead of printing its usage and exiting."""
        kwargs["exit_on_error"] = False
        return super().init_parser(**kwargs)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Let ``model`` without a class be a ``MegatronModule``."""
        parser.set_defaults({"model": {"class_path": f"{MegatronModule.__module__}.{MegatronModule.__qualname__}"}})

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse without the warning that both ``args`` and ``sys.argv`` are there: one is the other's tail."""
        if not isinstance(args, list):
            super().parse_arguments(parser, args)
            return
        refuse_yaml_without_end()
        try:
            self.config = parser.parse_args(args)
        except (ArgumentError, UnicodeDecodeError) as error:
            command = self._subcommand_parsers.get(args[0], parser)
            options = [name for action in command._actions for name in action.option_strings]
            classes = [*(each.__name__ for each in SHORT_NAMES), *callbacks.__all__, *loggers.__all__]
            raise UsageError(explained(error, args, options, classes)) from error

    @override
    def before_instantiate_classes(self) -> None:
        """Have every class made through ``_make``."""
        self.parser.add_instantiator(self._make, object)

    @override
    def instantiate_classes(self) -> None:
        """Make model, data and Trainer.

        Raises:
            ConfigError: If a constructor found a mistake of the user's.
        """
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
        own = given.callbacks if isinstance(given.callbacks, list) else [given.callbacks]
        if given.enable_progress_bar is not False and not any(isinstance(each, ProgressBar) for each in own):
            self.trainer_defaults = {"callbacks": ProgressLine()}
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, ModuleNotFoundError, MisconfigurationException) as error:
            message = str(error)
            if given.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
                message = f"accelerator={given.accelerator}: expected a GPU that torch can use, got none; give "
                message += "accelerator=cpu, or see lightning-megatron doctor"
            elif "invalid strategy name" in message:
                message = f"strategy={given.strategy}: expected MegatronStrategy, megatron, megatron_tpN, megatron_ppN,"
                message += f" megatron_tpN_ppN with N of {', '.join(map(str, SIZES))}, or a strategy of Lightning's"
            raise ConfigError(message) from error

    def _make(self, class_type: type, *args: Any, **kwargs: Any) -> Any:
        """Call a constructor and remember what it says: jsonargparse buries it where an option has several types."""
        try:
            return class_type(*args, **kwargs)
        except (ConfigError, MisconfigurationException) as error:
            self._mistakes.append(error)
            raise

    def before_fit(self) -> None:
        """Check everything that can be checked before processes are launched."""
        _check_checkpoint_exists(self._get(self.config_init, "ckpt_path"))
        model: LightningModule = self.model
        datamodule: LightningDataModule | None = self.datamodule
        if isinstance(self.trainer.strategy, MegatronStrategy):
            model.trainer = self.trainer  # as Trainer.fit does next; a module checks itself against its Trainer
            preflight(self.trainer, model, datamodule)
        folders = [each.save_dir for each in self.trainer.loggers] or [self.trainer.default_root_dir]
        check_writable(Path(each) for each in folders if each and "://" not in str(each))
        self._messages.release()

    before_validate = before_test = before_predict = before_fit


def _check_checkpoint_exists(path: str | Path | None) -> None:
    if path is None or str(path) in _CHECKPOINT_WORDS or "://" in str(path):
        return
    if not Path(os.path.expanduser(path)).exists():
        words = ", ".join(_CHECKPOINT_WORDS)
        raise UsageError(f"ckpt_path={path} does not exist; give the path of a *.ckpt, or one of {words}")


def run(arguments: Sequence[str]) -> None:
    """Parse the arguments of one command and run it.

    Raises:
        ConfigError: If an argument or a setting is wrong.
    """
    # Help of the fields of LRSchedule and others stands below them; reading it takes time, so it is for help alone.
    set_parsing_settings(docstring_parse_attribute_docstrings=any(each.endswith("help") for each in arguments))
    MegatronCLI(args=list(arguments))


def show_all_options(command: str) -> None:
    """Print every option of a command, and every argument of the classes that have short names.

    Args:
        command: ``fit`` or another one that LightningCLI runs.
    """
    classes = (("model", (MegatronModule,)), ("trainer.strategy", (MegatronStrategy,)), ("data", DATA_MODULES))
    for arguments in (["--help"], *([f"--{key}.help", each.__name__] for key, found in classes for each in found)):
        with contextlib.suppress(SystemExit):
            run([command, *arguments])
