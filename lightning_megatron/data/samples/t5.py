"""Which tokens are sample number i of a T5: a text whose masked spans are sentinels, and the spans as the answer?

The spans equal Megatron's for WordPiece, random number by random number (megatron-core 0.16.1, datasets/t5_dataset.py).
Where a run of the engine would end because sentinels or labels run out, the spans that are left stay unmasked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from typing_extensions import override

from lightning_megatron.data.samples.base import Objective, Part, Rows
from lightning_megatron.data.samples.masking import IGNORED, GeometricSizes, MaskingOptions, WordFinder, masked_ngrams
from lightning_megatron.data.samples.sentence_index import SentenceCut, SentenceIndex, count_samples, cut_of
from lightning_megatron.data.samples.special_tokens import TokenizerFacts
from lightning_megatron.errors import ConfigError

_log = logging.getLogger(__name__)

T5Format: TypeAlias = Literal["hugging_face", "megatron"]

_MAX_NGRAM = 10


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
        return GeometricSizes(self.masking.max_ngram or _MAX_NGRAM)

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
