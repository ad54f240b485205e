"""How do texts become a GPT's rows? Tokenized, and cut into windows or into contexts and last words.

Source of both: Megatron-LM core_r0.16, tasks/zeroshot_gpt/datasets.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from lightning_megatron.data.corpus.tokenizer import batch_encoder, load_tokenizer
from lightning_megatron.data.samples.evaluation import EvaluationOptions, EvaluationTexts
from lightning_megatron.data.samples.texts import read_texts
from lightning_megatron.errors import DataError

_BATCH = 256
"""Texts that are tokenized at a time."""


def read_evaluation_texts(options: EvaluationOptions) -> EvaluationTexts:
    """All rows in the order of the texts.

    Raises:
        DataError: With file and line, if a text is malformed or has no last word; if files or tokenizer are missing, or
            there is no text.
    """
    tokenizer = load_tokenizer(options.tokenizer)
    collected = _Collected(options)
    texts = read_texts(options.path, options.json_key)
    if options.task == "last_word":
        _add_last_words(collected, tokenizer, texts)
    else:
        _add_windows(collected, tokenizer, texts)
    return collected.texts()


def _add_windows(collected: _Collected, tokenizer: Any, texts: Iterator[tuple[str, str]]) -> None:
    encode, prefix = batch_encoder(tokenizer), _tokens_before_texts(tokenizer)
    while batch := list(islice(texts, _BATCH)):
        for ids in encode([text for _, text in batch]):
            collected.add_windows([*prefix, *ids])


def _add_last_words(collected: _Collected, tokenizer: Any, texts: Iterator[tuple[str, str]]) -> None:
    encode, prefix = batch_encoder(tokenizer), _tokens_before_texts(tokenizer)
    while batch := list(islice(texts, _BATCH)):
        parts = [_context_and_word(text, place) for place, text in batch]
        whole = encode([f"{context} {word}" for context, word in parts])
        contexts, words = encode([context for context, _ in parts]), encode([f" {word}" for _, word in parts])
        for (place, _), ids, context, word in zip(batch, whole, contexts, words, strict=True):
            # Some tokenizers (SentencePiece) put a space before every text that they get: there the tokens of the word
            # are those that follow the context's in the whole.
            target = ids[len(context) :] if ids[: len(context)] == context else word
            collected.add_row([*prefix, *context, *target], len(target), place)


def _context_and_word(text: str, place: str) -> tuple[str, str]:
    words = text.split()
    if len(words) < 2:
        found = f"the single word {words[0]!r}" if words else "no word"
        raise DataError(
            f"{place} has {found}, and a last word is predicted from those before it; remove the line or give it more "
            "text"
        )
    return text[: text.rstrip().rfind(words[-1])].strip(), words[-1]


def _tokens_before_texts(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text by itself, such as Llama's token for the beginning."""
    alone = tokenizer.encode("a", add_special_tokens=False)
    whole: list[int] = tokenizer.encode("a")
    starts = [start for start in range(len(whole)) if whole[start : start + len(alone)] == alone]
    return whole[: starts[0]] if starts else []


class _Collected:
    """Rows in flat arrays."""

    def __init__(self, options: EvaluationOptions) -> None:
        self._options = options
        self._tokens = array("i")
        self._begins, self._first_targets, self._ends = array("q"), array("q"), array("q")
        self._num_cut = self._num_left_out = 0

    def add_windows(self, ids: Sequence[int]) -> None:
        """Every token but the first is a target of one row, the first that comes to it."""
        if len(ids) < 2:  # collections of texts have empty ones, which say nothing
            self._num_left_out += 1
            return
        start = len(self._tokens)
        self._tokens.extend(ids)
        stop = len(self._tokens)
        length, stride = self._options.seq_length, self._options.stride or self._options.seq_length
        end = start + 1
        for begin in range(start, stop, stride):
            first, end = end, min(begin + length + 1, stop)
            self._add(begin, first, end)
            if end == stop:
                return

    def add_row(self, ids: Sequence[int], num_targets: int, place: str) -> None:
        """One row whose last tokens are its targets, and which loses what does not fit of its beginning."""
        length = self._options.seq_length
        num_targets = num_targets if self._options.strict else 1
        if num_targets > length:
            raise DataError(
                f"{place} ends with a word of {num_targets} tokens, more than seq_length={length} can predict; raise "
                "seq_length or remove the line"
            )
        kept = ids[-(length + 1) :]
        self._num_cut += len(kept) < len(ids)
        begin = len(self._tokens)
        self._tokens.extend(kept)
        self._add(begin, len(self._tokens) - num_targets, len(self._tokens))

    def _add(self, begin: int, first_target: int, end: int) -> None:
        self._begins.append(begin)
        self._first_targets.append(first_target)
        self._ends.append(end)

    def texts(self) -> EvaluationTexts:
        """What was added, of which there must be something."""
        if not self._begins:
            raise DataError(f"{self._options.path} has no text of two tokens; give a file with at least one")
        begins, firsts, ends = (
            np.frombuffer(each, dtype=np.int64) for each in (self._begins, self._first_targets, self._ends)
        )
        return EvaluationTexts(
            tokens=np.frombuffer(self._tokens, dtype=np.int32),
            begins=begins,
            first_targets=firsts,
            ends=ends,
            num_cut=self._num_cut,
            num_left_out=self._num_left_out,
        )
