"""What is a GPT asked about texts? Rows of tokens with the targets that count, each of them once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.samples.base import Rows
from lightning_megatron.errors import ConfigError

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
