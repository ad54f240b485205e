"""The launcher of a run's ranks: checks the run once, starts the other ranks, and reports how they end."""

from __future__ import annotations

import atexit
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_megatron.checkpoint.schema import restore_error
from lightning_megatron.predictions import predict_size_error
from lightning_megatron.run.check import check_loaders
from lightning_megatron.run.failures import is_lost_connection, report_as
from lightning_megatron.run.restarts import LAUNCHER

if TYPE_CHECKING:
    import lightning.pytorch as pl

_REAP_SECONDS = 0.2
"""Seconds until a killed process, whose connections close at once, can be waited for."""


class _Start(Protocol):
    """Finds the checkpoint that a run begins with."""

    def resolve_ckpt_path(
        self, trainer: pl.Trainer, ckpt_path: str | Path | None
    ) -> str | Path | None: ...


class _LaunchedStrategy(Protocol):
    """What the launcher needs of ``MegatronStrategy``."""

    @property
    def checkpointing(self) -> _Start: ...

    def check_run(
        self,
        trainer: pl.Trainer,
        model: pl.LightningModule,
        datamodule: pl.LightningDataModule | None,
    ) -> None: ...


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, which runs the script once per rank; here the ranks know their launcher's process id.

    Where torchrun or a scheduler has started the ranks already, it only calls the function.
    """

    _has_failed = False
    """Whether the last function that any Trainer of this process launched has failed, or is still running."""

    is_interactive_compatible = True  # check_world_size refuses more than one process

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Start the other ranks and call ``function``; they die with this process, which waits for them when it exits.

        Args:
            function: The Trainer's function that fits, validates, tests or predicts.
            args: Its arguments; ``ckpt_path`` among them is replaced by the path of the checkpoint that it refers to.
            trainer: The Trainer of this launcher's strategy.
            kwargs: Further arguments of ``function``.

        Raises:
            CheckpointError: If that checkpoint is missing or not complete.
            ConfigError: If the run cannot work, or a data-parallel replica has no sample to predict.
        """
        strategy: _LaunchedStrategy = trainer.strategy
        call = inspect.signature(function).bind(*args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        check_loaders(arguments)
        ckpt_path = strategy.checkpointing.resolve_ckpt_path(trainer, arguments["ckpt_path"])
        arguments["ckpt_path"] = ckpt_path
        ScriptLauncher._has_failed = True  # until it returns
        try:
            if self.cluster_environment.creates_processes_externally:
                # Each rank checks the run when Lightning connects it.
                result = function(*call.args, **call.kwargs)
            else:
                self._check(strategy, trainer, arguments["datamodule"])
                os.environ[LAUNCHER] = str(os.getpid())
                atexit.register(self._wait_for_other_ranks)
                self._announce_other_ranks()
                result = super().launch(function, *call.args, trainer=trainer, **call.kwargs)
        except Exception as error:
            self._report_killed_ranks(error)
            if isinstance(error, AssertionError):
                size_error = predict_size_error(error)
                if size_error is not None:
                    raise size_error from None
            damage = restore_error(error, ckpt_path)
            if damage is not None:
                raise damage from error
            raise
        ScriptLauncher._has_failed = False
        return result

    def _announce_other_ranks(self) -> None:
        """Say what the next ten seconds or more are for: nothing else is printed until all ranks have met."""
        others = self.num_processes - 1
        if others:
            rank_zero_info(
                f"Starting {others} more process{'es' * (others > 1)}, each of which imports PyTorch, Lightning and"
                " Megatron-Core first"
            )

    def _check(
        self,
        strategy: _LaunchedStrategy,
        trainer: pl.Trainer,
        datamodule: pl.LightningDataModule | None,
    ) -> None:
        """Check the run before other ranks exist."""
        module = trainer.lightning_module
        module.trainer = trainer  # as the Trainer does next
        if datamodule is not None:
            datamodule.trainer = trainer
        strategy.check_run(trainer, module, datamodule)

    def _report_killed_ranks(self, error: Exception) -> None:
        """Name the ranks that a signal has ended: the error of a lost connection does not."""
        if self.procs:
            time.sleep(_REAP_SECONDS)
        for local_rank, process in enumerate(self.procs, 1):
            code = process.poll() or 0
            if code >= 0:
                continue
            line = f"error: local rank {local_rank} was ended by {signal.Signals(-code).name}"
            print(line, file=sys.stderr)
            if is_lost_connection(error):
                report_as(error, f"{line}, and rank 0 ends with it")

    def _wait_for_other_ranks(self) -> None:
        """Wait at normal exit for the other ranks, which may still write files; exit with 1 if one of them fails."""
        if self._has_failed or getattr(sys, "last_value", None) is not None:
            return  # the other ranks wait in a collective, and die with this process
        for local_rank, process in enumerate(self.procs, 1):
            code = process.wait()
            if code:
                line = f"error: local rank {local_rank} ended with code {code}"
                print(line, file=sys.stderr, flush=True)
                sys.stdout.flush()
                os._exit(1)  # nothing else sets the exit code by now
