"""Launch of a run: checks of Trainer and world size, and a rendezvous of all ranks that works after restarts, too.

torchrun restarts all ranks when one has failed (``--max-restarts``) or when nodes join or leave (``--nnodes 1:2``), and
its agent's key-value store outlives them. PyTorch writes the ranks' addresses into that store under the same keys each
time (torch 2.13, distributed/rendezvous.py: "We create a new TCPStore for every retry", which does not hold where the
store is shared), so a rank that arrives before the others connects to a dead one. No environment variable identifies a
start on all hosts: ``TORCHELASTIC_RESTART_COUNT`` is each agent's own, and does not change when another host has
failed. So rank 0 generates a key prefix for the start, and hands it to each rank that is alive.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities import distributed as fabric
from lightning.pytorch import LightningDataModule, callbacks
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.utils.data import Dataset, IterableDataset

from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import MOST_PROCESSES, ConfigError, require_number
from lightning_megatron.precision import check_clipping
from lightning_megatron.run.restarts import LAUNCHER

if TYPE_CHECKING:
    import lightning.pytorch as pl

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.05
_LAUNCHER_POLL_SECONDS = 5.0
_RUN_ID = "TORCHELASTIC_RUN_ID"
_TORCHRUN_VARIABLES = {_RUN_ID, "TORCHELASTIC_USE_AGENT_STORE"}
"""Variables that torchrun's agent sets for its ranks; by hand, only the first is set, to imitate it."""

_REFUSED_CALLBACKS: dict[type | tuple[type, ...], str] = {
    callbacks.GradientAccumulationScheduler: "does not work with MegatronStrategy, whose batches are whole optimizer "
    "steps; use MegatronStrategy(num_microbatches=...) and a larger batch_size",
    (
        callbacks.StochasticWeightAveraging,
        callbacks.WeightAveraging,
    ): "copies the module before its weights exist, and "
    "would average nothing; remove it, and average checkpoints with lightning-megatron average",
    callbacks.ModelPruning: "masks whole weights, of which each rank has a shard, under names of its own; remove it",
    callbacks.BaseFinetuning: "adds parameters to the optimizer while training, and Megatron's buffers are laid out "
    "once; freeze with requires_grad_(False) in configure_model, and unfreeze between two runs of fit, instead",
}
"""Lightning callbacks that would not do what they promise here, most of them silently; and the reason."""


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_trainer(trainer: pl.Trainer) -> None:
    """Refuse options and callbacks of ``trainer`` that Megatron's engine cannot honour.

    Raises:
        ConfigError: For the first one found.
    """
    if (steps := trainer.accumulate_grad_batches) != 1:
        raise ConfigError(
            f"accumulate_grad_batches={steps}: expected 1, since a batch is a whole optimizer step; use "
            f"MegatronStrategy(num_microbatches={steps}) and a batch_size {steps} times as large"
        )
    for name, unit in (
        ("val_check_interval", "steps or a share of an epoch"),
        ("check_val_every_n_epoch", "epochs"),
    ):
        # Missing if the interval is a time, which each rank would measure by its own clock.
        if (value := getattr(trainer, name, "a time")) in (0, "a time"):
            raise ConfigError(
                f"{name}={value}: expected {unit}; use limit_val_batches=0 for no validation"
            )
    for name in ("max_steps", "max_epochs", "min_steps", "min_epochs", "log_every_n_steps"):
        value = getattr(trainer, name, None)
        require_number(
            name, 0 if value is None else value, at_least=0 if name == "log_every_n_steps" else -1
        )
    if (
        trainer._detect_anomaly
    ):  # it would inspect uninitialized placeholders of gradients, and report their NaN
        raise ConfigError(
            "detect_anomaly=True: expected False, since gradients go to Megatron's buffers and not through autograd; "
            "use MegatronStrategy(on_nan='raise'), which names microbatch and rank"
        )
    check_clipping(trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in _REFUSED_CALLBACKS.items():
            if (
                isinstance(callback, kind)
                and getattr(callback, "going_to_accumulate_grad_batches", lambda: True)()
            ):
                raise ConfigError(f"{type(callback).__name__} {reason}")


def check_loaders(arguments: Mapping[str, Any]) -> None:
    """Refuse datasets where the Trainer's functions take loaders of batches, and data modules that are none.

    Args:
        arguments: Arguments of ``Trainer.fit``, ``validate``, ``test`` or ``predict``, by name.

    Raises:
        ConfigError: For the first one.
    """
    datamodule = arguments.get("datamodule")
    if datamodule is not None and not isinstance(datamodule, LightningDataModule):
        kind = type(datamodule).__name__
        raise ConfigError(
            f"datamodule: expected a LightningDataModule, got a {kind}; pass loaders as train_dataloaders"
        )
    for name in ("train_dataloaders", "val_dataloaders", "dataloaders"):
        value = arguments.get(name)
        loaders = list(value.values()) if isinstance(value, Mapping) else [value]
        if isinstance(value, (list, tuple)):
            loaders = list(value)[:1]  # the first item of a dataset is enough
        for loader in loaders:
            if loader is not None and not _yields_batches(loader):
                what = f"a {type(value).__name__}" + f" of {type(loader).__name__}" * (
                    value is not loader
                )
                fix = "give DataLoader(dataset, batch_size=...), or datamodule=DatasetDataModule(train=dataset)"
                raise ConfigError(f"{name}: expected a DataLoader, got {what}; {fix}")


def _yields_batches(loader: object) -> bool:
    """Whether an object can be a loader: iterable, and neither data itself nor a dataset of single samples."""
    if isinstance(loader, (Mapping, list, tuple, str, bytes, torch.Tensor)):
        return False
    is_dataset = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
    is_hugging_face = type(loader).__module__.partition(".")[0] == "datasets"
    return isinstance(loader, Iterable) and not is_dataset and not is_hugging_face


def check_world_size(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
    """Check that as many processes have been, or can be, started as the run needs.

    Raises:
        ConfigError: If torchrun or a scheduler has started another number (some ranks would have no device, and the
            others would wait for them), a process group of another size exists, or this process would start other
            ranks but is interactive, without a script that they could run.
    """
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    has_script = not is_interactive and (
        sys.modules["__main__"].__spec__ is not None or os.path.isfile(sys.argv[0])
    )
    if num_processes > MOST_PROCESSES and not environment.creates_processes_externally:
        raise ConfigError(
            f"devices={num_processes} must be at most {MOST_PROCESSES}; correct devices"
        )
    if num_processes > 1 and not has_script and not environment.creates_processes_externally:
        raise ConfigError(
            f"devices={num_processes} needs a script that each process runs, and this program has none (a notebook, "
            f"python -c); save it and run python FILE.py or torchrun --nproc-per-node {num_processes} FILE.py"
        )
    if dist.is_initialized() and dist.get_world_size() != num_processes * num_nodes:
        raise ConfigError(
            f"process group of this process: expected {num_processes * num_nodes} ranks for the run, got "
            f"{dist.get_world_size()}; start the run in a new process"
        )
    if (
        isinstance(environment, LightningEnvironment)
        or not environment.creates_processes_externally
    ):
        return
    started = environment.world_size()
    if started != num_processes * num_nodes:
        raise ConfigError(
            f"processes: expected {num_processes * num_nodes} (devices={num_processes} x num_nodes={num_nodes}), got "
            f"{started}; start that many (torchrun --nproc-per-node {num_processes}), or change devices and num_nodes"
        )


# ---- ranks -----------------------------------------------------------------------------------------------------------


def die_with_launcher() -> None:
    """End this rank when its launcher dies, for whatever reason: Lightning's, ours or torchrun's agent.

    A rank that waits in a collective for a killed rank 0 would otherwise wait until the timeout, holding its GPU, and
    one whose agent was killed would train on beside the next start. SLURM ends all processes of a step itself. Does
    nothing in a process that the user or another launcher has started: its parent may end before it.
    """
    launcher = _find_launcher()
    if launcher is None:
        return
    if sys.platform.startswith("linux") and os.getppid() == launcher.pid:
        # At once, also if this process is stopped or waits in the kernel.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if _has_ended(launcher):  # while this rank was importing
        os._exit(1)
    if launcher.pid not in _watched_launchers:
        _watched_launchers.add(launcher.pid)
        threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()


_watched_launchers: set[int] = set()
"""Process ids of launchers that a thread of this process watches."""


def _find_launcher() -> psutil.Process | None:
    """The process that has started this rank and ends its other ranks; None if there is none to watch.

    A script may stand between torchrun's agent and this rank, and has the variables of the rank; the agent has not.
    """
    try:
        if LAUNCHER in os.environ:
            own = psutil.Process(int(os.environ[LAUNCHER]))
            return own if own.pid != os.getpid() else None
        if not os.environ.keys() >= _TORCHRUN_VARIABLES:
            return None
        for parent in psutil.Process().parents():
            if parent.environ().get(_RUN_ID) != os.environ[_RUN_ID]:
                return parent
    except psutil.NoSuchProcess:
        os._exit(1)  # it died while this rank was importing
    except psutil.AccessDenied:  # of another user: no agent that this user has started
        return None
    return None


def _end_with(launcher: psutil.Process) -> None:
    while not _has_ended(launcher):
        time.sleep(_LAUNCHER_POLL_SECONDS)
    text = f"the launcher (process {launcher.pid}) has ended, so this rank ends, too"
    print(
        f"error: rank {os.environ.get('RANK', os.environ.get('LOCAL_RANK', 0))}: {text}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def elastic_layout(
    parallel: ParallelConfig, environment: ClusterEnvironment, num_processes: int, num_nodes: int
) -> tuple[ParallelConfig, int]:
    """Layout and number of nodes of this start, for which torchrun or a scheduler may have started fewer nodes.

    Fewer data-parallel replicas then run more microbatches each: global batch, samples and their order stay the same.

    Raises:
        ConfigError: If the remaining replicas cannot share the microbatches evenly, or the nodes hold no whole number
            of replicas.
    """
    started, rest = divmod(environment.world_size(), num_processes)
    if not environment.creates_processes_externally or rest or not 0 < started < num_nodes:
        return parallel, num_nodes
    dp, new_dp = (
        parallel.data_parallel_size(nodes * num_processes) for nodes in (num_nodes, started)
    )
    change = f"{started} of num_nodes={num_nodes} were started, so dp={new_dp} instead of {dp}"
    num_microbatches, rest = divmod(parallel.num_microbatches * dp, new_dp)
    if rest:
        raise ConfigError(
            f"{change}: expected replicas that share num_microbatches={parallel.num_microbatches} x {dp} evenly, got "
            f"{new_dp}; choose num_microbatches so that {new_dp} divides the product, or start all nodes"
        )
    rank_zero_info(
        f"{change}: num_microbatches={num_microbatches} instead of {parallel.num_microbatches} keeps the batch"
    )
    return replace(parallel, num_microbatches=num_microbatches), started


def connect_ranks(
    environment: ClusterEnvironment,
    num_nodes: int,
    device: torch.device,
    timeout: timedelta,
    pg_timeout: timedelta,
) -> None:
    """Initialize the default process group; log what is awaited if the user starts the other nodes by hand.

    Raises:
        ConfigError: If not all ranks arrive within ``timeout``, or they cannot connect to each other.
    """
    address = f"{environment.main_address}:{environment.main_port}"
    if num_nodes > 1 and isinstance(environment, LightningEnvironment):
        rank_zero_info(
            f"num_nodes={num_nodes}: node {environment.node_rank()} waits at {address} for the other nodes' ranks, at "
            f"most {timeout}; start the same script on each node with MASTER_ADDR, MASTER_PORT and its NODE_RANK set, "
            f"or all with torchrun --nnodes {num_nodes}"
        )
    backend = fabric._get_default_process_group_backend_for_device(device)
    device_id = device if device.type == "cuda" else None
    try:
        store = (
            None if dist.is_initialized() else _rendezvous_store(environment, num_nodes, timeout)
        )
        fabric._init_dist_connection(
            environment, backend, timeout=pg_timeout, device_id=device_id, store=store
        )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        others = ""
        if num_nodes > 1:
            others = ", or start the script on every node with the same MASTER_ADDR and MASTER_PORT"
        raise ConfigError(
            f"ranks at {address}: expected {environment.world_size()} (num_nodes={num_nodes}) within {timeout}, got "
            f"{str(error).splitlines()[0]}; raise MegatronStrategy(timeout=...), which limits this wait, too, if ranks "
            f"start more slowly{others}"
        ) from error
    except RuntimeError as error:
        if num_nodes == 1 or "connectFullMesh" not in str(error):
            raise
        raise ConfigError(
            f"{_GLOO_INTERFACE}={os.environ.get(_GLOO_INTERFACE)}: expected the network interface of this host that "
            f"the {num_nodes} hosts use, got {str(error).splitlines()[0]}; set it on every host (see ip addr)"
        ) from error


def _rendezvous_store(environment: ClusterEnvironment, num_nodes: int, timeout: timedelta) -> Store:
    """Key-value store of this start alone, once all of its ranks have joined; also sets gloo's network interface."""
    rank, world_size = environment.global_rank(), environment.world_size()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = (
        environment.main_address,
        str(environment.main_port),
    )
    store = _local_store(environment, timeout) if rank == 0 and num_nodes == 1 else None
    if store is None:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    address = _source_address(environment.main_address)
    if rank == 0:
        prefix, peer = _admit_ranks(store, world_size, address, timeout)
    else:
        token = uuid.uuid4().hex
        store.set(f"rank/{rank}", f"{token} {address}")
        prefix, _, peer = store.get(token).decode().partition(" ")
        store.add(prefix, 1)
    if num_nodes > 1 and _GLOO_INTERFACE not in os.environ:
        # Debian resolves a host's own name to 127.0.1.1, which gloo would advertise to the other hosts.
        own = address if _is_routable(address) else _source_address(peer)
        for interface, addresses in psutil.net_if_addrs().items():
            if own in (each.address for each in addresses):
                os.environ[_GLOO_INTERFACE] = interface
    return PrefixStore(prefix, store)


def _local_store(environment: ClusterEnvironment, timeout: timedelta) -> Store | None:
    """Store for the ranks of one host that listens at the address to which they connect, and at no other.

    torch's own server listens on all interfaces of the host (2.13, TCPStore without ``master_listen_fd``), and whoever
    connects can send pickles.

    Returns:
        None if torchrun's agent has the store, or the address is not one of this host.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    host, port = environment.main_address, environment.main_port
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
    except OSError:
        return None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError:  # another host's address, or an earlier run of this process still has the port
        listener.close()
        return None
    return dist.TCPStore(  # type: ignore[attr-defined]
        host_name=host,
        port=port,
        world_size=environment.world_size(),
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=listener.detach(),  # the store closes it
        use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
    )


def _admit_ranks(
    store: Store, world_size: int, address: str, timeout: timedelta
) -> tuple[str, str]:
    """On rank 0, answer every rank that announces itself, until all other ranks have received this start's prefix.

    Announcements left by ranks of an earlier start are answered, too; nobody reads those answers.

    Returns:
        The prefix, and a routable address of one of the hosts, or "" if all ranks are on one host.

    Raises:
        DistStoreError: If ranks are missing after ``timeout``.
    """
    prefix, deadline, answered = (
        uuid.uuid4().hex,
        time.monotonic() + timeout.total_seconds(),
        set[bytes](),
    )
    keys = [f"rank/{rank}" for rank in range(1, world_size)]
    while (joined := store.add(prefix, 0)) < len(keys):
        announced = store.multi_get(keys)  # waits until every rank has announced itself once
        others = [each.decode().partition(" ")[2] for each in announced]
        peer = next(filter(_is_routable, (address, *others)), "")
        for each in set(announced) - answered:
            store.set(each.decode().partition(" ")[0], f"{prefix} {peer}")
            answered.add(each)
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"{joined + 1}")
        time.sleep(_POLL_SECONDS)
    return prefix, peer if keys else ""


def _source_address(host: str) -> str:
    """This host's IPv4 address on the route to ``host``; "" without a route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return ""


def _is_routable(address: str) -> bool:
    return bool(address) and not address.startswith("127.")
