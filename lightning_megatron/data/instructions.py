"""Instructions for a GPT: records of JSON lines as text, tokens with their answers, and rows of one or several samples.

A record is a prompt and a completion, or a conversation that the tokenizer's chat template renders. Tokenized samples
are kept in a cache; short ones share a row (packing).
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

from lightning_megatron.data.documents import find_files, format_of, progress_bar, read_records, replace_surrogates
from lightning_megatron.data.samples import Rows, SavedArrays, build_once
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.errors import DataError

_log = logging.getLogger(__name__)

Answers: TypeAlias = Literal["all", "each", "last"]
"""What of a conversation is learned: all answers at once, each in a sample that ends with it, or the last one."""
Message: TypeAlias = dict[str, Any]
Span: TypeAlias = tuple[int, int]
"""Characters from the first to before the second."""
TokenizedSample: TypeAlias = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""Tokens of a sample, and which of them are learned."""

_NO_TARGET = -100
"""Hugging Face's label for "no target here"."""
_BATCH = 1000
"""Records that are tokenized at a time: enough for the tokenizer's threads, little enough to hold their offsets."""
_ASSISTANT = "assistant"
# A template may take apart or leave out what these say: reasoning of earlier turns, results as JSON.
_REWRITTEN_ROLES = (_ASSISTANT, "tool")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Instructions(SavedArrays):
    """Tokenized samples, in flat arrays: 5 bytes a token."""

    tokens: NDArray[np.int32]
    """[tokens of all samples]."""
    is_answer: NDArray[np.bool_]
    """[tokens of all samples]: whether a token is learned; a sample's first one never is, as nothing predicts it."""
    starts: NDArray[np.int64]
    """[samples + 1]: sample ``i`` has the tokens ``starts[i]:starts[i + 1]``."""
    padding_token: NDArray[np.int64]
    """[]: what fills rows up; never seen, never learned."""

    def __len__(self) -> int:
        """Samples."""
        return len(self.starts) - 1

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[samples]: tokens of each."""
        return np.diff(self.starts)

    def sample(self, index: int) -> TokenizedSample:
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
    files = [file for file in files if format_of(file)[0] == "json lines"]
    if not files:
        raise DataError(f"{path} holds no .jsonl file; give the file, or a folder or pattern with some")
    return files


def check_instructions(options: InstructionOptions) -> None:
    """Check files, tokenizer and the first records, in a moment.

    Raises:
        DataError: If files or tokenizer are missing, or unfit for each other.
    """
    records = islice(read_records(record_files(options.path)), 8)
    if next(_Reader(options).samples(records), None) is None:
        raise DataError(f"{options.path} has no records; give a file with at least one")


def read_instructions(options: InstructionOptions) -> Instructions:
    """All samples in the order of the files.

    Raises:
        DataError: With file and line, if a record is malformed; if files or tokenizer are missing, or no sample is
            left.
    """
    reader, files, limit = _Reader(options), record_files(options.path), options.seq_length
    # Bytes grow in place; a list of a million small arrays would take more memory than what is in them.
    tokens, is_answer, lengths = bytearray(), bytearray(), array("q")
    num_truncated = left_out = 0
    # A short file is read before anybody wonders.
    with progress_bar(files, "Tokenizing instructions", delay=3) as bar:
        for ids, learned in reader.samples(read_records(files, bar.update)):
            num_truncated += len(ids) > limit
            if not learned[:limit].any():
                left_out += 1
                continue
            tokens += ids[:limit].tobytes()
            is_answer += learned[:limit].tobytes()
            lengths.append(min(limit, len(ids)))
    if not lengths:
        raise DataError(
            f"seq_length={limit} leaves nothing of the answers of the {left_out} samples of {options.path}; raise it,"
            " or give others"
        )
    if num_truncated:
        _log.warning(
            "%d of %d samples of %s have more than seq_length=%d tokens: %d lost their end, and %d are left out, as"
            " nothing of their answers was left. Raise seq_length to keep them whole.",
            *(num_truncated, len(lengths) + left_out, options.path, limit, num_truncated - left_out, left_out),
        )
    return Instructions(
        tokens=np.frombuffer(tokens, dtype=np.int32),
        is_answer=np.frombuffer(is_answer, dtype=np.bool_),
        starts=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        padding_token=np.array(reader.padding_token),
    )


# ---- records to tokens ----------------------------------------------------------------------------------------------


_Rendered: TypeAlias = tuple[str, list[Span], bool]
"""A record as text; what of it is to be learned, in order, apart from each other; and whether a chat template wrote it,
so that the text has all special tokens that it shall have."""


class _Reader:
    """Turns records into tokens, of which those of the answers are learned."""

    def __init__(self, options: InstructionOptions) -> None:
        self._options = options
        self._tokenizer = tokenizer = load_tokenizer(options.tokenizer)
        if not tokenizer.is_fast:
            raise DataError(f"tokenizer={options.tokenizer}: expected one with tokenizer.json, got {tokenizer!r:.40}")
        self.padding_token: int = next(t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if t is not None)

    def samples(self, records: Iterator[tuple[str, Message]]) -> Iterator[TokenizedSample]:
        """The tokens of each record, or of each answer in it.

        Raises:
            DataError: With the place, if a record is malformed, or the chat template cannot render it or hides its
                answers.
        """
        while batch := list(islice(records, _BATCH)):
            rendered = [(place, each) for place, record in batch for each in self._render(record, place)]
            samples = self._tokenize([each for _, each in rendered])
            for (place, _), sample in zip(rendered, samples, strict=True):
                if not sample[1].any():
                    raise DataError(f"{place} has an answer without a token to learn; remove or complete it")
                yield sample

    def _render(self, record: Message, place: str) -> list[_Rendered]:
        prompt, completion, messages = record.get("prompt"), record.get("completion"), record.get("messages")
        if "messages" not in record and isinstance(prompt, str) and isinstance(completion, str):
            if not completion.strip():
                raise DataError(f"{place} has an empty 'completion', so there is nothing to learn; complete it")
            if self._tokenizer.eos_token_id is None:
                raise DataError(f"{place}: expected a tokenizer with an eos_token, which ends a completion, got none")
            prompt += self._options.separator
            return [(prompt + completion, [(len(prompt), len(prompt + completion))], False)]
        num_prompt = 0
        if "messages" not in record and isinstance(prompt, list) and isinstance(completion, list):
            messages, num_prompt = prompt + completion, len(prompt)
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise DataError(
                f"{place} must have a 'prompt' and a 'completion', two strings or two lists of messages, or 'messages':"
                f' [{{"role": "user", "content": "..."}}, ...], and is {reprlib.repr(record)}; write it so'
            )
        turns = [i for i, message in enumerate(messages) if message["role"] == _ASSISTANT and i >= num_prompt]
        if not turns or not all(_says_something(messages[turn]) for turn in turns):
            roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in messages))
            raise DataError(
                f"{place} has no answer, or an empty one: its roles are {roles}, and what the role 'assistant' says is"
                " learned; complete or remove its turns, or rename the role"
            )
        tools = record.get("tools")
        if self._options.answers == "all":
            return [self._chat(messages, turns, tools, place)]
        turns = turns[-1:] if self._options.answers == "last" else turns
        return [self._chat(messages[: turn + 1], [turn], tools, place) for turn in turns]

    def _chat(self, messages: list[Message], turns: list[int], tools: Any, place: str) -> _Rendered:
        """A conversation, with the answers that the template marks, or else what it writes after asking for them."""
        text, marks = self._apply_template(messages, tools, place)
        # Many templates pass over roles that they do not know, and over tools, without a word.
        calls = (call for message in messages for call in message.get("tool_calls") or ())
        said = [(f"the tool {name!r}", name) for name in map(_function_name, (*(tools or ()), *calls))]
        for message in messages:
            content, role = message.get("content"), message["role"]
            if role not in _REWRITTEN_ROLES and isinstance(content, str):
                said.append((f"what the role {role!r} says", content.strip()))
        for what, part in said:
            if part not in text:
                raise DataError(f"{place}: the chat template leaves out {what}; use another")
        if marks is not None:
            before = self._apply_template(messages[: turns[0]], tools, place)[1] if turns[0] else None
            return text, marks[len(before or ()) :], True
        answers = []
        for turn in turns:
            begin = self._apply_template(messages[:turn], tools, place, asks=True)[0] if turn else None
            end = self._apply_template(messages[: turn + 1], tools, place)[0]
            if begin is None or not (text.startswith(end) and end.startswith(begin)):
                raise DataError(
                    f"{place}: the answer in message {turn + 1} cannot be found: nothing comes before it, or the chat"
                    " template writes the beginning of a conversation in another way than within the whole; put"
                    " {% generation %} and {% endgeneration %} around the answers in the template, or set answers=each"
                )
            answers.append((len(begin), len(end)))
        return text, answers, True

    def _apply_template(
        self, messages: list[Message], tools: Any, place: str, asks: bool = False
    ) -> tuple[str, list[Span] | None]:
        """Text, and the characters that the template's ``generation`` blocks wrote; None if it has no such blocks.

        Not by ``apply_chat_template(return_assistant_tokens_mask=True)``: where an answer begins or ends with a space
        that the tokenizer does not count as part of a token, its mask is empty or goes on to the end
        (transformers 5.23, tokenization_utils_base.py:apply_chat_template).
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        # As apply_chat_template does it: many templates cannot read a key without a value.
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            template = self._tokenizer.get_chat_template(None, tools)
            has_marks = bool(_GENERATION.search(template))
            texts, marks = render_jinja_template(
                conversations=[present],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=has_marks,
                add_generation_prompt=asks,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # of any kind: what the template does with the conversation decides
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"{place}: the tokenizer has no chat template, or it does not take a conversation of {roles} ({error});"
                " correct the conversation, or use the tokenizer of a chat model, or save a template as"
                " chat_template.jinja in its folder"
            ) from error
        return texts[0], [(begin, end) for begin, end in marks[0]] if has_marks else None

    def _tokenize(self, records: Sequence[_Rendered]) -> Iterator[TokenizedSample]:
        """Each text's tokens; learned are those with a character of an answer, and the end of a completion.

        The whole text is tokenized at once, as the model will meet it: a token may stand for the last character of a
        question and the first of its answer, and is then learned. A prompt and completion get the special tokens that
        the tokenizer puts around a text, and the end-of-sequence token if that is not among them.
        """
        for is_chat, group in groupby(records, key=lambda record: record[2]):
            same = list(group)
            encoded = self._tokenizer(
                [replace_surrogates(text) for text, _, _ in same],
                add_special_tokens=not is_chat,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            found = zip(same, encoded["input_ids"], encoded["offset_mapping"], strict=True)
            for (_, answers, _), ids, offsets in found:
                tokens = np.array(ids, dtype=np.int32)
                is_answer = _lies_in(np.array(offsets, dtype=np.int64).reshape(-1, 2), answers)
                if not is_chat:
                    eos = self._tokenizer.eos_token_id
                    if len(tokens) == 0 or tokens[-1] != eos:
                        tokens, is_answer = np.append(tokens, np.int32(eos)), np.append(is_answer, False)
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
    """Of a tool or a call, as it is or under ``function``; nothing where neither is there."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _says_something(message: Message) -> bool:
    content = message.get("content")
    return bool((content.strip() if isinstance(content, str) else content) or message.get("tool_calls"))


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
    found: list[int] = []  # the row of each, the longest first
    with_room: defaultdict[int, deque[int]] = defaultdict(deque)  # rows by the room that they have left
    rooms: list[int] = []  # what there is of it, ascending
    num_rows = 0
    for length in np.sort(lengths)[::-1].tolist():
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, room, num_rows = num_rows, capacity, num_rows + 1
        else:
            room = rooms[place]
            row = with_room[room].popleft()
            if not with_room[room]:
                del rooms[place]
        found.append(row)
        if not with_room[room - length]:
            insort(rooms, room - length)
        with_room[room - length].append(row)
    row_of = generator.permutation(num_rows)[found]
    starts = np.concatenate([[0], np.bincount(row_of, minlength=num_rows).cumsum()]).astype(np.int64)
    return by_length[np.argsort(row_of, kind="stable")], starts


# ---- rows -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class InstructionSamples:
    """Rows of samples for ``GPTTrainStep``; one pass over them."""

    instructions: Instructions
    """The samples."""
    seq_length: int
    """Tokens of a row; no sample is longer."""
    packing_seed: int | None = None
    """Let short samples share a row, without seeing each other, in an order drawn from this seed."""
    pad_to_multiple_of: int | None = None
    """Pad to the longest row of the batch, rounded up to this; None: to ``seq_length``."""

    def __post_init__(self) -> None:
        lengths = self.instructions.lengths
        self._members, self._starts = np.arange(len(lengths)), np.arange(len(lengths) + 1)
        if self.packing_seed is not None:
            self._members, self._starts = pack(lengths, self.seq_length, self.packing_seed)

    @cached_property
    def fingerprint(self) -> str:
        """Of samples and packing; not of padding, which changes nothing that is learned."""
        source = self.instructions
        digest = hashlib.blake2b(repr((self.seq_length, int(source.padding_token))).encode(), digest_size=8)
        begin, end = source.starts[0], source.starts[-1]
        for part in (source.starts - begin, source.tokens[begin:end], source.is_answer[begin:end]):
            digest.update(np.ascontiguousarray(part).data)
        return f"{digest.hexdigest()}-{'alone' if self.packing_seed is None else f'packed-{self.packing_seed}'}"

    def __len__(self) -> int:
        """Rows."""
        return len(self._starts) - 1

    def rows(self, indices: Sequence[int]) -> Rows:
        """Rows as Hugging Face names them, [rows, L] int64 each, padded on the right.

        ``input_ids``; ``labels``, -100 outside of answers and at the first token of each sample; ``attention_mask``,
        the number of the sample in its row from 1, and 0 for padding; ``position_ids``, from 0 in each sample.
        """
        import torch

        source = self.instructions
        members = [self._members[self._starts[index] : self._starts[index + 1]] for index in indices]
        length = self.seq_length
        if self.pad_to_multiple_of is not None:
            longest = max(int(source.lengths[row].sum()) for row in members)
            length = -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of
        fillings = {"input_ids": source.padding_token, "labels": _NO_TARGET, "attention_mask": 0, "position_ids": 0}
        columns = {name: np.full((len(members), length), filling, np.int64) for name, filling in fillings.items()}
        for row, samples in enumerate(members):
            end = 0
            for number, sample in enumerate(samples, 1):
                tokens, is_answer = source.sample(sample)
                begin, end = end, end + len(tokens)
                values: list[Any] = [tokens, np.where(is_answer, tokens, _NO_TARGET), number, np.arange(len(tokens))]
                for column, value in zip(columns.values(), values, strict=True):
                    column[row, begin:end] = value
        return {name: torch.from_numpy(column) for name, column in columns.items()}


_LAYOUT = 1
"""Of the files in a folder, and of the rules by which they come about; a change makes the old folders unknown."""


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
    tokenizer = load_tokenizer(options.tokenizer)
    files = [(os.path.realpath(file), os.stat(file)) for file in record_files(options.path)]
    identity = (
        _LAYOUT,
        [(path, stat.st_size, stat.st_mtime_ns) for path, stat in files],
        (options.seq_length, options.answers, options.separator),
        (tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else "", tokenizer.chat_template),
        sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items()),
    )
    name = f"instructions-{hashlib.sha256(repr(identity).encode()).hexdigest()[:24]}"
    folder = os.path.join(os.path.abspath(index_cache), name)

    def write(staging: str) -> str:
        read_instructions(options).save(staging)
        return "as tokenized"

    build_once(folder, write, options.path)
    return Instructions.load(folder)
