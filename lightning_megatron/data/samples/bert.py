"""Which tokens are sample number i of a BERT: two segments, in order or swapped, with some tokens masked?

Rows equal Megatron's for WordPiece, random number by random number (megatron-core 0.16.1, datasets/bert_dataset.py),
but for padding: types, masks and labels behind the end do not depend on the padding's id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lightning_megatron.data.samples.base import Objective, Part, Rows
from lightning_megatron.data.samples.masking import IGNORED, MaskingOptions, NgramSizes, WordFinder, masked_ngrams
from lightning_megatron.data.samples.sentence_index import SentenceCut, SentenceIndex, count_samples, cut_of
from lightning_megatron.data.samples.special_tokens import TokenizerFacts

_MAX_NGRAM = 3


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
        self._sizes = NgramSizes(masking.max_ngram or _MAX_NGRAM)

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
