"""Ranks that are started again find each other through a store that remembers those before."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks

_TIMEOUT = timedelta(seconds=20)


def _sum_of_ranks(port: int, last: int, *, is_ours: bool = True) -> float:
    """As a worker of torchrun does whose agent has its store at ``port``; rank ``last`` comes later than the others."""
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    from lightning_megatron.rendezvous import meeting

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    environment = TorchElasticEnvironment()
    rank = environment.global_rank()
    if rank == last:
        time.sleep(1)
    if is_ours:
        with meeting(environment, 1, _TIMEOUT) as store:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=environment.world_size())
    else:
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    return float(total)


def test_each_start_has_addresses_of_its_own_with_more_and_fewer_ranks() -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for world_size, last in ((2, 0), (2, 0), (2, 1), (3, 0), (1, 0), (2, 0)):
        expected = world_size * (world_size - 1) / 2
        assert run_ranks(_sum_of_ranks, world_size, agent.port, last) == [expected] * world_size


@pytest.mark.exhaustive
def test_pytorch_alone_takes_the_addresses_of_dead_ranks() -> None:
    """The reason for all this; where it fails, ``rendezvous.py`` is needless."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_ranks(_torch_alone, 2, agent.port) == [1.0, 1.0]
    with pytest.raises(RankError, match="connectFullMesh|refused|closed"):
        run_ranks(_torch_alone, 2, agent.port)


def _torch_alone(port: int) -> float:
    return _sum_of_ranks(port, 0, is_ours=False)
