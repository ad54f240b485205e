"""Evaluation samples for a GPT: sliding windows over texts (perplexity), or contexts with their last word (LAMBADA).

Source of both: Megatron-LM core_r0.16, tasks/zeroshot_gpt/datasets.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_megatron.data.samples import Rows
from lightning_megatron.data.tokenizer import batch_encoder, load_tokenizer
from lightning_megatron.errors import DataError

EvaluationTask: TypeAlias = Literal["perplexity", "last_word"]
"""Predict every token, or the last word of each text."""

_PADDING = -1
"""Padding in ``text`` for ``GPTTrainStep``."""
_BATCH = 256
"""Texts tokenized at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationTexts:
    """Tokenized texts as rows for ``GPTTrainStep``, all of one length; rows of one text may overlap."""

    tokens: NDArray[np.int32]
    """[tokens of all texts]."""
    bounds: NDArray[np.int64]
    """Per row: index of the first token read, of the first target, and end of the targets (exclusive): [rows, 3]."""
    row_length: int
    """Tokens read per row, padding included; at least the length of the longest row."""
    num_truncated: int
    """Texts whose beginning was cut off to fit ``seq_length``."""
    fingerprint = ""
    """Unused: no training run resumes in their order."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.bounds)

    def rows(self, indices: Sequence[int]) -> Rows:
        """``text`` [rows, row_length + 1] int64, padded on the right with -1; ``loss_mask`` [rows, row_length] fp32."""
        num_rows = len(indices)
        text = np.full(
            (num_rows, self.row_length + 1),
            _PADDING,
            dtype=np.int64,
        )
        loss_mask = np.zeros((num_rows, self.row_length), dtype=np.float32)
        for row, index in enumerate(indices):
            begin, first, end = self.bounds[index].tolist()
            text[row, : end - begin] = self.tokens[begin:end]
            # The mask is set where a target is predicted, one token before it.
            loss_mask[row, first - begin - 1 : end - begin - 1] = 1.0
        return {"text": torch.from_numpy(text), "loss_mask": torch.from_numpy(loss_mask)}


def tokenize_evaluation_texts(
    path: str,
    texts: Iterable[tuple[str, str]],
    tokenizer: str,
    seq_length: int,
    task: EvaluationTask,
    stride: int,
    strict: bool,
) -> EvaluationTexts:
    """Tokenize texts; rows are in the order of the texts.

    Args:
        path: Where the texts are from, for messages.
        texts: Texts after their locations, as of ``read_texts``.
        tokenizer: Directory of a transformers tokenizer.
        seq_length: Maximum number of tokens that the model reads in one row.
        task: Which targets count.
        stride: Perplexity: tokens between the beginnings of consecutive rows.
        strict: Last word: whether all of its tokens must be right, or only the last token of the text counts.

    Raises:
        DataError: With file and line, if a text has no last word; if the tokenizer is missing, or there is no text.
    """
    loaded = load_tokenizer(tokenizer)
    encode = batch_encoder(loaded)
    prefix = _prefix_tokens(loaded)
    located = iter(texts)
    tokens = array("i")
    bounds = array("q")
    num_truncated = 0
    while batch := list(islice(located, _BATCH)):
        if task == "last_word":
            samples = _last_words(batch, encode, prefix, seq_length, strict)
        else:
            encoded = [[*prefix, *ids] for ids in encode([text for _, text in batch])]
            samples = (_windows(ids, seq_length, stride) for ids in encoded)
        for ids, rows in samples:
            if not rows:
                continue
            first_begin, *_ = rows[0]
            num_truncated += first_begin > 0
            for row in rows:
                bounds.extend(len(tokens) + bound for bound in row)
            tokens.extend(ids)
    if not bounds:
        raise DataError(
            f"{path}: expected a text of at least two tokens, got none; give another file"
        )
    return EvaluationTexts(
        tokens=np.frombuffer(tokens, dtype=np.int32),
        bounds=np.frombuffer(bounds, dtype=np.int64).reshape(-1, 3),
        row_length=seq_length,
        num_truncated=num_truncated,
    )


_Rows: TypeAlias = tuple[list[int], list[tuple[int, int, int]]]
"""Tokens of a text, and the bounds of its rows within them."""


def _windows(
    ids: list[int],
    length: int,
    stride: int,
) -> _Rows:
    """Rows in which every token but the first is a target exactly once, in the first row that reaches it."""
    rows = []
    end = 1
    for begin in range(0, len(ids), stride):
        if end < len(ids):
            first = end
            end = min(begin + length + 1, len(ids))
            rows.append((begin, first, end))
    return ids, rows


def _last_words(
    batch: Sequence[tuple[str, str]],
    encode: Callable[[list[str]], list[list[int]]],
    prefix: list[int],
    length: int,
    strict: bool,
) -> Iterator[_Rows]:
    """One row per text, whose last tokens are the targets; its beginning is cut off to fit ``length``."""
    parts = [_split_last_word(text, location) for location, text in batch]
    texts = encode([f"{context} {word}" for context, word in parts])
    contexts = encode([context for context, _ in parts])
    words = encode([f" {word}" for _, word in parts])
    for (location, _), both, context, word in zip(batch, texts, contexts, words, strict=True):
        # Some tokenizers (SentencePiece) prepend a space to every text: the tokens of the word are then those that
        # follow the context in the full text.
        target = word
        if both[: len(context)] == context:
            target = both[len(context) :]
        ids = [*prefix, *context, *target]
        num_targets = len(target) if strict else 1
        if num_targets > length:
            raise DataError(
                f"{location} ends with a word of {num_targets} tokens, seq_length={length}; raise it"
            )
        end = len(ids)
        begin = max(0, end - length - 1)
        yield ids, [(begin, end - num_targets, end)]


def _split_last_word(text: str, location: str) -> tuple[str, str]:
    words = text.split()
    if len(words) < 2:
        raise DataError(
            f"{location}: expected at least two words, to predict the last, got {len(words)}; remove it"
        )
    return text[: text.rstrip().rfind(words[-1])].strip(), words[-1]


def _prefix_tokens(tokenizer: Any) -> list[int]:
    """Special tokens that the tokenizer prepends to every text, such as Llama's beginning-of-sequence token."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    ids: list[int] = tokenizer.encode("a")
    for start in range(len(ids)):
        if ids[start : start + len(plain)] == plain:
            return ids[:start]
    return []
