"""Which sentences are sample number i? The index of BERT's and T5's samples, over documents of several sentences.

The index is the engine's own (``build_mapping``), so that samples and their order equal Megatron's. The class around it
is not used: it needs collectives, trusts whatever has the right name, waits for ever on documents that give no sample,
and cannot make a single pass (megatron-core 0.16.1, datasets/masked_dataset.py:_build_sample_index).
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.indexed import open_dataset
from lightning_megatron.data.samples import Part, open_array, split_ranges
from lightning_megatron.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

LONG_SENTENCE = 512
"""A document of several sentences is left out if one has more tokens (``LONG_SENTENCE_LEN`` in helpers.cpp)."""

_MAX_INT32 = 2**31 - 1
_NAME = "sentences"


@dataclass(frozen=True, kw_only=True)
class SentenceCut:
    """How documents are cut into samples of whole sentences."""

    seq_length: int
    """Tokens of a row."""
    special_tokens: int
    """How many of them the text leaves to special tokens."""
    min_sentences: int
    """Sentences of a sample, at least: 2 if their order is to be learned."""
    short_sequence_probability: float
    """Share of the samples that are made shorter."""

    @property
    def max_tokens(self) -> int:
        """Tokens of text in a row."""
        return self.seq_length - self.special_tokens


def count_samples(part: Part, cut: SentenceCut) -> int:
    """Samples in one pass over the documents of ``part``.

    Raises:
        ConfigError: If the seed is none that the engine's index takes.
        DataError: If there is not even one.
    """
    documents = _Documents(part)
    documents.check(cut)
    return len(_mapping(documents, cut, None))


class SentenceIndex:
    """The samples of one split of one dataset in Megatron's order, as runs of sentences."""

    def __init__(self, part: Part, cut: SentenceCut, folder: str) -> None:
        """Open the index, or build it.

        Args:
            part: Which documents.
            cut: How they are cut.
            folder: Where the index is, or is to be written if this is empty; ``""`` keeps it in memory.

        Raises:
            ConfigError: If the seed is none that the engine's index takes.
            DataError: If the documents give no sample.
        """
        self._seed, self._cut = part.seed, cut
        self._folder = folder
        path = os.path.join(folder, f"{_NAME}.npy")
        if folder and os.path.isfile(path):
            self._mapping: NDArray[np.uint64] = open_array(folder, _NAME)
        else:
            documents = _Documents(part)
            documents.check(cut)
            documents.warn(cut)
            self._mapping = _mapping(documents, cut, part.num_samples)
            if folder:
                np.save(path, self._mapping)
        self._dataset = open_dataset(part.prefix)

    def __len__(self) -> int:
        """Samples."""
        return len(self._mapping)

    def __getstate__(self) -> dict[str, Any]:
        """Without what can be opened again from disk."""
        return {**self.__dict__, "_mapping": None if self._folder else self._mapping}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open it again."""
        self.__dict__.update(state)
        if self._folder:
            self._mapping = open_array(self._folder, _NAME)

    @property
    def fingerprint(self) -> str:
        """Equal for equal runs of sentences in equal order; masking may change when a run is resumed, the order not.

        The beginning of an order tells it from others: any difference reshuffles all of it.
        """
        beginning = np.ascontiguousarray(self._mapping[:4096])
        digest = hashlib.sha256(repr((len(self), self._seed, self._cut)).encode() + beginning.tobytes())
        return digest.hexdigest()[:16]

    def sentences(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
        """A sample's tokens [n], the lengths of its sentences [sentences], and how many tokens it was to have."""
        begin, end, target = self._mapping[index].tolist()
        tokens, lengths = self._dataset.sequences(begin, end)
        return tokens.astype(np.int64), lengths, target


class _Documents:
    """The documents of one split, with the arrays of the whole dataset."""

    def __init__(self, part: Part) -> None:
        if not 0 < part.seed < _MAX_INT32:
            raise ConfigError(
                f"seed={part.seed} must be from 1 to {_MAX_INT32 - 1} for BERT and T5 (the engine's index of sentences"
                " takes no other); choose such a seed"
            )
        dataset = open_dataset(part.prefix)
        documents = split_ranges(part.split, dataset.num_documents)[part.name]
        if len(documents) >= _MAX_INT32:
            raise DataError(
                f"{part.prefix} has {len(documents)} documents for {part.name}, the engine's index of sentences takes"
                f" {_MAX_INT32 - 1}; split the dataset into several and blend them"
            )
        self.part = part
        self.total = dataset.num_documents
        self.lengths: NDArray[np.int32] = dataset.lengths
        self.bounds: NDArray[np.int64] = dataset.document_bounds[documents.start : documents.stop + 1]

    @property
    def count(self) -> int:
        """Documents of this split."""
        return len(self.bounds) - 1

    def with_long_sentences(self) -> NDArray[np.int64]:
        """Those of several sentences that the engine leaves out because of one."""
        lengths = self.lengths[self.bounds[0] : self.bounds[-1]]
        long = np.flatnonzero(lengths > LONG_SENTENCE) + self.bounds[0]
        documents = np.unique(np.searchsorted(self.bounds, long, side="right") - 1)
        several: NDArray[np.int64] = documents[self.bounds[documents + 1] - self.bounds[documents] > 1]
        return several

    def check(self, cut: SentenceCut) -> None:
        """Refuse documents of which the engine would make no sample, for ever.

        Raises:
            DataError: With what is wrong with them.
        """
        part = self.part
        where = f"split={part.split!r} gives {part.name} {self.count} of {self.total} documents of {part.prefix}"
        if self.count < 1:
            raise DataError(f"{where}; give {part.name} a larger weight or weight 0, or add documents")
        num_sentences = np.diff(self.bounds)
        enough = int((num_sentences >= cut.min_sentences).sum())
        if enough == 0 and cut.min_sentences > 1:
            raise DataError(
                f"{where}, none with two sentences, whose order is to be learned; preprocess with --split-sentences, or"
                " set sentence_order=False"
            )
        long = self.with_long_sentences()
        if enough == len(long):
            raise DataError(
                f"{where}, {len(long)} of them with a sentence of more than {LONG_SENTENCE} tokens, none that can be"
                " used; preprocess with --split-sentences and shorter sentences, or give other documents"
            )
        if not self.lengths[self.bounds[0] : self.bounds[-1]].any():
            raise DataError(f"{where}, none with any token; preprocess inputs that contain text")

    def warn(self, cut: SentenceCut) -> None:
        """Say how much is left out."""
        part, long = self.part, self.with_long_sentences()
        if len(long):
            _log.warning(
                "%d of %d documents of %s (%s) have a sentence of more than %d tokens and are left out, as by Megatron;"
                " split them into shorter sentences to train on them.",
                *(len(long), self.count, part.prefix, part.name, LONG_SENTENCE),
            )
        if cut.min_sentences > 1:
            few = int((np.diff(self.bounds) < cut.min_sentences).sum())
            if few > 0.01 * self.count:
                _log.warning(
                    "%d of %d documents of %s (%s) have less than two sentences and are left out, as there is no order"
                    " to learn; preprocess with --split-sentences if they were not split.",
                    *(few, self.count, part.prefix, part.name),
                )
            return
        begins = self.bounds[:-1][np.diff(self.bounds) == 1]
        behind = int(np.maximum(self.lengths[begins].astype(np.int64) - cut.max_tokens, 0).sum())
        tokens = int(self.lengths[self.bounds[0] : self.bounds[-1]].sum(dtype=np.int64))
        if behind > 0.01 * tokens:
            _log.warning(
                "%.0f %% of the tokens of %s (%s) are never trained on: documents of one sequence give one sample each,"
                " cut at %d tokens, as by Megatron; preprocess with --split-sentences.",
                *(100 * behind / tokens, part.prefix, part.name, cut.max_tokens),
            )


def _mapping(documents: _Documents, cut: SentenceCut, num_samples: int | None) -> NDArray[np.uint64]:
    """First sentence, end, and tokens to have of each sample: [samples, 3], uint32 or uint64."""
    from megatron.core.datasets.helpers import build_mapping

    mapping: NDArray[np.uint64] = build_mapping(
        documents.bounds,
        documents.lengths,
        _MAX_INT32 - 1,  # passes; whole ones are made until there are as many samples
        max(1, num_samples or 1),
        cut.max_tokens,
        cut.short_sequence_probability,
        documents.part.seed,
        False,
        cut.min_sentences,
    )
    return mapping
