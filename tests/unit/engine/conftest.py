"""Process group of the engine's unit tests."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def world() -> Iterator[Any]:
    """Process group of one rank in the pytest process."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
    )
    yield dist.group.WORLD
    dist.destroy_process_group()
