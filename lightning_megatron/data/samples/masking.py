"""Which tokens of a sample are masked?

Words are taken in a random order; each begins an n-gram of random size that is masked if it still fits into the share
that is to be masked and touches no other. The random numbers are drawn in the engine's order, so that for WordPiece the
same words are masked as by Megatron. Source: megatron-core 0.16.1, datasets/masked_dataset.py:
_create_masked_lm_predictions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.samples.special_tokens import TokenizerFacts
from lightning_megatron.errors import ConfigError, DataError

IGNORED = -100
"""The label of a place where nothing is predicted."""
GEOMETRIC_PROBABILITY = 0.2
"""Of the end after each word of a T5's span. Source: SpanBERT, https://arxiv.org/abs/1907.10529, section 3.1."""


@dataclass(frozen=True, kw_only=True)
class MaskingOptions:
    """How much is masked, in pieces of which size.

    Args:
        probability: Share of the tokens that is masked; more than 0, less than 1.
        short_sequence_probability: Share of the samples that are made shorter than the row, at random; drawn as one in
            a whole number.
        max_ngram: Words that are masked together, at most; None for 3 (BERT) and 10 (T5).
        whole_words: Whether all pieces of a word are masked, or none of them.
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
            raise ConfigError(f"probability={self.probability} must be more than 0 and less than 1; 0.15 is usual")
        share = self.short_sequence_probability
        one_in = round(1 / share) if 1e-9 < share <= 1 else 0
        if share != 0 and not (one_in and abs(1 / one_in - share) <= 0.1 * share):
            raise ConfigError(
                f"short_sequence_probability={share} must be 0 or close to one in a whole number (1, 0.5, 0.33, 0.25,"
                " 0.2, ...), as it is drawn so; 0.1 is usual"
            )
        if self.max_ngram is not None and self.max_ngram < 1:
            raise ConfigError(f"max_ngram={self.max_ngram} words must be at least 1; leave it out for the usual size")

    def masked(self, num_tokens: int, target: int) -> float:
        """Tokens to mask, at most.

        Args:
            num_tokens: Of the sample.
            target: That it was to have.
        """
        return min(self.probability * target, max(1, int(round(num_tokens * self.probability))))


class NgramSizes:
    """Draws sizes that are the less probable the larger: 1/n, normalised."""

    def __init__(self, max_ngram: int) -> None:
        # Rounded as by the engine and numpy's choice, step by step: one bit decides about a whole sample.
        probabilities = 1.0 / (np.arange(max_ngram, dtype=np.int64) + 1)
        probabilities = probabilities / probabilities.sum(keepdims=True)
        probabilities = probabilities / probabilities.sum(keepdims=True)
        cumulative = probabilities.cumsum()
        self._cumulative: list[float] = (cumulative / cumulative[-1]).tolist()

    def drawn_by(self, state: np.random.RandomState) -> Callable[[], int]:
        """Draws one size a call."""
        cumulative, random = self._cumulative, state.random_sample
        return lambda: bisect_right(cumulative, random()) + 1


class GeometricSizes:
    """Draws sizes of a geometric distribution, cut off."""

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram

    @property
    def mean(self) -> float:
        """Words of a span."""
        return (1 - (1 - GEOMETRIC_PROBABILITY) ** self._max_ngram) / GEOMETRIC_PROBABILITY

    def drawn_by(self, state: np.random.RandomState) -> Callable[[], int]:
        """Draws one size a call."""
        largest, geometric = self._max_ngram, state.geometric
        return lambda: min(geometric(GEOMETRIC_PROBABILITY), largest)


@dataclass(frozen=True)
class Words:
    """The words of a sample that may be masked."""

    places: NDArray[np.int64]
    """Places of their tokens in the sample, in ascending order."""
    bounds: list[int]
    """Where in ``places`` each word begins, and the number of places."""


class WordFinder:
    """Finds words by the pieces' marks."""

    def __init__(self, tokenizer: TokenizerFacts, whole_words: bool, prefix: str) -> None:
        """Read the facts.

        Args:
            tokenizer: Of the dataset.
            whole_words: Whether all pieces of a word belong together.
            prefix: The dataset, for messages.
        """
        self._begins_word = tokenizer.begins_word
        self._maskable = tokenizer.maskable
        self._source = tokenizer.source
        self._whole_words = whole_words
        self._prefix = prefix

    def begins(self, tokens: NDArray[np.int64], lengths: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether each token begins a word: [n]; the first of a sentence does, with a mark or without.

        Args:
            tokens: Of some sentences: [n].
            lengths: Of the sentences.

        Raises:
            DataError: If there are other ids than the tokenizer's.
        """
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < len(self._begins_word):
            token = tokens.min() if tokens.min() < 0 else tokens.max()
            raise DataError(
                f"{self._prefix} has the token {token}, ids of the tokenizer {self._source} are from 0 to"
                f" {len(self._begins_word) - 1}; give the tokenizer that made the dataset"
            )
        begins = self._begins_word[tokens]
        begins[(lengths.cumsum() - lengths)[lengths > 0]] = True
        return begins

    def words(self, tokens: NDArray[np.int64], begins: NDArray[np.bool_]) -> Words:
        """The words of a sample.

        A piece in the middle of a word belongs to the word before it even if a special token stands between them: that
        is where the engine puts the rest of a word that was cut at the beginning of a segment.

        Args:
            tokens: [n].
            begins: Whether each begins a word: [n].
        """
        places = np.flatnonzero(self._maskable[tokens])
        if not self._whole_words:
            return Words(places, list(range(len(places) + 1)))
        first = begins[places]
        first[:1] = True
        return Words(places, [*np.flatnonzero(first).tolist(), len(places)])


def masked_ngrams(
    bounds: list[int], budget: float, draw_size: Callable[[], int], state: np.random.RandomState
) -> Iterator[tuple[int, int]]:
    """Beginning and end of each n-gram to mask, counted in places, in the order in which they are drawn.

    Whoever draws by ``state`` for an n-gram does so before asking for the next.

    Args:
        bounds: As in ``Words``.
        budget: Tokens to mask, at most.
        draw_size: Draws the words of an n-gram by ``state``.
        state: Where all random numbers come from.
    """
    num_words = len(bounds) - 1
    order = np.arange(num_words)
    # The engine shuffles a list of all n-grams; the numbers drawn depend on its length alone.
    state.shuffle(order)
    taken = bytearray(num_words)
    masked = 0
    for word in order.tolist():
        # The engine goes on drawing here though no word fits any more, but nothing is drawn by its numbers after that.
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
