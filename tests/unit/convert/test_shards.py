"""A tensor that is assembled from parts is refused if an element of it was never written."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.convert.shards import assemble
from lightning_megatron.errors import CheckpointError


def test_a_hole_is_refused_and_parts_get_the_tensors_dtype() -> None:
    matrix = torch.empty(4, 3)
    parts = [(slice(0, 2), torch.ones(2, 3)), (torch.tensor([2, 3]), torch.ones(2, 3, dtype=torch.float16))]
    with pytest.raises(CheckpointError, match="a matrix: expected 12 elements, got 6;"):
        assemble("a matrix", matrix, parts[:1])
    assemble("a matrix", matrix, parts)
    assert torch.equal(matrix, torch.ones(4, 3))
    assemble("nothing", torch.empty(0, 3), [])
