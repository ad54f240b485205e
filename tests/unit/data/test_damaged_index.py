"""Is every damaged index refused by an error of ours or harmless, without much memory or time, in both formats?"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.formats.any_format import check_any_dataset
from lightning_megatron.data.formats.description import describe_dataset, first_documents
from lightning_megatron.data.formats.index_files import LEGACY_MAGIC, MMAP_MAGIC, DatasetHeader
from lightning_megatron.data.formats.legacy import check_legacy_dataset, read_legacy_header
from lightning_megatron.data.formats.merge import merge_datasets
from lightning_megatron.data.formats.mmap import check_dataset, read_header, read_lengths
from lightning_megatron.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Golden:
    """A sound dataset of three sequences in three documents."""

    name: str
    idx: bytes
    bin: bytes
    fields: tuple[tuple[int, str], ...]
    """Offset and struct's letter of each field of the header, and of one element of each array."""
    header_only: Callable[[str], DatasetHeader]
    check: Callable[[str], DatasetHeader]


def _longs(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


MMAP = Golden(
    name="mmap",
    idx=MMAP_MAGIC
    + struct.pack("<QBQQ", 1, 8, 3, 4)
    + struct.pack("<3i", 3, 1, 2)
    + _longs(0, 6, 8)
    + _longs(0, 1, 2, 3),
    bin=struct.pack("<6H", 5, 6, 7, 65535, 1, 2),
    fields=((9, "Q"), (17, "B"), (18, "Q"), (26, "Q"), (38, "I"), (54, "Q"), (78, "Q"), (94, "Q")),
    header_only=read_header,
    check=check_dataset,
)
LEGACY = Golden(
    name="legacy",
    idx=LEGACY_MAGIC
    + struct.pack("<QQQQQQ", 1, 4, 4, 3, 3, 4)
    + _longs(0, 1, 2, 3)
    + _longs(0, 3, 4, 6)
    + _longs(3, 1, 2)
    + _longs(0, 1, 2, 3),
    bin=struct.pack("<6i", 5, 6, 7, 65535, 1, 2),
    fields=tuple((offset, "Q") for offset in (8, 16, 24, 32, 40, 48, 64, 96, 120, 152, 168)),
    header_only=read_legacy_header,
    check=check_legacy_dataset,
)
OLDEST = Golden(
    name="legacy without documents",
    idx=LEGACY.idx[:48] + _longs(0, 1, 2, 3) + _longs(0, 3, 3, 6) + _longs(3, 0, 3),
    bin=LEGACY.bin,
    fields=tuple((offset, "Q") for offset in (8, 16, 24, 32, 40, 48, 56, 88, 120)),
    header_only=read_legacy_header,
    check=check_legacy_dataset,
)
GOLDEN = [MMAP, LEGACY, OLDEST]
SPECIAL = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
MOST_BYTES = 300_000
"""What a reader may allocate for files of a few hundred bytes; most of it are the messages' and numpy's own."""


def _write(folder: Path, idx: bytes, data: bytes) -> str:
    (folder / "x.idx").write_bytes(idx)
    (folder / "x.bin").write_bytes(data)
    return str(folder / "x")


@contextmanager
def _little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES


def _refusal(read: Callable[[str], object], prefix: str) -> str | None:
    """What the error says, which names the dataset; None if there is none."""
    try:
        read(prefix)
    except DataError as error:
        message = str(error)
    else:
        return None
    assert prefix in message
    return message


def _read_all(golden: Golden, prefix: str) -> None:
    """Whatever is accepted can be read in full, from .bin alone, each byte once; all else is a DataError."""
    data = Path(prefix + ".bin").read_bytes()
    _refusal(golden.header_only, prefix)
    if _refusal(lambda path: check_any_dataset(path, "input"), prefix) is not None:
        for read in (golden.check, describe_dataset, lambda path: merge_datasets([path], path + "_new")):
            assert _refusal(read, prefix) is not None
        assert sorted(path.name for path in Path(prefix).parent.iterdir()) == ["x.bin", "x.idx"]
        return
    header = check_any_dataset(prefix, "input")
    lengths = np.concatenate(list(header.lengths()))
    bounds = np.concatenate(list(header.document_bounds()))
    assert len(lengths) == header.num_sequences > 0
    assert len(bounds) == header.num_document_bounds > 0
    assert (np.diff(bounds) >= 0).all()
    assert (bounds[0], bounds[-1]) == (0, len(lengths))
    assert int(lengths.sum()) * header.dtype.itemsize == len(data) == header.bin_bytes
    description = describe_dataset(prefix)
    assert (description.num_tokens, description.lengths.count) == (lengths.sum(), len(lengths))
    tokens = [token for each in first_documents(header, len(bounds)) for token in each.tokens]
    assert np.array(tokens, dtype=header.dtype).tobytes() == data
    merged = merge_datasets([prefix], prefix + "_new")
    assert Path(merged.prefix + ".bin").read_bytes() == data


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
def test_the_sound_datasets_are_accepted(tmp_path: Path, golden: Golden) -> None:
    prefix = _write(tmp_path, golden.idx, golden.bin)

    _read_all(golden, prefix)
    assert golden.check(prefix).num_sequences == golden.header_only(prefix).num_sequences == 3


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
@pytest.mark.parametrize("value", SPECIAL)
def test_special_numbers_in_any_field_cost_nothing(tmp_path: Path, golden: Golden, value: int) -> None:
    for number, (offset, letter) in enumerate(golden.fields):
        field = struct.pack("<Q", value)[: struct.calcsize(letter)]
        idx = golden.idx[:offset] + field + golden.idx[offset + len(field) :]
        folder = tmp_path / str(number)
        folder.mkdir()
        prefix = _write(folder, idx, golden.bin)
        with _little_memory():
            for read in (golden.header_only, golden.check, describe_dataset):
                _refusal(read, prefix)
        _read_all(golden, prefix)


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
def test_every_truncation_is_refused(tmp_path: Path, golden: Golden) -> None:
    for size in range(len(golden.idx)):
        with pytest.raises(DataError, match=str(tmp_path / "x")):
            golden.check(_write(tmp_path, golden.idx[:size], golden.bin))
    for size in range(len(golden.bin)):
        with pytest.raises(DataError, match=str(tmp_path / "x")):
            golden.check(_write(tmp_path, golden.idx, golden.bin[:size]))


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.name)
def test_every_flipped_bit_of_the_index_is_refused_or_harmless(tmp_path: Path, golden: Golden) -> None:
    prefix = _write(tmp_path, golden.idx, golden.bin)
    accepted = 0
    for bit in range(8 * len(golden.idx)):
        damaged = bytearray(golden.idx)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "x.idx").write_bytes(damaged)
        try:
            header = golden.check(prefix)
        except DataError:
            continue
        accepted += 1
        lengths = np.concatenate(list(header.lengths()))
        assert int(lengths.sum()) * header.dtype.itemsize == len(golden.bin)
    # Another type of as many bytes, other bounds in order: nothing in the files contradicts them.
    assert accepted <= 2


@settings(max_examples=300, deadline=None)
@given(
    golden=st.sampled_from(GOLDEN),
    cut=st.integers(len(MMAP_MAGIC), len(LEGACY.idx)) | st.none(),
    changes=st.dictionaries(st.integers(0, len(LEGACY.idx) - 1), st.integers(0, 255), max_size=6),
    words=st.dictionaries(
        st.integers(0, 10), st.integers(0, 2**64 - 1) | st.integers(0, 8) | st.sampled_from(SPECIAL), max_size=3
    ),
    tail=st.binary(max_size=40),
)
def test_any_damage_is_either_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory,
    golden: Golden,
    cut: int | None,
    changes: dict[int, int],
    words: dict[int, int],
    tail: bytes,
) -> None:
    damaged = bytearray(golden.idx)
    for place, word in words.items():
        offset, letter = golden.fields[place % len(golden.fields)]
        field = struct.pack("<Q", word)[: struct.calcsize(letter)]
        damaged[offset : offset + len(field)] = field
    for offset, value in changes.items():
        damaged[offset % len(damaged)] = value
    # Whole files more often than not: one of another length is refused before anything else is looked at.
    if cut is not None:
        damaged = damaged[:cut] + tail
    folder = tmp_path_factory.mktemp("fuzz")

    _read_all(golden, _write(folder, bytes(damaged), golden.bin))


@settings(max_examples=60, deadline=None)
@given(idx=st.binary(max_size=200), magic=st.sampled_from([MMAP_MAGIC, LEGACY_MAGIC, b""]), data=st.binary(max_size=40))
def test_noise_is_refused(tmp_path_factory: pytest.TempPathFactory, idx: bytes, magic: bytes, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("noise")
    for golden in (MMAP, LEGACY):
        _read_all(golden, _write(folder, magic + idx, data))


def test_a_file_that_is_mostly_hole_is_read_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header may announce 16 million sequences if its file is as large; reading it takes chunks, not the file."""
    monkeypatch.setattr("lightning_megatron.data.formats.index_files.CHUNK", 1 << 10)
    num_sequences = 1 << 14
    (tmp_path / "x.idx").write_bytes(MMAP_MAGIC + struct.pack("<QBQQ", 1, 8, num_sequences, num_sequences + 1))
    with open(tmp_path / "x.idx", "r+b") as stream:
        stream.truncate(34 + 12 * num_sequences + 8 * (num_sequences + 1))
    (tmp_path / "x.bin").write_bytes(b"")

    with _little_memory(), pytest.raises(DataError, match="holds no token"):
        check_dataset(str(tmp_path / "x"))
    assert not read_lengths(read_header(str(tmp_path / "x"))).any()
