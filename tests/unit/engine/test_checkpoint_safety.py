"""Does a small file of a checkpoint stay small in memory, and do its bytes reach no reader without restrictions?"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_megatron.engine.checkpoint_safety import load_plain, read_table
from lightning_megatron.engine.dist_checkpoint_patches import _load_only_data
from lightning_megatron.errors import CheckpointError


def _packed(content: bytes, *, within_each_other: bool) -> bytes:
    """A file of ``torch.save`` whose members are compressed, or all begin at the first one."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as saved, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in saved.namelist():
            packed.writestr(name, saved.read(name), zipfile.ZIP_STORED if within_each_other else zipfile.ZIP_DEFLATED)
        if within_each_other:
            largest = max(packed.infolist(), key=lambda member: member.file_size)
            for member in packed.infolist():
                member.file_size = member.compress_size = largest.file_size
                member.header_offset = largest.header_offset
    return stream.getvalue()


@pytest.mark.parametrize("within_each_other", [False, True])
def test_what_would_become_more_is_refused(tmp_path: Path, within_each_other: bool) -> None:
    stream = io.BytesIO()
    torch.save({"x": torch.zeros(100_000)}, stream)
    (tmp_path / "meta.pt").write_bytes(_packed(stream.getvalue(), within_each_other=within_each_other))
    with pytest.raises(CheckpointError, match=r"meta.pt is not loaded: its [\d,]+ bytes would become"):
        load_plain(tmp_path / "meta.pt")


def test_no_memory_is_reserved(tmp_path: Path) -> None:
    torch.save({"x": bytearray(b"ab")}, tmp_path / "meta.pt")
    with pytest.raises(CheckpointError, match=r"meta.pt is not loaded: it would reserve memory for a bytearray"):
        load_plain(tmp_path / "meta.pt")
    torch.save({"x": b"ab"}, tmp_path / "meta.pt")
    assert load_plain(tmp_path / "meta.pt") == {"x": b"ab"}


def _folded(times: int, deep: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(deep):
        value = [value] * times
    return value


@pytest.mark.parametrize(("times", "deep"), [(2, 60), (1, 150), (1000, 4)])
def test_containers_that_hold_each_other_are_refused(tmp_path: Path, times: int, deep: int) -> None:
    torch.save({"x": _folded(times, deep)}, tmp_path / "meta.pt")
    with pytest.raises(CheckpointError, match=r"meta.pt is not loaded: its containers hold each other without end"):
        load_plain(tmp_path / "meta.pt")


@pytest.mark.parametrize("is_zip", [True, False])
def test_what_is_as_large_as_it_says_is_loaded(tmp_path: Path, is_zip: bool) -> None:
    view = torch.ones(1).expand(1000)  # of one number
    content = {"numbers": torch.arange(3), "view": view, ("a", 1): [1.5, None], "many": [_folded(3, 3)] * 1000}
    torch.save(content, tmp_path / "meta.pt", _use_new_zipfile_serialization=is_zip)
    loaded = load_plain(tmp_path / "meta.pt")
    assert (loaded["numbers"].tolist(), loaded["a", 1]) == ([0, 1, 2], [1.5, None])
    assert torch.equal(loaded["view"], view)


def test_the_engines_reader_gets_no_bytes_of_the_file() -> None:
    """It unpickles without restriction: whatever the check has missed must not reach it."""
    given: list[bytes] = []
    load = _load_only_data(lambda _, __, value: given.append(value.getvalue()))
    stream = io.BytesIO()
    torch.save([None, torch.ones(2)], stream, _use_new_zipfile_serialization=False)

    load(None, SimpleNamespace(dest_index=SimpleNamespace(fqn="x")), stream)

    (value,) = given
    assert value != stream.getvalue()
    assert torch.load(io.BytesIO(value), weights_only=True)[1].tolist() == [1.0, 1.0]


def _table() -> Any:
    from torch.distributed.checkpoint import filesystem, metadata, planner

    size, box = torch.Size([4, 6]), metadata.ChunkStorageMetadata(offsets=torch.Size([2, 0]), sizes=torch.Size([2, 6]))
    properties = metadata.TensorProperties(dtype=torch.bfloat16)
    index = metadata.MetadataIndex("w", box.offsets, 1)
    table = metadata.Metadata(
        {"w": metadata.TensorStorageMetadata(properties, size, [box]), "b": metadata.BytesStorageMetadata()},
        storage_data={
            index: filesystem._StorageInfo("__1_0.distcp", 3, 10),
            metadata.MetadataIndex("b"): filesystem._StorageInfo("__0_0.distcp", 0, 3, ["zstd"]),
        },
        storage_meta=metadata.StorageMeta(checkpoint_id=Path("a.ckpt")),
    )
    item = planner.WriteItem(
        index, planner.WriteItemType.SHARD, tensor_data=planner.TensorWriteData(box, properties, size)
    )
    table.all_local_plans = [planner.SavePlan([item])]  # type: ignore[attr-defined]  # as Megatron-Core's writer
    return table


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_table_says_what_torch_reads_in_it(tmp_path: Path, protocol: int) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_table(), protocol))
    if protocol < 2:  # nobody has written them for decades; they name other functions
        with pytest.raises(CheckpointError, match=r"it would run copy_reg._reconstructor when loaded"):
            read_table(tmp_path)
        return
    found, expected = read_table(tmp_path), pickle.loads((tmp_path / ".metadata").read_bytes())
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data


_SIZE = b"ctorch\nSize\n"


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        (_SIZE + b"N}X\x01\x00\x00\x00xNs\x86b", "would change a class"),  # BUILD with (None, {"x": None})
        (_SIZE + b"}X\x01\x00\x00\x00xNsb", "would change a class"),
        (_SIZE + b")R}X\x06\x00\x00\x00append" + _SIZE + b"sbNa", "unreadable"),  # APPEND to an object
        (_SIZE + b")R)R", "unreadable"),  # calls an object
        (_SIZE + b")}X\x01\x00\x00\x00xNs\x92", "unreadable"),  # NEWOBJ_EX
        (b"ctorch.distributed.checkpoint.filesystem\nos.system\n", "would run .*os.system"),
        (b"ctorch\nload\n", "would run torch.load"),
        (b"Px\n", "unreadable"),  # a persistent id
        (b"\x82\x01", "unreadable"),  # an extension
    ],
)
def test_instructions_of_a_table_reach_nothing(tmp_path: Path, instructions: bytes, message: str) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + instructions + b".")
    with pytest.raises(CheckpointError, match=message):
        read_table(tmp_path)
