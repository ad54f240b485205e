"""Before a run: what cannot work is refused, and its ranks find each other, in the nth start as in the first.

torchrun starts all ranks again when one has failed (``--max-restarts``) or when hosts come and go (``--nnodes 1:2``),
and its agent's key-value store outlives them. PyTorch writes the addresses of ranks into that store under the same keys
each time (torch 2.13, distributed/rendezvous.py: "We create a new TCPStore for every retry", which is not so where the
store is shared), so a rank that comes earlier than the others connects to one that is dead. No variable of the
environment tells one start from another on all hosts: ``TORCHELASTIC_RESTART_COUNT`` is each agent's own, and stays
where another host has failed. So rank 0 makes a name for the start, and hands it to each rank that is alive.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import socket
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities import distributed as fabric
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.precision import check_clipping
from lightning_megatron.restarts import LAUNCHER

if TYPE_CHECKING:
    import lightning.pytorch as pl

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.05

_REFUSED_CALLBACKS: dict[type | tuple[type, ...], str] = {
    callbacks.GradientAccumulationScheduler: "does not work with MegatronStrategy, whose batches are whole optimizer "
    "steps; use MegatronStrategy(num_microbatches=...) and a larger batch_size",
    (callbacks.StochasticWeightAveraging, callbacks.WeightAveraging): "copies the module before its weights exist, and "
    "would average nothing; remove it, and average checkpoints with lightning-megatron average",
    callbacks.ModelPruning: "masks whole weights, of which each rank has a part, under names of its own; remove it",
    callbacks.BaseFinetuning: "adds parameters to the optimizer while training, and Megatron's buffers are laid out "
    "once; freeze with requires_grad_(False) in configure_model, and unfreeze between two runs of fit, instead",
}
"""Callbacks of Lightning's that would do something else here than they promise, most of them silently."""

_REFUSED_HOOKS = {
    "backward": "Megatron's schedule runs it; override loss_func of the TrainStep",
    **dict.fromkeys(
        ("transfer_batch_to_device", "on_after_batch_transfer"),
        "the batch that one rank has read goes to all of its copy of the model; override get_batch of the TrainStep",
    ),
}
"""Methods of modules and data modules that nobody would call."""


# ---- what cannot work ------------------------------------------------------------------------------------------------


def check_trainer(trainer: pl.Trainer, *parts: pl.LightningModule | pl.LightningDataModule | None) -> None:
    """Refuse options and callbacks of ``trainer``, and hooks of ``parts``, that Megatron's engine cannot honour.

    Raises:
        ConfigError: For the first of them.
    """
    if (steps := trainer.accumulate_grad_batches) != 1:
        raise ConfigError(
            f"accumulate_grad_batches={steps} does not work, a batch is a whole step; use "
            f"MegatronStrategy(num_microbatches={steps}) and a batch_size that many times as large"
        )
    for name, unit in (("val_check_interval", "steps or a share of an epoch"), ("check_val_every_n_epoch", "epochs")):
        # A trainer that validates by time has none, and its ranks would ask clocks of their own.
        if (value := getattr(trainer, name, "a time")) in (0, "a time"):
            raise ConfigError(f"{name}={value}: expected {unit}; use limit_val_batches=0 for no validation")
    if trainer._detect_anomaly:  # it would look at memory that stands for them, and find NaN where there is none
        raise ConfigError(
            "detect_anomaly=True: expected False, since gradients go to Megatron's buffers and not through autograd; "
            "use MegatronStrategy(on_nan='raise'), which names microbatch and rank"
        )
    check_clipping(trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in _REFUSED_CALLBACKS.items():
            if isinstance(callback, kind) and getattr(callback, "going_to_accumulate_grad_batches", lambda: True)():
                raise ConfigError(f"{type(callback).__name__} {reason}")
    for part, (hook, reason) in itertools.product(parts, _REFUSED_HOOKS.items()):
        if hasattr(part, hook) and is_overridden(hook, part):
            raise ConfigError(f"{type(part).__name__}.{hook} would not be called: {reason}")


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


# ---- ranks -----------------------------------------------------------------------------------------------------------


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


def elastic_layout(
    parallel: ParallelConfig, environment: ClusterEnvironment, num_processes: int, num_nodes: int
) -> tuple[ParallelConfig, int]:
    """Layout and number of nodes of this start: torchrun or a scheduler may have started fewer than ``num_nodes``.

    The model then has fewer copies, which take the microbatches of the others: batches, samples and their order stay.

    Raises:
        ConfigError: If the copies that are left cannot share the microbatches evenly, or there is no whole one.
    """
    present, rest = divmod(environment.world_size(), num_processes)
    if not environment.creates_processes_externally or rest or not 0 < present < num_nodes:
        return parallel, num_nodes
    dp, left = (parallel.data_parallel_size(nodes * num_processes) for nodes in (num_nodes, present))
    news = f"{present} of num_nodes={num_nodes} are there, so dp={left} instead of {dp}"
    num_microbatches, rest = divmod(parallel.num_microbatches * dp, left)
    if rest:
        raise ConfigError(
            f"{news}: expected copies that share num_microbatches={parallel.num_microbatches} x {dp} evenly, got "
            f"{left}; choose num_microbatches so that {left} divides them, or start all nodes"
        )
    rank_zero_info(
        f"{news}: num_microbatches={num_microbatches} instead of {parallel.num_microbatches} keeps the batch"
    )
    return replace(parallel, num_microbatches=num_microbatches), present


def connect_ranks(
    environment: ClusterEnvironment, num_nodes: int, device: torch.device, timeout: timedelta, of_collectives: timedelta
) -> None:
    """Make the process group of all ranks; a line says which are awaited where the user starts those of other nodes.

    Raises:
        ConfigError: If they do not come within ``timeout``, or cannot connect to each other.
    """
    place = f"{environment.main_address}:{environment.main_port}"
    if num_nodes > 1 and isinstance(environment, LightningEnvironment):
        rank_zero_info(
            f"num_nodes={num_nodes}: node {environment.node_rank()} waits at {place} for the ranks of the others, at "
            f"most {timeout}; start the same script on each node with MASTER_ADDR, MASTER_PORT and its NODE_RANK set, "
            f"or all with torchrun --nnodes {num_nodes}"
        )
    backend = fabric._get_default_process_group_backend_for_device(device)
    device_id = device if device.type == "cuda" else None
    try:
        store = None if dist.is_initialized() else _store_of_start(environment, num_nodes, timeout)
        fabric._init_dist_connection(environment, backend, timeout=of_collectives, device_id=device_id, store=store)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise ConfigError(
            f"ranks at {place}: expected {environment.world_size()} (num_nodes={num_nodes}) within {timeout}, got "
            f"{str(error).splitlines()[0]}; start the script on every node with the same MASTER_ADDR and MASTER_PORT"
        ) from error
    except RuntimeError as error:
        if num_nodes == 1 or "connectFullMesh" not in str(error):
            raise
        raise ConfigError(
            f"{_GLOO_INTERFACE}={os.environ.get(_GLOO_INTERFACE)}: expected the network interface of this host that "
            f"the {num_nodes} hosts use, got {str(error).splitlines()[0]}; set it on every host (see ip addr)"
        ) from error


def _store_of_start(environment: ClusterEnvironment, num_nodes: int, timeout: timedelta) -> Store:
    """The store of this start, after all ranks of it are there; gloo then uses the interface that reaches them."""
    rank, world_size = environment.global_rank(), environment.world_size()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    address = _source_address(environment.main_address)
    if rank == 0:
        start, seen_from = _gather(store, world_size, address, timeout)
    else:
        token = uuid.uuid4().hex
        store.set(f"rank/{rank}", f"{token} {address}")
        start, _, seen_from = store.get(token).decode().partition(" ")
        store.add(start, 1)
    if num_nodes > 1 and _GLOO_INTERFACE not in os.environ:
        # Debian gives a host's own name the address 127.0.1.1, which gloo would tell the others, too.
        own = address if _is_outward(address) else _source_address(seen_from)
        for interface, addresses in psutil.net_if_addrs().items():
            if own in (each.address for each in addresses):
                os.environ[_GLOO_INTERFACE] = interface
    return PrefixStore(start, store)


def _gather(store: Store, world_size: int, address: str, timeout: timedelta) -> tuple[str, str]:
    """Answer every rank that announces itself until as many have taken the name of this start as there are others.

    What a rank of an earlier start has announced is answered too, and nobody reads it.

    Returns:
        The name, and the address of a host, or "" if all are one host.

    Raises:
        DistStoreError: If some are missing after ``timeout``.
    """
    start, deadline, answered = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds(), set[bytes]()
    places = [f"rank/{rank}" for rank in range(1, world_size)]
    while (present := store.add(start, 0)) < len(places):
        announced = store.multi_get(places)  # waits for the first of each rank
        others = [each.decode().partition(" ")[2] for each in announced]
        seen_from = next(filter(_is_outward, (address, *others)), "")
        for each in set(announced) - answered:
            store.set(each.decode().partition(" ")[0], f"{start} {seen_from}")
            answered.add(each)
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"{present + 1} of them")
        time.sleep(_POLL_SECONDS)
    return start, seen_from if places else ""


def _source_address(host: str) -> str:
    """The IPv4 address that this host has for ``host``; "" without a way to it. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return ""


def _is_outward(address: str) -> bool:
    return bool(address) and not address.startswith("127.")
