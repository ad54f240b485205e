"""Exactly the answers are learned, whatever tokenizer and template; rows are few; tokens are kept for the next run."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data import instructions as records
from lightning_megatron.data.instructions import (
    InstructionOptions,
    Instructions,
    InstructionSamples,
    cached_instructions,
    pack,
    read_instructions,
)
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.errors import DataError
from tests.tokenizers import END, FORGETFUL, MARKED, REASONING, STRICT, UNMARKED, make_tokenizer

QUESTIONS = [{"prompt": "is it?", "completion": " yes"}, {"prompt": "the question", "completion": "the answer is: no!"}]
CHAT = [
    {"role": "system", "content": "the answer is yes"},
    {"role": "user", "content": "is it?"},
    {"role": "assistant", "content": "yes, it is"},
    {"role": "user", "content": "was it?"},
    {"role": "assistant", "content": "the answer was: no ünïcödé 🙂"},
]
USER = CHAT[1]
TOOL = {"type": "function", "function": {"name": "weather"}}
CALL = {"role": "assistant", "content": "", "tool_calls": [TOOL]}


def _write(folder: Path, *records: Any) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def _read(
    folder: Path,
    *records: Any,
    template: str | None = None,
    trim_offsets: bool = False,
    bos: bool = False,
    **options: Any,
) -> tuple[Instructions, Any]:
    """The samples of ``records``, and the tokenizer that made them."""
    tokenizer = make_tokenizer(folder / "tokenizer", template, trim_offsets=trim_offsets, bos=bos)
    given = {"path": _write(folder, *records), "tokenizer": tokenizer, "seq_length": 200, **options}
    return read_instructions(InstructionOptions(**given)), load_tokenizer(tokenizer)


def _parts(instructions: Instructions, tokenizer: Any, index: int = 0) -> list[tuple[bool, str]]:
    """Text of each run of tokens that are learned, or not."""
    tokens, is_answer = instructions.sample(index)
    cuts = np.flatnonzero(np.diff(is_answer)) + 1
    parts = zip(np.split(is_answer, cuts), np.split(tokens, cuts), strict=True)
    return [(bool(learned[0]), tokenizer.decode(part, clean_up_tokenization_spaces=False)) for learned, part in parts]


def _learned(*read: Any) -> list[str]:
    return [text for is_learned, text in _parts(*read) if is_learned]


@pytest.mark.parametrize(("trim_offsets", "bos"), [(False, False), (True, False), (True, True)])
def test_a_completion_and_its_end_are_learned(tmp_path: Path, trim_offsets: bool, bos: bool) -> None:
    kind: dict[str, Any] = {"trim_offsets": trim_offsets, "bos": bos}
    got, tokenizer = _read(tmp_path, *QUESTIONS, **kind)
    begin = "<s>" if bos else ""
    assert _parts(got, tokenizer) == [(False, f"{begin}is it?"), (True, f" yes{END}")]
    # The tokens are those of the whole text, as transformers makes them.
    whole = tokenizer("the questionthe answer is: no!")["input_ids"]
    assert got.sample(1)[0].tolist() == [*whole, tokenizer.eos_token_id]
    parted = _read(tmp_path, *QUESTIONS, separator="\n", **kind)
    assert _parts(*parted, 1) == [(False, f"{begin}the question\n"), (True, f"the answer is: no!{END}")]


def test_a_token_of_question_and_answer_is_learned_and_an_end_is_not_doubled(tmp_path: Path) -> None:
    got, tokenizer = _read(tmp_path, {"prompt": "is t", "completion": f"he{END}"})
    (joint,) = tokenizer(" the")["input_ids"]
    assert got.sample(0)[0][-2:].tolist() == [joint, tokenizer.eos_token_id]
    assert _parts(got, tokenizer) == [(False, "is"), (True, f" the{END}")]


@pytest.mark.parametrize("answers", ["all", "each", "last"])
@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "unmarked"])
def test_the_assistants_turns_are_learned(tmp_path: Path, template: str, answers: str) -> None:
    got, tokenizer = _read(tmp_path, {"messages": [*CHAT, USER]}, template=template, answers=answers)
    # What follows the last word of a turn belongs to it where the template does not say otherwise.
    line = "" if template == MARKED else "\n"
    turns = [f"yes, it is{END}{line}", f"the answer was: no ünïcödé 🙂{END}{line}"]
    samples = {"all": [([*CHAT, USER], turns)], "each": [(CHAT[:3], turns[:1]), (CHAT, turns[1:])]}
    samples["last"] = samples["each"][1:]
    assert len(got) == len(samples[answers])
    for index, (messages, learned) in enumerate(samples[answers]):
        assert _learned(got, tokenizer, index) == learned
        asked = {"return_assistant_tokens_mask": template == MARKED, "return_dict": True}
        whole = tokenizer.apply_chat_template(messages, **asked)
        assert got.sample(index)[0].tolist() == whole["input_ids"]
        if template == MARKED and answers == "all":
            assert got.sample(index)[1].tolist() == whole["assistant_masks"]


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "unmarked"])
@pytest.mark.parametrize("end", [END, " "])
def test_answers_with_spaces_at_their_ends_are_learned_by_any_tokenizer(
    tmp_path: Path, template: str, end: str
) -> None:
    """Where spaces are no part of a token's characters, transformers' own mask is empty or does not end."""
    template = template.replace("{{ '\\n' }}", "").replace(END, end)
    chat = [USER, {"role": "assistant", "content": " yes "}, USER, {"role": "assistant", "content": "no"}]
    got = _read(tmp_path, {"messages": chat}, template=template, trim_offsets=True)
    assert _learned(*got) == [f" yes {end}", f"no{end}"]


def test_each_answer_is_found_where_a_template_rewrites_the_earlier_ones(tmp_path: Path) -> None:
    got = _read(tmp_path, {"messages": CHAT[1:], "tools": [TOOL]}, template=REASONING, answers="each", seq_length=300)
    learned = [text for index in (0, 1) for text in _learned(*got, index)]
    assert learned == [f"<think></think>{CHAT[turn]['content']}{END}\n" for turn in (2, 4)]


def test_long_samples_lose_their_end_and_those_without_an_answer_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long_answer = {"prompt": "is it?", "completion": "zqzqzqzqzqzq"}
    long_question = {"prompt": "zqzqzqzqzqzq", "completion": "yes"}
    with caplog.at_level(logging.WARNING):
        got, tokenizer = _read(tmp_path, QUESTIONS[0], long_answer, long_question, seq_length=8)
    assert _learned(got, tokenizer, 1) == ["zqzqzqzq"[: sum(got.sample(1)[1])]]
    assert got.lengths.tolist()[1:] == [8]
    assert "2 of 3 samples" in caplog.text
    assert "1 lost their end, and 1 are left out" in caplog.text
    with pytest.raises(DataError, match="seq_length=12 leaves nothing of the answers of the 1 samples"):
        _read(tmp_path, long_question, seq_length=12)


# ---- rows -----------------------------------------------------------------------------------------------------------


def _instructions(*lengths: int) -> Instructions:
    """Tokens 1, 2, 3, ... through all samples; all but the first two of each are learned."""
    starts = np.cumsum([0, *lengths])
    positions = np.concatenate([np.arange(length) for length in lengths])
    tokens = np.arange(1, starts[-1] + 1, dtype=np.int32)
    return Instructions(tokens=tokens, is_answer=positions > 1, starts=starts, padding_token=np.array(99))


def test_a_row_holds_one_sample_and_padding_or_packed_samples() -> None:
    rows = InstructionSamples(_instructions(3, 5), 8, pad_to_multiple_of=2).rows([1, 0])
    assert {name: tensor.tolist() for name, tensor in rows.items()} == {
        "input_ids": [[4, 5, 6, 7, 8, 99], [1, 2, 3, 99, 99, 99]],
        "labels": [[-100, -100, 6, 7, 8, -100], [-100, -100, 3, -100, -100, -100]],
        "attention_mask": [[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 0, 0]],
    }
    assert all(tensor.dtype == torch.int64 for tensor in rows.values())
    fixed = InstructionSamples(_instructions(3, 5), 8)
    assert (len(fixed), fixed.rows([0])["input_ids"].shape) == (2, (1, 8))
    packed = InstructionSamples(_instructions(3, 5), 8, packing_seed=1234)
    assert len(packed) == 1
    assert {name: tensor.tolist() for name, tensor in packed.rows([0]).items()} == {
        "input_ids": [[4, 5, 6, 7, 8, 1, 2, 3]],
        "labels": [[-100, -100, 6, 7, 8, -100, -100, 3]],
        "attention_mask": [[1, 1, 1, 1, 1, 2, 2, 2]],
        "position_ids": [[0, 1, 2, 3, 4, 0, 1, 2]],
    }


# ---- wrong input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "template", "says"),
    [
        ({"question": "?", "answer": "yes"}, None, "expected 'prompt' and 'completion', .* got {'answer': 'yes'"),
        ({"prompt": "is it?", "completion": " "}, None, "an empty 'completion', so there is nothing to learn"),
        ({"messages": [{"from": "human", "value": "is it?"}]}, UNMARKED, "expected 'prompt' and"),
        ({"messages": [USER, {"role": "bot", "content": ""}]}, UNMARKED, "no answer, .* its roles are 'user', 'bot'"),
        ({"messages": [{"role": "assistant", "content": "yes"}]}, UNMARKED, "nothing comes before it"),
        ({"messages": CHAT}, STRICT, "does not take a conversation of system, user, .*Only user and assistant roles"),
        ({"messages": CHAT}, FORGETFUL, "leaves out a message of the role 'system'; use another"),
        ({"messages": [USER, CALL]}, UNMARKED, "the chat template leaves out the tool 'weather'; use another"),
        ({"messages": CHAT, "tools": [TOOL]}, UNMARKED, "the chat template leaves out the tool 'weather'; use another"),
        ({"messages": CHAT}, "{{ 1 // 0 }}", r"does not take a conversation of .* \(integer division"),
        ({"messages": CHAT}, REASONING, "the answer in message 3 cannot .* put {% generation %} .*, or set answers="),
        ({"messages": CHAT}, None, "the tokenizer has no chat template, .* use the tokenizer of a chat model"),
    ],
)
def test_a_record_that_is_malformed_or_that_the_template_hides_is_named_by_its_line(
    tmp_path: Path, record: dict[str, Any], template: str | None, says: str
) -> None:
    with pytest.raises(DataError, match=rf"data\.jsonl, line 2:? .*{says}"):
        _read(tmp_path, QUESTIONS[0], record, template=template)


# ---- packing and cache ----------------------------------------------------------------------------------------------

CAPACITY = 20


def _best_fit_decreasing(lengths: list[int]) -> list[list[int]]:
    """The lengths in each row, one sample at a time."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= CAPACITY]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return rows


@given(lengths=st.lists(st.integers(1, CAPACITY), max_size=60), seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_packed_rows_are_those_of_best_fit_decreasing(lengths: list[int], seed: int) -> None:
    members, starts = pack(np.array(lengths, dtype=np.int64), CAPACITY, seed)
    rows = [part.tolist() for part in np.split(members, starts[1:-1])][: len(starts) - 1]

    assert sorted(member for row in rows for member in row) == list(range(len(lengths)))
    # Which of several equally full rows comes first is free, and does not change the number of rows or their fill.
    fill = [sum(lengths[member] for member in row) for row in rows]
    assert sorted(fill) == sorted(map(sum, _best_fit_decreasing(lengths)))


def test_tokens_are_kept_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[InstructionOptions] = []

    def counted(options: InstructionOptions) -> Instructions:
        reads.append(options)
        return read_instructions(options)

    monkeypatch.setattr(records, "read_instructions", counted)
    tokenizer = make_tokenizer(tmp_path / "tokenizer", UNMARKED)
    options = InstructionOptions(path=_write(tmp_path, {"messages": CHAT}), tokenizer=tokenizer, seq_length=64)

    def fingerprint(changed: InstructionOptions) -> str:
        cached = cached_instructions(changed, str(tmp_path / "cache"))
        return InstructionSamples(cached, changed.seq_length).fingerprint

    first = fingerprint(options)
    assert [first, first] == [fingerprint(options), InstructionSamples(read_instructions(options), 64).fingerprint]
    assert len(reads) == 1
    assert fingerprint(replace(options, answers="last")) != first
    make_tokenizer(Path(options.tokenizer), MARKED)
    assert fingerprint(options) != first
    os.utime(options.path, ns=(1, 1))
    fingerprint(options)
    assert len(reads) == 4
