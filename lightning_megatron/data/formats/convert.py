"""How does a dataset of Megatron 1.x or 2.x ("cached", "lazy") become one that Megatron-Core maps into memory?

The tokens are the same bytes in both; only the index is written anew. Nothing is held in memory but a piece of either.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_megatron.data.formats.index_files import StagedPair
from lightning_megatron.data.formats.legacy import LegacyHeader, check_legacy_dataset
from lightning_megatron.data.formats.mmap import index_header, index_parts
from lightning_megatron.errors import DataError

_PIECE_BYTES = 1 << 23
_LONGEST_SEQUENCE = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    """What ``convert_dataset`` did."""

    prefix: str
    """The written dataset: a value for ``IndexedDataModule(data_path=...)``."""
    documents: int
    """Documents in it."""
    sequences: int
    """Sequences in it: as many as documents, unless these are cut into sentences."""
    tokens: int
    """Tokens in it."""


def convert_dataset(source: str, output_prefix: str) -> ConversionResult:
    """Write the legacy dataset at ``source`` in the mmap format; the files appear when both are complete.

    Documents, sequences and the type of tokens stay as they are.

    Raises:
        DataError: If ``source`` is missing, damaged, foreign or has a sequence too long for the mmap format, or
            ``output_prefix`` exists or cannot be written.
    """
    _require_new(output_prefix)
    try:
        header = check_legacy_dataset(source)
        _require_short_sequences(header)
        num_bytes = os.path.getsize(source + ".bin")
        with _ConvertedPair(output_prefix, header) as pair, _progress_bar(num_bytes) as bar:
            for piece in _pieces(Path(source + ".bin"), num_bytes):
                pair.write(piece)
                bar.update(len(piece))
    except OSError as error:
        raise DataError(
            f"{source} cannot be converted to {output_prefix} ({error}); give an output prefix that can be written and"
            " has room for as much as the input, which must be readable"
        ) from error
    return ConversionResult(
        prefix=output_prefix,
        documents=header.num_document_bounds - 1,
        sequences=header.num_sequences,
        tokens=num_bytes // header.dtype.itemsize,
    )


class _ConvertedPair(StagedPair):
    """The mmap files that hold what a legacy dataset holds."""

    def __init__(self, prefix: str, legacy: LegacyHeader) -> None:
        super().__init__(prefix)
        self._legacy = legacy

    def _index_parts(self) -> Iterator[bytes]:
        legacy = self._legacy
        header = index_header(legacy.dtype, legacy.num_sequences, legacy.num_document_bounds)
        return index_parts(header, legacy.dtype.itemsize, legacy.lengths, legacy.document_bounds())


def _require_new(prefix: str) -> None:
    """Nothing is overwritten: the only copy of a corpus may be what stands there, ``source`` itself included."""
    existing = [prefix + suffix for suffix in (".idx", ".bin") if os.path.lexists(prefix + suffix)]
    if existing:
        raise DataError(f"output_prefix={prefix} would overwrite {', '.join(existing)}; choose another or remove them")
    if prefix.endswith((".bin", ".idx")):
        raise DataError(f"output_prefix={prefix} ends like a file, it must be the prefix of two; write {prefix[:-4]}")
    if not os.path.basename(prefix):
        raise DataError(f"output_prefix={prefix} names no file; add one, e.g. {os.path.join(prefix, 'corpus')}")


def _require_short_sequences(header: LegacyHeader) -> None:
    longest = max(int(chunk.max()) for chunk in header.lengths())
    if longest > _LONGEST_SEQUENCE:
        raise DataError(
            f"{header.prefix} has a sequence of {longest} tokens, the mmap format holds at most {_LONGEST_SEQUENCE} in"
            " one; preprocess the text again, in shorter documents"
        )


def _pieces(path: Path, num_bytes: int) -> Iterator[bytes]:
    """The file in pieces; what has been checked is ``num_bytes`` long."""
    left = num_bytes
    with open(path, "rb") as stream:
        while piece := stream.read(_PIECE_BYTES):
            left -= len(piece)
            yield piece
    if left != 0:
        raise DataError(f"{path} has changed while it was read; let no other job write it, run again")


def _progress_bar(num_bytes: int) -> Any:
    from tqdm import tqdm

    # A corpus that is done within a second needs no bar.
    return tqdm(total=num_bytes, unit="B", unit_scale=True, desc="Converting", mininterval=0.5, delay=1.0)
