"""Records of instruction tuning as tokens with their answers.

A record is a prompt and a completion, or a conversation rendered by the tokenizer's chat template.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.encoding import replace_surrogates
from lightning_megatron.data.input_files import find_files, format_of
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.data.tokenizer_files import panics_as_errors
from lightning_megatron.errors import DataError

Answers: TypeAlias = Literal["all", "each", "last"]
"""Answers of a conversation to learn: all in one sample, each in a sample that ends with it, or the last one."""
Message: TypeAlias = dict[str, Any]
Span: TypeAlias = tuple[int, int]
"""First character and end (exclusive)."""
TokenizedSample: TypeAlias = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""Tokens of a sample, and whether each is a target of the loss."""
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


_Rendered: TypeAlias = tuple[str, list[Span], bool]
"""A record as text; the spans of its answers, in order and disjoint; and whether a chat template rendered it, so that
the text already has all special tokens."""


class RecordTokenizer:
    """Tokenizes records and marks the tokens of their answers."""

    def __init__(self, options: InstructionOptions) -> None:
        self._options = options
        self._tokenizer = tokenizer = load_tokenizer(options.tokenizer)
        if not tokenizer.is_fast:
            raise DataError(
                f"tokenizer={options.tokenizer}: expected one with tokenizer.json, got {tokenizer!r:.40}"
            )
        self.padding_token: int = 0
        for token in (tokenizer.eos_token_id, tokenizer.pad_token_id):
            if token is not None:
                self.padding_token = token

    def samples(self, records: Iterator[tuple[str, Message]]) -> Iterator[TokenizedSample]:
        """Yield the samples of each record: one, or one per answer.

        Raises:
            DataError: With the location, if a record is malformed, or the chat template cannot render it or hides its
                answers.
        """
        while batch := list(islice(records, _BATCH)):
            locations = []
            rendered = []
            for location, record in batch:
                items = self._render(record, location)
                locations += [location] * len(items)
                rendered += items
            for location, sample in zip(locations, self._tokenize(rendered), strict=True):
                _, is_answer = sample
                if not is_answer.any():
                    raise DataError(
                        f"{location} has an answer without a token to learn; remove or complete it"
                    )
                yield sample

    def _render(self, record: Message, location: str) -> list[_Rendered]:
        messages = record.get("messages")
        num_prompt = 0
        if "messages" not in record:
            prompt = record.get("prompt")
            completion = record.get("completion")
            if isinstance(prompt, str) and isinstance(completion, str):
                return [self._render_text(prompt, completion, location)]
            if isinstance(prompt, list) and isinstance(completion, list):
                messages = prompt + completion
                num_prompt = len(prompt)
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise DataError(
                f"{location}: expected 'prompt' and 'completion', two strings or two lists of messages, or 'messages':"
                f' [{{"role": "user", "content": "..."}}, ...], got {reprlib.repr(record)}; correct it'
            )
        turns = [
            turn
            for turn in range(num_prompt, len(messages))
            if messages[turn]["role"] == _ASSISTANT
        ]
        if not turns or not all(_has_content(messages[turn]) for turn in turns):
            roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in messages))
            raise DataError(
                f"{location} has no answer, or an empty one: its roles are {roles}, and turns of the role 'assistant'"
                " are learned; complete or remove them, or rename the role"
            )
        tools = record.get("tools")
        if self._options.answers == "last":
            turns = turns[-1:]
        _check_nothing_ignored(record, messages, turns, location)
        if self._options.answers == "all":
            return [self._render_chat(messages, turns, tools, location)]
        rendered = []
        for turn in turns:
            conversation = messages[: turn + 1]
            rendered.append(self._render_chat(conversation, [turn], tools, location))
        return rendered

    def _render_text(self, prompt: str, completion: str, location: str) -> _Rendered:
        if not completion.strip():
            raise DataError(
                f"{location} has an empty 'completion', so there is nothing to learn; complete it"
            )
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                f"{location}: expected a tokenizer with an eos_token to end completions, got none"
            )
        begin = len(prompt) + len(self._options.separator)
        text = prompt + self._options.separator + completion
        return text, [(begin, len(text))], False

    def _render_chat(
        self,
        messages: list[Message],
        turns: list[int],
        tools: Any,
        location: str,
    ) -> _Rendered:
        """Render a conversation; its answers are what the template marks, or else what follows a generation prompt."""
        text, marks = self._apply_template(messages, tools, location)
        _check_nothing_left_out(text, messages, tools, location)
        if marks is not None:
            before = None
            if turns[0]:
                _, before = self._apply_template(
                    messages[: turns[0]],
                    tools,
                    location,
                )
            return text, marks[len(before or ()) :], True
        answers = []
        for turn in turns:
            end, _ = self._apply_template(messages[: turn + 1], tools, location)
            begin = None
            if turn:
                begin, _ = self._apply_template(
                    messages[:turn],
                    tools,
                    location,
                    generation_prompt=True,
                )
            if begin is None or not (text.startswith(end) and end.startswith(begin)):
                raise DataError(
                    f"{location}: the answer in message {turn + 1} cannot be found: nothing comes before it, or the"
                    " chat template renders the beginning of a conversation differently than within the whole; put"
                    " {% generation %} and {% endgeneration %} around the answers in the template, or set answers=each"
                )
            answers.append((len(begin), len(end)))
        return text, answers, True

    def _apply_template(
        self,
        messages: list[Message],
        tools: Any,
        location: str,
        generation_prompt: bool = False,
    ) -> tuple[str, list[Span] | None]:
        """Rendered text, and the spans that the template's ``generation`` blocks wrote; None if it has no such blocks.

        Not by ``apply_chat_template(return_assistant_tokens_mask=True)``: where an answer begins or ends with a space
        that the tokenizer does not count as part of a token, its mask is empty or extends to the end
        (transformers 5.23, tokenization_utils_base.py:apply_chat_template).
        """
        # transformers' import takes seconds.
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
        if not has_marks:
            return texts[0], None
        return texts[0], [(begin, end) for begin, end in marks[0]]

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
                spans = np.array(offsets, dtype=np.int64).reshape(-1, 2)
                is_answer = _overlaps(spans, answers)
                if not is_chat:
                    eos = self._tokenizer.eos_token_id
                    if len(tokens) == 0 or tokens[-1] != eos:
                        tokens = np.append(tokens, np.int32(eos))
                        is_answer = np.append(is_answer, False)
                    is_answer[-1] = True
                is_answer[:1] = False
                yield tokens, is_answer


def _check_nothing_ignored(
    record: Message, messages: list[Message], turns: list[int], location: str
) -> None:
    """Raise if a record says more of how to learn it than is read here, in the keys of OpenAI and TRL.

    Args:
        record: The record.
        messages: Its conversation.
        turns: Indices of the answers to learn.
        location: Of the record.

    Raises:
        DataError: With the key, the value and the fix.
    """
    options = record.get("chat_template_kwargs")
    if options:
        raise DataError(
            f"{location}: chat_template_kwargs={reprlib.repr(options)}: expected none, since all records are rendered "
            "alike; write them into the template, or give prompt and completion as rendered texts"
        )
    for turn in turns:
        weight = messages[turn].get("weight")
        if weight not in (None, 1):
            raise DataError(
                f"{location}: weight={weight!r} of message {turn + 1}: expected 1, as all answers are learned alike; "
                "leave the key out, or end the conversation with the answer to learn and set answers=last"
            )


def _check_nothing_left_out(
    text: str,
    messages: list[Message],
    tools: Any,
    location: str,
) -> None:
    """Raise if a template has left something out: many ignore tools, and roles that they do not know."""
    expected = []
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    for tool in (*(tools or ()), *calls):
        name = _function_name(tool)
        expected.append((f"the tool {name!r}", name))
    for message in messages:
        content = message.get("content")
        role = message["role"]
        if role not in _REWRITTEN_ROLES and isinstance(content, str):
            expected.append((f"a message of the role {role!r}", content.strip()))
    for subject, content in expected:
        if content not in text:
            raise DataError(f"{location}: the chat template leaves out {subject}; use another")


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | list | None)
        and isinstance(message.get("tool_calls") or [], list)
    )


def _function_name(tool: Any) -> str:
    """Name of a tool or a tool call, at its top level or under ``function``; empty if there is none."""
    if not isinstance(tool, dict):
        return ""
    function = tool.get("function", tool)
    if not isinstance(function, dict):
        return ""
    return str(function.get("name", ""))


def _has_content(message: Message) -> bool:
    content = message.get("content")
    if isinstance(content, str):
        content = content.strip()
    return bool(content or message.get("tool_calls"))


def _overlaps(offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Whether each token has a character within a span: [tokens].

    Some tokenizers do not count spaces as part of a token: one of only spaces is then empty and lies after them. A
    special token that the tokenizer adds is empty and lies at 0.
    """
    begins = offsets[:, 0]
    ends = offsets[:, 1]
    inside = np.zeros(len(offsets), dtype=np.bool_)
    for first, last in spans:
        inside |= (ends > first) & ((begins < last) | (ends <= last))
    return inside
