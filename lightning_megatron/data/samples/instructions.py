"""How does a model learn to answer? Prompts and answers from JSON lines, tokenized once, with the loss on the answers.

``read_instructions`` tokenizes a file; ``Instructions.part`` takes a split of it; ``InstructionSamples`` makes rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.samples.base import Rows


@dataclass(frozen=True, kw_only=True)
class InstructionOptions:
    """What determines the samples of a file of instructions."""

    path: str
    """A .jsonl file, a folder of them, or a pattern; with ``prompt`` and ``completion``, or ``messages``, a line."""
    tokenizer: str
    """Folder of a transformers tokenizer; with a chat template if there are messages."""
    seq_length: int
    """Tokens of a row; longer samples lose their end."""
    answers: Literal["all", "last"] = "all"
    """Which of the assistant's turns are learned."""
    separator: str = ""
    """Text between a prompt and a completion that are strings; part of the prompt."""


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """How samples become rows."""

    packing: bool = False
    """Whether short samples share a row, without seeing each other."""
    pad_to_multiple_of: int | None = None
    """Without packing, pad to the longest sample of the batch, rounded up to this; None: to ``seq_length``."""
    seed: int = 1234
    """Of the order of packed rows."""


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """Tokenized samples, in flat arrays: 5 bytes a token."""

    tokens: NDArray[np.int32]
    """[tokens of all samples]."""
    is_answer: NDArray[np.bool_]
    """[tokens of all samples]: whether a token is learned."""
    starts: NDArray[np.int64]
    """[samples + 1]: sample ``i`` has the tokens ``starts[i]:starts[i + 1]``."""
    seq_length: int
    """Tokens of a row; no sample is longer."""
    padding_token: int
    """What fills rows up; never seen, never learned."""
    fingerprint: str
    """Of the content."""

    def __len__(self) -> int:
        """Samples."""
        return len(self.starts) - 1

    @property
    def largest_token(self) -> int:
        """For a comparison with the model's vocabulary; covers ``padding_token``."""
        raise NotImplementedError

    def part(self, samples: range) -> Instructions:
        """Consecutive samples, e.g. a range of ``split_ranges(split, len(instructions))``; shares memory."""
        raise NotImplementedError


def check_instructions(options: InstructionOptions) -> int:
    """Check files, tokenizer and the first record, in a moment; the largest token of the tokenizer.

    Raises:
        ConfigError: If a setting cannot work.
        DataError: If files or tokenizer are missing, or unfit for each other.
    """
    raise NotImplementedError


def read_instructions(options: InstructionOptions) -> Instructions:
    """All samples in the order of the files; those whose answers lie wholly behind ``seq_length`` are left out.

    Raises:
        ConfigError: If a setting cannot work.
        DataError: With file and line, if a record is malformed; if files or tokenizer are missing, or no sample is
            left.
    """
    raise NotImplementedError


class InstructionSamples:
    """Rows of samples for ``GPTTrainStep``; one pass. Small enough a description to be sent to worker processes."""

    def __init__(self, instructions: Instructions, options: RowOptions) -> None:
        """Pack, if ``options.packing``; the same on every rank."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """Of samples and packing."""
        raise NotImplementedError

    @property
    def efficiency(self) -> float:
        """Fraction of tokens in rows of ``seq_length`` that is no padding."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Rows."""
        raise NotImplementedError

    def rows(self, indices: Sequence[int]) -> Rows:
        """Rows as Hugging Face names them, [rows, L] int64 each.

        ``input_ids``; ``labels``, -100 outside of answers and at the first token of each sample; ``attention_mask``,
        the number of the sample in its row from 1, and 0 for padding; ``position_ids``, from 0 in each sample.
        """
        raise NotImplementedError
