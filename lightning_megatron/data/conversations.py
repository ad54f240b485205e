"""Text of prompts, completions and chats, and which of its tokens are the answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.documents import without_surrogates
from lightning_megatron.errors import DataError

Answers: TypeAlias = Literal["all", "each", "last"]
"""What of a conversation is learned: all answers at once, each in a sample that ends with it, or the last one."""

Message: TypeAlias = dict[str, Any]
Span: TypeAlias = tuple[int, int]
"""Characters from the first to before the second."""

_ASSISTANT = "assistant"
# A template may take apart or leave out what these say: reasoning of earlier turns, results as JSON.
_REWRITTEN_ROLES = (_ASSISTANT, "tool")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RenderedRecord(NamedTuple):
    """A record as text."""

    text: str
    """All of it."""
    answers: list[Span]
    """What is to be learned; in order, apart from each other."""
    is_chat: bool
    """Whether a chat template wrote it: then the text has all special tokens that it shall have."""


class RecordRenderer:
    """Turns records into text.

    Args:
        tokenizer: A transformers tokenizer.
        answers: What of a conversation is learned.
        separator: Text between a prompt and a completion that are strings.
    """

    def __init__(self, tokenizer: Any, *, answers: Answers, separator: str) -> None:
        self._tokenizer = tokenizer
        self._answers = answers
        self._separator = separator

    def render(self, record: dict[str, Any], place: str) -> list[RenderedRecord]:
        """The text of ``record`` and where its answers are, or one text for each answer.

        Args:
            record: With ``prompt`` and ``completion``, or ``messages``; ``tools`` go to the chat template.
            place: File and line, for error messages.

        Raises:
            DataError: If the record is malformed, or the chat template cannot render it or hides its answers.
        """
        if "messages" in record:
            return self._chat(record["messages"], 0, record.get("tools"), place)
        if "prompt" not in record or "completion" not in record:
            raise DataError(
                f"{place} has the keys {', '.join(map(repr, record)) or 'none'}, neither 'prompt' and 'completion' nor"
                " 'messages'; name them so"
            )
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            return self._chat(prompt + completion, len(prompt), record.get("tools"), place)
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            raise DataError(
                f"{place} has a 'prompt' of type {type(prompt).__name__} and a 'completion' of type"
                f" {type(completion).__name__}; give two strings, or two lists of messages"
            )
        return [self._plain(prompt + self._separator, completion, place)]

    def _plain(self, prompt: str, completion: str, place: str) -> RenderedRecord:
        if not completion.strip():
            raise DataError(f"{place} has an empty 'completion', so there is nothing to learn; remove or complete it")
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                f"{place} has a prompt and a completion, which an end-of-sequence token must end, and the tokenizer"
                " has none; set eos_token in its tokenizer_config.json"
            )
        text = prompt + completion
        return RenderedRecord(text=text, answers=[(len(prompt), len(text))], is_chat=False)

    def _chat(self, messages: Any, num_prompt: int, tools: Any, place: str) -> list[RenderedRecord]:
        _check_messages(messages, place)
        turns = [i for i, message in enumerate(messages) if message["role"] == _ASSISTANT and i >= num_prompt]
        if not turns:
            roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in messages))
            raise DataError(
                f"{place} has no answer: its roles are {roles}, and only what the role 'assistant' says is learned;"
                " add its turn, or rename the role"
            )
        if self._answers == "all":
            return [self._conversation(messages, turns, tools, place)]
        if self._answers == "last":
            turns = turns[-1:]
        return [self._conversation(messages[: turn + 1], [turn], tools, place) for turn in turns]

    def _conversation(self, messages: list[Message], turns: list[int], tools: Any, place: str) -> RenderedRecord:
        for turn in turns:
            if not _says_something(messages[turn]):
                raise DataError(
                    f"{place} has an empty answer in message {turn + 1}; remove the conversation or complete it"
                )
        chat = _Chat(self._tokenizer, messages, tools, place)
        _check_nothing_is_left_out(chat)
        answers = chat.marked_answers(turns[0]) if chat.template_marks_answers else list(map(chat.answer, turns))
        return RenderedRecord(text=chat.text, answers=answers, is_chat=True)


class _Chat:
    """One conversation and the tokenizer's chat template."""

    def __init__(self, tokenizer: Any, messages: list[Message], tools: Any, place: str) -> None:
        self._tokenizer = tokenizer
        self.messages = messages
        self._tools = tools
        self.place = place
        try:
            self._template: str = tokenizer.get_chat_template(None, tools)
        except ValueError as error:
            raise DataError(
                f"{place} has messages, and the tokenizer has no chat template for them; use the tokenizer of a chat"
                " model, or save a template as chat_template.jinja in its folder"
            ) from error
        self.template_marks_answers = bool(_GENERATION.search(self._template))
        self.text, self._marks = self._render(messages)

    def marked_answers(self, first: int) -> list[Span]:
        """What the template's ``generation`` blocks wrote for message ``first`` and later ones.

        Not from ``apply_chat_template(return_assistant_tokens_mask=True)``: where an answer begins or ends with a
        space that the tokenizer does not count as part of a token, its mask is empty or goes on to the end
        (transformers 5.23, tokenization_utils_base.py:apply_chat_template).
        """
        num_before = len(self._render(self.messages[:first])[1]) if first else 0
        return self._marks[num_before:]

    def answer(self, turn: int) -> Span:
        """What the template writes for message ``turn`` after the words that ask a model for it.

        Raises:
            DataError: If nothing asks, or the conversation up to there is not rendered as the beginning of the whole.
        """
        if turn == 0:
            raise DataError(
                f"{self.place} begins with the assistant's turn, which answers nothing; remove it, or put what it"
                " answers before it"
            )
        begin = self._render(self.messages[:turn], add_generation_prompt=True)[0]
        end = self._render(self.messages[: turn + 1])[0]
        if not (self.text.startswith(end) and end.startswith(begin)):
            fix = "put {% generation %} and {% endgeneration %} around the answers in the template"
            if turn < len(self.messages) - 1:
                fix += ", or set answers=each, which makes a sample for each"
            raise DataError(
                f"{self.place}: the chat template writes the beginning of a conversation, up to message {turn + 1},"
                f" in another way than within the whole, so that its answer cannot be found; {fix}"
            )
        return len(begin), len(end)

    def _render(self, messages: list[Message], add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        """Text, and the characters that ``generation`` blocks wrote."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        # As apply_chat_template does it: many templates cannot read a key without a value.
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            texts, marks = render_jinja_template(
                conversations=[present],
                tools=self._tools,
                chat_template=self._template,
                return_assistant_tokens_mask=self.template_marks_answers,
                add_generation_prompt=add_generation_prompt,
                **self._tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"{self.place}: the chat template does not take a conversation of {roles} ({error}); correct the"
                " conversation or use another template"
            ) from error
        return texts[0], [(begin, end) for begin, end in marks[0]] if marks else []


def _check_messages(messages: Any, place: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{place} has no list of messages; write [{{"role": "user", "content": "..."}}, ...]')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            has = ", ".join(map(repr, message)) if isinstance(message, dict) else f"the type {type(message).__name__}"
            raise DataError(
                f"{place}: message {number} has {has or 'nothing'} instead of 'role' and 'content'; write"
                ' {"role": "user", "content": "..."}'
            )
        if not isinstance(message.get("content"), str | list | None):
            raise DataError(
                f"{place}: message {number} has a 'content' of type {type(message['content']).__name__}; give a string"
            )


def _says_something(message: Message) -> bool:
    content = message.get("content")
    if isinstance(content, str):
        content = content.strip()
    return bool(content or message.get("tool_calls"))


def _check_nothing_is_left_out(chat: _Chat) -> None:
    """Many templates pass over roles that they do not know, without a word."""
    for message in chat.messages:
        content = message.get("content")
        if message["role"] not in _REWRITTEN_ROLES and isinstance(content, str) and content.strip() not in chat.text:
            raise DataError(
                f"{chat.place}: the chat template leaves out what the role {message['role']!r} says; use a role that"
                " it knows, or another template"
            )


TokenizedSample: TypeAlias = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""Tokens of a sample, and which of them are learned."""


def tokenize(tokenizer: Any, records: Sequence[RenderedRecord]) -> Iterator[TokenizedSample]:
    """Each record's tokens, and which are learned: those with a character of an answer, and the end of a completion.

    The whole text is tokenized at once, as the model will meet it: a token may stand for the last character of a
    question and the first of its answer, and is then learned. A prompt and completion get the special tokens that the
    tokenizer puts around a text, and the end-of-sequence token if that is not among them.

    Args:
        tokenizer: A fast transformers tokenizer, with an end-of-sequence token unless all records are chats.
        records: Some.
    """
    for is_chat, group in groupby(records, key=lambda record: record.is_chat):
        same = list(group)
        encoded = tokenizer(
            [without_surrogates(record.text) for record in same],
            add_special_tokens=not is_chat,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        for record, ids, offsets in zip(same, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            tokens = np.array(ids, dtype=np.int32)
            is_answer = _lies_in(np.array(offsets, dtype=np.int64).reshape(-1, 2), record.answers)
            if not is_chat:
                tokens, is_answer = _with_end(tokens, is_answer, tokenizer.eos_token_id)
            is_answer[:1] = False
            yield tokens, is_answer


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


def _with_end(tokens: NDArray[np.int32], is_answer: NDArray[np.bool_], eos: int) -> TokenizedSample:
    if len(tokens) == 0 or tokens[-1] != eos:
        tokens, is_answer = np.append(tokens, np.int32(eos)), np.append(is_answer, False)
    is_answer[-1] = True
    return tokens, is_answer
