"""Write and merge Megatron's indexed datasets.

``merge_datasets`` copies tokens, widened if need be, piece by piece; the new index is held in memory: 8 bytes per
sequence, and about 25 at the peak, while it is written.

The engine's ``IndexedDatasetBuilder`` is not used: it leaves half-written files under their final names when it is
interrupted, takes ten times as long and ten times the memory for its lists, and imports torch.
"""

from __future__ import annotations

import contextlib
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike
from tqdm import tqdm

from lightning_megatron.data.indexed import (
    MAGIC,
    TOKEN_TYPES,
    IndexedDataset,
    check_dataset,
    open_dataset,
)
from lightning_megatron.errors import DataError
from lightning_megatron.storage.publish import exit_on_sigterm, staged

PIECE_TOKENS = 1 << 22
"""Tokens copied at a time."""


class IndexedDatasetWriter:
    """Writes one dataset; made by ``dataset_writers``, which also completes it."""

    def __init__(
        self,
        tokens: BinaryIO,
        index: BinaryIO,
        dtype: np.dtype[Any],
    ) -> None:
        self._bin = tokens
        self._idx = index
        self._dtype = dtype
        self._lengths = array("i")
        """Tokens of each sequence."""
        self.counts = array("i")
        """Sequences of each document."""

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return self._bin.tell() // self._dtype.itemsize

    def add_documents(
        self, tokens: bytes | memoryview, lengths: ArrayLike, sequences: ArrayLike | None = None
    ) -> None:
        """Append documents.

        Args:
            tokens: Tokens of all documents, concatenated, in the dataset's dtype.
            lengths: Tokens of each sequence.
            sequences: Sequences of each document; None if each document is one sequence.
        """
        self._bin.write(tokens)
        sizes = np.asarray(lengths, np.intc)
        self._lengths.frombytes(sizes.tobytes())
        counts = np.ones_like(sizes)
        if sequences is not None:
            counts = np.asarray(sequences, np.intc)
        self.counts.frombytes(counts.tobytes())

    def complete(self) -> None:
        """Write ``.idx``."""
        code = next(code for code, dtype in TOKEN_TYPES.items() if dtype == self._dtype)
        lengths = np.asarray(self._lengths)
        positions = (np.cumsum(lengths, dtype=np.int64) - lengths) * self._dtype.itemsize
        ends = np.cumsum(self.counts, dtype=np.int64)
        self._idx.write(MAGIC)
        self._idx.write(struct.pack("<QBQQ", 1, code, len(lengths), len(ends) + 1))
        self._idx.write(lengths.data)
        self._idx.write(positions.data)
        self._idx.write(np.zeros(1, np.int64).data)
        self._idx.write(ends.data)


@contextlib.contextmanager
def dataset_writers(
    output_prefix: str | Path,
    dtype: np.dtype[Any],
    endings: Sequence[str] = ("",),
) -> Iterator[list[IndexedDatasetWriter]]:
    """Writers of datasets whose files appear together, when all of them are complete, however the process ends.

    ``.idx`` appears after ``.bin``, so where it exists both are complete.

    Args:
        output_prefix: Beginning of the paths of all files; its directory is created if need be.
        dtype: Token dtype.
        endings: What follows the prefix in the name of each dataset, without a slash.

    Raises:
        DataError: If a file exists already, the directory is not writable or another process writes there, or the disk
            is full.
    """
    prefixes = [f"{output_prefix}{ending}" for ending in endings]
    paths = [prefix + suffix for prefix in prefixes for suffix in (".idx", ".bin")]
    existing = ", ".join(filter(os.path.lexists, paths))
    if existing:  # it may be the only copy of a corpus
        raise DataError(
            f"output_prefix={output_prefix} would overwrite {existing}; choose another or remove them"
        )
    folder = Path(prefixes[0]).parent
    names = [os.path.basename(prefix) for prefix in prefixes]
    indices = [f"{name}.idx" for name in names]
    with (
        exit_on_sigterm(),
        staged(folder, names[0], last=indices, error=DataError) as hidden,
        contextlib.ExitStack() as files,
    ):
        writers = []
        for name in names:
            tokens = files.enter_context(open(hidden / f"{name}.bin", "wb"))
            index = files.enter_context(open(hidden / f"{name}.idx", "wb"))
            writers.append(IndexedDatasetWriter(tokens, index, dtype))
        yield writers
        for writer in writers:
            writer.complete()


def merge_datasets(inputs: Sequence[str], output_prefix: str) -> IndexedDataset:
    """Concatenate the datasets at ``inputs`` into one, in the mmap format.

    Documents and sequences are unchanged; the token dtype is the smallest that holds those of all inputs.

    Raises:
        DataError: If an input is missing, damaged, foreign or cannot be combined with the others, or ``output_prefix``
            exists or cannot be written.
    """
    if output_prefix.endswith((".bin", ".idx")) or not os.path.basename(output_prefix):
        raise DataError(
            f"output_prefix={output_prefix}: expected the prefix of two files, like data/corpus"
        )
    sources = [check_dataset(prefix, option="input", for_training=False) for prefix in inputs]
    for source in sources:
        first = sources[0]
        if source.dtype != first.dtype and "f" in (source.dtype.kind, first.dtype.kind):
            raise DataError(
                f"{source.prefix} holds {source.dtype} and {first.prefix} {first.dtype}; only integer types can be "
                "merged"
            )
    dtype = np.result_type(*(source.dtype for source in sources))
    bar = tqdm(
        total=sum(len(source.tokens) for source in sources),
        unit=" tokens",
        unit_scale=True,
        desc="Writing",
        mininterval=0.5,
        delay=1.0,  # a corpus that is merged within a second needs no progress bar
    )
    with dataset_writers(output_prefix, dtype) as (writer,), bar:
        for source in sources:
            for begin in range(0, len(source.tokens), PIECE_TOKENS):
                piece = source.tokens[begin : begin + PIECE_TOKENS]
                writer.add_documents(piece.astype(dtype, copy=False).data, ())
                bar.update(len(piece))
            # Raises if it was truncated meanwhile: its map reads zeros.
            open_dataset(source.prefix, for_training=False)
            writer.add_documents(b"", source.lengths, np.diff(source.document_bounds))
    return open_dataset(output_prefix, for_training=False)


def convert_dataset(source: str, output_prefix: str) -> IndexedDataset:
    """Rewrite the dataset of an old format (cached, lazy) at ``source`` in the mmap format.

    Documents, sequences and the token dtype are unchanged.

    Raises:
        DataError: As ``merge_datasets``, or if ``source`` is in the mmap format.
    """
    if open_dataset(source, option="input", for_training=False).format == "mmap":
        raise DataError(
            f"{source}.idx is in the mmap format (MMIDIDX) already; use the dataset as it is"
        )
    return merge_datasets([source], output_prefix)
