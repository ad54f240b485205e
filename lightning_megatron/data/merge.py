"""Merge indexed datasets of any format into one, and convert old formats (``merge``, ``convert-dataset``).

Tokens are copied, or widened, piece by piece; the new index is held in memory: 8 bytes a sequence, and about 25 at the
peak, while it is written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_megatron.data.indexed import IndexedDataset, IndexedDatasetWriter, check_dataset, open_dataset
from lightning_megatron.errors import DataError
from lightning_megatron.files import exit_on_sigterm

PIECE_TOKENS = 1 << 22
"""Tokens that are copied at a time."""


@dataclass(frozen=True, kw_only=True)
class MergedDataset:
    """What ``merge_datasets`` or ``convert_dataset`` wrote."""

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


def merge_datasets(inputs: Sequence[str], output_prefix: str) -> MergedDataset:
    """Write the datasets at ``inputs`` one after the other, in the mmap format, as one dataset.

    Documents and sequences stay as they are; the type of tokens is the smallest that holds those of all inputs.

    Raises:
        DataError: If an input is missing, damaged, foreign or does not go with the others, or ``output_prefix`` exists
            or cannot be written.
    """
    from tqdm import tqdm

    _require_new(output_prefix)
    sources = [check_dataset(prefix, option="input", for_training=False) for prefix in inputs]
    for source in sources:
        _require_alike(sources[0], source)
    dtype = np.result_type(*(source.dtype for source in sources))
    num_tokens = sum(len(source.tokens) for source in sources)
    # A corpus that is done within a second needs no bar.
    bar = tqdm(total=num_tokens, unit=" tokens", unit_scale=True, desc="Writing", mininterval=0.5, delay=1.0)
    with exit_on_sigterm(), IndexedDatasetWriter(output_prefix, dtype) as writer, bar:
        for source in sources:
            for begin in range(0, len(source.tokens), PIECE_TOKENS):
                piece = source.tokens[begin : begin + PIECE_TOKENS]
                writer.add_documents(piece.astype(dtype, copy=False).data, ())
                source.check_unchanged()
                bar.update(len(piece))
            writer.add_documents(b"", source.lengths, np.diff(source.document_bounds), source.modes.tobytes())
    notes = [source.note for source in sources if source.note is not None]
    notes += [f"{each.prefix} was widened from {each.dtype} to {dtype}" for each in sources if each.dtype != dtype]
    return MergedDataset(
        prefix=output_prefix,
        documents=sum(source.num_documents for source in sources),
        sequences=sum(len(source.lengths) for source in sources),
        tokens=num_tokens,
        notes=tuple(notes),
    )


def convert_dataset(source: str, output_prefix: str) -> MergedDataset:
    """Write the dataset of an old format (cached, lazy) at ``source`` in the mmap format.

    Documents, sequences and the type of tokens stay as they are.

    Raises:
        DataError: As ``merge_datasets``, or if ``source`` is in the mmap format.
    """
    if open_dataset(source, option="input", for_training=False).format == "mmap":
        raise DataError(f"{source}.idx is in the mmap format (MMIDIDX) already; use the dataset as it is")
    return merge_datasets([source], output_prefix)


def _require_new(prefix: str) -> None:
    """Nothing is overwritten: the only copy of a corpus may be what stands there, an input included."""
    existing = [prefix + suffix for suffix in (".idx", ".bin") if os.path.lexists(prefix + suffix)]
    if existing:
        raise DataError(f"output_prefix={prefix} would overwrite {', '.join(existing)}; choose another or remove them")
    if prefix.endswith((".bin", ".idx")) or not os.path.basename(prefix):
        raise DataError(f"output_prefix={prefix} must be the prefix of two files; write it like data/corpus")


def _require_alike(first: IndexedDataset, source: IndexedDataset) -> None:
    if bool(len(first.modes)) != bool(len(source.modes)):
        raise DataError(f"{first.prefix} and {source.prefix}: only one of them has modes (multimodal)")
    if source.dtype != first.dtype and "f" in (source.dtype.kind, first.dtype.kind):
        raise DataError(f"{source.prefix} holds {source.dtype} and {first.prefix} {first.dtype}; only integers mix")
