"""BERT and T5 samples: sentences whose words, n-grams or spans are masked, in Megatron's order.

Samples equal Megatron's for WordPiece, random number by random number (megatron-core 0.16.1, datasets/bert_dataset.py,
t5_dataset.py, masked_dataset.py), except for padding: its types, masks and labels do not depend on the padding token.
Where the engine fails because sentinels or labels run out, the remaining spans stay unmasked. Words are also recognized
by the marks of SentencePiece and byte-level BPE (``tokenizer``).

The sentence index is built by the engine's ``build_mapping``. The classes around it are not used: they need
collectives, trust any file of the right name, loop forever on documents that give no sample, cannot make a single
pass, and recognize only words of WordPiece.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lightning_megatron.data.indexed import IndexedDataset, open_dataset
from lightning_megatron.data.samples import Objective, Part, Rows, SavedArrays
from lightning_megatron.data.splits import split_ranges
from lightning_megatron.data.tokenizer_facts import TokenizerFacts
from lightning_megatron.errors import ConfigError, DataError, require_number
from lightning_megatron.foreign_names import checks_options

_log = logging.getLogger(__name__)

IGNORED = -100
"""Label of positions without a target."""
LONG_SENTENCE = 512
"""A document of several sentences is skipped if one has more tokens (``LONG_SENTENCE_LEN`` in helpers.cpp)."""
_MAX_INT32 = 2**31 - 1


@checks_options
@dataclass(frozen=True, kw_only=True)
class MaskingOptions:
    """How many tokens of BERT and T5 samples are masked, and how many together.

    Args:
        probability: Fraction of the tokens to mask; more than 0, less than 1.
        short_sequence_probability: Fraction of the samples that are made shorter than the row, at random; rounded to
            one in N samples: 0.1 and 0.097 are one in 10.
        max_ngram: Maximum number of words masked together; None for 3 (BERT) and 10 (T5).
        whole_words: Mask all tokens of a word or none of them.
    """

    probability: float = 0.15
    short_sequence_probability: float = 0.1
    max_ngram: int | None = None
    whole_words: bool = True

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: With the value, the rule and the fix.
        """
        if not 0 < self.probability < 1:
            raise ConfigError(
                f"probability={self.probability} must be more than 0 and less than 1; 0.15 is usual"
            )
        share = self.short_sequence_probability
        if not 0 <= share <= 1:
            raise ConfigError(
                f"short_sequence_probability={share} must be from 0 to 1; 0.1 is usual"
            )
        if self.max_ngram is not None:
            require_number("max_ngram", self.max_ngram, at_least=1)

    def masked(self, num_tokens: int, target: int) -> float:
        """Maximum number of tokens to mask.

        Args:
            num_tokens: Tokens of the sample.
            target: Target length of the sample.
        """
        share = max(1, int(round(num_tokens * self.probability)))
        return min(self.probability * target, share)


def masked_ngrams(
    bounds: list[int],
    budget: float,
    draw_size: Callable[[], int],
    state: np.random.RandomState,
) -> Iterator[tuple[int, int]]:
    """Yield the bounds of each n-gram to mask, as indices of maskable tokens, in the order in which they are drawn.

    Words are visited in random order; each begins an n-gram of random size, shortened to the remaining budget, that is
    masked unless it overlaps another. Random numbers are drawn in the engine's order (datasets/
    masked_dataset.py:_create_masked_lm_predictions). A caller that draws from ``state`` for an n-gram must do so before
    it requests the next.

    Args:
        bounds: Index at which each word begins, and the number of maskable tokens.
        budget: Maximum number of tokens to mask.
        draw_size: Draws the number of words of an n-gram from ``state``.
        state: Source of all random numbers.
    """
    num_words = len(bounds) - 1
    order = np.arange(num_words)
    # The engine shuffles a list of all n-grams; the random numbers drawn depend only on its length.
    state.shuffle(order)
    taken = bytearray(num_words)
    masked = 0
    for word in order.tolist():
        # The engine continues to draw although no word fits any more, but nothing depends on its random state then.
        if masked + 1 > budget:
            return
        begin = bounds[word]
        end = min(word + draw_size(), num_words)
        while end > word and masked + bounds[end] - begin > budget:
            end -= 1
        if end == word or taken.find(1, word, end) >= 0:
            continue
        taken[word:end] = b"\1" * (end - word)
        masked += bounds[end] - begin
        yield begin, bounds[end]


Ids: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]
Arrays: TypeAlias = dict[str, Ids]
Sentences: TypeAlias = tuple[Ids, Flags, NDArray[np.int32], int]
"""Text of a sample: tokens of all sentences; whether each begins a word, as the first one of a sentence always does;
lengths of the sentences; and target length, the maximum number of tokens of the sample."""


@dataclass(frozen=True, kw_only=True)
class SentenceIndex(SavedArrays):
    """Sentences of each sample, and order of the samples."""

    sentences: NDArray[Any]
    """First sentence, end (exclusive) and target length of each sample: [samples, 3], uint32 or uint64."""

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.sentences)


@dataclass(frozen=True, kw_only=True)
class MaskedObjective(Objective):
    """Base class of the objectives of BERT and T5."""

    seq_length: int
    """Tokens of a row (for T5, of the encoder)."""
    tokenizer: TokenizerFacts
    """Facts of the tokenizer that made the dataset."""
    masking: MaskingOptions = field(default_factory=MaskingOptions)
    """How many tokens are masked, and how many together."""
    num_special_tokens: ClassVar[int]
    """Tokens of a row that are reserved for special tokens."""
    roles: ClassVar[tuple[str, ...]]
    """Roles of the special tokens that rows need, besides sentinels."""
    default_max_ngram: ClassVar[int]
    """``max_ngram`` where ``masking`` does not set it."""
    index_type = SentenceIndex

    def __post_init__(self) -> None:
        """Check what can be checked before a dataset is opened.

        Raises:
            ConfigError: If rows are too short to mask a token, or the tokenizer lacks a special token.
        """
        assert self.special_ids
        probability = self.masking.probability
        if self.max_tokens < 2 or probability * self.max_tokens < 1:
            least = self.num_special_tokens + max(2, math.ceil(1 / probability))
            raise ConfigError(
                f"seq_length={self.seq_length} is too small to mask a token; choose at least {least}"
            )

    @cached_property
    def special_ids(self) -> tuple[int, ...]:
        """Token ids of ``roles``."""
        return self.tokenizer.require(self.roles, self.name.upper())

    @property
    def min_sentences(self) -> int:
        """Minimum number of sentences of a sample: 2 if their order is learned."""
        return 1

    @property
    def max_tokens(self) -> int:
        """Maximum number of text tokens in a row."""
        return self.seq_length - self.num_special_tokens

    @property
    def requirement(self) -> str:
        """Requirement on documents, for messages."""
        number = "two or more" if self.min_sentences > 1 else "one sequence, or several"
        return f"{number} sentences of at most {LONG_SENTENCE} tokens"

    @property
    def cut_key(self) -> str:
        """How documents are cut into samples, as spelled in index names and fingerprints since older versions."""
        return (
            f"SentenceCut(seq_length={self.seq_length}, special_tokens={self.num_special_tokens},"
            f" min_sentences={self.min_sentences},"
            f" short_sequence_probability={self.masking.short_sequence_probability})"
        )

    @property
    @override
    def index_key(self) -> str:
        return f"{self.name} {self.cut_key}"

    @override
    def count(self, part: Part) -> int:
        return len(self._sentences(part, None))

    @override
    def build_index(self, part: Part) -> SentenceIndex:
        return SentenceIndex(sentences=self._sentences(part, part.num_samples, warns=True))

    def _sentences(
        self, part: Part, num_samples: int | None, *, warns: bool = False
    ) -> NDArray[Any]:
        """Build ``SentenceIndex.sentences``; None for ``num_samples`` makes one pass.

        Raises:
            ConfigError: If the engine's index does not support the seed.
            DataError: If the documents give no sample, so that the engine would loop forever; with the reason.
        """
        # Megatron's import takes seconds.
        from megatron.core.datasets.helpers import build_mapping

        if not 0 < part.seed < _MAX_INT32:
            raise ConfigError(
                f"seed={part.seed}: expected 1 to {_MAX_INT32 - 1} for BERT and T5 (the engine's rule)"
            )
        dataset = open_dataset(part.prefix)
        documents = split_ranges(part.split, dataset.num_documents)[part.name]
        bounds = dataset.document_bounds[documents.start : documents.stop + 1]
        lengths = dataset.lengths[bounds[0] : bounds[-1]]
        num_sentences = np.diff(bounds)
        num_tokens = int(lengths.sum(dtype=np.int64))
        long_sentences = np.flatnonzero(lengths > LONG_SENTENCE) + bounds[0]
        long_documents = np.searchsorted(bounds, long_sentences, side="right") - 1
        skipped = num_sentences < max(1, self.min_sentences)
        skipped[long_documents] |= num_sentences[long_documents] > 1
        if not num_tokens or skipped.all():
            raise DataError(
                f"split={part.split!r} gives {part.name} {len(documents)} of {dataset.num_documents} documents of"
                f" {part.prefix} with {num_tokens} tokens, and none of {self.requirement}; give {part.name} a larger"
                " weight or weight 0, or preprocess such documents with --split-sentences"
            )
        if warns:
            of_one_sentence = bounds[:-1][num_sentences == 1]
            single = dataset.lengths[of_one_sentence].astype(np.int64)
            num_lost = int(np.maximum(single - self.max_tokens, 0).sum())
            self._warn(part, skipped, num_lost / num_tokens)
        return build_mapping(  # type: ignore[no-any-return]
            bounds,
            dataset.lengths,
            _MAX_INT32 - 1,  # passes: the engine stops after the one that completes the samples
            max(1, num_samples or 1),
            self.max_tokens,
            self.masking.short_sequence_probability,
            part.seed,
            False,
            self.min_sentences,
        )

    def _warn(self, part: Part, skipped: Flags, truncated_share: float) -> None:
        """Warn of skipped documents, and of the fraction of tokens beyond the end of rows."""
        count = int(skipped.sum())
        if count > 0.01 * len(skipped):
            _log.warning(
                "%d of %d documents of %s (%s) are left out, as by Megatron: a sample is made of %s; preprocess with"
                " --split-sentences if they were not split.",
                count,
                len(skipped),
                part.prefix,
                part.name,
                self.requirement,
            )
        if self.min_sentences == 1 and truncated_share > 0.01:
            _log.warning(
                "%.0f %% of the tokens of %s (%s) are never trained on: documents of one sequence give one sample each,"
                " cut at %d tokens, as by Megatron; preprocess with --split-sentences.",
                100 * truncated_share,
                part.prefix,
                part.name,
                self.max_tokens,
            )

    @override
    def order_key(self, part: Part) -> str:
        # A resumed run may change the masking, but not the order.
        return f"{part.seed}, {self.cut_key}"

    @override
    def read(
        self, dataset: IndexedDataset, index: SentenceIndex, indices: Sequence[int], seed: int
    ) -> Rows:
        """Masked samples at ``indices``, as the tensors of ``empty_rows``.

        Raises:
            DataError: If the dataset has a token that the tokenizer lacks.
        """
        rows = self.empty_rows(len(indices))
        state = np.random.RandomState(0)
        for row, sample in enumerate(indices):
            state.seed((seed + int(sample)) % 2**32)
            first, end, target = index.sentences[int(sample)].tolist()
            self.fill_row(
                rows,
                row,
                self._text(dataset, first, end, target),
                state,
            )
        return {name: torch.from_numpy(array) for name, array in rows.items()}

    def _text(
        self,
        dataset: IndexedDataset,
        first: int,
        end: int,
        target: int,
    ) -> Sentences:
        stored, lengths = dataset.sequences(first, end)
        tokens = stored.astype(np.int64)
        tokenizer = self.tokenizer
        if len(tokens):
            smallest = tokens.min()
            largest = tokens.max()
            if smallest < 0 or largest >= tokenizer.size:
                token = smallest if smallest < 0 else largest
                raise DataError(
                    f"{dataset.prefix} has token {token}, {tokenizer.source} has 0 to {tokenizer.size - 1}"
                )
        begins = tokenizer.begins_word[tokens]
        first_tokens = lengths.cumsum() - lengths
        begins[first_tokens[lengths > 0]] = True
        return tokens, begins, lengths, target

    @abstractmethod
    def empty_rows(self, num_rows: int) -> Arrays:
        """Rows of padding, [rows, ...] int64 each, by the input names of the Hugging Face model."""

    @abstractmethod
    def fill_row(
        self,
        rows: Arrays,
        row: int,
        sample: Sentences,
        state: np.random.RandomState,
    ) -> None:
        """Write a sample into row ``row``; all random numbers come from ``state``."""

    def _words(
        self,
        tokens: Ids,
        begins: Flags,
    ) -> tuple[Ids, list[int]]:
        """Positions of maskable tokens, ascending; the indices among them at which words begin, and their number.

        A token that continues a word belongs to the word before it even if a special token separates them: the engine
        does so with the rest of a word that was cut at the beginning of a segment.
        """
        positions = np.flatnonzero(self.tokenizer.maskable[tokens])
        if not self.masking.whole_words:
            return positions, list(range(len(positions) + 1))
        first = begins[positions]
        first[:1] = True
        return positions, [*np.flatnonzero(first).tolist(), len(positions)]
