"""T5 samples: span corruption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from typing_extensions import override

from lightning_megatron.data.masked import (
    IGNORED,
    Arrays,
    Flags,
    Ids,
    MaskedObjective,
    Sentences,
    masked_ngrams,
)
from lightning_megatron.errors import ConfigError, require_choice

GEOMETRIC_PROBABILITY = 0.2
"""Probability that a T5 span ends after a word. Source: SpanBERT, https://arxiv.org/abs/1907.10529, section 3.1."""

T5Format: TypeAlias = Literal["hugging_face", "megatron"]


@dataclass(frozen=True, kw_only=True)
class T5Objective(MaskedObjective):
    """Span corruption, from datasets whose documents are one or several sequences."""

    name = "t5"
    num_special_tokens = 2
    roles = ("eos",)
    default_max_ngram = 10
    seq_length_decoder: int
    """Labels per row of the decoder."""
    format: T5Format = "hugging_face"
    """How rows end.

    ``hugging_face``, as the released models were trained: the text with eos, the labels with one more sentinel and eos.
    ``megatron``: the labels with eos.
    """

    def __post_init__(self) -> None:
        """Check sentinels and labels, too.

        Raises:
            ConfigError: If rows are too short, or the tokenizer lacks a special token.
        """
        require_choice("t5_format", self.format, get_args(T5Format))
        super().__post_init__()
        if self.max_spans < 1:
            raise ConfigError(
                f"the tokenizer {self.tokenizer.source} has too few sentinels (<extra_id_0>, ...) for T5"
            )
        # If each word is one token; with longer words there are fewer spans.
        tokens = int(self.masking.masked(self.max_tokens, self.max_tokens))
        largest = self.masking.max_ngram or self.default_max_ngram
        mean_length = (1 - (1 - GEOMETRIC_PROBABILITY) ** largest) / GEOMETRIC_PROBABILITY
        spans = round(tokens / mean_length)
        needed = tokens + spans + self._num_final_labels
        if self.seq_length_decoder < needed:
            raise ConfigError(
                f"seq_length_decoder={self.seq_length_decoder} is too small: {self.masking.probability:.0%} of"
                f" seq_length={self.seq_length} are {tokens} tokens in about {spans} spans, which need {needed} labels;"
                f" choose at least {needed}, or lower probability"
            )

    @property
    def max_spans(self) -> int:
        """Maximum number of spans of a sample; in Hugging Face's format one more sentinel follows the last span."""
        return len(self.tokenizer.sentinels) - (self.format == "hugging_face")

    @property
    def _num_final_labels(self) -> int:
        return 2 if self.format == "hugging_face" else 1

    @override
    def empty_rows(self, num_rows: int) -> Arrays:
        """Padding; ``labels`` is -100 for no target."""
        shape = (num_rows, self.seq_length)
        decoder_shape = (num_rows, self.seq_length_decoder)
        return {
            "input_ids": np.full(
                shape,
                self.tokenizer.padding_token,
                dtype=np.int64,
            ),
            "attention_mask": np.zeros(shape, dtype=np.int64),
            "labels": np.full(decoder_shape, IGNORED, dtype=np.int64),
        }

    @override
    def fill_row(
        self,
        rows: Arrays,
        row: int,
        sample: Sentences,
        state: np.random.RandomState,
    ) -> None:
        text, begins, _, target = sample
        text = text[:target]
        spans = self._spans(text, begins[:target], target, state)
        tokens: list[int] = text.tolist()
        inputs: list[int] = []
        labels: list[int] = []
        sentinels = self.tokenizer.sentinels
        (eos,) = self.special_ids
        last = 0
        for sentinel, (begin, end) in zip(sentinels, spans, strict=False):
            inputs += [*tokens[last:begin], sentinel]
            labels += [sentinel, *tokens[begin:end]]
            last = end
        inputs += tokens[last:]
        if self.format == "hugging_face":
            labels.append(sentinels[len(spans)])
            if inputs[-1:] != [eos]:  # preprocess may have appended it to the document
                inputs.append(eos)
        labels.append(eos)
        rows["input_ids"][row, : len(inputs)] = inputs
        rows["attention_mask"][row, : len(inputs)] = 1
        rows["labels"][row, : len(labels)] = labels

    def _spans(
        self,
        text: Ids,
        begins: Flags,
        target: int,
        state: np.random.RandomState,
    ) -> list[tuple[int, int]]:
        """Beginning and end of each masked span, in text order."""
        positions, bounds = self._words(text, begins)
        max_ngram = self.masking.max_ngram or self.default_max_ngram
        budget = self.masking.masked(len(text), target)
        spans: list[tuple[int, int]] = []
        num_labels = self._num_final_labels

        def draw_size() -> int:
            return min(state.geometric(GEOMETRIC_PROBABILITY), max_ngram)

        for first, stop in masked_ngrams(bounds, budget, draw_size, state):
            begin = int(positions[first])
            end = int(positions[stop - 1]) + 1
            num_labels += 1 + end - begin
            if len(spans) == self.max_spans or num_labels > self.seq_length_decoder:
                break
            spans.append((begin, end))
        return sorted(spans)
