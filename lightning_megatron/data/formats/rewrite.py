"""How are datasets written anew, one after the other, as one dataset in the mmap format?

Only the index is made; the tokens are copied, or widened, in pieces. Memory holds no more than a piece of a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.formats.index_files import DatasetHeader, reading
from lightning_megatron.data.formats.mmap import index_header, index_parts
from lightning_megatron.data.formats.staged import StagedPair, exit_on_sigterm
from lightning_megatron.errors import DataError

_PIECE_BYTES = 1 << 23
_LONGEST_SEQUENCE = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True)
class RewrittenDataset:
    """What ``rewrite`` wrote."""

    prefix: str
    """The written dataset: a value for ``IndexedDataModule(data_path=...)``."""
    documents: int
    """Documents in it."""
    sequences: int
    """Sequences in it: as many as documents, unless these are cut into sentences."""
    tokens: int
    """Tokens in it."""
    notes: tuple[str, ...] = ()
    """What whoever uses the dataset should know."""


def rewrite(
    sources: Sequence[DatasetHeader], output_prefix: str, dtype: np.dtype[Any], activity: str
) -> RewrittenDataset:
    """Write ``sources``, which have been checked, as one dataset; the files appear when both are complete.

    Args:
        sources: What to write, in this order. Modes are written if the first has them.
        output_prefix: Where to; nothing is there.
        dtype: The type of tokens, which holds those of every source.
        activity: What the progress bar says, e.g. "Converting".

    Raises:
        DataError: If a sequence is too long for the format, a source changes meanwhile or cannot be read, or nothing
            can be written.
    """
    for source in sources:
        _require_short_sequences(source)
    sizes = [source.bin_bytes for source in sources]
    with (
        exit_on_sigterm(),
        _Rewriting(output_prefix, sources, dtype) as pair,
        _progress_bar(sum(sizes), activity) as bar,
    ):
        for source, num_bytes in zip(sources, sizes, strict=True):
            for piece in _pieces(Path(source.prefix + ".bin"), num_bytes):
                pair.write(piece if source.dtype == dtype else _as_type(piece, source.dtype, dtype))
                bar.update(len(piece))
    return RewrittenDataset(
        prefix=output_prefix,
        documents=sum(source.num_documents for source in sources),
        sequences=sum(source.num_sequences for source in sources),
        tokens=sum(size // source.dtype.itemsize for source, size in zip(sources, sizes, strict=True)),
        notes=tuple(source.remark for source in sources if source.remark is not None),
    )


class _Rewriting(StagedPair):
    """The mmap files that hold what the sources hold."""

    def __init__(self, prefix: str, sources: Sequence[DatasetHeader], dtype: np.dtype[Any]) -> None:
        super().__init__(prefix)
        self._sources = sources
        self._dtype = dtype

    def _index_parts(self) -> Iterator[bytes]:
        num_sequences = sum(source.num_sequences for source in self._sources)
        num_documents = sum(source.num_documents for source in self._sources)
        header = index_header(self._dtype, num_sequences, num_documents + 1)
        with_modes = self._sources if self._sources[0].has_modes else ()
        modes = chain.from_iterable(source.modes() for source in with_modes)
        return index_parts(header, self._dtype.itemsize, self._lengths, self._document_bounds(), modes)

    def _lengths(self) -> Iterator[NDArray[Any]]:
        return chain.from_iterable(source.lengths() for source in self._sources)

    def _document_bounds(self) -> Iterator[NDArray[np.int64]]:
        """The bounds of all sources; where two meet, the end of one is the beginning of the other."""
        yield np.zeros(1, dtype=np.int64)
        begin = 0
        for source in self._sources:
            to_skip = 1
            for chunk in source.document_bounds():
                yield begin + chunk[to_skip:]
                to_skip = 0
            begin += source.num_sequences


def _require_short_sequences(source: DatasetHeader) -> None:
    longest = max(int(chunk.max()) for chunk in source.lengths())
    if longest > _LONGEST_SEQUENCE:
        raise DataError(
            f"{source.prefix} has a sequence of {longest} tokens, the mmap format holds at most {_LONGEST_SEQUENCE} in"
            " one; preprocess the text again, in shorter documents"
        )


def _pieces(path: Path, num_bytes: int) -> Iterator[bytes]:
    """The file in pieces of whole tokens; what has been checked is ``num_bytes`` long."""
    left = num_bytes
    with reading(path), open(path, "rb") as stream:
        while left > 0 and (piece := stream.read(_PIECE_BYTES)):
            left -= len(piece)
            yield piece
        if left != 0 or stream.read(1):
            raise DataError(f"{path} has changed while it was read; let no other job write it, run again")


def _as_type(piece: bytes, old: np.dtype[Any], new: np.dtype[Any]) -> bytes:
    return np.frombuffer(piece, dtype=old).astype(new).tobytes()


def _progress_bar(num_bytes: int, activity: str) -> Any:
    from tqdm import tqdm

    # A corpus that is done within a second needs no bar.
    return tqdm(total=num_bytes, unit="B", unit_scale=True, desc=activity, mininterval=0.5, delay=1.0)
