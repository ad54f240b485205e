"""Is a tensor that is assembled from parts refused as long as an element of it was never written?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_megatron.convert.directory import Directory, files_of
from lightning_megatron.convert.filling import Filling
from lightning_megatron.convert.hugging_face_files import open_weights
from lightning_megatron.convert.legacy.merged import Merged
from lightning_megatron.convert.pieces import Place
from lightning_megatron.convert.reading import read_rows
from lightning_megatron.convert.rules import Rule
from lightning_megatron.convert.stored.chunks import Chunk, ChunkedFiles, ChunkedTensor
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


def _saved(folder: Path, **tensors: torch.Tensor) -> Path:
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def test_every_source_and_target_refuses_holes(tmp_path: Path) -> None:
    files = open_weights(_saved(tmp_path, w=torch.ones(4, 2)))
    handle = files.tensors["w"].place
    # A legacy shard whose order names no row of a rank: what an impossible number of heads once gave.
    nowhere = Merged(name="qkv", shards=(handle, handle), axis=0, order=torch.empty(0, dtype=torch.int64))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="qkv: expected 16 elements, got 0"):
        nowhere.rows(0, 8)

    rule = Rule(megatron="fc1", hugging_face=("w",), order=torch.tensor([0, 1, 9, 3]))
    place = Place(rule=0, layer=None, shape=(4, 2), offset=(0, 0), size=(4, 2), dtype=torch.float32)
    with pytest.raises(CheckpointError, match="fc1: expected 8 elements, got 6"):
        read_rows(files, ["w"], rule, place, torch.empty(4, 2))
    target = torch.empty(6, 2)
    read_rows(files, ["w"], replace(rule, order=None), replace(place, size=(6, 2)), target)
    assert target.tolist() == [[1, 1]] * 4 + [[0, 0]] * 2  # padding of a vocabulary

    file = tmp_path / "part"
    torch.save(torch.ones(2, 2), file)
    chunks = tuple(
        Chunk(start=(row, 0), size=(2, 2), file=file, offset=0, length=file.stat().st_size) for row in (0, 1)
    )
    overlapping = ChunkedTensor(shape=(4, 2), dtype=torch.float32, chunks=chunks)  # as many numbers as it should have
    with pytest.raises(CheckpointError, match="weight: expected 8 elements, got 6"):
        ChunkedFiles(tmp_path, {"weight": overlapping}).read("weight", (0, 0), (4, 2))

    target_directory = Directory(tmp_path / "saved", files_of({"w": ((4, 2), torch.float32)}, 100))
    from transformers import GPT2Config

    target_directory.begin(GPT2Config())
    with pytest.raises(CheckpointError, match="w: expected 8 elements, got 6"):
        target_directory.write_rows("w", [torch.ones(3, 2)])
    target_directory.discard()
