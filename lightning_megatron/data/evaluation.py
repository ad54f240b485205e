"""Texts for the evaluation of a GPT: windows of tokens (perplexity), or contexts with their last words.

Source of both: Megatron-LM core_r0.16, tasks/zeroshot_gpt/datasets.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_megatron.data.documents import read_texts
from lightning_megatron.data.samples import Rows
from lightning_megatron.data.tokenizer import batch_encoder, load_tokenizer
from lightning_megatron.errors import DataError

EvaluationTask: TypeAlias = Literal["perplexity", "last_word"]
"""How well every token is predicted, or the last word of each text."""

_PADDING = -1
"""``GPTTrainStep``: no token, no target."""
_BATCH = 256
"""Texts that are tokenized at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationTexts:
    """Tokenized texts as rows for ``GPTTrainStep``, all of one length; rows of a text may overlap."""

    tokens: NDArray[np.int32]
    """[tokens of all texts]."""
    bounds: NDArray[np.int64]
    """Of each row the first token that it reads, its first target, and behind its last target: [rows, 3]."""
    row_length: int
    """Tokens that each row reads, padding included; as many as any needs, at least."""
    num_truncated: int
    """Texts that lost their beginning to ``seq_length``."""
    fingerprint = ""
    """Nothing is trained on them, and no run goes on in their order."""

    def __len__(self) -> int:
        """Rows."""
        return len(self.bounds)

    def rows(self, indices: Sequence[int]) -> Rows:
        """``text`` [rows, row_length + 1] int64, -1 for padding on the right; ``loss_mask`` [rows, row_length] fp32."""
        text = np.full((len(indices), self.row_length + 1), _PADDING, dtype=np.int64)
        loss_mask = np.zeros((len(indices), self.row_length), dtype=np.float32)
        for row, index in enumerate(indices):
            begin, first, end = self.bounds[index].tolist()
            text[row, : end - begin] = self.tokens[begin:end]
            # The mask stands where a target is predicted, one token before it.
            loss_mask[row, first - begin - 1 : end - begin - 1] = 1.0
        return {"text": torch.from_numpy(text), "loss_mask": torch.from_numpy(loss_mask)}


def read_evaluation_texts(
    path: str, tokenizer: str, seq_length: int, task: EvaluationTask, stride: int, strict: bool, json_key: str
) -> EvaluationTexts:
    """All rows in the order of the texts.

    Args:
        path: A file, a folder or a pattern, as for ``preprocess``.
        tokenizer: Folder of a transformers tokenizer.
        seq_length: Most tokens that the model reads in one row.
        task: Which targets count.
        stride: Perplexity: tokens by which each row begins behind the one before.
        strict: Last word: whether all of its tokens must be right, or only the last token of the text counts.
        json_key: What holds the text in .jsonl and .parquet files.

    Raises:
        DataError: With file and line, if a text is malformed or has no last word; if files or tokenizer are missing, or
            there is no text.
    """
    loaded = load_tokenizer(tokenizer)
    encode, prefix = batch_encoder(loaded), _tokens_before_texts(loaded)
    texts = read_texts(path, json_key)
    tokens, bounds = array("i"), array("q")
    num_truncated = 0
    while batch := list(islice(texts, _BATCH)):
        if task == "last_word":
            found = _last_words(batch, encode, prefix, seq_length, strict)
        else:
            found = (_windows([*prefix, *ids], seq_length, stride) for ids in encode([text for _, text in batch]))
        for ids, rows in found:
            if rows:
                num_truncated += rows[0][0] > 0
                bounds.extend(len(tokens) + bound for row in rows for bound in row)
                tokens.extend(ids)
    if not bounds:
        raise DataError(f"{path} has no text of two tokens; give a file with at least one")
    return EvaluationTexts(
        tokens=np.frombuffer(tokens, dtype=np.int32),
        bounds=np.frombuffer(bounds, dtype=np.int64).reshape(-1, 3),
        row_length=seq_length,
        num_truncated=num_truncated,
    )


_Rows: TypeAlias = tuple[list[int], list[tuple[int, int, int]]]
"""Tokens of a text, and the bounds of its rows in them."""


def _windows(ids: list[int], length: int, stride: int) -> _Rows:
    """Every token but the first is a target of one row, the first that comes to it."""
    rows, end = [], 1
    for begin in range(0, len(ids), stride):
        if end < len(ids):
            first, end = end, min(begin + length + 1, len(ids))
            rows.append((begin, first, end))
    return ids, rows


def _last_words(
    batch: Sequence[tuple[str, str]],
    encode: Callable[[list[str]], list[list[int]]],
    prefix: list[int],
    length: int,
    strict: bool,
) -> Iterator[_Rows]:
    """One row whose last tokens are its targets, and which loses what does not fit of its beginning."""
    parts = [_context_and_word(text, place) for place, text in batch]
    whole = encode([f"{context} {word}" for context, word in parts])
    contexts, words = encode([context for context, _ in parts]), encode([f" {word}" for _, word in parts])
    for (place, _), of_both, context, word in zip(batch, whole, contexts, words, strict=True):
        # Some tokenizers (SentencePiece) put a space before every text that they get: there the tokens of the word
        # are those that follow the context's in the whole.
        target = of_both[len(context) :] if of_both[: len(context)] == context else word
        ids, num_targets = [*prefix, *context, *target], len(target) if strict else 1
        if num_targets > length:
            raise DataError(f"{place} ends with a word of {num_targets} tokens, seq_length={length}")
        yield ids, [(max(0, len(ids) - length - 1), len(ids) - num_targets, len(ids))]


def _context_and_word(text: str, place: str) -> tuple[str, str]:
    words = text.split()
    if len(words) < 2:
        raise DataError(f"{place} has {len(words)} words, a last word is predicted from those before it; remove it")
    return text[: text.rstrip().rfind(words[-1])].strip(), words[-1]


def _tokens_before_texts(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text by itself, such as Llama's token for the beginning."""
    alone = tokenizer.encode("a", add_special_tokens=False)
    whole: list[int] = tokenizer.encode("a")
    starts = [start for start in range(len(whole)) if whole[start : start + len(alone)] == alone]
    return whole[: starts[0]] if starts else []
