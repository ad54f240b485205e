"""Gathering of Python objects over a process group; imports nothing of Megatron, whose import takes seconds."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The ``value`` of each rank, in rank order; collective over ``group``, by default over the world."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
