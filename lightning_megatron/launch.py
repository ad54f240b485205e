"""How ranks start and end: the launcher, and signals that wait until all ranks can act on them.

Lightning ends a run on SIGTERM with code 0 and without a checkpoint (2.6.6: ``SIGTERMException`` is a ``SystemExit``).
Here it ends with a checkpoint that ``ckpt_path="last"`` finds (``checkpointing.py``), and exit code 143.

A signal handler runs wherever the program happens to be, which on a Megatron rank is nearly always in the middle of
some communication. Lightning's handlers communicate themselves (trainer/connectors/signal_connector.py: SIGTERM
broadcasts, SLURM's requeue signal saves a checkpoint), and ranks that are at different places then wait for each other
for ever. Here a signal is only noted; the handlers that were registered run between two batches, on all ranks at once.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

from lightning_megatron.errors import ConfigError
from lightning_megatron.predictions import told_predict_size
from lightning_megatron.restarts import LAUNCHER

TERMINATED = 128 + signal.SIGTERM
"""The exit code of a process that SIGTERM ended; schedulers take it for a preemption, not for a failure."""

_PR_SET_PDEATHSIG = 1


# ---- start -----------------------------------------------------------------------------------------------------------


def check_world_size(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
    """Compare the processes that there are, or can be, with those of the run.

    Raises:
        ConfigError: If torchrun or a scheduler has started another number: some ranks would have no device, and the
            others wait for them; or the other ranks could not run what this process runs, since it was typed in.
    """
    is_typed = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    has_script = not is_typed and (sys.modules["__main__"].__spec__ is not None or os.path.isfile(sys.argv[0]))
    if num_processes > 1 and not has_script and not environment.creates_processes_externally:
        raise ConfigError(
            f"devices={num_processes} needs a script that each process runs, and this program is typed in (a notebook, "
            f"python -c); save it and run python FILE.py or torchrun --nproc-per-node {num_processes} FILE.py"
        )
    if dist.is_initialized() and dist.get_world_size() != num_processes * num_nodes:
        raise ConfigError(
            f"this process is one of {dist.get_world_size()} already, and the run has {num_processes * num_nodes}; "
            "start another process for it"
        )
    if isinstance(environment, LightningEnvironment) or not environment.creates_processes_externally:
        return
    started = environment.world_size()
    if started != num_processes * num_nodes:
        raise ConfigError(
            f"{started} processes were started, and the run has {num_processes * num_nodes} (devices={num_processes} x "
            f"num_nodes={num_nodes}); start so many (torchrun --nproc-per-node {num_processes}), or give those"
        )


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, which runs the script again for each rank; here the ranks know who started them.

    Where torchrun or a scheduler has started them already, it only calls the function.
    """

    _has_failed = False
    """Whether the last function that any Trainer of this process has launched raised."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True  # with one process; more are refused by check_world_size

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks, which this process takes along if it dies and waits for if it ends; call ``function``.

        Args:
            function: What fits, validates, tests or predicts.
            args: Its arguments; ``ckpt_path`` among them is replaced by the checkpoint that it means.
            trainer: Whose strategy this is the launcher of.
            kwargs: Further arguments of ``function``.

        Raises:
            CheckpointError: If that checkpoint is missing or not complete.
            ConfigError: If copies of the model are left without a row to predict.
        """
        call = inspect.signature(function).bind(*args, **kwargs)
        if trainer is not None and "ckpt_path" in call.signature.parameters:
            call.apply_defaults()
            checkpointing = trainer.strategy.checkpointing
            call.arguments["ckpt_path"] = checkpointing.begin_with(trainer, call.arguments["ckpt_path"])
        ScriptLauncher._has_failed = True  # until it returns
        try:
            if self.cluster_environment.creates_processes_externally:
                result = function(*call.args, **call.kwargs)
            else:
                if trainer is not None:
                    _check_run(trainer, call.arguments.get("datamodule"))
                os.environ[LAUNCHER] = str(os.getpid())
                atexit.register(self._wait_for_other_ranks)
                result = super().launch(function, *call.args, trainer=trainer, **call.kwargs)
        except Exception as error:
            self._tell_killed_ranks()
            if isinstance(error, AssertionError) and (told := told_predict_size(error)) is not None:
                raise told from None
            raise
        ScriptLauncher._has_failed = False
        return result

    def _tell_killed_ranks(self) -> None:
        """Before the error of a lost connection, which does not say whose."""
        for local_rank, process in enumerate(self.procs, 1):
            if (code := process.poll() or 0) < 0:
                print(f"error: local rank {local_rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)

    def _wait_for_other_ranks(self) -> None:
        """At a normal end of this process: the others may still write files. Exits with 1 if one of them fails."""
        if self._has_failed or getattr(sys, "last_value", None) is not None:
            return  # the others wait in a collective, and end with this process
        for local_rank, process in enumerate(self.procs, 1):
            if code := process.wait():
                print(f"error: local rank {local_rank} ended with code {code}", file=sys.stderr, flush=True)
                sys.stdout.flush()
                os._exit(1)  # nothing else sets the exit code by now


def _check_run(trainer: Any, datamodule: Any) -> None:
    """Say what cannot work now and once, instead of in every rank; Lightning connects the parts behind the launch."""
    for part in filter(None, (trainer.lightning_module, datamodule)):
        part.trainer = trainer  # as the Trainer does next
    trainer.strategy.check_run(trainer, trainer.lightning_module, datamodule)


def die_with_launcher() -> None:
    """Have the kernel end this rank when what launched it dies, however it dies (Linux only).

    A child that waits in a collective for a killed rank 0 would otherwise wait until the timeout, holding its GPU. Does
    nothing in a rank 0 that was typed, and where torchrun or a scheduler started the processes.
    """
    launcher = int(os.environ.get(LAUNCHER, os.getpid()))
    if launcher == os.getpid() or not sys.platform.startswith("linux"):
        return
    if os.getppid() == launcher:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not os.path.exists(f"/proc/{launcher}"):  # it died while this rank was importing
        os._exit(1)


# ---- signals ---------------------------------------------------------------------------------------------------------


def deferred_signums(environment: ClusterEnvironment) -> list[int]:
    """Signals for which Lightning registers handlers that communicate, and which therefore wait for a step's end."""
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue and environment.requeue_signal:
        return [signal.SIGTERM, environment.requeue_signal]
    return [signal.SIGTERM]


class DeferredSignals:
    """Notes signals and delivers them to their handlers where every rank has come to."""

    def __init__(self, signums: Iterable[int], group: dist.ProcessGroup) -> None:
        """Defer ``signums``; nothing changes before the first ``deliver``.

        Args:
            signums: Signals whose handlers communicate.
            group: All ranks, over gloo: the question must not wait for a GPU.
        """
        self._signums = tuple(signums)
        self._group = group
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._noted: set[int] = set()
        self._question: tuple[dist.Work, torch.Tensor] | None = None
        self._stand_in = self._note
        self.is_delivering = False
        """Whether handlers run."""

    def deliver(self, done: bool = False) -> bool:
        """Run the handlers of signals that any rank had noted at the call before; every rank must call.

        The answer travels while the batch in between is worked on, so nothing waits for it.

        Args:
            done: Something that this rank has to say to the others.

        Returns:
            Whether all ranks said ``done`` at the call before.
        """
        self._stand_in_for_handlers()
        some_not_done, *noted = [True, *(False for _ in self._signums)]
        if self._question is not None:
            work, flags = self._question
            work.wait()
            some_not_done, *noted = flags.tolist()
        flags = torch.tensor([not done, *(signum in self._noted for signum in self._signums)], dtype=torch.uint8)
        self._noted.clear()
        self._question = (dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True), flags)
        self.is_delivering = True
        try:
            for signum, is_noted in zip(self._signums, noted, strict=True):
                if is_noted and signum in self._handlers:
                    self._handlers[signum](signum, None)
        finally:
            self.is_delivering = False
        return not some_not_done

    def _stand_in_for_handlers(self) -> None:
        """Take the place of handlers that Lightning has registered since; it puts back what was there before itself."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in self._signums:
            handler = signal.getsignal(signum)
            if callable(handler) and handler is not self._stand_in:
                self._handlers[signum] = handler
                signal.signal(signum, self._stand_in)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._noted.add(signum)
