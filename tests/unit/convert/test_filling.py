"""A tensor that is assembled from parts is refused as long as an element of it was never written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_megatron.convert.shards import Filling, Key, Place, Shard, fill_from_whole
from lightning_megatron.errors import CheckpointError


def test_overlapping_parts_do_not_hide_a_hole() -> None:
    filling = Filling("a matrix", torch.empty(4, 3))
    filling.put(slice(0, 2), torch.ones(2, 3))
    filling.put((torch.tensor([1, 2]), slice(0, 3)), torch.ones(2, 3, dtype=torch.float16))
    with pytest.raises(CheckpointError, match="a matrix: expected 12 elements, got 9;"):
        filling.whole()
    filling.put((slice(3, 4), slice(0, 2)), torch.ones(1, 2))
    with pytest.raises(CheckpointError, match="got 11"):
        filling.whole()
    filling.put((3, 2), 1)
    assert torch.equal(filling.whole(), torch.ones(4, 3))
    assert Filling("nothing", torch.empty(0, 3)).whole().shape == (0, 3)


def test_a_shard_is_filled_with_its_rows_and_zeros_that_pad_the_vocabulary() -> None:
    place = Place(key=Key("w"), shape=(5, 2), offset=(3, 1), size=(3, 1), dtype=torch.float32)
    shard = Shard(place=place, data=torch.empty(3, 1), is_first_copy=True)
    whole = torch.arange(10.0).view(5, 2)
    for stored in (whole, torch.cat([whole, torch.ones(4, 2)])):  # without padding, and with other padding
        fill_from_whole(shard, stored)
        assert shard.data.tolist() == [[7], [9], [0]]
    with pytest.raises(CheckpointError, match="w: expected 3 elements, got 2"):
        fill_from_whole(replace(shard, data=torch.empty(3, 1)), whole[:4])
