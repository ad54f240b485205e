"""What happens between ``Trainer.fit`` and the first line of the run? Ranks start, and its checkpoint is found."""

from __future__ import annotations

import atexit
import inspect
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_megatron.engine.launch import announce_launcher
from lightning_megatron.errors import ConfigError
from lightning_megatron.rows_for_copies import rows_for_copies

if TYPE_CHECKING:
    from lightning_megatron.strategy import MegatronStrategy


def check_world_size(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
    """Compare the processes that torchrun or a scheduler has started with those of the run.

    Raises:
        ConfigError: If they differ: some ranks would have no device, and the others wait for them; or none can start.
    """
    check_has_script(environment, num_processes)
    if dist.is_initialized() and dist.get_world_size() != num_processes * num_nodes:
        raise ConfigError(
            f"this process is one of {dist.get_world_size()} already (a module that answers without a Trainer, or an "
            f"earlier run), and the run has {num_processes * num_nodes}; start another process for it"
        )
    if isinstance(environment, LightningEnvironment) or not environment.creates_processes_externally:
        return
    started = environment.world_size()
    if started != num_processes * num_nodes:
        raise ConfigError(
            f"{started} processes were started, and the run has {num_processes * num_nodes} (devices={num_processes} x "
            f"num_nodes={num_nodes}); start as many as it has (torchrun --nproc-per-node {num_processes}), or give the "
            "devices and num_nodes of those there are"
        )


@contextmanager
def meeting(environment: ClusterEnvironment, num_nodes: int, timeout: timedelta) -> Generator[None, None, None]:
    """While the ranks meet: outside of a cluster say for which, since somebody has to start those of other nodes.

    Raises:
        ConfigError: If they do not come within ``timeout``.
    """
    place = f"{environment.main_address}:{environment.main_port}"
    if num_nodes > 1 and isinstance(environment, LightningEnvironment):
        rank_zero_info(
            f"num_nodes={num_nodes}: node {environment.node_rank()} waits at {place} for the ranks of the others, at "
            f"most {timeout}; start the same script on each node with MASTER_ADDR, MASTER_PORT and its NODE_RANK set, "
            f"or all with torchrun --nnodes {num_nodes}"
        )
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise ConfigError(
            f"ranks at {place}: expected {environment.world_size()} (num_nodes={num_nodes}) within {timeout}, got "
            f"{str(error).splitlines()[0]}; start the script on every node with the same MASTER_ADDR and MASTER_PORT"
        ) from error


def check_has_script(environment: ClusterEnvironment, num_processes: int) -> None:
    """Raise where the other ranks could not run what this process runs: a program that is typed in has no file.

    Raises:
        ConfigError: In a notebook, ``python -i``, ``python -`` and ``python -c``, if there is more than one process.
    """
    if num_processes == 1 or environment.creates_processes_externally:
        return
    is_typed = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    if is_typed or (sys.modules["__main__"].__spec__ is None and not os.path.isfile(sys.argv[0])):
        raise ConfigError(
            f"devices={num_processes} needs a script, which each process runs, and this program is typed in (a "
            "notebook, python -i, python -c or standard input); save it as a file and run python FILE.py or "
            f"torchrun --nproc-per-node {num_processes} FILE.py; devices=1 works here"
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
        return True  # with one process; more are refused by check_has_script

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
            strategy: MegatronStrategy = trainer.strategy
            call.arguments["ckpt_path"] = strategy.begin_with(trainer, call.arguments["ckpt_path"])
        ScriptLauncher._has_failed = True  # until it returns
        with rows_for_copies():
            if self.cluster_environment.creates_processes_externally:
                result = function(*call.args, **call.kwargs)
            else:
                announce_launcher()
                atexit.register(self._wait_for_other_ranks)
                result = super().launch(function, *call.args, trainer=trainer, **call.kwargs)
        ScriptLauncher._has_failed = False
        return result

    def _wait_for_other_ranks(self) -> None:
        """At a normal end of this process: the others may still write files. Exits with 1 if one of them fails."""
        if self._has_failed or getattr(sys, "last_value", None) is not None:
            return  # the others wait in a collective, and end with this process
        for local_rank, process in enumerate(self.procs, 1):
            if code := process.wait():
                print(f"error: local rank {local_rank} ended with code {code}", file=sys.stderr, flush=True)
                sys.stdout.flush()
                os._exit(1)  # nothing else sets the exit code by now
