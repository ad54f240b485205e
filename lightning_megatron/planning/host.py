"""Memory of this host, and what of it the optimizer's state takes if it is kept there."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from lightning_megatron.errors import ConfigError
from lightning_megatron.planning.devices import GIB
from lightning_megatron.planning.memory import host_bytes, optimizer_bytes
from lightning_megatron.planning.run import PlannedRun

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_ZONES = Path("/proc/zoneinfo")


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of main memory that processes may use: the host's, or fewer in a container."""

    total: float
    free: float
    """Without what files occupy that can be read again."""

    def __str__(self) -> str:
        """For the user."""
        return f"{self.total / GIB:,.1f} GiB, {self.free / GIB:,.1f} GiB free"


def host_memory() -> HostMemory:
    """Memory of this host, or of the innermost container that has less."""
    memory = psutil.virtual_memory()
    total = max(float(memory.total), _present_bytes())
    free = memory.available + total - memory.total
    for limit, used in _limits():
        total = min(total, limit)
        free = min(free, max(0.0, limit - used))
    return HostMemory(total=total, free=free)


def _present_bytes() -> float:
    """Bytes of memory that the kernel has, or 0 if it does not tell.

    A virtual machine may begin with a small part of its memory: ``MemTotal``, which psutil reads, then grows as it is
    used.
    """
    try:
        lines = _ZONES.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0
    words = [line.split() for line in lines]
    pages = sum(int(each[1]) for each in words if len(each) == 2 and each[0] == "present")
    return float(pages * mmap.PAGESIZE)


def _limits() -> Iterator[tuple[float, float]]:
    """Limit of each control group of this process, and how much of it is used; those that cannot be read have none."""
    try:
        lines = _OWN_CGROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            root = _CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
        elif controllers == "":
            root = _CGROUPS
            names = ("memory.max", "memory.current", "file", "shmem")
        else:
            continue
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            limit = _limit(folder, *names)
            if limit is not None:
                yield limit
            if folder == root:
                break


def _limit(
    folder: Path,
    limit: str,
    usage: str,
    cache: str,
    shared: str,
) -> tuple[float, float] | None:
    try:
        total = float((folder / limit).read_text(encoding="utf-8"))  # "max": no limit
        used = float((folder / usage).read_text(encoding="utf-8"))
        lines = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        parts = {name: float(size) for name, size in (line.split() for line in lines)}
    except (OSError, ValueError):
        return None
    return total, used - parts.get(cache, 0.0) + parts.get(shared, 0.0)


def check_host_state(run: PlannedRun, ranks_per_host: int, *, copies_state: bool) -> str | None:
    """Check that the hosts hold the optimizer's state of their ranks, before anything is built.

    Args:
        run: The run; of a user's own layers it knows nothing.
        ranks_per_host: Ranks that share a host's memory.
        copies_state: Whether a save copies the state within the host, too.

    Returns:
        A warning if it fits the host, but not into what is free now; None if it does.

    Raises:
        ConfigError: If it does not fit.
    """
    host = host_memory()
    state, copied = _bytes_of_fullest_host(run, ranks_per_host, copies_state=copies_state)
    needed = state + copied
    ranks = f"{ranks_per_host} rank" + "s" * (ranks_per_host > 1)
    figures = (
        f"{needed / GIB:,.1f} GiB of host memory for {ranks} (optimizer state {state / GIB:,.1f}, copy of a save "
        f"{copied / GIB:,.1f}), got {host}"
    )
    mismatch = f"offload_optimizer={run.offload_optimizer:g}: expected {figures}"
    if needed > host.total:
        raise ConfigError(
            f"{mismatch}; give a smaller share, distributed_optimizer=True with more replicas, or async_save=False"
        )
    if needed > host.free:
        return f"{mismatch}; end other programs, or give a smaller share"
    return None


def _bytes_of_fullest_host(
    run: PlannedRun,
    ranks_per_host: int,
    *,
    copies_state: bool,
) -> tuple[float, float]:
    """Bytes of the state in the memory of the host that has most of it, and of the copy that a save makes there."""
    ranks_per_stage = run.world_size // run.parallel.pp
    state_of = [host_bytes(run, stage) for stage in range(run.parallel.pp)]
    copied_of = [_copied_bytes(run, stage, copies_state) for stage in range(run.parallel.pp)]
    found = []
    for first in range(0, run.world_size, ranks_per_host):
        stages = [rank // ranks_per_stage for rank in range(first, first + ranks_per_host)]
        stages = [min(stage, run.parallel.pp - 1) for stage in stages]
        found.append(
            (sum(state_of[stage] for stage in stages), sum(copied_of[stage] for stage in stages))
        )
    return max(found, key=sum)


def _copied_bytes(run: PlannedRun, stage: int, copies_state: bool) -> float:
    """Bytes of a rank that a save copies: weights and state of which other replicas have copies are shared out."""
    weights: Mapping[int, float] = run.parameters(stage)
    copied = run.bytes_per_element * sum(count / replicas for replicas, count in weights.items())
    on_device = optimizer_bytes(run, stage) - host_bytes(run, stage)
    copied += on_device
    if copies_state:
        copied += host_bytes(run, stage)
    return copied
