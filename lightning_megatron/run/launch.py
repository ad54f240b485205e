"""The launcher of a run's ranks: checks the run once, starts the other ranks, and reports how they end."""

from __future__ import annotations

import atexit
import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lightning.fabric.utilities import rank_zero_info
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_megatron.checkpoint.schema import restore_error
from lightning_megatron.errors import (
    DONE,
    TERMINATED,
    WRONG_ARGUMENTS,
    ReportedError,
)
from lightning_megatron.predictions import predict_size_error
from lightning_megatron.run.check import check_loaders
from lightning_megatron.run.failures import is_lost_connection, report_as
from lightning_megatron.run.restarts import LAUNCHER, describe_end

if TYPE_CHECKING:
    import lightning.pytorch as pl

_REAP_SECONDS = 3.0
"""Most seconds until a killed process, whose connections close at once, can be waited for."""
_UNWIND_SECONDS = 10.0
"""Seconds in which local rank 0 may end by itself after another rank: it raises, and the user's handlers run."""
_NO_FAILURE = (None, DONE, TERMINATED)
"""Exit codes of a rank that is running, done or preempted."""


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

    Lightning kills local rank 0 up to five seconds after another rank has failed, so chance decides whether rank 0 can
    say why it ends, and the exit code may be that of a kill. Here it has time to, and the exit code is its own.

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
                self._start_other_ranks()
                result = function(*call.args, **call.kwargs)
        except Exception as error:
            self._report_ended_ranks(error)
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

    def _start_other_ranks(self) -> None:
        """Start them as Lightning does, but for what ends local rank 0 when one of them fails."""
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes,
            num_nodes=self.num_nodes,
        )
        self._call_children_scripts()
        threading.Thread(target=_end_with_failed_rank, args=(self.procs,), daemon=True).start()
        _set_num_threads_if_needed(self.num_processes)

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

    def _report_ended_ranks(self, error: Exception) -> None:
        """Name the ranks that a signal has ended, or one that has ended without an exception.

        The error of a lost connection does not.
        """
        is_lost = is_lost_connection(error)
        if is_lost and self.procs:
            deadline = time.monotonic() + _REAP_SECONDS
            while not any(map(_has_ended, self.procs)) and time.monotonic() < deadline:
                time.sleep(0.05)
        codes = {rank: process.poll() or 0 for rank, process in enumerate(self.procs, 1)}
        for local_rank, code in codes.items():
            if code < 0:
                print(_failure(local_rank, code), file=sys.stderr)
        if not is_lost or not any(codes.values()):
            return
        # Ranks that have lost a connection, too, end with code 1.
        first = min(codes, key=lambda rank: (codes[rank] == 0, codes[rank] == 1, codes[rank]))
        line = f"{_failure(first, codes[first])}, and rank 0 ends with it"
        # A rank that has announced its exception is reported by that, soon.
        report_as(error, line)
        if codes[first] == WRONG_ARGUMENTS:
            error.__cause__ = ReportedError(line)

    def _wait_for_other_ranks(self) -> None:
        """Wait at normal exit for the other ranks, which may still write files; exit with 1 if one of them fails."""
        if self._has_failed or getattr(sys, "last_value", None) is not None:
            return  # the other ranks wait in a collective, and die with this process
        for local_rank, process in enumerate(self.procs, 1):
            code = process.wait()
            if code:
                _exit(_failure(local_rank, code))  # nothing else sets the exit code by now


def _end_with_failed_rank(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End this process some time after one of ``processes`` has failed, if it waits for that rank in a collective.

    A preempted rank has not: all ranks are, and this one may take its time, as loggers that upload at exit do.

    Args:
        processes: The ranks that this process has started: local ranks from 1 on.
    """
    failed = None
    while failed is None:
        time.sleep(1)
        all_have_ended = all(map(_has_ended, processes))
        failed = next((each for each in processes if each.poll() not in _NO_FAILURE), None)
        if all_have_ended and failed is None:
            return
    time.sleep(_UNWIND_SECONDS)
    for process in processes:
        process.kill()
    line = _failure(processes.index(failed) + 1, failed.returncode)
    _exit(f"{line}, and the others end with it")


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


def _failure(local_rank: int, code: int) -> str:
    return f"error: local rank {local_rank} {describe_end(code)}"


def _exit(line: str) -> None:
    """End this process, whose main thread may wait for ever, with ``line`` as its last."""
    sys.stdout.flush()
    print(line, file=sys.stderr, flush=True)
    os._exit(1)
