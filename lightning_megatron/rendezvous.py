"""Rendezvous: the ranks of one start of a run find each other, on however many hosts, in the nth start as in the first.

torchrun starts all ranks again when one has failed (``--max-restarts``) or when hosts come and go (``--nnodes 1:2``),
and its agent's key-value store outlives them. PyTorch writes the addresses of ranks into that store under the same keys
each time (torch 2.13, distributed/rendezvous.py: "We create a new TCPStore for every retry", which is not so where the
store is shared), so a rank that comes earlier than the others connects to one that is dead. No variable of the
environment tells one start from another on all hosts: ``TORCHELASTIC_RESTART_COUNT`` is each agent's own, and stays
where another host has failed. So rank 0 makes a name for the start, and hands it to each rank that is alive.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface."""
_POLL_SECONDS = 0.05


def on_present_nodes(
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


@contextmanager
def meeting(environment: ClusterEnvironment, num_nodes: int, timeout: timedelta) -> Generator[Store | None, None, None]:
    """While ranks meet; outside of a cluster a line says which are awaited, as the user starts those of other nodes.

    Yields:
        The store to initialize process groups with; None if they are already.

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
    try:
        yield None if dist.is_initialized() else _meet(environment, num_nodes, timeout)
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


def _meet(environment: ClusterEnvironment, num_nodes: int, timeout: timedelta) -> Store:
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
        interface = _interface(address if _is_outward(address) else _source_address(seen_from))
        if interface is not None:
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


def _interface(address: str) -> str | None:
    """The network interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # has none
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
