"""GPT samples in Megatron's order.

All documents of a split, shuffled, are one stream of tokens; sample k is its tokens from k * seq_length to
(k + 1) * seq_length, both included, so neighbours share one token. The samples are shuffled in turn. Both shuffles, and
the rule for shuffling the last pass separately, are Megatron's, so samples and order equal its own for the same file,
split, sequence length, seed and number of samples (megatron-core 0.16.1, datasets/gpt_dataset.py). Its ``GPTDataset``
itself is not used, only the functions beneath it that build the indices. It reads document by document: with 4,096
tokens per sample 18 M tokens/s from documents of 50 tokens and 73 M from those of 5,000, where this reads 250 M and
300 M. It counts a partial last sample in single precision, and builds on global rank 0 alone, not atomically.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lightning_megatron.data.indexed import IndexedDataset, open_dataset
from lightning_megatron.data.samples import Objective, Part, Rows, SavedArrays
from lightning_megatron.data.splits import split_ranges
from lightning_megatron.errors import DataError

Int32s: TypeAlias = NDArray[np.int32]
Int64s: TypeAlias = NDArray[np.int64]
PADDING = -1
"""Padding token of a partial last sample."""
_SEPARATE_LAST_PASS_BELOW = 0.80
"""The last pass is shuffled separately if a smaller fraction of it is needed: Megatron's rule. Otherwise documents that
come once more than others would be spread over the whole run."""


@dataclass(frozen=True, kw_only=True)
class GPTIndex(SavedArrays):
    """Order of the documents in the stream, bounds of the samples in it, and order of the samples."""

    document_index: NDArray[np.int32]
    """Documents in the order of the stream: [passes * documents]."""
    sample_index: NDArray[Any]
    """Beginning of each sample and end of the last one, as index into ``document_index`` and token of that document:
    [samples + 1, 2], int32 or int64."""
    shuffle_index: NDArray[Any]
    """Samples in the order in which they are read: [samples], uint32 or int64."""

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.shuffle_index)


@dataclass(frozen=True, kw_only=True)
class GPTObjective(Objective):
    """Next-token prediction: ``text`` [rows, seq_length + 1] int64, with ``seq_length`` predictions per row."""

    seq_length: int
    """Predictions of a sample, which has one more token."""
    drop_last_partial_validation_sequence: bool = True
    """Drop the tokens at the end of the validation documents that do not fill a sample; otherwise they are one more
    sample, padded with -1. Training and test always drop them, as in Megatron."""
    name = "gpt"
    index_type = GPTIndex

    @property
    @override
    def index_key(self) -> str:
        return (
            f"seq_length={self.seq_length} drop_last={self.drop_last_partial_validation_sequence}"
        )

    @override
    def count(self, part: Part) -> int:
        return self._measure(part)[0]

    @override
    def build_index(self, part: Part) -> GPTIndex:
        _, lengths, documents = self._measure(part)
        keep_partial = self._keeps_partial(part)
        return build_gpt_index(
            lengths.copy(),
            documents,
            self.seq_length,
            part.num_samples,
            part.seed,
            keep_partial,
        )

    @override
    def order_key(self, part: Part) -> str:
        return str(self.seq_length)

    @override
    def read(
        self, dataset: IndexedDataset, index: GPTIndex, indices: Sequence[int], seed: int
    ) -> Rows:
        """``text`` [rows, seq_length + 1] int64, padded with -1."""
        width = self.seq_length + 1
        pieces, begins, counts = _row_pieces(
            dataset,
            index,
            np.asarray(indices, dtype=np.int64),
        )
        ends = np.cumsum(counts)
        if counts.min() < 0 or ends[-1] > len(pieces) * width:
            raise IndexError(f"expected at most {width} tokens a sample, got other bounds")
        positions = np.repeat(begins - (ends - counts), counts) + np.arange(ends[-1])
        text = dataset.tokens[positions].astype(np.int64)
        if len(text) < len(pieces) * width:
            filled = np.add.reduceat(counts, np.cumsum(pieces) - pieces)
            padded = np.full(
                (len(pieces), width),
                PADDING,
                dtype=np.int64,
            )
            padded[np.arange(width) < filled[:, None]] = text
            text = padded
        return {"text": torch.from_numpy(text.reshape(len(pieces), width))}

    def _measure(self, part: Part) -> tuple[int, Int32s, Int32s]:
        """Samples in one pass, at least one; tokens of each document of the dataset; and documents of ``part``."""
        lengths = open_dataset(part.prefix).lengths
        bounds = split_ranges(part.split, len(lengths))[part.name]
        documents = np.arange(bounds.start, bounds.stop, dtype=np.int32)
        tokens = int(lengths[bounds.start : bounds.stop].sum(dtype=np.int64))
        samples = _count(tokens, self.seq_length, self._keeps_partial(part))
        if samples == 0:
            fix = (
                "lower seq_length, or add documents (each line of a .jsonl, each .txt file is one)"
            )
            if len(documents) < len(lengths):
                fix = f"give {part.name} a larger weight or weight 0, {fix}"
            raise DataError(
                f"split={part.split!r} gives {part.name} {len(documents)} of {len(lengths)} documents of {part.prefix}"
                f" with {tokens} tokens, one sample of seq_length={self.seq_length} needs {self.seq_length + 1};"
                f" {fix}"
            )
        return samples, lengths, documents

    def _keeps_partial(self, part: Part) -> bool:
        return part.name == "valid" and not self.drop_last_partial_validation_sequence


def build_gpt_index(
    lengths: Int32s,
    documents: Int32s,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    keep_partial: bool,
) -> GPTIndex:
    """Build the index of GPT samples.

    Args:
        lengths: Tokens of each document of the dataset.
        documents: Documents of the split, which together have at least one token to predict.
        seq_length: Predictions of a sample.
        num_samples: Samples needed; None for one pass.
        seed: Seed of both shuffles.
        keep_partial: Whether the tokens at the end that do not fill a sample are a sample, too.
    """
    # Megatron's import takes seconds.
    from megatron.core.datasets import helpers
    from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index

    per_pass = int(lengths[documents].sum(dtype=np.int64))
    passes = 1
    if num_samples is not None:
        passes = max(1, -(-(num_samples * seq_length + 1) // per_pass))
    samples_before_last = _count((passes - 1) * per_pass, seq_length)
    samples_of_last = (num_samples or 0) - samples_before_last
    limit = int(_SEPARATE_LAST_PASS_BELOW * _count(per_pass, seq_length))
    is_separate = passes > 1 and samples_of_last < limit
    random = np.random.RandomState(seed)

    order = _build_document_index(documents, passes, random, is_separate)
    begins = helpers.build_sample_idx(lengths, order, seq_length, passes, per_pass, True, True)
    # The engine counts a partial sample in single precision (helpers.cpp:build_sample_idx): from 2^24 tokens on it
    # makes one sample too few, or one too many, which is only padding.
    if keep_partial and (passes * per_pass - 1) % seq_length:
        last = np.flatnonzero(lengths[order])[-1]
        end = [[last, lengths[order[last]] - 1]]
        begins = np.concatenate((begins, np.array(end, dtype=begins.dtype)))
    total = len(begins) - 1
    shuffle = _build_shuffle_index(samples_before_last if is_separate else total, total, random)
    return GPTIndex(document_index=order, sample_index=begins, shuffle_index=shuffle)


def _row_pieces(
    dataset: IndexedDataset, index: GPTIndex, indices: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """Pieces of documents that make up rows: pieces of each row; first token and length of each piece.

    A row is the end of one document, complete documents, and the beginning of another, or part of one document.
    """
    samples = index.shuffle_index[indices].astype(np.int64)
    first, first_token = index.sample_index[samples].astype(np.int64).T
    last, last_token = index.sample_index[samples + 1].astype(np.int64).T
    pieces = last - first + 1
    row_ends = np.cumsum(pieces)
    positions = np.repeat(first - (row_ends - pieces), pieces) + np.arange(row_ends[-1])
    documents = index.document_index[positions]
    ends = dataset.lengths[documents].astype(np.int64)
    ends[row_ends - 1] = last_token + 1
    starts = np.zeros_like(ends)
    starts[row_ends - pieces] = first_token
    first_tokens = dataset.positions[documents] // dataset.dtype.itemsize
    return pieces, first_tokens + starts, ends - starts


def _count(tokens: int, seq_length: int, keep_partial: bool = False) -> int:
    """Number of samples in a stream of tokens."""
    predictions = max(0, tokens - 1)
    if keep_partial:
        return -(-predictions // seq_length)
    return predictions // seq_length
