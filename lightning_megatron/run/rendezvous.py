"""Rendezvous of all ranks of a start, which works after restarts, too.

torchrun restarts all ranks when one has failed (``--max-restarts``) or when nodes join or leave (``--nnodes 1:2``), and
its agent's key-value store outlives them. PyTorch writes the ranks' addresses into that store under the same keys each
time (torch 2.13, distributed/rendezvous.py: "We create a new TCPStore for every retry", which does not hold where the
store is shared), so a rank that arrives before the others connects to a dead one. No environment variable identifies a
start on all hosts: ``TORCHELASTIC_RESTART_COUNT`` is each agent's own, and does not change when another host has
failed. So rank 0 generates a key prefix for the start, and hands it to each rank that is alive.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from contextlib import suppress
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities import distributed as fabric
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lightning_megatron.errors import ConfigError

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_POLL_SECONDS = 0.02


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
        store = None
        if not dist.is_initialized():
            store = _rendezvous_store(environment, num_nodes, timeout)
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
    rank = environment.global_rank()
    world_size = environment.world_size()
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    store = None
    if rank == 0 and num_nodes == 1:
        store = _local_store(environment, timeout)
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
        own = address
        if not _is_routable(own):
            own = _source_address(peer)
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
    host = environment.main_address
    port = environment.main_port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, _, _, address = found[0]
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
    return dist.TCPStore(
        host_name=host,
        port=port,
        world_size=environment.world_size(),
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        wait_for_workers=False,  # it would in C++, where Ctrl-C interrupts nothing: _admit_ranks waits
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
    prefix = uuid.uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()
    answered: set[bytes] = set()
    peer = ""
    keys = [f"rank/{rank}" for rank in range(1, world_size)]
    while store.add(prefix, 0) < len(keys):
        if store.check(keys):  # otherwise reading them would wait, in C++
            announced = store.multi_get(keys)
            others = [each.decode().partition(" ")[2] for each in announced]
            peer = next(filter(_is_routable, (address, *others)), "")
            for each in set(announced) - answered:
                store.set(each.decode().partition(" ")[0], f"{prefix} {peer}")
                answered.add(each)
        if time.monotonic() > deadline:
            joined = sum(store.check([key]) for key in keys)
            raise dist.DistStoreError(f"{joined + 1}")
        time.sleep(_POLL_SECONDS)
    return prefix, peer


def _source_address(host: str) -> str:
    """This host's IPv4 address on the route to ``host``; "" without a route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return ""


def _is_routable(address: str) -> bool:
    return bool(address) and not address.startswith("127.")
