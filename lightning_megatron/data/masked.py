"""Samples of BERT and T5: masked words, n-grams and spans."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lightning_megatron.data.samples import Objective, Part, Rows
from lightning_megatron.data.sentence_index import SentenceCut, SentenceIndex, count_samples
from lightning_megatron.data.special_tokens import TokenizerFacts
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


_BERT_MAX_NGRAM = 3


def cut_of(seq_length: int, special_tokens: int, min_sentences: int, masking: MaskingOptions) -> SentenceCut:
    """The cut that goes with ``masking``.

    Raises:
        ConfigError: If rows are so short that not one token would be masked.
    """
    cut = SentenceCut(
        seq_length=seq_length,
        special_tokens=special_tokens,
        min_sentences=min_sentences,
        short_sequence_probability=masking.short_sequence_probability,
    )
    if cut.max_tokens < 2 or masking.probability * cut.max_tokens < 1:
        needed = special_tokens + max(2, math.ceil(1 / masking.probability))
        raise ConfigError(
            f"seq_length={seq_length} is too small: a row has {special_tokens} special tokens, and"
            f" probability={masking.probability:g} of the others must be a token; choose at least {needed}"
        )
    return cut


@dataclass(frozen=True, kw_only=True)
class BertObjective(Objective):
    """Masked tokens and, if wanted, the order of two segments, from datasets whose documents are several sentences."""

    seq_length: int
    """Tokens of a row."""
    tokenizer: TokenizerFacts
    """Of the tokenizer that made the dataset."""
    masking: MaskingOptions = field(default_factory=MaskingOptions)
    """Which tokens are masked."""
    sentence_order: bool = True
    """Whether rows are two segments, in order (``next_sentence_label`` 0) or swapped (1)."""

    def __post_init__(self) -> None:
        """Check what can be known before a dataset is opened.

        Raises:
            ConfigError: If rows are too short, or the tokenizer lacks a special token.
        """
        self.tokenizer.require(("cls", "sep", "mask"), "BERT")
        _ = self.cut

    @property
    @override
    def name(self) -> str:
        return "bert"

    @property
    @override
    def index_key(self) -> str:
        return f"bert {self.cut}"

    @property
    @override
    def largest_token(self) -> int:
        # Any may take the place of a masked token.
        return self.tokenizer.size - 1

    @property
    def cut(self) -> SentenceCut:
        """How documents are cut: cls and two sep stand in each row."""
        return cut_of(self.seq_length, 3, 2 if self.sentence_order else 1, self.masking)

    @override
    def count(self, part: Part) -> int:
        return count_samples(part, self.cut)

    @override
    def open(self, part: Part, folder: str) -> BertSamples:
        return BertSamples(self, SentenceIndex(part, self.cut, folder), part)


class BertSamples:
    """The samples of one split of one dataset."""

    def __init__(self, objective: BertObjective, index: SentenceIndex, part: Part) -> None:
        tokenizer, masking = objective.tokenizer, objective.masking
        self._objective = objective
        self._index = index
        self._seed = part.seed
        self._cls, self._sep, self._mask = tokenizer.require(("cls", "sep", "mask"), "BERT")
        self._finder = WordFinder(tokenizer, masking.whole_words, part.prefix)
        self._sizes = NgramSizes(masking.max_ngram or _BERT_MAX_NGRAM)

    @property
    def fingerprint(self) -> str:
        """Of the order of the samples."""
        return self._index.fingerprint

    def __len__(self) -> int:
        """Samples."""
        return len(self._index)

    def rows(self, indices: Sequence[int]) -> Rows:
        """``input_ids``, ``token_type_ids``, ``attention_mask`` and ``labels`` (-100: none): [rows, s], int64.

        With ``sentence_order`` also ``next_sentence_label``: [rows], int64, 1 where the segments are swapped.

        Raises:
            DataError: If the dataset has an id that the tokenizer has not.
        """
        shape = (len(indices), self._objective.seq_length)
        rows: dict[str, NDArray[np.int64]] = {
            "input_ids": np.full(shape, self._objective.tokenizer.fill, dtype=np.int64),
            "token_type_ids": np.zeros(shape, dtype=np.int64),
            "attention_mask": np.zeros(shape, dtype=np.int64),
            "labels": np.full(shape, IGNORED, dtype=np.int64),
        }
        order: NDArray[np.int64] = np.zeros(len(indices), dtype=np.int64)
        state = np.random.RandomState(0)
        for row, index in enumerate(indices):
            state.seed((self._seed + int(index)) % 2**32)
            order[row] = self._fill({name: array[row] for name, array in rows.items()}, int(index), state)
        if self._objective.sentence_order:
            rows["next_sentence_label"] = order
        return {name: torch.from_numpy(array) for name, array in rows.items()}

    def _fill(self, row: dict[str, NDArray[np.int64]], index: int, state: np.random.RandomState) -> bool:
        """Write one sample into its row, and say whether its segments are swapped."""
        text, lengths, target = self._index.sentences(index)
        begins = self._finder.begins(text, lengths)
        middle, swapped = len(text), False
        if self._objective.sentence_order:
            middle = int(lengths[: state.randint(1, len(lengths)) if len(lengths) > 2 else 1].sum())
            swapped = state.random_sample() < 0.5
        segments = [slice(0, middle), slice(middle, len(text))]
        first, second = _trimmed(segments[::-1] if swapped else segments, target, state)

        tokens, starts = row["input_ids"], np.zeros(len(row["input_ids"]), dtype=np.bool_)
        end = 1 + first.stop - first.start
        tokens[0], tokens[1:end], tokens[end] = self._cls, text[first], self._sep
        starts[1:end] = begins[first]
        end += 1
        if second.stop > second.start:
            begin, end = end, end + second.stop - second.start
            tokens[begin:end], tokens[end] = text[second], self._sep
            starts[begin:end] = begins[second]
            end += 1
            row["token_type_ids"][begin:end] = 1
        row["attention_mask"][:end] = 1
        self._mask_words(tokens[:end], starts[:end], row["labels"], target, state)
        return swapped

    def _mask_words(
        self,
        tokens: NDArray[np.int64],
        begins: NDArray[np.bool_],
        labels: NDArray[np.int64],
        target: int,
        state: np.random.RandomState,
    ) -> None:
        """Of the tokens to predict 80 % become the mask, 10 % any token, and 10 % stay.

        Source: BERT, https://arxiv.org/abs/1810.04805, section 3.1.
        """
        words, ids, random = self._finder.words(tokens, begins), self._objective.tokenizer.ids, state.random_sample
        budget = self._objective.masking.masked(len(tokens), target)
        chosen: list[int] = []
        masked: list[int] = []
        replaced: dict[int, int] = {}
        for begin, end in masked_ngrams(words.bounds, budget, self._sizes.drawn_by(state), state):
            for place in range(begin, end):
                chosen.append(place)
                if random() < 0.8:
                    masked.append(place)
                elif random() >= 0.5:
                    replaced[place] = int(ids[state.randint(0, len(ids))])
        where = words.places[chosen]
        labels[where] = tokens[where]
        tokens[words.places[masked]] = self._mask
        tokens[words.places[list(replaced)]] = list(replaced.values())


def _trimmed(segments: Sequence[slice], target: int, state: np.random.RandomState) -> tuple[slice, slice]:
    """Two segments of ``target`` tokens together at most: the longer one loses a token at a random end, repeatedly.

    One draw a token, as the engine's loop; which segment is the longer one each time is known beforehand.
    """
    first, second = segments
    longer = (first.stop - first.start) - (second.stop - second.start)
    excess = (first.stop - first.start) + (second.stop - second.start) - target
    if excess <= 0:
        return first, second
    at_front = state.random_sample(excess) < 0.5
    of_first = np.zeros(excess, dtype=np.bool_)
    of_first[: abs(longer)] = longer > 0
    of_first[abs(longer) + 1 :: 2] = True  # of two that are equal the second is cut
    trimmed = []
    for segment, here in ((first, of_first), (second, ~of_first)):
        front = int((here & at_front).sum())
        trimmed.append(slice(segment.start + front, segment.stop - int(here.sum()) + front))
    return trimmed[0], trimmed[1]


_log = logging.getLogger(__name__)

T5Format: TypeAlias = Literal["hugging_face", "megatron"]

_T5_MAX_NGRAM = 10


@dataclass(frozen=True, kw_only=True)
class T5Objective(Objective):
    """Masked spans, from datasets whose documents are one or several sequences."""

    seq_length: int
    """Tokens of a row of the encoder."""
    seq_length_decoder: int
    """Labels of a row of the decoder."""
    tokenizer: TokenizerFacts
    """Of the tokenizer that made the dataset."""
    masking: MaskingOptions = field(default_factory=MaskingOptions)
    """Which tokens are masked."""
    format: T5Format = "hugging_face"
    """What ends a row.

    ``hugging_face``, as the released models were trained: the text with eos, the labels with one more sentinel and eos.
    ``megatron``: the labels with eos.
    """

    def __post_init__(self) -> None:
        """Check what can be known before a dataset is opened.

        Raises:
            ConfigError: If rows are too short, or the tokenizer lacks a special token.
        """
        if self.format not in get_args(T5Format):
            raise ConfigError(f"format={self.format!r} must be one of {', '.join(get_args(T5Format))}")
        self.tokenizer.require(("eos",), "T5")
        if self.max_spans < 1:
            raise ConfigError(
                f"the tokenizer {self.tokenizer.source} has {len(self.tokenizer.sentinels)} sentinels (<extra_id_0>,"
                " <extra_id_1>, ...), T5 needs one for each span; use the tokenizer of a T5 model, or give it 100 with"
                " tokenizer.add_special_tokens and save it"
            )
        _ = self.cut
        tokens, spans = self._usual_spans
        needed = tokens + spans + self._ending
        if self.seq_length_decoder < needed:
            raise ConfigError(
                f"seq_length_decoder={self.seq_length_decoder} is too small: {self.masking.probability:.0%} of"
                f" seq_length={self.seq_length} are {tokens} tokens in about {spans} spans, which need {needed} labels;"
                f" choose at least {needed}, or lower probability"
            )

    @property
    @override
    def name(self) -> str:
        return "t5"

    @property
    @override
    def index_key(self) -> str:
        return f"t5 {self.cut}"

    @property
    @override
    def largest_token(self) -> int:
        return max(*self.tokenizer.sentinels, self.eos, self.tokenizer.fill)

    @property
    def cut(self) -> SentenceCut:
        """How documents are cut: the engine leaves two tokens to bos and eos."""
        return cut_of(self.seq_length, 2, 1, self.masking)

    @property
    def eos(self) -> int:
        """Ends text and labels."""
        return self.tokenizer.require(("eos",), "T5")[0]

    @property
    def sizes(self) -> GeometricSizes:
        """Of spans, in words."""
        return GeometricSizes(self.masking.max_ngram or _T5_MAX_NGRAM)

    @property
    def max_spans(self) -> int:
        """Spans of a sample, at most; in Hugging Face's format one sentinel stands behind the last."""
        return len(self.tokenizer.sentinels) - (self.format == "hugging_face")

    @property
    def max_answer(self) -> int:
        """Labels of a sample, at most, without its ending."""
        return self.seq_length_decoder - self._ending

    @property
    def _ending(self) -> int:
        return 2 if self.format == "hugging_face" else 1

    @property
    def _usual_spans(self) -> tuple[int, int]:
        """Masked tokens and spans of a full row if each word is one token; with longer words there are fewer spans."""
        tokens = int(self.masking.masked(self.cut.max_tokens, self.cut.max_tokens))
        return tokens, round(tokens / self.sizes.mean)

    @override
    def count(self, part: Part) -> int:
        return count_samples(part, self.cut)

    @override
    def open(self, part: Part, folder: str) -> T5Samples:
        if self._usual_spans[1] > self.max_spans:
            _log.warning(
                "Rows of seq_length=%d have about %d spans, the tokenizer %s has sentinels for %d: fewer than"
                " probability=%g of the tokens will be masked; raise max_ngram, or add sentinels to the tokenizer.",
                *(self.seq_length, self._usual_spans[1], self.tokenizer.source, self.max_spans),
                self.masking.probability,
            )
        return T5Samples(self, SentenceIndex(part, self.cut, folder), part)


class T5Samples:
    """The samples of one split of one dataset."""

    def __init__(self, objective: T5Objective, index: SentenceIndex, part: Part) -> None:
        self._objective = objective
        self._index = index
        self._seed = part.seed
        self._finder = WordFinder(objective.tokenizer, objective.masking.whole_words, part.prefix)
        self._sizes = objective.sizes

    @property
    def fingerprint(self) -> str:
        """Of the order of the samples."""
        return self._index.fingerprint

    def __len__(self) -> int:
        """Samples."""
        return len(self._index)

    def rows(self, indices: Sequence[int]) -> Rows:
        """``input_ids`` and ``attention_mask`` [rows, s], ``labels`` (-100: none) [rows, s of the decoder], all int64.

        Raises:
            DataError: If the dataset has an id that the tokenizer has not.
        """
        objective = self._objective
        shape = (len(indices), objective.seq_length)
        tokens = np.full(shape, objective.tokenizer.fill, dtype=np.int64)
        attention = np.zeros(shape, dtype=np.int64)
        labels = np.full((len(indices), objective.seq_length_decoder), IGNORED, dtype=np.int64)
        state = np.random.RandomState(0)
        for row, index in enumerate(indices):
            state.seed((self._seed + int(index)) % 2**32)
            text, answer = self._sample(int(index), state)
            tokens[row, : len(text)], attention[row, : len(text)] = text, 1
            labels[row, : len(answer)] = answer
        return {
            "input_ids": torch.from_numpy(tokens),
            "attention_mask": torch.from_numpy(attention),
            "labels": torch.from_numpy(labels),
        }

    def _sample(self, index: int, state: np.random.RandomState) -> tuple[list[int], list[int]]:
        """The text with sentinels in place of spans, and the labels."""
        objective = self._objective
        text, lengths, target = self._index.sentences(index)
        begins = self._finder.begins(text, lengths)
        text = text[:target]
        spans = self._spans(text, begins[:target], target, state)

        tokens: list[int] = text.tolist()
        inputs: list[int] = []
        labels: list[int] = []
        sentinels = objective.tokenizer.sentinels
        last = 0
        for sentinel, (begin, end) in zip(sentinels, spans, strict=False):
            inputs += tokens[last:begin]
            inputs.append(sentinel)
            labels.append(sentinel)
            labels += tokens[begin:end]
            last = end
        inputs += tokens[last:]
        if objective.format == "hugging_face":
            labels.append(sentinels[len(spans)])
            if inputs[-1:] != [objective.eos]:  # which preprocess may have appended to the document
                inputs.append(objective.eos)
        labels.append(objective.eos)
        return inputs, labels

    def _spans(
        self, text: np.ndarray, begins: np.ndarray, target: int, state: np.random.RandomState
    ) -> list[tuple[int, int]]:
        """Beginning and end of each masked span, in the order of the text."""
        objective = self._objective
        words = self._finder.words(text, begins)
        budget = objective.masking.masked(len(text), target)
        spans: list[tuple[int, int]] = []
        answer = 0
        for first, stop in masked_ngrams(words.bounds, budget, self._sizes.drawn_by(state), state):
            begin, end = int(words.places[first]), int(words.places[stop - 1]) + 1
            answer += 1 + end - begin
            if len(spans) == objective.max_spans or answer > objective.max_answer:
                break
            spans.append((begin, end))
        return sorted(spans)
