"""Rows of instruction tuning for a GPT, of one sample each or of several (packing)."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_megatron.data.instructions import Instructions
from lightning_megatron.data.samples import Rows

_NO_TARGET = -100
"""Hugging Face's label of positions without a target."""


def pack(
    lengths: NDArray[np.integer], capacity: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack samples into rows by best-fit decreasing, with the rows in random order.

    Each sample, longest first, goes into the fullest row that still has room for it: at most 11/9 of the fewest
    possible rows plus a constant (Johnson, Near-optimal bin packing algorithms, 1973).

    Args:
        lengths: [samples], each from 1 to ``capacity``.
        capacity: Tokens of a row.
        seed: Seed of the order of rows, and of which of several equally long samples share a row.

    Returns:
        Indices of samples, row by row: [samples]; and the bounds of each row in these: [rows + 1].
    """
    generator = np.random.default_rng(seed)
    shuffled = generator.permutation(len(lengths))
    negative = -lengths[shuffled].astype(np.int64)
    by_length = shuffled[np.argsort(negative, kind="stable")]
    rows: list[int] = []  # row of each sample, longest samples first
    with_room: defaultdict[int, deque[int]] = defaultdict(deque)  # rows by remaining room
    rooms: list[int] = []  # distinct values of remaining room, ascending
    num_rows = 0
    for length in np.sort(lengths)[::-1].tolist():
        position = bisect_left(rooms, length)
        if position == len(rooms):
            row = num_rows
            room = capacity
            num_rows += 1
        else:
            room = rooms[position]
            row = with_room[room].popleft()
            if not with_room[room]:
                del rooms[position]
        rows.append(row)
        left = room - length
        if not with_room[left]:
            insort(rooms, left)
        with_room[left].append(row)
    row_of = generator.permutation(num_rows)[rows]
    ends = np.bincount(row_of, minlength=num_rows).cumsum()
    starts = np.concatenate([[0], ends]).astype(np.int64)
    return by_length[np.argsort(row_of, kind="stable")], starts


@dataclass(eq=False)
class InstructionSamples:
    """Rows of one or several samples for ``GPTTrainStep``, in one pass over the samples."""

    instructions: Instructions
    """Tokenized samples."""
    seq_length: int
    """Tokens of a row; no sample is longer."""
    packing_seed: int | None = None
    """Seed of packing, which lets short samples share a row without attending to each other; None: one per row."""
    pad_to_multiple_of: int | None = None
    """Pad rows to the longest of the batch, rounded up to a multiple of this; None: to ``seq_length``."""

    def __post_init__(self) -> None:
        lengths = self.instructions.lengths
        if self.packing_seed is None:
            self._members = np.arange(len(lengths))
            self._starts = np.arange(len(lengths) + 1)
        else:
            self._members, self._starts = pack(lengths, self.seq_length, self.packing_seed)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of samples and packing; not of padding, which does not change what is learned."""
        source = self.instructions
        settings = (self.seq_length, int(source.padding_token))
        digest = hashlib.blake2b(repr(settings).encode(), digest_size=8)
        begin = source.starts[0]
        end = source.starts[-1]
        for part in (
            source.starts - begin,
            source.tokens[begin:end],
            source.is_answer[begin:end],
        ):
            digest.update(np.ascontiguousarray(part).data)
        if self.packing_seed is None:
            return f"{digest.hexdigest()}-alone"
        return f"{digest.hexdigest()}-packed-{self.packing_seed}"

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._starts) - 1

    def rows(self, indices: Sequence[int]) -> Rows:
        """Rows under Hugging Face's names, [rows, L] int64 each, padded on the right.

        ``input_ids``; ``labels``, -100 outside of answers and at the first token of each sample; ``attention_mask``,
        the number of the sample within its row, from 1, and 0 for padding; ``position_ids``, from 0 in each sample.
        """
        source = self.instructions
        members = [
            self._members[self._starts[index] : self._starts[index + 1]] for index in indices
        ]
        length = self.seq_length
        if self.pad_to_multiple_of is not None:
            longest = max(int(source.lengths[row].sum()) for row in members)
            length = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        padding = {
            "input_ids": source.padding_token,
            "labels": _NO_TARGET,
            "attention_mask": 0,
            "position_ids": 0,
        }
        shape = (len(members), length)
        columns = {name: np.full(shape, value, np.int64) for name, value in padding.items()}
        for row, samples in enumerate(members):
            end = 0
            for number, sample in enumerate(samples, 1):
                tokens, is_answer = source.sample(sample)
                begin = end
                end += len(tokens)
                columns["input_ids"][row, begin:end] = tokens
                columns["labels"][row, begin:end] = np.where(is_answer, tokens, _NO_TARGET)
                columns["attention_mask"][row, begin:end] = number
                columns["position_ids"][row, begin:end] = np.arange(len(tokens))
        return {name: torch.from_numpy(column) for name, column in columns.items()}
