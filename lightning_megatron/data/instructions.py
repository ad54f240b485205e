"""Instruction tuning samples for a GPT: records of JSON lines, tokens with their answers, and packed rows.

A record is a prompt and a completion, or a conversation rendered by the tokenizer's chat template. Tokenized samples
are cached on disk; short ones may share a row (packing).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import reprlib
from array import array
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.documents import find_files, format_of, progress_bar, read_records
from lightning_megatron.data.encoding import replace_surrogates
from lightning_megatron.data.samples import Rows, SavedArrays, build_once
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.data.tokenizer_files import panics_as_errors
from lightning_megatron.errors import DataError

_log = logging.getLogger(__name__)

Answers: TypeAlias = Literal["all", "each", "last"]
"""Answers of a conversation to learn: all in one sample, each in a sample that ends with it, or the last one."""
Message: TypeAlias = dict[str, Any]
Span: TypeAlias = tuple[int, int]
"""First character and end (exclusive)."""
TokenizedSample: TypeAlias = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""Tokens of a sample, and whether each is a target of the loss."""

_NO_TARGET = -100
"""Hugging Face's label of positions without a target."""
_BATCH = 1000
"""Records tokenized at a time: enough for the tokenizer's threads, few enough to hold their offsets."""
_ASSISTANT = "assistant"
# Roles whose messages a template may rewrite or leave out: reasoning of earlier turns, results as JSON.
_REWRITTEN_ROLES = (_ASSISTANT, "tool")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class InstructionOptions:
    """Settings that determine the samples of a file of instructions."""

    path: str
    """A .jsonl file, a directory of them, or a pattern; a line has ``prompt`` and ``completion``, or ``messages``."""
    tokenizer: str
    """Directory of a transformers tokenizer, with a chat template if there are messages."""
    seq_length: int
    """Tokens of a row."""
    answers: Answers = "all"
    """Turns of the assistant to learn: all in one sample, each in a sample of its own that ends with it (for templates
    that render earlier turns differently, e.g. without their reasoning), or the last one of each conversation."""
    separator: str = ""
    """Text between a prompt and a completion if they are strings; part of the prompt."""


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
        begin, end = self.starts[index], self.starts[index + 1]
        return self.tokens[begin:end], self.is_answer[begin:end]

    def part(self, samples: range) -> Instructions:
        """Consecutive samples, e.g. a range of ``split_ranges(split, len(instructions))``; shares memory."""
        return replace(self, starts=self.starts[samples.start : samples.stop + 1])


def record_files(path: str) -> list[Path]:
    """JSON lines files at ``path``, in order; a file named explicitly is one whatever its suffix.

    Raises:
        ConfigError: If reading one needs a library that is not installed.
        DataError: If there is none.
    """
    files = find_files([path])
    if Path(path).expanduser().is_file():
        return files
    files = [file for file in files if format_of(file)[0] == "json lines"]
    if not files:
        raise DataError(
            f"{path} contains no .jsonl file; give such a file, or a directory or pattern with some"
        )
    return files


def check_instructions(options: InstructionOptions) -> None:
    """Check files, tokenizer and the first records, without reading the rest.

    Raises:
        DataError: If files or tokenizer are missing, or do not fit together.
    """
    records = islice(read_records(record_files(options.path)), 8)
    if next(_RecordTokenizer(options).samples(records), None) is None:
        raise DataError(f"{options.path} has no records; give a file with at least one")


def read_instructions(options: InstructionOptions) -> Instructions:
    """Read and tokenize all samples, in the order of the files.

    Raises:
        DataError: With file and line, if a record is malformed; if files or tokenizer are missing, or no sample has a
            target.
    """
    reader, files, limit = _RecordTokenizer(options), record_files(options.path), options.seq_length
    # Byte arrays grow in place; a list of a million small arrays would take more memory than their content.
    tokens, is_answer, lengths = bytearray(), bytearray(), array("q")
    num_truncated = num_skipped = 0
    # No progress bar for files that are read within three seconds.
    with progress_bar(files, "Tokenizing instructions", delay=3) as bar:
        for ids, learned in reader.samples(read_records(files, bar.update)):
            num_truncated += len(ids) > limit
            if not learned[:limit].any():
                num_skipped += 1
                continue
            tokens += ids[:limit].tobytes()
            is_answer += learned[:limit].tobytes()
            lengths.append(min(limit, len(ids)))
    if not lengths:
        raise DataError(
            f"seq_length={limit} leaves nothing of the answers of the {num_skipped} samples of {options.path}; raise"
            " it, or give others"
        )
    if num_truncated:
        _log.warning(
            "%d of %d samples of %s have more than seq_length=%d tokens: %d lost their end, and %d are left out, as"
            " nothing of their answers was left. Raise seq_length to keep them whole.",
            *(
                num_truncated,
                len(lengths) + num_skipped,
                options.path,
                limit,
                num_truncated - num_skipped,
                num_skipped,
            ),
        )
    return Instructions(
        tokens=np.frombuffer(tokens, dtype=np.int32),
        is_answer=np.frombuffer(is_answer, dtype=np.bool_),
        starts=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        padding_token=np.array(reader.padding_token),
    )


# ---- records to tokens ----------------------------------------------------------------------------------------------


_Rendered: TypeAlias = tuple[str, list[Span], bool]
"""A record as text; the spans of its answers, in order and disjoint; and whether a chat template rendered it, so that
the text already has all special tokens."""


class _RecordTokenizer:
    """Tokenizes records and marks the tokens of their answers."""

    def __init__(self, options: InstructionOptions) -> None:
        self._options = options
        self._tokenizer = tokenizer = load_tokenizer(options.tokenizer)
        if not tokenizer.is_fast:
            raise DataError(
                f"tokenizer={options.tokenizer}: expected one with tokenizer.json, got {tokenizer!r:.40}"
            )
        self.padding_token: int = next(
            t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if t is not None
        )

    def samples(self, records: Iterator[tuple[str, Message]]) -> Iterator[TokenizedSample]:
        """Yield the samples of each record: one, or one per answer.

        Raises:
            DataError: With the location, if a record is malformed, or the chat template cannot render it or hides its
                answers.
        """
        while batch := list(islice(records, _BATCH)):
            rendered = [
                (location, item)
                for location, record in batch
                for item in self._render(record, location)
            ]
            samples = self._tokenize([item for _, item in rendered])
            for (location, _), sample in zip(rendered, samples, strict=True):
                if not sample[1].any():
                    raise DataError(
                        f"{location} has an answer without a token to learn; remove or complete it"
                    )
                yield sample

    def _render(self, record: Message, location: str) -> list[_Rendered]:
        prompt, completion, messages = (
            record.get("prompt"),
            record.get("completion"),
            record.get("messages"),
        )
        if "messages" not in record and isinstance(prompt, str) and isinstance(completion, str):
            if not completion.strip():
                raise DataError(
                    f"{location} has an empty 'completion', so there is nothing to learn; complete it"
                )
            if self._tokenizer.eos_token_id is None:
                raise DataError(
                    f"{location}: expected a tokenizer with an eos_token to end completions, got none"
                )
            prompt += self._options.separator
            return [(prompt + completion, [(len(prompt), len(prompt + completion))], False)]
        num_prompt = 0
        if "messages" not in record and isinstance(prompt, list) and isinstance(completion, list):
            messages, num_prompt = prompt + completion, len(prompt)
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise DataError(
                f"{location}: expected 'prompt' and 'completion', two strings or two lists of messages, or 'messages':"
                f' [{{"role": "user", "content": "..."}}, ...], got {reprlib.repr(record)}; correct it'
            )
        turns = [
            i
            for i, message in enumerate(messages)
            if message["role"] == _ASSISTANT and i >= num_prompt
        ]
        if not turns or not all(_has_content(messages[turn]) for turn in turns):
            roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in messages))
            raise DataError(
                f"{location} has no answer, or an empty one: its roles are {roles}, and turns of the role 'assistant'"
                " are learned; complete or remove them, or rename the role"
            )
        tools = record.get("tools")
        if self._options.answers == "all":
            return [self._render_chat(messages, turns, tools, location)]
        turns = turns[-1:] if self._options.answers == "last" else turns
        return [self._render_chat(messages[: turn + 1], [turn], tools, location) for turn in turns]

    def _render_chat(
        self, messages: list[Message], turns: list[int], tools: Any, location: str
    ) -> _Rendered:
        """Render a conversation; its answers are what the template marks, or else what follows a generation prompt."""
        text, marks = self._apply_template(messages, tools, location)
        # Many templates silently ignore tools, and roles that they do not know.
        calls = (call for message in messages for call in message.get("tool_calls") or ())
        expected = [
            (f"the tool {name!r}", name) for name in map(_function_name, (*(tools or ()), *calls))
        ]
        for message in messages:
            content, role = message.get("content"), message["role"]
            if role not in _REWRITTEN_ROLES and isinstance(content, str):
                expected.append((f"a message of the role {role!r}", content.strip()))
        for subject, content in expected:
            if content not in text:
                raise DataError(f"{location}: the chat template leaves out {subject}; use another")
        if marks is not None:
            before = (
                self._apply_template(messages[: turns[0]], tools, location)[1] if turns[0] else None
            )
            return text, marks[len(before or ()) :], True
        answers = []
        for turn in turns:
            begin = (
                self._apply_template(messages[:turn], tools, location, generation_prompt=True)[0]
                if turn
                else None
            )
            end = self._apply_template(messages[: turn + 1], tools, location)[0]
            if begin is None or not (text.startswith(end) and end.startswith(begin)):
                raise DataError(
                    f"{location}: the answer in message {turn + 1} cannot be found: nothing comes before it, or the"
                    " chat template renders the beginning of a conversation differently than within the whole; put"
                    " {% generation %} and {% endgeneration %} around the answers in the template, or set answers=each"
                )
            answers.append((len(begin), len(end)))
        return text, answers, True

    def _apply_template(
        self, messages: list[Message], tools: Any, location: str, generation_prompt: bool = False
    ) -> tuple[str, list[Span] | None]:
        """Rendered text, and the spans that the template's ``generation`` blocks wrote; None if it has no such blocks.

        Not by ``apply_chat_template(return_assistant_tokens_mask=True)``: where an answer begins or ends with a space
        that the tokenizer does not count as part of a token, its mask is empty or extends to the end
        (transformers 5.23, tokenization_utils_base.py:apply_chat_template).
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        # As in apply_chat_template: many templates fail on keys whose value is None.
        present = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        try:
            template = self._tokenizer.get_chat_template(None, tools)
            has_marks = bool(_GENERATION.search(template))
            texts, marks = render_jinja_template(
                conversations=[present],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=has_marks,
                add_generation_prompt=generation_prompt,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # of any type, depending on the template
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"{location}: the tokenizer has no chat template, or it does not take a conversation of {roles}"
                f" ({error}); correct the conversation, or use the tokenizer of a chat model, or save a template as"
                " chat_template.jinja in its directory"
            ) from error
        return texts[0], [(begin, end) for begin, end in marks[0]] if has_marks else None

    def _tokenize(self, records: Sequence[_Rendered]) -> Iterator[TokenizedSample]:
        """Tokens of each text; targets are those with a character of an answer, and the end of a completion.

        The text is tokenized as a whole, as the model will see it: a token may cover the last character of a question
        and the first of its answer, and is then a target. A prompt and completion get the special tokens that the
        tokenizer puts around a text, and the end-of-sequence token if that is not among them.
        """
        for is_chat, group in groupby(records, key=lambda record: record[2]):
            texts = list(group)
            with panics_as_errors(self._tokenizer.name_or_path):
                encoded = self._tokenizer(
                    [replace_surrogates(text) for text, _, _ in texts],
                    add_special_tokens=not is_chat,
                    return_offsets_mapping=True,
                    return_attention_mask=False,
                    return_token_type_ids=False,
                    verbose=False,
                )
            encodings = zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True)
            for (_, answers, _), ids, offsets in encodings:
                tokens = np.array(ids, dtype=np.int32)
                is_answer = _overlaps(np.array(offsets, dtype=np.int64).reshape(-1, 2), answers)
                if not is_chat:
                    eos = self._tokenizer.eos_token_id
                    if len(tokens) == 0 or tokens[-1] != eos:
                        tokens, is_answer = (
                            np.append(tokens, np.int32(eos)),
                            np.append(is_answer, False),
                        )
                    is_answer[-1] = True
                is_answer[:1] = False
                yield tokens, is_answer


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | list | None)
        and isinstance(message.get("tool_calls") or [], list)
    )


def _function_name(tool: Any) -> str:
    """Name of a tool or a tool call, at its top level or under ``function``; empty if there is none."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _has_content(message: Message) -> bool:
    content = message.get("content")
    return bool(
        (content.strip() if isinstance(content, str) else content) or message.get("tool_calls")
    )


def _overlaps(offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Whether each token has a character within a span: [tokens].

    Some tokenizers do not count spaces as part of a token: one of only spaces is then empty and lies after them. A
    special token that the tokenizer adds is empty and lies at 0.
    """
    begins, ends = offsets[:, 0], offsets[:, 1]
    inside = np.zeros(len(offsets), dtype=np.bool_)
    for first, last in spans:
        inside |= (ends > first) & ((begins < last) | (ends <= last))
    return inside


# ---- packing --------------------------------------------------------------------------------------------------------


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
    by_length = shuffled[np.argsort(-lengths[shuffled].astype(np.int64), kind="stable")]
    rows: list[int] = []  # row of each sample, longest samples first
    with_room: defaultdict[int, deque[int]] = defaultdict(deque)  # rows by remaining room
    rooms: list[int] = []  # distinct values of remaining room, ascending
    num_rows = 0
    for length in np.sort(lengths)[::-1].tolist():
        position = bisect_left(rooms, length)
        if position == len(rooms):
            row, room, num_rows = num_rows, capacity, num_rows + 1
        else:
            room = rooms[position]
            row = with_room[room].popleft()
            if not with_room[room]:
                del rooms[position]
        rows.append(row)
        if not with_room[room - length]:
            insort(rooms, room - length)
        with_room[room - length].append(row)
    row_of = generator.permutation(num_rows)[rows]
    starts = np.concatenate([[0], np.bincount(row_of, minlength=num_rows).cumsum()]).astype(
        np.int64
    )
    return by_length[np.argsort(row_of, kind="stable")], starts


# ---- rows -----------------------------------------------------------------------------------------------------------


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
        self._members, self._starts = np.arange(len(lengths)), np.arange(len(lengths) + 1)
        if self.packing_seed is not None:
            self._members, self._starts = pack(lengths, self.seq_length, self.packing_seed)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of samples and packing; not of padding, which does not change what is learned."""
        source = self.instructions
        digest = hashlib.blake2b(
            repr((self.seq_length, int(source.padding_token))).encode(), digest_size=8
        )
        begin, end = source.starts[0], source.starts[-1]
        for part in (source.starts - begin, source.tokens[begin:end], source.is_answer[begin:end]):
            digest.update(np.ascontiguousarray(part).data)
        return f"{digest.hexdigest()}-{'alone' if self.packing_seed is None else f'packed-{self.packing_seed}'}"

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._starts) - 1

    def rows(self, indices: Sequence[int]) -> Rows:
        """Rows under Hugging Face's names, [rows, L] int64 each, padded on the right.

        ``input_ids``; ``labels``, -100 outside of answers and at the first token of each sample; ``attention_mask``,
        the number of the sample within its row, from 1, and 0 for padding; ``position_ids``, from 0 in each sample.
        """
        import torch

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
        columns = {
            name: np.full((len(members), length), value, np.int64)
            for name, value in padding.items()
        }
        for row, samples in enumerate(members):
            end = 0
            for number, sample in enumerate(samples, 1):
                tokens, is_answer = source.sample(sample)
                begin, end = end, end + len(tokens)
                values: list[Any] = [
                    tokens,
                    np.where(is_answer, tokens, _NO_TARGET),
                    number,
                    np.arange(len(tokens)),
                ]
                for column, value in zip(columns.values(), values, strict=True):
                    column[row, begin:end] = value
        return {name: torch.from_numpy(column) for name, column in columns.items()}


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
    if index_cache is None:
        return read_instructions(options)
    tokenizer = load_tokenizer(options.tokenizer)
    files = [(os.path.realpath(file), os.stat(file)) for file in record_files(options.path)]
    identity = (
        _FORMAT_VERSION,
        [(path, stat.st_size, stat.st_mtime_ns) for path, stat in files],
        (options.seq_length, options.answers, options.separator),
        (
            tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else "",
            tokenizer.chat_template,
        ),
        sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items()),
    )
    name = f"instructions-{hashlib.sha256(repr(identity).encode()).hexdigest()[:24]}"
    folder = os.path.join(os.path.abspath(index_cache), name)

    def write(staging: str) -> str:
        read_instructions(options).save(staging)
        return "as tokenized"

    build_once(folder, write, options.path)
    return Instructions.load(folder)
