"""Which tokens of a text are the answer? By the characters that each token stands for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.samples.conversations import RenderedRecord, Span

TokenizedSample: TypeAlias = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""Tokens of a sample, and which of them are learned."""

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character, which JSON can spell and no tokenizer takes; ``preprocess`` replaces it too."""


def tokenize(tokenizer: Any, records: Sequence[RenderedRecord]) -> Iterator[TokenizedSample]:
    """Each record's tokens, and which are learned: those with a character of an answer, and the end of a completion.

    The whole text is tokenized at once, as the model will meet it: a token may stand for the last character of a
    question and the first of its answer, and is then learned. A prompt and completion get the special tokens that the
    tokenizer puts around a text, and the end-of-sequence token if that is not among them.

    Args:
        tokenizer: A fast transformers tokenizer, with an end-of-sequence token unless all records are chats.
        records: Some.
    """
    # Only one of the two kinds at a time; files rarely mix them.
    by_kind = {is_chat: [record for record in records if record.is_chat == is_chat] for is_chat in (False, True)}
    encoded = {is_chat: _encode(tokenizer, part, is_chat) for is_chat, part in by_kind.items()}
    for record in records:
        ids, offsets = next(encoded[record.is_chat])
        tokens = np.array(ids, dtype=np.int32)
        is_answer = _lies_in(np.array(offsets, dtype=np.int64).reshape(-1, 2), record.answers)
        if not record.is_chat:
            tokens, is_answer = _with_end(tokens, is_answer, tokenizer.eos_token_id)
        is_answer[:1] = False
        yield tokens, is_answer


def _encode(tokenizer: Any, records: Sequence[RenderedRecord], is_chat: bool) -> Iterator[tuple[list[int], list[Span]]]:
    if not records:
        return
    encoded = tokenizer(
        [_SURROGATE.sub("\ufffd", record.text) for record in records],
        add_special_tokens=not is_chat,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    yield from zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)


def _lies_in(offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """[tokens]: whether a token has a character within a span.

    Some tokenizers do not count spaces as part of a token: one of spaces alone is then empty and stands behind them.
    A special token that the tokenizer adds is empty and stands at 0.
    """
    begins, ends = offsets[:, 0], offsets[:, 1]
    inside = np.zeros(len(offsets), dtype=np.bool_)
    for first, last in spans:
        inside |= (ends > first) & ((begins < last) | (ends <= last))
    return inside


def _with_end(tokens: NDArray[np.int32], is_answer: NDArray[np.bool_], eos: int) -> TokenizedSample:
    if len(tokens) == 0 or tokens[-1] != eos:
        tokens, is_answer = np.append(tokens, np.int32(eos)), np.append(is_answer, False)
    is_answer[-1] = True
    return tokens, is_answer
