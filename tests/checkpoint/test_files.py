"""Shards are copied and written as they are, by threads that leave no trace in torch."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from lightning_megatron.checkpoint.files import checksums_of
from lightning_megatron.checkpoint.save import FileWriter, HostMemory

TENSORS = [
    torch.arange(300, dtype=torch.float32).view(3, 100),
    torch.arange(10, dtype=torch.bfloat16)[2:7],
    torch.tensor(4.5),
    torch.empty(0, 3),
    torch.arange(12).view(3, 4).t(),
    torch.tensor([True, False]),
]


def test_copies_are_equal_apart_and_no_larger_than_their_tensors() -> None:
    originals = [tensor.clone() for tensor in TENSORS]
    copies = HostMemory().copy(originals)
    for original in originals:
        original.zero_()
    for copy, tensor in zip(copies, TENSORS, strict=True):
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
        assert copy.is_contiguous()
        assert copy.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_memory_is_reused_and_grows() -> None:
    memory = HostMemory()
    places = [memory.copy([torch.ones(size)])[0].data_ptr() for size in (5000, 4000, 5000)]
    assert len(set(places)) == 1
    assert torch.equal(memory.copy([torch.ones(50_000), torch.full((3,), 2.0)])[1], torch.full((3,), 2.0))
    memory.release()
    assert torch.equal(memory.copy([torch.full((3,), 2.0)])[0], torch.full((3,), 2.0))


def _item(name: str, kind: WriteItemType) -> WriteItem:
    return WriteItem(index=MetadataIndex(name), type=kind)


def test_files_hold_what_was_given_where_the_results_say(tmp_path: Path) -> None:
    tensors = [(_item(str(i), WriteItemType.SHARD), tensor) for i, tensor in enumerate(TENSORS)]
    blob = (_item("bytes", WriteItemType.BYTE_IO), io.BytesIO(b"some state"))
    before = torch.serialization.get_crc32_options()

    writer = FileWriter(tmp_path, {"a": tensors[:3], "b": [blob, *tensors[3:]]}, {"rng": b"random"})
    results, checksums = writer.wait()

    assert writer.is_done
    assert torch.serialization.get_crc32_options() == before
    assert (tmp_path / "rng").read_bytes() == b"random"
    assert checksums == {name: checksums_of((tmp_path / name).read_bytes()) for name in ("a", "b", "rng")}
    found = {}
    for result in results:
        place = result.storage_data
        data = (tmp_path / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        found[result.index.fqn] = data
    assert found.pop("bytes") == b"some state"
    for index, tensor in enumerate(TENSORS):
        assert torch.equal(torch.load(io.BytesIO(found[str(index)]), weights_only=True), tensor)
    assert zipfile.ZipFile(io.BytesIO(found["0"])).namelist()
