"""BERT samples: masked words, and optionally the order of two segments."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

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


@dataclass(frozen=True, kw_only=True)
class BertObjective(MaskedObjective):
    """Masked tokens and optionally the order of two segments, from datasets whose documents are several sentences."""

    name = "bert"
    num_special_tokens = 3
    roles = ("cls", "sep", "mask")
    default_max_ngram = 3
    sentence_order: bool = True
    """Whether rows are two segments, in order (``next_sentence_label`` 0) or swapped (1)."""

    @property
    @override
    def min_sentences(self) -> int:
        return 2 if self.sentence_order else 1

    @override
    def empty_rows(self, num_rows: int) -> Arrays:
        """Padding; ``labels`` is -100 for no target, ``next_sentence_label`` 1 where segments are swapped."""
        shape = (num_rows, self.seq_length)
        rows: Arrays = {
            "input_ids": np.full(
                shape,
                self.tokenizer.padding_token,
                dtype=np.int64,
            ),
            "token_type_ids": np.zeros(shape, dtype=np.int64),
            "attention_mask": np.zeros(shape, dtype=np.int64),
            "labels": np.full(shape, IGNORED, dtype=np.int64),
        }
        if self.sentence_order:
            rows["next_sentence_label"] = np.zeros(num_rows, dtype=np.int64)
        return rows

    @override
    def fill_row(
        self,
        rows: Arrays,
        row: int,
        sample: Sentences,
        state: np.random.RandomState,
    ) -> None:
        text, begins, lengths, target = sample
        tokens = rows["input_ids"][row]
        starts = np.zeros(self.seq_length, dtype=np.bool_)
        middle = len(text)
        if self.sentence_order:
            num_first = state.randint(1, len(lengths)) if len(lengths) > 2 else 1
            middle = int(lengths[:num_first].sum())
        segments = [slice(0, middle), slice(middle, len(text))]
        if self.sentence_order and state.random_sample() < 0.5:
            segments.reverse()
            rows["next_sentence_label"][row] = 1
        tokens[0], separator, _ = self.special_ids
        end = 1
        for kind, segment in enumerate(_trim(segments, target, state)):
            begin = end
            end += segment.stop - segment.start
            if kind == 0 or end > begin:
                tokens[begin:end] = text[segment]
                starts[begin:end] = begins[segment]
                tokens[end] = separator
                end += 1
                rows["token_type_ids"][row, begin:end] = kind
        rows["attention_mask"][row, :end] = 1
        self._mask_words(
            tokens[:end],
            starts[:end],
            rows["labels"][row],
            target,
            state,
        )

    def _mask_words(
        self,
        tokens: Ids,
        begins: Flags,
        labels: Ids,
        target: int,
        state: np.random.RandomState,
    ) -> None:
        """Choose tokens to predict: 80 % become the mask token, 10 % a random token, and 10 % stay unchanged.

        Source: BERT, https://arxiv.org/abs/1810.04805, section 3.1.
        """
        positions, bounds = self._words(tokens, begins)
        ids = self.tokenizer.ids
        random = state.random_sample
        cumulative = self._ngram_distribution
        selected: list[int] = []
        masked: list[int] = []
        replaced: dict[int, int] = {}
        budget = self.masking.masked(len(tokens), target)

        def draw_size() -> int:
            return bisect_right(cumulative, random()) + 1

        for begin, end in masked_ngrams(bounds, budget, draw_size, state):
            for index in range(begin, end):
                selected.append(index)
                if random() < 0.8:
                    masked.append(index)
                elif random() >= 0.5:
                    replaced[index] = int(ids[state.randint(0, len(ids))])
        targets = positions[selected]
        labels[targets] = tokens[targets]
        tokens[positions[masked]] = self.special_ids[2]
        tokens[positions[list(replaced)]] = list(replaced.values())

    @cached_property
    def _ngram_distribution(self) -> list[float]:
        """Cumulative distribution of the n-gram size n, whose probability is proportional to 1/n."""
        # Rounded step by step as in the engine and numpy's choice: one bit may change a whole sample.
        largest = self.masking.max_ngram or self.default_max_ngram
        probabilities = 1.0 / (np.arange(largest, dtype=np.int64) + 1)
        probabilities = probabilities / probabilities.sum(keepdims=True)
        probabilities = probabilities / probabilities.sum(keepdims=True)
        cumulative = probabilities.cumsum()
        return (cumulative / cumulative[-1]).tolist()  # type: ignore[no-any-return]


def _trim(
    segments: list[slice],
    target: int,
    state: np.random.RandomState,
) -> list[slice]:
    """Trim two segments to at most ``target`` tokens in total: the longer one repeatedly loses a token at a random end.

    One draw per token, as in the engine's loop; of two equally long segments the second is trimmed.
    """
    begins = [segment.start for segment in segments]
    lengths = [segment.stop - segment.start for segment in segments]
    excess = max(0, sum(lengths) - target)
    for at_front in (state.random_sample(excess) < 0.5).tolist():
        trimmed = 0 if lengths[0] > lengths[1] else 1
        lengths[trimmed] -= 1
        begins[trimmed] += at_front
    return [slice(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
