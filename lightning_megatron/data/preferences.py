"""Pairs of a chosen and a rejected answer to a prompt: records, their tokens, and rows for training.

Tokens and targets are those of instruction tuning: each answer is a record of its own with the prompt of the pair.
"""

from __future__ import annotations

import hashlib
import logging
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_megatron.data.documents import read_records
from lightning_megatron.data.input_files import input_progress
from lightning_megatron.data.instruction_records import (
    InstructionOptions,
    RecordTokenizer,
    TokenizedSample,
    record_files,
)
from lightning_megatron.data.instructions import Instructions, SampleArrays, cached_samples
from lightning_megatron.data.samples import Rows
from lightning_megatron.errors import DataError

_log = logging.getLogger(__name__)

_NO_TARGET = -100
"""Hugging Face's label of positions without a target."""
_ANSWERS = ("chosen", "rejected")
"""Answers of a pair, in the order of their samples."""


def tokenized_pairs(
    reader: RecordTokenizer, records: Iterator[tuple[str, dict[str, Any]]]
) -> Iterator[tuple[TokenizedSample, TokenizedSample]]:
    """Yield the samples of each record: the prompt with the chosen answer, and with the rejected one.

    Raises:
        DataError: With the location, if a record is malformed, or the chat template cannot render it.
    """
    samples = reader.samples(_answers(records))
    return zip(samples, samples, strict=True)


def _answers(
    records: Iterator[tuple[str, dict[str, Any]]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each record as two of prompt and completion."""
    for location, record in records:
        prompt = record.get("prompt")
        answers: list[Any] = [record.get(name) for name in _ANSWERS]
        are_chats = all(isinstance(answer, list) for answer in answers)
        if are_chats and not isinstance(prompt, list):
            prompt, answers = _split_conversations(prompt, answers, location)
        kind = list if are_chats else str
        if not all(isinstance(part, kind) for part in (prompt, *answers)):
            raise DataError(
                f"{location}: expected 'prompt', 'chosen' and 'rejected', strings or lists of messages, or 'chosen' and"
                f" 'rejected' as whole conversations with a common beginning, got {reprlib.repr(record)}; correct it"
            )
        for name, answer in zip(_ANSWERS, answers, strict=True):
            parts = {"prompt": prompt, "completion": answer}
            parts |= {name: record.get(name) for name in ("tools", "chat_template_kwargs")}
            yield f"{location}, {name}", parts


def _split_conversations(
    prompt: Any, answers: list[Any], location: str
) -> tuple[list[Any], list[list[Any]]]:
    """Common beginning of two conversations, and what follows in each.

    Args:
        prompt: Text of the last message of the beginning, as some datasets repeat it; None if there is none.
        answers: The conversations.
        location: Of the record.

    Raises:
        DataError: If they have no common beginning, or its last message is not the prompt.
    """
    chosen, rejected = answers
    length = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        length += 1
    common = chosen[:length]
    last = None
    if common and isinstance(common[-1], dict):
        last = common[-1].get("content")
    if last is None or prompt not in (None, last):
        raise DataError(
            f"{location}: expected 'chosen' and 'rejected' to begin with the same messages, the last of which is"
            f" 'prompt' if there is one, got a prompt of {reprlib.repr(prompt)} and {length} common messages; correct"
            " it, or give 'prompt' as a list of messages"
        )
    return common, [chosen[length:], rejected[length:]]


def check_preferences(options: InstructionOptions) -> None:
    """Check files, tokenizer and the first records, without reading the rest.

    Raises:
        DataError: If files or tokenizer are missing, or do not fit together.
    """
    records = islice(read_records(record_files(options.path)), 8)
    if next(tokenized_pairs(RecordTokenizer(options), records), None) is None:
        raise DataError(f"{options.path} has no records; give a file with at least one")


def read_preferences(options: InstructionOptions) -> Instructions:
    """Read and tokenize all pairs, in the order of the files: two samples each, the chosen answer first.

    Raises:
        DataError: With file and line, if a record is malformed; if files or tokenizer are missing, or no pair has a
            target in both of its answers.
    """
    reader = RecordTokenizer(options)
    files = record_files(options.path)
    limit = options.seq_length
    arrays = SampleArrays()
    num_truncated = 0
    num_skipped = 0
    with input_progress(files, "Tokenizing preferences", delay=3) as bar:
        for pair in tokenized_pairs(reader, read_records(files, bar.update)):
            num_truncated += any(len(tokens) > limit for tokens, _ in pair)
            if not all(is_answer[:limit].any() for _, is_answer in pair):
                num_skipped += 1
                continue
            for tokens, is_answer in pair:
                arrays.append(tokens[:limit], is_answer[:limit])
    num_pairs = len(arrays) // 2
    if not num_pairs:
        raise DataError(
            f"seq_length={limit} leaves nothing of an answer in each of the {num_skipped} pairs of {options.path}; "
            "raise it, or give others"
        )
    if num_truncated:
        _log.warning(
            "%d of %d pairs of %s have more than seq_length=%d tokens: %d lost the end of an answer, and %d are left"
            " out, as nothing of an answer was left. Raise seq_length to keep them whole.",
            num_truncated,
            num_pairs + num_skipped,
            options.path,
            limit,
            num_truncated - num_skipped,
            num_skipped,
        )
    return arrays.instructions(reader.padding_token)


def cached_preferences(options: InstructionOptions, index_cache: str | None) -> Instructions:
    """All pairs in the order of the files, tokenized once and memory-mapped.

    Args:
        options: Settings of the samples.
        index_cache: Directory of the cache; None to tokenize in memory.

    Raises:
        DataError: As ``read_preferences``; if the directory cannot be written.
    """
    return cached_samples("preferences", read_preferences, options, index_cache)


@dataclass(eq=False)
class PreferenceSamples:
    """Pairs of one split, in one pass over them."""

    answers: Instructions
    """Tokenized answers with their prompts, two a pair, the chosen one first."""
    seq_length: int
    """Maximum number of tokens of a row."""
    pad_to_multiple_of: int | None = None
    """Pad rows to the longest of the batch, rounded up to a multiple of this; None: to ``seq_length``."""
    has_labels: bool = True
    """Whether rows have labels, which reward models do not take."""
    reference_logps: NDArray[np.float32] | None = None
    """[pairs, 2]: sums of the reference's log-probabilities of the answers; None for rows without them."""

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all tokens and targets; not of padding, nor of what a reference model says of them."""
        source = self.answers
        begin = source.starts[0]
        end = source.starts[-1]
        digest = hashlib.blake2b(digest_size=16)
        for part in (
            source.starts - begin,
            source.tokens[begin:end],
            source.is_answer[begin:end],
        ):
            digest.update(np.ascontiguousarray(part).data)
        return f"{digest.hexdigest()}-pairs"

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.answers) // 2

    def rows(self, indices: Sequence[int]) -> Rows:
        """Pairs under the keys of ``DPOTrainStep``, [rows, L] each, padded on the right.

        ``chosen_input_ids``, ``chosen_attention_mask`` and ``chosen_labels`` (-100 outside of the answer), int64, and
        the same for ``rejected_``; ``reference_chosen_logps`` and ``reference_rejected_logps`` [rows], fp32, if known.
        """
        source = self.answers
        length = self.seq_length
        if self.pad_to_multiple_of is not None:
            of_pairs = source.lengths.reshape(-1, 2)[list(indices)]
            longest = int(of_pairs.max())
            length = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        rows: Rows = {}
        for number, name in enumerate(_ANSWERS):
            shape = (len(indices), length)
            tokens = np.full(shape, int(source.padding_token), np.int64)
            mask = np.zeros_like(tokens)
            labels = np.full_like(tokens, _NO_TARGET)
            for row, index in enumerate(indices):
                ids, is_answer = source.sample(2 * index + number)
                tokens[row, : len(ids)] = ids
                mask[row, : len(ids)] = 1
                labels[row, : len(ids)] = np.where(is_answer, ids, _NO_TARGET)
            rows[f"{name}_input_ids"] = torch.from_numpy(tokens)
            rows[f"{name}_attention_mask"] = torch.from_numpy(mask)
            if self.has_labels:
                rows[f"{name}_labels"] = torch.from_numpy(labels)
            if self.reference_logps is not None:
                values = self.reference_logps[list(indices), number]
                rows[f"reference_{name}_logps"] = torch.from_numpy(values)
        return rows
