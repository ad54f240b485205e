"""The table of contents of a distributed checkpoint reaches no reader without restrictions."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_megatron.checkpoint.files import read_table
from lightning_megatron.checkpoint.load import MCoreLoadPlanner, _LoadPlanner
from lightning_megatron.errors import CheckpointError


def test_the_engines_reader_gets_no_bytes_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """It unpickles without restriction: whatever the check has missed must not reach it."""
    given: list[bytes] = []
    monkeypatch.setattr(
        MCoreLoadPlanner, "load_bytes", lambda _, __, value: given.append(value.getvalue()), raising=False
    )
    stream = io.BytesIO()
    torch.save([None, torch.ones(2)], stream, _use_new_zipfile_serialization=False)

    _LoadPlanner().load_bytes(SimpleNamespace(dest_index=SimpleNamespace(fqn="x")), stream)

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
