"""Instruction tuning samples for a GPT: read from JSON lines, tokenized once and cached on disk."""

from __future__ import annotations

import hashlib
import logging
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.build_once import build_once
from lightning_megatron.data.documents import read_records
from lightning_megatron.data.input_files import input_progress
from lightning_megatron.data.instruction_records import (
    InstructionOptions,
    RecordTokenizer,
    TokenizedSample,
    record_files,
)
from lightning_megatron.data.samples import SavedArrays
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.errors import DataError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Instructions(SavedArrays):
    """Tokenized samples in flat arrays, of 5 bytes per token."""

    tokens: NDArray[np.int32]
    """Tokens of all samples, concatenated: [tokens]."""
    is_answer: NDArray[np.bool_]
    """Whether a token is a target: [tokens]; never the first one of a sample, which nothing predicts."""
    starts: NDArray[np.int64]
    """Sample ``i`` has the tokens ``starts[i]:starts[i + 1]``: [samples + 1]."""
    padding_token: NDArray[np.int64]
    """Token that pads rows, never attended to or learned: []."""

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.starts) - 1

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample: [samples]."""
        return np.diff(self.starts)

    def sample(self, index: int) -> TokenizedSample:
        """Tokens of one sample, and whether each is a target."""
        begin, end = self.starts[index : index + 2]
        return self.tokens[begin:end], self.is_answer[begin:end]

    def part(self, samples: range) -> Instructions:
        """Consecutive samples, e.g. a range of ``split_ranges(split, len(instructions))``; shares memory."""
        return replace(
            self,
            starts=self.starts[samples.start : samples.stop + 1],
        )


class SampleArrays:
    """Tokenized samples that are appended one by one.

    Byte arrays grow in place; a list of a million small arrays would take more memory than their content.
    """

    def __init__(self) -> None:
        """Begin without samples."""
        self._tokens = bytearray()
        self._is_answer = bytearray()
        self._lengths = array("q")

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._lengths)

    def append(self, tokens: NDArray[np.int32], is_answer: NDArray[np.bool_]) -> None:
        """Append a sample."""
        self._tokens += tokens.tobytes()
        self._is_answer += is_answer.tobytes()
        self._lengths.append(len(tokens))

    def instructions(self, padding_token: int) -> Instructions:
        """All samples."""
        return Instructions(
            tokens=np.frombuffer(self._tokens, dtype=np.int32),
            is_answer=np.frombuffer(self._is_answer, dtype=np.bool_),
            starts=np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)]),
            padding_token=np.array(padding_token),
        )


def check_instructions(options: InstructionOptions) -> None:
    """Check files, tokenizer and the first records, without reading the rest.

    Raises:
        DataError: If files or tokenizer are missing, or do not fit together.
    """
    records = islice(read_records(record_files(options.path)), 8)
    if next(RecordTokenizer(options).samples(records), None) is None:
        raise DataError(f"{options.path} has no records; give a file with at least one")


def read_instructions(options: InstructionOptions) -> Instructions:
    """Read and tokenize all samples, in the order of the files.

    Raises:
        DataError: With file and line, if a record is malformed; if files or tokenizer are missing, or no sample has a
            target.
    """
    reader = RecordTokenizer(options)
    files = record_files(options.path)
    limit = options.seq_length
    arrays = SampleArrays()
    num_truncated = 0
    num_skipped = 0
    # No progress bar for files that are read within three seconds.
    with input_progress(files, "Tokenizing instructions", delay=3) as bar:
        for ids, learned in reader.samples(read_records(files, bar.update)):
            num_truncated += len(ids) > limit
            if not learned[:limit].any():
                num_skipped += 1
                continue
            arrays.append(ids[:limit], learned[:limit])
    if not len(arrays):
        raise DataError(
            f"seq_length={limit} leaves nothing of the answers of the {num_skipped} samples of {options.path}; raise"
            " it, or give others"
        )
    if num_truncated:
        _log.warning(
            "%d of %d samples of %s have more than seq_length=%d tokens: %d lost their end, and %d are left out, as"
            " nothing of their answers was left. Raise seq_length to keep them whole.",
            num_truncated,
            len(arrays) + num_skipped,
            options.path,
            limit,
            num_truncated - num_skipped,
            num_skipped,
        )
    return arrays.instructions(reader.padding_token)


_FORMAT_VERSION = 1
"""Version of the cached files, and of the rules that determine them; a change invalidates existing directories."""


def cached_instructions(options: InstructionOptions, index_cache: str | None) -> Instructions:
    """All samples in the order of the files, tokenized once and memory-mapped, so that the ranks of a node share them.

    Args:
        options: Settings of the samples.
        index_cache: Directory of the cache; None to tokenize in memory.

    Raises:
        DataError: As ``read_instructions``; if the directory cannot be written.
    """
    return cached_samples("instructions", read_instructions, options, index_cache)


def cached_samples(
    kind: str,
    read: Callable[[InstructionOptions], Instructions],
    options: InstructionOptions,
    index_cache: str | None,
) -> Instructions:
    """All samples that ``read`` makes of files, which it reads once; then memory-mapped.

    Args:
        kind: What the samples are, for the name of the directory.
        read: Reads and tokenizes.
        options: Settings of the samples.
        index_cache: Directory of the cache; None to keep the samples in memory.

    Raises:
        DataError: As ``read``; if the directory cannot be written.
    """
    if index_cache is None:
        return read(options)
    tokenizer = load_tokenizer(options.tokenizer)
    files = []
    for file in record_files(options.path):
        stat = os.stat(file)
        files.append(
            (
                os.path.realpath(file),
                stat.st_size,
                stat.st_mtime_ns,
            )
        )
    backend = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else ""
    special = tokenizer.special_tokens_map
    identity = (
        _FORMAT_VERSION,
        files,
        (options.seq_length, options.answers, options.separator),
        # The library does not write the last of them to its file, tokenizer.json.
        (backend, tokenizer.chat_template, tokenizer.split_special_tokens),
        sorted((name, str(token)) for name, token in special.items()),
    )
    name = f"{kind}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:24]}"
    folder = os.path.join(os.path.abspath(index_cache), name)

    def write(staging: str) -> str:
        read(options).save(staging)
        return "as tokenized"

    build_once(folder, write, options.path)
    return Instructions.load(folder)
