"""How do all ranks fail alike? A check that one rank may fail raises on every rank, so that none is left waiting."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from lightning_megatron.errors import ConfigError

T = TypeVar("T")

_GLANCE = 0.05
"""Seconds between two looks at who has come."""


def on_all_ranks_alike(check: Callable[[], T]) -> T:
    """Run ``check`` on every rank and raise the first rank's error on all. Every rank of the world must call.

    Args:
        check: Something that may raise; it must not communicate itself, since another rank may already have raised.

    Raises:
        ConfigError: What any rank raised: as it was on the rank itself, and with that rank's number on the others.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = check()
    except (ConfigError, OSError) as caught:
        error = caught
    if dist.is_initialized() and dist.get_world_size() > 1:
        kinds: list[tuple[type[ConfigError], str] | None] = [None] * dist.get_world_size()
        mine = None
        if error is not None:
            mine = (type(error) if isinstance(error, ConfigError) else ConfigError, str(error))
        dist.all_gather_object(kinds, mine)
        if error is None:
            for rank, kind in enumerate(kinds):
                if kind is not None:
                    same_everywhere = len({k[1] for k in kinds if k}) == 1 and all(kinds)
                    raise kind[0](kind[1] if same_everywhere else f"{kind[1]} (on rank {rank})")
    if isinstance(error, ConfigError):
        raise error
    if error is not None:
        raise ConfigError(str(error)) from error
    return result  # type: ignore[return-value]


_meetings = itertools.count()


def all_ranks_come(patience: timedelta) -> bool:
    """Whether every rank calls this within ``patience`` of the others; False if some are elsewhere.

    Unlike a collective, it leaves ranks that are in the middle of one alone.
    """
    place = f"lightning_megatron/all_ranks_come/{next(_meetings)}"
    store = dist.distributed_c10d._get_default_store()
    deadline = time.monotonic() + patience.total_seconds()
    store.add(place, 1)
    while store.add(place, 0) < dist.get_world_size():
        if time.monotonic() > deadline:
            return False
        time.sleep(_GLANCE)
    return True
