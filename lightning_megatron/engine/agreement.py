"""How do all ranks fail alike? A check that one rank may fail raises on every rank, so that none is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from lightning_megatron.errors import ConfigError

T = TypeVar("T")


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
