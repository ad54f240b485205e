"""Texts for the evaluation of a GPT: windows of tokens (perplexity), or contexts with their last words."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.documents import (
    PLAIN_TEXT_KEY,
    BadDocuments,
    check_keys,
    cut_into_pieces,
    find_files,
    format_of,
    read_documents,
)
from lightning_megatron.data.instructions import read_records
from lightning_megatron.data.samples import Rows
from lightning_megatron.data.tokenizer import batch_encoder, load_tokenizer
from lightning_megatron.errors import ConfigError, DataError

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character, which JSON can spell and no tokenizer takes; ``preprocess`` replaces it too."""


def read_texts(path: str, key: str = PLAIN_TEXT_KEY) -> Iterator[tuple[str, str]]:
    """Each text with its place, ``FILE, line N``, or ``FILE`` where the whole file is one text.

    Args:
        path: A file, a folder or a pattern, as for ``preprocess``.
        key: What holds the text in .jsonl and .parquet files.

    Raises:
        DataError: With the place, if something is no text; if a file is missing or cannot be read.
    """
    files = find_files([path])
    check_keys(files, [key])
    for file in files:
        yield from _lines(file, key) if format_of(file).content == "json lines" else _documents(file, key)


def _lines(file: Path, key: str) -> Iterator[tuple[str, str]]:
    for place, record in read_records([file], example=f'{{"{key}": "..."}}'):
        if key not in record:
            names = ", ".join(map(repr, record)) or "none"
            raise DataError(f"{place} has the keys {names}, and no {key!r}; name the text so, or set json_key")
        text = record[key]
        if not isinstance(text, str):
            raise DataError(f"{place} has no string under {key!r} (but {type(text).__name__}); give the text as one")
        yield place, _SURROGATE.sub("\ufffd", text)


def _documents(file: Path, key: str) -> Iterator[tuple[str, str]]:
    is_table = format_of(file).content == "parquet"
    bad, number = BadDocuments("fail", print), 0
    for piece in cut_into_pieces([file], [key]):
        found = read_documents(piece, [key])
        bad.add(found)
        for (text,) in found.documents:
            number += 1
            yield (f"{file}, row {number}" if is_table else str(file)), text


EvaluationTask: TypeAlias = Literal["perplexity", "last_word"]
"""How well every token is predicted, or the last word of each text."""

_PADDING = -1
"""``GPTTrainStep``: no token, no target."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """What determines the rows of a set of texts."""

    path: str
    """A file, a folder or a pattern, as for ``preprocess``."""
    tokenizer: str
    """Folder of a transformers tokenizer."""
    seq_length: int
    """Most tokens that the model reads in one row."""
    task: EvaluationTask = "perplexity"
    """Which targets count."""
    stride: int | None = None
    """Perplexity: tokens by which each row begins behind the one before; None for ``seq_length``, no overlap."""
    strict: bool = True
    """Last word: whether all of its tokens must be right, or only the last token of the text counts."""
    json_key: str = "text"
    """What holds the text in .jsonl and .parquet files."""

    def __post_init__(self) -> None:
        """Check what can be known before anything is read.

        Raises:
            ConfigError: If a value cannot work.
        """
        if self.task not in get_args(EvaluationTask):
            raise ConfigError(f"task={self.task!r} is unknown; choose from {', '.join(get_args(EvaluationTask))}")
        if self.seq_length < 1:
            raise ConfigError(f"seq_length={self.seq_length} must be at least 1; it is what the model reads in a row")
        if self.stride is None:
            return
        if self.task != "perplexity":
            raise ConfigError(f"stride={self.stride} is for task=perplexity, and task={self.task}; leave it out")
        if not 1 <= self.stride <= self.seq_length:
            raise ConfigError(
                f"stride={self.stride} must be between 1 and seq_length={self.seq_length}: each row goes on by that "
                "many tokens, and none may be left out"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationTexts:
    """Tokenized texts, and how they are cut into rows; rows of a text may overlap."""

    tokens: NDArray[np.int32]
    """[tokens of all texts]."""
    begins: NDArray[np.int64]
    """[rows]: the first token that a row reads."""
    first_targets: NDArray[np.int64]
    """[rows]: the first token that counts as its target, behind ``begins``."""
    ends: NDArray[np.int64]
    """[rows]: behind its last target, which it does not read."""
    num_cut: int
    """Texts that lost their beginning to ``seq_length``."""
    num_left_out: int
    """Texts without a target."""

    def __len__(self) -> int:
        """Rows."""
        return len(self.begins)

    @property
    def num_targets(self) -> int:
        """Tokens that count, over all rows."""
        return int((self.ends - self.first_targets).sum())

    @property
    def longest(self) -> int:
        """Tokens that the longest row reads."""
        return int((self.ends - self.begins).max()) - 1

    @cached_property
    def fingerprint(self) -> str:
        """Of the content."""
        digest = hashlib.blake2b(digest_size=8)
        for part in (self.tokens, self.begins, self.first_targets, self.ends):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()


class EvaluationRows:
    """The rows of texts for ``GPTTrainStep``, all of one length.

    Args:
        texts: What is cut.
        row_length: Tokens that each row reads, padding included; at least ``texts.longest``.
    """

    def __init__(self, texts: EvaluationTexts, row_length: int) -> None:
        self._texts = texts
        self._row_length = row_length

    @property
    def fingerprint(self) -> str:
        """Of the texts and their rows; not of padding, which changes no result."""
        return self._texts.fingerprint

    def __len__(self) -> int:
        """Rows."""
        return len(self._texts)

    def rows(self, indices: Sequence[int]) -> Rows:
        """``text`` [rows, row_length + 1] int64, -1 for padding on the right; ``loss_mask`` [rows, row_length] fp32."""
        import torch

        source = self._texts
        text = np.full((len(indices), self._row_length + 1), _PADDING, dtype=np.int64)
        loss_mask = np.zeros((len(indices), self._row_length), dtype=np.float32)
        for row, index in enumerate(indices):
            begin, first, end = (int(each[index]) for each in (source.begins, source.first_targets, source.ends))
            text[row, : end - begin] = source.tokens[begin:end]
            # The mask stands where a target is predicted, one token before it.
            loss_mask[row, first - begin - 1 : end - begin - 1] = 1.0
        return {"text": torch.from_numpy(text), "loss_mask": torch.from_numpy(loss_mask)}


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
