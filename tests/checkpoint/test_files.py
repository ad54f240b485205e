"""Checkpoint files: checksums locate every changed byte, and reading the files runs no code."""

import io
import json
import pickle
import zlib
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_megatron.checkpoint.table import are_disjoint, read_table
from lightning_megatron.errors import CheckpointError
from lightning_megatron.storage import checksums
from lightning_megatron.storage.checksums import CHECKSUMS, verify_checksums
from tests.checkpoint.damage import Damage, flipped_bit, missing, truncated, update_checksums
from tests.ranks import run_ranks
from tests.recording import recorded_warnings

# ---- checksums ------------------------------------------------------------------------------------------------------

SEGMENT = 1000
"""Bytes per checksum, instead of 64 MiB; the longest file has three segments and a remainder."""
LENGTHS = {
    "__0_0.distcp": 3210,
    "__0_1.distcp": 1000,
    ".metadata": 999,
    "common.pt": 1,
    "empty.pt": 0,
}


def _content(name: str) -> bytes:
    return bytes((index * 7 + len(name)) % 251 for index in range(LENGTHS[name]))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(checksums, "SEGMENT", SEGMENT)
    path = tmp_path / "a.ckpt"
    path.mkdir()
    for name in LENGTHS:
        (path / name).write_bytes(_content(name))
    (path / "meta.pt").write_bytes(b"123456789")
    update_checksums(path)
    return path


def test_checksums_are_zlib_crc32_of_every_segment(folder: Path) -> None:
    content = json.loads((folder / CHECKSUMS).read_text())

    assert content["files"].keys() == {*LENGTHS, "meta.pt"}
    for name, length in LENGTHS.items():
        data = _content(name)
        expected = [
            zlib.crc32(data[start : start + SEGMENT]) for start in range(0, length, SEGMENT)
        ]
        assert content["files"][name] == {"size": length, "segments": expected}
    # The published check value of this CRC.
    assert content["files"]["meta.pt"] == {"size": 9, "segments": [0xCBF43926]}
    verify_checksums(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated("__0_0.distcp"), "has 1605 of 3210 bytes"),
        (flipped_bit("__0_0.distcp"), "__0_0.distcp differs from its checksum in bytes 1000-2000;"),
        (flipped_bit("meta.pt"), "meta.pt differs from its checksum in bytes 0-9;"),
        (missing("common.pt"), "lacks its file common.pt"),
    ],
)
def test_verification_names_the_damage(folder: Path, damage: Damage, message: str) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        verify_checksums(folder)


# ---- reading without running code -----------------------------------------------------------------------------------


_SIZE = b"ctorch\nSize\n"


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        # BUILD with (None, {"x": None}), then APPEND to an object.
        (_SIZE + b"N}X\x01\x00\x00\x00xNs\x86b", "would change a class"),
        (_SIZE + b"}X\x01\x00\x00\x00xNsb", "would change a class"),
        (_SIZE + b")R}X\x06\x00\x00\x00append" + _SIZE + b"sbNa", "unreadable"),
        (_SIZE + b")R)R", "unreadable"),  # calls an object
        (_SIZE + b")}X\x01\x00\x00\x00xNs\x92", "unreadable"),  # NEWOBJ_EX
        (b"ctorch.distributed.checkpoint.filesystem\nos.system\n", "would run .*os.system"),
        (b"ctorch\nload\n", "would run torch.load"),
        (b"Px\n", "unreadable"),  # a persistent id
        (b"\x82\x01", "unreadable"),  # an extension
    ],
)
def test_pickle_opcodes_of_a_table_run_no_code(
    tmp_path: Path, instructions: bytes, message: str
) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + instructions + b".")
    with pytest.raises(CheckpointError, match=message):
        read_table(tmp_path)


def test_chunks_are_disjoint_if_no_value_is_in_two() -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    generator = torch.Generator().manual_seed(1)
    found = {True: 0, False: 0}
    for _ in range(300):
        starts = torch.randint(0, 5, (4, 3), generator=generator)
        sizes = torch.randint(0, 4, (4, 3), generator=generator)
        counts = torch.zeros(9, 9, 9)
        chunks = []
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            box = tuple(slice(a, a + b) for a, b in zip(start, size, strict=True))
            counts[box] += 1
            chunks.append(ChunkStorageMetadata(torch.Size(start), torch.Size(size)))
        is_disjoint = bool((counts <= 1).all())
        found[is_disjoint] += 1
        assert are_disjoint(chunks) is is_disjoint
    assert min(found.values()) > 20


def test_table_with_enumerations_of_any_python_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.0 to 3.11.3 pickle a member as a call of ``getattr``, other versions by its value."""
    from torch.distributed.checkpoint import metadata

    entry = metadata.TensorStorageMetadata(
        properties=metadata.TensorProperties(dtype=torch.bfloat16),
        size=torch.Size([2]),
        chunks=[],
    )
    table = metadata.Metadata(state_dict_metadata={"weight": entry}, storage_data={})
    monkeypatch.setattr(
        Enum,
        "__reduce_ex__",
        lambda self, _: (getattr, (type(self), self.name)),
        raising=True,
    )
    content = pickle.dumps(table)
    assert b"getattr" in content
    (tmp_path / ".metadata").write_bytes(content)

    assert read_table(tmp_path).state_dict_metadata == {"weight": entry}


# ---- content of meta.pt ---------------------------------------------------------------------------------------------


class _Color(Enum):
    RED = Path("red")


def _save_and_load(hyper_parameters: dict[str, Any]) -> tuple[Any, list[str]]:
    """``meta.pt`` of a run with these hyper-parameters as it is loaded, and the warnings."""
    import torch

    from lightning_megatron.checkpoint.plain_data import plain_state, torch_bytes

    with recorded_warnings() as warned:
        written = torch_bytes(plain_state({"epoch": 3, "hyper_parameters": hyper_parameters}))
    return torch.load(io.BytesIO(written), weights_only=True), warned


def test_hyper_parameters_are_saved_as_plain_data_or_text() -> None:
    data = {
        "lr": np.float32(0.5),
        "color": _Color.RED,
        "sizes": (1, [np.int64(2)]),
        "none": None,
        "module": [io.StringIO, 3],
    }
    ((meta, warned),) = run_ranks(_save_and_load, 1, data)
    plain = {
        "lr": 0.5,
        "color": "red",
        "sizes": (1, [2]),
        "none": None,
        "module": ["<class '_io.StringIO'>", 3],
    }
    assert meta == {"epoch": 3, "hyper_parameters": plain}
    assert warned == ["hyper-parameter 'module' is a type; the checkpoint keeps its text only"]
