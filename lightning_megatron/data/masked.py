"""Samples of BERT and T5: whole sentences whose words, n-grams or spans are masked, in Megatron's order.

Samples equal Megatron's for WordPiece, random number by random number (megatron-core 0.16.1, datasets/bert_dataset.py,
t5_dataset.py, masked_dataset.py), but for padding: types, masks and labels behind the end do not depend on the
padding's id. Where a run of the engine would end because sentinels or labels run out, the spans that are left stay
unmasked. Words are also found by the marks of SentencePiece and byte-level BPE (``special_tokens``).

The index of sentences is the engine's own (``build_mapping``). The classes around it are not used: they need
collectives, trust whatever file has the right name, wait for ever on documents that give no sample, cannot make a
single pass, and know no words but WordPiece's.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lightning_megatron.data.indexed import IndexedDataset, open_dataset
from lightning_megatron.data.samples import Objective, Part, Rows, SavedArrays, split_ranges
from lightning_megatron.data.tokenizer import TokenizerFacts
from lightning_megatron.errors import ConfigError, DataError, require_choice, require_number

_log = logging.getLogger(__name__)

IGNORED = -100
"""The label of a place where nothing is predicted."""
LONG_SENTENCE = 512
"""A document of several sentences is left out if one has more tokens (``LONG_SENTENCE_LEN`` in helpers.cpp)."""
GEOMETRIC_PROBABILITY = 0.2
"""Of the end after each word of a T5's span. Source: SpanBERT, https://arxiv.org/abs/1907.10529, section 3.1."""
_MAX_INT32 = 2**31 - 1

T5Format: TypeAlias = Literal["hugging_face", "megatron"]


# ---- what is masked -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MaskingOptions:
    """How much is masked, in pieces of which size.

    Args:
        probability: Share of the tokens that is masked; more than 0, less than 1.
        short_sequence_probability: Share of the samples that are made shorter than the row, at random; drawn as one in
            the nearest whole number: 0.1 and 0.097 are one in 10.
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
        if not 0 <= (share := self.short_sequence_probability) <= 1:
            raise ConfigError(f"short_sequence_probability={share} must be from 0 to 1; 0.1 is usual")
        require_number("max_ngram", 1 if self.max_ngram is None else self.max_ngram, at_least=1)

    def masked(self, num_tokens: int, target: int) -> float:
        """Tokens to mask, at most.

        Args:
            num_tokens: Of the sample.
            target: That it was to have.
        """
        return min(self.probability * target, max(1, int(round(num_tokens * self.probability))))


def masked_ngrams(
    bounds: list[int], budget: float, draw_size: Callable[[], int], state: np.random.RandomState
) -> Iterator[tuple[int, int]]:
    """Beginning and end of each n-gram to mask, counted in places, in the order in which they are drawn.

    Words are taken in a random order; each begins an n-gram of random size that is masked if it still fits into the
    share that is to be masked and touches no other. The random numbers are drawn in the engine's order (datasets/
    masked_dataset.py:_create_masked_lm_predictions). Whoever draws by ``state`` for an n-gram does so before asking for
    the next.

    Args:
        bounds: Where each word begins, and the number of places.
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


# ---- sentences ------------------------------------------------------------------------------------------------------


Ids: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]
Arrays: TypeAlias = dict[str, Ids]
Sentences: TypeAlias = tuple[Ids, Flags, NDArray[np.int32], int]
"""The text of a sample: tokens of all sentences; whether each begins a word, as the first one of a sentence does, with
a mark or without; lengths of the sentences; and the tokens that the sample shall have, at most."""


@dataclass(frozen=True, kw_only=True)
class SentenceIndex(SavedArrays):
    """Which sentences samples are made of, in which order."""

    sentences: NDArray[Any]
    """First sentence, end, and tokens to have of each sample: [samples, 3], uint32 or uint64."""

    def __len__(self) -> int:
        """Samples."""
        return len(self.sentences)


@dataclass(frozen=True, kw_only=True)
class MaskedObjective(Objective):
    """What BERT and T5 have in common."""

    seq_length: int
    """Tokens of a row, of the encoder."""
    tokenizer: TokenizerFacts
    """Of the tokenizer that made the dataset."""
    masking: MaskingOptions = field(default_factory=MaskingOptions)
    """Which tokens are masked."""
    special_tokens: ClassVar[int]
    """How many of a row the text leaves to special tokens."""
    roles: ClassVar[tuple[str, ...]]
    """Of the special tokens that rows need, beside sentinels."""
    usual_ngram: ClassVar[int]
    """Words that are masked together, at most, where ``masking`` does not say."""
    index_type = SentenceIndex

    def __post_init__(self) -> None:
        """Check what can be known before a dataset is opened.

        Raises:
            ConfigError: If rows are so short that no token would be masked, or the tokenizer lacks a special token.
        """
        assert self.special_ids
        probability = self.masking.probability
        if self.max_tokens < 2 or probability * self.max_tokens < 1:
            least = self.special_tokens + max(2, math.ceil(1 / probability))
            raise ConfigError(f"seq_length={self.seq_length} is too small to mask a token; choose at least {least}")

    @cached_property
    def special_ids(self) -> tuple[int, ...]:
        """The ids of ``roles``."""
        return self.tokenizer.require(self.roles, self.name.upper())

    @property
    def min_sentences(self) -> int:
        """Sentences of a sample, at least: 2 if their order is to be learned."""
        return 1

    @property
    def max_tokens(self) -> int:
        """Tokens of text in a row."""
        return self.seq_length - self.special_tokens

    @property
    def needs(self) -> str:
        """What documents must have, in words."""
        number = "two or more" if self.min_sentences > 1 else "one sequence, or several"
        return f"{number} sentences of at most {LONG_SENTENCE} tokens"

    @property
    def cut(self) -> str:
        """How documents are cut, as the names of index folders and the fingerprints of older runs spell it."""
        return (
            f"SentenceCut(seq_length={self.seq_length}, special_tokens={self.special_tokens},"
            f" min_sentences={self.min_sentences},"
            f" short_sequence_probability={self.masking.short_sequence_probability})"
        )

    @property
    @override
    def index_key(self) -> str:
        return f"{self.name} {self.cut}"

    @override
    def count(self, part: Part) -> int:
        return len(self._sentences(part, None))

    @override
    def build_index(self, part: Part) -> SentenceIndex:
        return SentenceIndex(sentences=self._sentences(part, part.num_samples, warns=True))

    def _sentences(self, part: Part, num_samples: int | None, *, warns: bool = False) -> NDArray[Any]:
        """First sentence, end, and tokens to have of each sample: [samples, 3], uint32 or uint64.

        Raises:
            ConfigError: If the seed is none that the engine's index takes.
            DataError: If the engine would make no sample of the documents, for ever; with what is wrong with them.
        """
        from megatron.core.datasets.helpers import build_mapping

        if not 0 < part.seed < _MAX_INT32:
            raise ConfigError(f"seed={part.seed}: expected 1 to {_MAX_INT32 - 1} for BERT and T5 (the engine's rule)")
        dataset = open_dataset(part.prefix)
        documents = split_ranges(part.split, dataset.num_documents)[part.name]
        bounds = dataset.document_bounds[documents.start : documents.stop + 1]
        own, num_sentences = dataset.lengths[bounds[0] : bounds[-1]], np.diff(bounds)
        num_tokens = int(own.sum(dtype=np.int64))
        with_long = np.searchsorted(bounds, np.flatnonzero(own > LONG_SENTENCE) + bounds[0], side="right") - 1
        left_out = num_sentences < max(1, self.min_sentences)
        left_out[with_long] |= num_sentences[with_long] > 1
        if not num_tokens or left_out.all():
            raise DataError(
                f"split={part.split!r} gives {part.name} {len(documents)} of {dataset.num_documents} documents of"
                f" {part.prefix} with {num_tokens} tokens, and none of {self.needs}; give {part.name} a larger weight"
                " or weight 0, or preprocess such documents with --split-sentences"
            )
        if warns:
            alone = dataset.lengths[bounds[:-1][num_sentences == 1]].astype(np.int64)
            self._warn(part, left_out, int(np.maximum(alone - self.max_tokens, 0).sum()) / num_tokens)
        passes = _MAX_INT32 - 1  # whole ones are made until there are as many samples
        cut = (max(1, num_samples or 1), self.max_tokens, self.masking.short_sequence_probability, part.seed)
        return build_mapping(bounds, dataset.lengths, passes, *cut, False, self.min_sentences)  # type: ignore[no-any-return]

    def _warn(self, part: Part, left_out: Flags, share_behind: float) -> None:
        """Say which documents are left out, and which share of the tokens is behind the end of a row."""
        if (count := int(left_out.sum())) > 0.01 * len(left_out):
            _log.warning(
                "%d of %d documents of %s (%s) are left out, as by Megatron: a sample is made of %s; preprocess with"
                " --split-sentences if they were not split.",
                *(count, len(left_out), part.prefix, part.name, self.needs),
            )
        if self.min_sentences == 1 and share_behind > 0.01:
            _log.warning(
                "%.0f %% of the tokens of %s (%s) are never trained on: documents of one sequence give one sample each,"
                " cut at %d tokens, as by Megatron; preprocess with --split-sentences.",
                *(100 * share_behind, part.prefix, part.name, self.max_tokens),
            )

    @override
    def order_key(self, part: Part) -> str:
        # Masking may change when a run is resumed, the order not.
        return f"{part.seed}, {self.cut}"

    @override
    def read(self, dataset: IndexedDataset, index: SentenceIndex, indices: Sequence[int], seed: int) -> Rows:
        """What ``empty_rows`` names, filled.

        Raises:
            DataError: If the dataset has an id that the tokenizer has not.
        """
        rows, state = self.empty_rows(len(indices)), np.random.RandomState(0)
        for number, sample in enumerate(indices):
            state.seed((seed + int(sample)) % 2**32)
            first, end, target = index.sentences[int(sample)].tolist()
            self.fill(rows, number, self._text(dataset, first, end, target), state)
        return {name: torch.from_numpy(array) for name, array in rows.items()}

    def _text(self, dataset: IndexedDataset, first: int, end: int, target: int) -> Sentences:
        found, lengths = dataset.sequences(first, end)
        tokens, tokenizer = found.astype(np.int64), self.tokenizer
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < tokenizer.size:
            token = tokens.min() if tokens.min() < 0 else tokens.max()
            raise DataError(f"{dataset.prefix} has token {token}, {tokenizer.source} has 0 to {tokenizer.size - 1}")
        begins = tokenizer.begins_word[tokens]
        begins[(lengths.cumsum() - lengths)[lengths > 0]] = True
        return tokens, begins, lengths, target

    @abstractmethod
    def empty_rows(self, num_rows: int) -> Arrays:
        """Padding: [rows, ...] int64 each, by the names of the Hugging Face model."""

    @abstractmethod
    def fill(self, rows: Arrays, number: int, sample: Sentences, state: np.random.RandomState) -> None:
        """Write a sample into row ``number``; all random numbers come from ``state``."""

    def _words(self, tokens: Ids, begins: Flags) -> tuple[Ids, list[int]]:
        """Places of the tokens that may be masked, ascending; where in these each word begins, and their number.

        A piece in the middle of a word belongs to the word before it even if a special token stands between them: that
        is where the engine puts the rest of a word that was cut at the beginning of a segment.
        """
        places = np.flatnonzero(self.tokenizer.maskable[tokens])
        if not self.masking.whole_words:
            return places, list(range(len(places) + 1))
        first = begins[places]
        first[:1] = True
        return places, [*np.flatnonzero(first).tolist(), len(places)]


# ---- BERT -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BertObjective(MaskedObjective):
    """Masked tokens and, if wanted, the order of two segments, from datasets whose documents are several sentences."""

    name = "bert"
    special_tokens = 3
    roles = ("cls", "sep", "mask")
    usual_ngram = 3
    sentence_order: bool = True
    """Whether rows are two segments, in order (``next_sentence_label`` 0) or swapped (1)."""

    @property
    @override
    def min_sentences(self) -> int:
        return 2 if self.sentence_order else 1

    @override
    def empty_rows(self, num_rows: int) -> Arrays:
        """``labels`` is -100 where nothing is predicted, ``next_sentence_label`` 1 where segments are swapped."""
        shape = (num_rows, self.seq_length)
        rows: Arrays = {
            "input_ids": np.full(shape, self.tokenizer.padding_token, dtype=np.int64),
            "token_type_ids": np.zeros(shape, dtype=np.int64),
            "attention_mask": np.zeros(shape, dtype=np.int64),
            "labels": np.full(shape, IGNORED, dtype=np.int64),
        }
        return {**rows, "next_sentence_label": np.zeros(num_rows, dtype=np.int64)} if self.sentence_order else rows

    @override
    def fill(self, rows: Arrays, number: int, sample: Sentences, state: np.random.RandomState) -> None:
        text, begins, lengths, target = sample
        tokens, starts = rows["input_ids"][number], np.zeros(self.seq_length, dtype=np.bool_)
        segments = [slice(0, len(text)), slice(len(text), len(text))]
        if self.sentence_order:
            middle = int(lengths[: state.randint(1, len(lengths)) if len(lengths) > 2 else 1].sum())
            segments = [slice(0, middle), slice(middle, len(text))]
            if state.random_sample() < 0.5:
                segments.reverse()
                rows["next_sentence_label"][number] = 1
        (tokens[0], separator, _), end = self.special_ids, 1
        for kind, segment in enumerate(_trimmed(segments, target, state)):
            begin, end = end, end + segment.stop - segment.start
            if kind == 0 or end > begin:
                tokens[begin:end], starts[begin:end], tokens[end] = text[segment], begins[segment], separator
                end += 1
                rows["token_type_ids"][number, begin:end] = kind
        rows["attention_mask"][number, :end] = 1
        self._mask_words(tokens[:end], starts[:end], rows["labels"][number], target, state)

    def _mask_words(self, tokens: Ids, begins: Flags, labels: Ids, target: int, state: np.random.RandomState) -> None:
        """Of the tokens to predict 80 % become the mask, 10 % any token, and 10 % stay.

        Source: BERT, https://arxiv.org/abs/1810.04805, section 3.1.
        """
        places, bounds = self._words(tokens, begins)
        ids, random, cumulative = self.tokenizer.ids, state.random_sample, self._cumulative
        chosen: list[int] = []
        masked: list[int] = []
        replaced: dict[int, int] = {}
        budget = self.masking.masked(len(tokens), target)
        for begin, end in masked_ngrams(bounds, budget, lambda: bisect_right(cumulative, random()) + 1, state):
            for place in range(begin, end):
                chosen.append(place)
                if random() < 0.8:
                    masked.append(place)
                elif random() >= 0.5:
                    replaced[place] = int(ids[state.randint(0, len(ids))])
        where = places[chosen]
        labels[where] = tokens[where]
        tokens[places[masked]] = self.special_ids[2]
        tokens[places[list(replaced)]] = list(replaced.values())

    @cached_property
    def _cumulative(self) -> list[float]:
        """Of the sizes of n-grams, which are the less probable the larger: 1/n, normalised."""
        # Rounded as by the engine and numpy's choice, step by step: one bit decides about a whole sample.
        probabilities = 1.0 / (np.arange(self.masking.max_ngram or self.usual_ngram, dtype=np.int64) + 1)
        probabilities = probabilities / probabilities.sum(keepdims=True)
        probabilities = probabilities / probabilities.sum(keepdims=True)
        cumulative = probabilities.cumsum()
        return (cumulative / cumulative[-1]).tolist()  # type: ignore[no-any-return]


def _trimmed(segments: list[slice], target: int, state: np.random.RandomState) -> list[slice]:
    """Two segments of ``target`` tokens together at most: the longer one loses a token at a random end, repeatedly.

    One draw a token, as in the engine's loop; of two that are equally long the second is cut.
    """
    (begin, end), (other_begin, other_end) = ((segment.start, segment.stop) for segment in segments)
    excess = max(0, end - begin + other_end - other_begin - target)
    for at_front in (state.random_sample(excess) < 0.5).tolist():
        if end - begin > other_end - other_begin:
            begin, end = begin + at_front, end - (not at_front)
        else:
            other_begin, other_end = other_begin + at_front, other_end - (not at_front)
    return [slice(begin, end), slice(other_begin, other_end)]


# ---- T5 -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class T5Objective(MaskedObjective):
    """Masked spans, from datasets whose documents are one or several sequences."""

    name = "t5"
    special_tokens = 2
    roles = ("eos",)
    usual_ngram = 10
    seq_length_decoder: int
    """Labels of a row of the decoder."""
    format: T5Format = "hugging_face"
    """What ends a row.

    ``hugging_face``, as the released models were trained: the text with eos, the labels with one more sentinel and eos.
    ``megatron``: the labels with eos.
    """

    def __post_init__(self) -> None:
        """Check the labels, too.

        Raises:
            ConfigError: If rows are too short, or the tokenizer lacks a special token.
        """
        require_choice("t5_format", self.format, get_args(T5Format))
        super().__post_init__()
        if self.max_spans < 1:
            raise ConfigError(f"the tokenizer {self.tokenizer.source} has too few sentinels (<extra_id_0>, ...) for T5")
        # If each word is one token; with longer words there are fewer spans.
        tokens = int(self.masking.masked(self.max_tokens, self.max_tokens))
        largest = self.masking.max_ngram or self.usual_ngram
        spans = round(tokens / ((1 - (1 - GEOMETRIC_PROBABILITY) ** largest) / GEOMETRIC_PROBABILITY))
        needed = tokens + spans + self._ending
        if self.seq_length_decoder < needed:
            raise ConfigError(
                f"seq_length_decoder={self.seq_length_decoder} is too small: {self.masking.probability:.0%} of"
                f" seq_length={self.seq_length} are {tokens} tokens in about {spans} spans, which need {needed} labels;"
                f" choose at least {needed}, or lower probability"
            )

    @property
    def max_spans(self) -> int:
        """Spans of a sample, at most; in Hugging Face's format one sentinel stands behind the last."""
        return len(self.tokenizer.sentinels) - (self.format == "hugging_face")

    @property
    def _ending(self) -> int:
        return 2 if self.format == "hugging_face" else 1

    @override
    def empty_rows(self, num_rows: int) -> Arrays:
        """``labels`` is -100 where nothing is predicted."""
        return {
            "input_ids": np.full((num_rows, self.seq_length), self.tokenizer.padding_token, dtype=np.int64),
            "attention_mask": np.zeros((num_rows, self.seq_length), dtype=np.int64),
            "labels": np.full((num_rows, self.seq_length_decoder), IGNORED, dtype=np.int64),
        }

    @override
    def fill(self, rows: Arrays, number: int, sample: Sentences, state: np.random.RandomState) -> None:
        text, begins, _, target = sample
        text = text[:target]
        spans = self._spans(text, begins[:target], target, state)
        tokens: list[int] = text.tolist()
        inputs: list[int] = []
        labels: list[int] = []
        sentinels, (eos,) = self.tokenizer.sentinels, self.special_ids
        last = 0
        for sentinel, (begin, end) in zip(sentinels, spans, strict=False):
            inputs += [*tokens[last:begin], sentinel]
            labels += [sentinel, *tokens[begin:end]]
            last = end
        inputs += tokens[last:]
        if self.format == "hugging_face":
            labels.append(sentinels[len(spans)])
            if inputs[-1:] != [eos]:  # which preprocess may have appended to the document
                inputs.append(eos)
        labels.append(eos)
        rows["input_ids"][number, : len(inputs)], rows["attention_mask"][number, : len(inputs)] = inputs, 1
        rows["labels"][number, : len(labels)] = labels

    def _spans(self, text: Ids, begins: Flags, target: int, state: np.random.RandomState) -> list[tuple[int, int]]:
        """Beginning and end of each masked span, in the order of the text."""
        places, bounds = self._words(text, begins)
        largest, geometric = self.masking.max_ngram or self.usual_ngram, state.geometric
        spans: list[tuple[int, int]] = []
        labels = self._ending
        draw_size = lambda: min(geometric(GEOMETRIC_PROBABILITY), largest)  # noqa: E731
        for first, stop in masked_ngrams(bounds, self.masking.masked(len(text), target), draw_size, state):
            begin, end = int(places[first]), int(places[stop - 1]) + 1
            labels += 1 + end - begin
            if len(spans) == self.max_spans or labels > self.seq_length_decoder:
                break
            spans.append((begin, end))
        return sorted(spans)
