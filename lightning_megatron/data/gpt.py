"""Samples of a GPT: Megatron's order, read in a way that is made for short documents too.

All documents of a split, shuffled, are one stream of tokens; sample k is its tokens from k * seq_length to
(k + 1) * seq_length, both included, so neighbours share one. The samples are shuffled in turn. Both shuffles, and the
rule by which the last pass is shuffled by itself, are Megatron's, so samples and order equal its own for the same file,
split, sequence length, seed and number of samples (megatron-core 0.16.1, datasets/gpt_dataset.py).

Its ``GPTDataset`` itself is not used, only the functions beneath it that lay out samples and shuffle them. It reads
document by document: with 4,096 tokens a sample 18 M tokens/s from documents of 50 tokens and 73 M from those of 5,000,
where this reads 250 M and 300 M. It counts a partial last sample in single precision, and builds on global rank 0
alone, not atomically.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lightning_megatron.data.indexed import IndexedDataset, open_dataset
from lightning_megatron.data.samples import Objective, Part, Rows, SavedArrays, split_ranges
from lightning_megatron.errors import DataError

PADDING = -1
"""Fills a last sample up where the documents end before it."""
_OWN_SHUFFLE_BELOW = 0.80
"""The last pass is shuffled by itself if less of it than this is needed: Megatron's rule. Otherwise the documents that
come once more than others would be spread over the whole run."""


@dataclass(frozen=True, kw_only=True)
class GPTObjective(Objective):
    """Rows of ``seq_length`` predictions: ``text`` [rows, seq_length + 1] int64."""

    seq_length: int
    """Predictions of a sample; it has one token more."""
    drop_last_partial_validation_sequence: bool = True
    """Leave out the tokens at the end of the validation documents that fill no whole sample; otherwise they are one
    more sample, padded with -1. Training and test always leave them out, as in Megatron."""
    name = "gpt"

    @property
    @override
    def index_key(self) -> str:
        return f"seq_length={self.seq_length} drop_last={self.drop_last_partial_validation_sequence}"

    @property
    @override
    def largest_token(self) -> int:
        return -1

    @override
    def count(self, part: Part) -> int:
        return self._measured(part)[0]

    @override
    def lay_out(self, part: Part) -> GPTIndex:
        _, lengths, documents = self._measured(part)
        keep_partial = self._keeps_partial(part)
        return build_gpt_index(lengths.copy(), documents, self.seq_length, part.num_samples, part.seed, keep_partial)

    @override
    def open(self, part: Part, folder: str) -> GPTSamples:
        return GPTSamples(open_dataset(part.prefix), GPTIndex.load(folder), self.seq_length)

    def _measured(self, part: Part) -> tuple[int, NDArray[np.int32], NDArray[np.int32]]:
        """Samples in one pass, at least one; tokens of each document of the dataset; and the documents of ``part``."""
        lengths = open_dataset(part.prefix).lengths
        bounds = split_ranges(part.split, len(lengths))[part.name]
        documents = np.arange(bounds.start, bounds.stop, dtype=np.int32)
        tokens = int(lengths[bounds.start : bounds.stop].sum(dtype=np.int64))
        samples = _count(tokens, self.seq_length, self._keeps_partial(part))
        if samples == 0:
            weight = f"give {part.name} a larger weight or weight 0, " if len(documents) < len(lengths) else ""
            raise DataError(
                f"split={part.split!r} gives {part.name} {len(documents)} of {len(lengths)} documents of {part.prefix}"
                f" with {tokens} tokens, one sample of seq_length={self.seq_length} needs {self.seq_length + 1};"
                f" {weight}lower seq_length, or add documents (each line of a .jsonl, each .txt file is one)"
            )
        return samples, lengths, documents

    def _keeps_partial(self, part: Part) -> bool:
        return part.name == "valid" and not self.drop_last_partial_validation_sequence


@dataclass(frozen=True, kw_only=True)
class GPTIndex(SavedArrays):
    """Which documents come in which order, where samples begin, and in which order the samples come."""

    document_index: NDArray[np.int32]
    """The documents in the stream: [passes * documents]."""
    sample_index: NDArray[Any]
    """Where each sample begins and the last one ends: place in ``document_index``, token in that document:
    [samples + 1, 2], int32 or int64."""
    shuffle_index: NDArray[Any]
    """The sample that comes first, second, ...: [samples], uint32 or int64."""


def build_gpt_index(
    lengths: NDArray[np.int32],
    documents: NDArray[np.int32],
    seq_length: int,
    num_samples: int | None,
    seed: int,
    keep_partial: bool,
) -> GPTIndex:
    """Lay out the samples.

    Args:
        lengths: Tokens of each document of the dataset.
        documents: Those of the split; together they have a token to predict.
        seq_length: Predictions of a sample.
        num_samples: Samples that are needed; None for one pass.
        seed: Of both shuffles.
        keep_partial: Whether tokens at the end that fill no whole sample are one.
    """
    from megatron.core.datasets import helpers
    from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index

    per_pass = int(lengths[documents].sum(dtype=np.int64))
    passes = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // per_pass))
    before_last = _count((passes - 1) * per_pass, seq_length)
    of_last = (num_samples or 0) - before_last
    alone = passes > 1 and of_last < int(_OWN_SHUFFLE_BELOW * _count(per_pass, seq_length))
    random = np.random.RandomState(seed)

    order = _build_document_index(documents, passes, random, alone)
    begins = helpers.build_sample_idx(lengths, order, seq_length, passes, per_pass, True, True)
    # The engine counts a partial sample in single precision (helpers.cpp:build_sample_idx): from 2^24 tokens on one
    # sample too few or too many, which is then padding alone.
    if keep_partial and (passes * per_pass - 1) % seq_length:
        last = np.flatnonzero(lengths[order])[-1]
        begins = np.concatenate((begins, np.array([[last, lengths[order[last]] - 1]], dtype=begins.dtype)))
    total = len(begins) - 1
    samples = _build_shuffle_index(before_last if alone else total, total, random)
    return GPTIndex(document_index=order, sample_index=begins, shuffle_index=samples)


@dataclass(frozen=True, eq=False)
class GPTSamples:
    """An open split; each process maps the files for itself, and shares their pages."""

    dataset: IndexedDataset
    """What is read."""
    index: GPTIndex
    """In which order."""
    seq_length: int
    """Predictions of a sample."""

    @property
    def fingerprint(self) -> str:
        """Of the order."""
        return self.index.fingerprint(f"({len(self)}, {self.seq_length})")

    def __len__(self) -> int:
        return len(self.index.shuffle_index)

    def rows(self, indices: Sequence[int]) -> Rows:
        """``text`` [rows, seq_length + 1] int64; -1 where there is no token.

        Raises:
            DataError: If a file of the dataset is not as it was opened.
        """
        width = self.seq_length + 1
        self.dataset.check_unchanged()
        pieces, begins, counts = self._pieces(np.asarray(indices, dtype=np.int64))
        ends = np.cumsum(counts)
        found = self.dataset.tokens[np.repeat(begins - (ends - counts), counts) + np.arange(ends[-1])].astype(np.int64)
        self.dataset.check_unchanged()
        if len(found) < len(pieces) * width:
            filled = np.add.reduceat(counts, np.cumsum(pieces) - pieces)
            partly = np.full((len(pieces), width), PADDING, dtype=np.int64)
            partly[np.arange(width) < filled[:, None]] = found
            found = partly
        return {"text": torch.from_numpy(found.reshape(len(pieces), width))}

    def _pieces(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Pieces of documents that make up rows: how many for each row; for each its first token and its length.

        A row is the end of one document, whole documents, and the beginning of another, or a piece of one document.
        """
        samples = self.index.shuffle_index[indices].astype(np.int64)
        first, first_token = self.index.sample_index[samples].astype(np.int64).T
        last, last_token = self.index.sample_index[samples + 1].astype(np.int64).T
        pieces = last - first + 1
        row_ends = np.cumsum(pieces)
        places = np.repeat(first - (row_ends - pieces), pieces) + np.arange(row_ends[-1])
        documents = self.index.document_index[places]
        ends = self.dataset.lengths[documents].astype(np.int64)
        ends[row_ends - 1] = last_token + 1
        starts = np.zeros_like(ends)
        starts[row_ends - pieces] = first_token
        counts = ends - starts
        return pieces, self.dataset.positions[documents] // self.dataset.dtype.itemsize + starts, counts


def _count(tokens: int, seq_length: int, keep_partial: bool = False) -> int:
    """Samples in a stream of tokens."""
    predictions = max(0, tokens - 1)
    return -(-predictions // seq_length) if keep_partial else predictions // seq_length
