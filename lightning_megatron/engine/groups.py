"""Megatron's process groups, and this rank's coordinates in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from lightning_megatron.engine.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This rank's coordinate on every parallel axis, and its process groups."""

    parallel: ParallelConfig
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    dp: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    mp_group: dist.ProcessGroup
    """The tp x cp x pp ranks of one replica, which work on the same rows."""
    mp_header_group: dist.ProcessGroup
    """The same ranks over gloo: for host messages that must not wait for the GPU."""
    host_group: dist.ProcessGroup
    """All ranks over gloo."""
    mp_source: int
    """Global rank of the first rank of ``mp_group`` on every axis: the only one that reads data."""
    last_stage: int
    """Global rank of the last pipeline stage in ``pp_group``."""

    @cached_property
    def is_data_source(self) -> bool:
        """Whether this rank reads the data of its replica."""
        return self.tp_rank == self.cp_rank == self.pp_rank == 0

    @cached_property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pp_rank == self.parallel.pp - 1


_current: tuple[Topology, dist.ProcessGroup | None] | None = None


def initialize(parallel: ParallelConfig, timeout: timedelta) -> Topology:
    """Create the process groups of a layout in the existing world, or reuse them. Collective over the world.

    Groups are kept from one fit to the next (creating NCCL groups takes seconds) and replaced if the layout changes.

    Args:
        parallel: The layout.
        timeout: How long a collective may wait before it raises.
    """
    global _current
    world = dist.group.WORLD
    if (
        _current is not None
        and _current[1] is world
        and parallel_state.model_parallel_is_initialized()
    ):
        before, _ = _current
        axes = ("tp", "pp", "vpp", "cp", "ep")
        is_same = (getattr(before.parallel, axis) == getattr(parallel, axis) for axis in axes)
        if all(is_same):
            topology = replace(before, parallel=parallel)
            _current = (topology, world)
            return topology
    destroy()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=timeout.total_seconds() / 60,
    )
    # Megatron's model-parallel group leaves out cp.
    if parallel.cp == 1:
        mp_group = parallel_state.get_model_parallel_group()
    else:
        mp_group = _replica_group(parallel, timeout)
    # Gloo never waits for work that is queued on a GPU.
    mp_header_group = mp_group
    if dist.get_backend(mp_group) != "gloo":
        mp_header_group = _replica_group(parallel, timeout, "gloo")
    topology = Topology(
        parallel=parallel,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp=parallel_state.get_data_parallel_world_size(),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        mp_group=mp_group,
        mp_header_group=mp_header_group,
        host_group=host_group(timeout),
        mp_source=min(dist.get_process_group_ranks(mp_group)),
        last_stage=parallel_state.get_pipeline_model_parallel_last_rank(),
    )
    _current = (topology, world)
    return topology


def _replica_group(
    parallel: ParallelConfig,
    timeout: timedelta,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """Create this rank's tp x cp x pp group. Collective over the world."""
    # Megatron numbers ranks along tp first, then along cp, dp and pp.
    ranks = torch.arange(dist.get_world_size())
    ranks = ranks.view(parallel.pp, -1, parallel.cp * parallel.tp)
    replicas = [replica.flatten().tolist() for replica in ranks.unbind(1)]
    own: dist.ProcessGroup
    own, _ = dist.new_subgroups_by_enumeration(replicas, timeout=timeout, backend=backend)
    return own


_host: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
"""The default group, and its ranks over gloo; the ``timeout`` is that of the first call."""


def host_group(timeout: timedelta) -> dist.ProcessGroup:
    """Group of all ranks over gloo, which never waits for work queued on a GPU. Collective over the world."""
    global _host
    world: Any = dist.group.WORLD
    if _host is None or _host[0] is not world:
        group = world
        if dist.get_backend(world) != "gloo":
            group = dist.new_group(backend="gloo", timeout=timeout)
        _host = (world, group)
    return _host[1]


def destroy() -> None:
    """Destroy Megatron's groups. The default process group stays: Lightning owns it."""
    global _current
    _current = None
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
