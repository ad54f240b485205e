"""Tokenized instructions: records of JSON lines, their cache, and rows of one or several (packed) samples."""

from __future__ import annotations

import hashlib
import logging
import os
from array import array
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.conversations import Answers, RecordRenderer, TokenizedSample, tokenize
from lightning_megatron.data.documents import find_files, format_of, read_records
from lightning_megatron.data.samples import Rows, SampleOrder, build_once, open_array
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.errors import ConfigError, DataError, require_choice, require_divides

_log = logging.getLogger(__name__)

_NO_TARGET = -100
"""Hugging Face's label for "no target here"."""

_BATCH = 1000
"""Records that are tokenized at a time: enough for the tokenizer's threads, little enough to hold their offsets."""


@dataclass(frozen=True, kw_only=True)
class InstructionOptions:
    """What determines the samples of a file of instructions."""

    path: str
    """A .jsonl file, a folder of them, or a pattern; with ``prompt`` and ``completion``, or ``messages``, a line."""
    tokenizer: str
    """Folder of a transformers tokenizer; with a chat template if there are messages."""
    seq_length: int
    """Tokens of a row."""
    answers: Answers = "all"
    """What of a conversation is learned: all turns of the assistant at once, each in a sample of its own that ends with
    it (for templates that write earlier turns otherwise, e.g. without their reasoning), or the last one."""
    separator: str = ""
    """Text between a prompt and a completion that are strings; part of the prompt."""

    def __post_init__(self) -> None:
        """Check what can be known before anything is read.

        Raises:
            ConfigError: If a value cannot work.
        """
        require_choice("answers", self.answers, get_args(Answers))


@dataclass(frozen=True, kw_only=True, eq=False)
class Instructions:
    """Tokenized samples, in flat arrays: 5 bytes a token."""

    tokens: NDArray[np.int32]
    """[tokens of all samples]."""
    is_answer: NDArray[np.bool_]
    """[tokens of all samples]: whether a token is learned; a sample's first one never is, as nothing predicts it."""
    starts: NDArray[np.int64]
    """[samples + 1]: sample ``i`` has the tokens ``starts[i]:starts[i + 1]``."""
    seq_length: int
    """Tokens of a row; no sample is longer."""
    padding_token: int
    """What fills rows up; never seen, never learned."""

    def __len__(self) -> int:
        """Samples."""
        return len(self.starts) - 1

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[samples]: tokens of each."""
        return np.diff(self.starts)

    @cached_property
    def fingerprint(self) -> str:
        """Of the content."""
        digest = hashlib.blake2b(repr((self.seq_length, self.padding_token)).encode(), digest_size=8)
        begin, end = self.starts[0], self.starts[-1]
        for part in (self.starts - begin, self.tokens[begin:end], self.is_answer[begin:end]):
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    @property
    def largest_token(self) -> int:
        """For a comparison with the model's vocabulary; covers ``padding_token``."""
        return max(int(self.tokens.max()), self.padding_token)

    def sample(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Tokens of one sample, and which of them are learned."""
        begin, end = self.starts[index], self.starts[index + 1]
        return self.tokens[begin:end], self.is_answer[begin:end]

    def part(self, samples: range) -> Instructions:
        """Consecutive samples, e.g. a range of ``split_ranges(split, len(instructions))``; shares memory."""
        return replace(self, starts=self.starts[samples.start : samples.stop + 1])


def record_files(path: str) -> list[Path]:
    """The files of JSON lines that ``path`` stands for, in order; a file named by itself is one whatever its name.

    Raises:
        ConfigError: If one needs a library that is not installed.
        DataError: If there is none.
    """
    files = find_files([path])
    if Path(path).expanduser().is_file():
        return files
    files = [file for file in files if format_of(file).content == "json lines"]
    if not files:
        raise DataError(f"{path} holds no .jsonl file; give the file, or a folder or pattern with some")
    return files


def check_instructions(options: InstructionOptions) -> None:
    """Check files, tokenizer and the first records, in a moment.

    Raises:
        DataError: If files or tokenizer are missing, or unfit for each other.
    """
    reader = _Reader(options)
    if next(reader.samples(islice(read_records(record_files(options.path)), 8)), None) is None:
        raise _no_records(options)


def read_instructions(options: InstructionOptions) -> Instructions:
    """All samples in the order of the files.

    Raises:
        DataError: With file and line, if a record is malformed; if files or tokenizer are missing, or no sample is
            left.
    """
    from tqdm import tqdm

    reader, files, limit = _Reader(options), record_files(options.path), options.seq_length
    # Bytes grow in place; a list of a million small arrays would take more memory than what is in them.
    tokens, is_answer, lengths = bytearray(), bytearray(), array("q")
    num_cut, left_out = 0, list[int]()  # of those without an answer, the tokens that one would need
    total = sum(file.stat().st_size for file in files)
    # A short file is read before anybody wonders.
    with tqdm(total=total, unit="B", unit_scale=True, desc="Tokenizing instructions", delay=3) as bar:
        for ids, learned in reader.samples(read_records(files, bar.update)):
            num_cut += len(ids) > limit
            if not learned[:limit].any():
                left_out.append(int(learned.argmax()) + 1)
                continue
            tokens += ids[:limit].tobytes()
            is_answer += learned[:limit].tobytes()
            lengths.append(min(limit, len(ids)))
    if not lengths and not left_out:
        raise _no_records(options)
    if not lengths:
        raise DataError(
            f"seq_length={limit} leaves nothing of the answers of any of the {len(left_out)} samples of {options.path};"
            f" raise it, to {min(left_out)} at the very least"
        )
    if num_cut:
        _log.warning(
            "%d of %d samples of %s have more than seq_length=%d tokens: %d lost their end, and %d are left out, as"
            " nothing of their answers was left. Raise seq_length to keep them whole.",
            *(num_cut, len(lengths) + len(left_out), options.path, limit, num_cut - len(left_out), len(left_out)),
        )
    return Instructions(
        tokens=np.frombuffer(tokens, dtype=np.int32),
        is_answer=np.frombuffer(is_answer, dtype=np.bool_),
        starts=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        seq_length=limit,
        padding_token=reader.padding_token,
    )


class _Reader:
    """Turns records into tokens."""

    def __init__(self, options: InstructionOptions) -> None:
        self._tokenizer = tokenizer = load_tokenizer(options.tokenizer)
        if not tokenizer.is_fast:
            raise DataError(
                f"tokenizer={options.tokenizer} is a {type(tokenizer).__name__}, which cannot tell where in a text its"
                " tokens are, so answers cannot be found; give one with a tokenizer.json"
            )
        self._renderer = RecordRenderer(tokenizer, answers=options.answers, separator=options.separator)
        self.padding_token: int = next(t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if t is not None)

    def samples(self, records: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[TokenizedSample]:
        """Each record's tokens."""
        while batch := list(islice(records, _BATCH)):
            rendered = [(place, text) for place, record in batch for text in self._renderer.render(record, place)]
            samples = tokenize(self._tokenizer, [text for _, text in rendered])
            for (place, _), sample in zip(rendered, samples, strict=True):
                if not sample[1].any():
                    raise DataError(f"{place} has an answer without a token to learn; remove or complete it")
                yield sample


def _no_records(options: InstructionOptions) -> DataError:
    return DataError(f"{options.path} has no records; give a file with at least one")


# ---- packing --------------------------------------------------------------------------------------------------------


def pack(lengths: NDArray[np.integer], capacity: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """As few rows as best-fit-decreasing finds, in an order drawn from ``seed``.

    The longest sample first, each into the fullest row that still has room for it: at most 11/9 of the fewest possible
    rows and a constant (Johnson, Near-optimal bin packing algorithms, 1973).

    Args:
        lengths: [samples], each from 1 to ``capacity``.
        capacity: Tokens of a row.
        seed: Of the order of rows, and of which of several equally long samples share a row.

    Returns:
        Numbers of samples, row by row: [samples]; and where each row begins in these and the last one ends: [rows + 1].
    """
    generator = np.random.default_rng(seed)
    drawn = generator.permutation(len(lengths))
    by_length = drawn[np.argsort(-lengths[drawn].astype(np.int64), kind="stable")]
    row_of, num_rows = _rows_of(lengths[by_length].tolist(), capacity)
    row_of = generator.permutation(num_rows)[row_of]
    starts = np.concatenate([[0], np.bincount(row_of, minlength=num_rows).cumsum()]).astype(np.int64)
    return by_length[np.argsort(row_of, kind="stable")], starts


def _rows_of(lengths: list[int], capacity: int) -> tuple[NDArray[np.int64], int]:
    """The row of each sample, and the number of rows; ``lengths`` descend."""
    row_of = np.empty(len(lengths), dtype=np.int64)
    with_room: defaultdict[int, deque[int]] = defaultdict(deque)  # rows by the room that they have left
    rooms: list[int] = []  # what there is of it, ascending
    num_rows = 0
    for sample, length in enumerate(lengths):
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, room, num_rows = num_rows, capacity, num_rows + 1
        else:
            room = rooms[place]
            row = with_room[room].popleft()
            if not with_room[room]:
                del rooms[place]
        row_of[sample] = row
        left = room - length
        if not with_room[left]:
            insort(rooms, left)
        with_room[left].append(row)
    return row_of, num_rows


# ---- rows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """How samples become rows."""

    packing: bool = False
    """Whether short samples share a row, without seeing each other."""
    pad_to_multiple_of: int | None = None
    """Without packing, pad to the longest sample of the batch, rounded up to this; None: to ``seq_length``."""
    seed: int = 1234
    """Of the order of packed rows."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: If one cannot work.
        """
        if self.pad_to_multiple_of is not None and self.pad_to_multiple_of < 1:
            raise ConfigError(f"pad_to_multiple_of={self.pad_to_multiple_of} must be at least 1; 8 suits most GPUs")
        if self.packing and self.pad_to_multiple_of is not None:
            raise ConfigError(
                f"pad_to_multiple_of={self.pad_to_multiple_of} is for rows of one sample, and packing=True fills rows"
                " of seq_length; leave one of them out"
            )

    def check_length(self, seq_length: int) -> None:
        """See to it that rows of ``seq_length`` tokens can be padded so.

        Raises:
            ConfigError: If ``pad_to_multiple_of`` does not divide it.
        """
        if self.pad_to_multiple_of is not None:
            require_divides("pad_to_multiple_of", self.pad_to_multiple_of, "seq_length", seq_length)


class InstructionSamples:
    """Rows of samples for ``GPTTrainStep``; one pass over them.

    Args:
        instructions: The samples.
        options: How they become rows; checked for ``instructions.seq_length``.
    """

    def __init__(self, instructions: Instructions, options: RowOptions) -> None:
        self._instructions = instructions
        self._options = options
        num_samples = len(instructions)
        self._members, self._starts = (
            pack(instructions.lengths, instructions.seq_length, options.seed)
            if options.packing
            else (np.arange(num_samples), np.arange(num_samples + 1))
        )

    @property
    def fingerprint(self) -> str:
        """Of samples and packing; not of padding, which changes nothing that is learned."""
        order = f"packed-{self._options.seed}" if self._options.packing else "alone"
        return f"{self._instructions.fingerprint}-{order}"

    @property
    def efficiency(self) -> float:
        """Fraction of tokens in rows of ``seq_length`` that is no padding."""
        return float(self._instructions.lengths.sum() / (len(self) * self._instructions.seq_length))

    def __len__(self) -> int:
        """Rows."""
        return len(self._starts) - 1

    def rows(self, indices: Sequence[int]) -> Rows:
        """Rows as Hugging Face names them, [rows, L] int64 each, padded on the right.

        ``input_ids``; ``labels``, -100 outside of answers and at the first token of each sample; ``attention_mask``,
        the number of the sample in its row from 1, and 0 for padding; ``position_ids``, from 0 in each sample.
        """
        import torch

        source = self._instructions
        members = [self._members[self._starts[index] : self._starts[index + 1]] for index in indices]
        shape = (len(members), self._row_length(max(int(source.lengths[row].sum()) for row in members)))
        input_ids = np.full(shape, source.padding_token, dtype=np.int64)
        labels = np.full(shape, _NO_TARGET, dtype=np.int64)
        attention_mask, position_ids = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for row, samples in enumerate(members):
            begin = 0
            for number, sample in enumerate(samples, 1):
                tokens, is_answer = source.sample(sample)
                place = (row, slice(begin, begin + len(tokens)))
                input_ids[place] = tokens
                labels[place] = np.where(is_answer, tokens, _NO_TARGET)
                attention_mask[place] = number
                position_ids[place] = np.arange(len(tokens))
                begin += len(tokens)
        arrays = (input_ids, labels, attention_mask, position_ids)
        names = ("input_ids", "labels", "attention_mask", "position_ids")
        return dict(zip(names, map(torch.from_numpy, arrays), strict=True))

    def _row_length(self, longest: int) -> int:
        multiple = self._options.pad_to_multiple_of
        return self._instructions.seq_length if multiple is None else -(-longest // multiple) * multiple


_LAYOUT = 1
"""Of the files in a folder, and of the rules by which they come about; a change makes the old folders unknown."""

_ARRAYS = ("tokens", "is_answer", "starts")


def cached_instructions(options: InstructionOptions, index_cache: str | None) -> Instructions:
    """All samples in the order of the files; mapped into memory, so that the ranks of a machine share it.

    Args:
        options: Which samples.
        index_cache: Folder for them; None to tokenize in memory.

    Raises:
        DataError: As ``read_instructions``; if the folder cannot be written.
    """
    if index_cache is None:
        return read_instructions(options)
    folder = os.path.join(os.path.abspath(index_cache), f"instructions-{_identity(options)}")

    def write(staging: str) -> SampleOrder:
        made = read_instructions(options)
        for name in _ARRAYS:
            np.save(os.path.join(staging, f"{name}.npy"), getattr(made, name))
        np.save(os.path.join(staging, "padding_token.npy"), made.padding_token)
        return SampleOrder(num_samples=len(made), fingerprint=made.fingerprint)

    build_once(folder, write, options.path)
    tokens, is_answer, starts = (open_array(folder, name) for name in _ARRAYS)
    return Instructions(
        tokens=tokens,
        is_answer=is_answer,
        starts=starts,
        seq_length=options.seq_length,
        padding_token=int(open_array(folder, "padding_token")),
    )


def _identity(options: InstructionOptions) -> str:
    tokenizer = load_tokenizer(options.tokenizer)
    files = [(os.path.realpath(file), os.stat(file)) for file in record_files(options.path)]
    content = (
        _LAYOUT,
        [(path, stat.st_size, stat.st_mtime_ns) for path, stat in files],
        (options.seq_length, options.answers, options.separator),
        (tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else "", tokenizer.chat_template),
        sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items()),
    )
    return hashlib.sha256(repr(content).encode()).hexdigest()[:24]
