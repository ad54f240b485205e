"""Exactly the answers are learned, whatever tokenizer and template; rows are few; tokens are kept for the next run."""

from __future__ import annotations

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
from tests.unit.data.chat_tokenizer import (
    END,
    FORGETFUL,
    MARKED,
    REASONING,
    STRICT,
    UNMARKED,
    make_tokenizer,
)

QUESTIONS = [{"prompt": "is it?", "completion": " yes"}, {"prompt": "the question", "completion": "the answer is: no!"}]
CHAT = [
    {"role": "system", "content": "the answer is yes"},
    {"role": "user", "content": "is it?"},
    {"role": "assistant", "content": "yes, it is"},
    {"role": "user", "content": "was it?"},
    {"role": "assistant", "content": "the answer was: no ünïcödé 🙂"},
]
USER = CHAT[1]


def _write(folder: Path, *records: Any) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def _read(folder: Path, *records: Any, tokenizer: str, seq_length: int = 200, **options: Any) -> Instructions:
    path = _write(folder, *records)
    return read_instructions(InstructionOptions(path=path, tokenizer=tokenizer, seq_length=seq_length, **options))


def _parts(instructions: Instructions, tokenizer: str, index: int = 0) -> list[tuple[bool, str]]:
    """Text of each run of tokens that are learned, or not."""
    tokens, is_answer = instructions.sample(index)
    cuts = np.flatnonzero(np.diff(is_answer)) + 1
    decode = load_tokenizer(tokenizer).decode
    parts = zip(np.split(is_answer, cuts), np.split(tokens, cuts), strict=True)
    return [(bool(learned[0]), decode(part, clean_up_tokenization_spaces=False)) for learned, part in parts]


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("bos", [False, True])
def test_a_completion_and_its_end_are_learned(tmp_path: Path, trim_offsets: bool, bos: bool) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", trim_offsets=trim_offsets, bos=bos)
    got = _read(tmp_path, *QUESTIONS, tokenizer=tokenizer)
    begin = "<s>" if bos else ""
    assert _parts(got, tokenizer) == [(False, f"{begin}is it?"), (True, f" yes{END}")]
    # The tokens are those of the whole text, as transformers makes them.
    whole = load_tokenizer(tokenizer)("the questionthe answer is: no!")["input_ids"]
    assert got.sample(1)[0].tolist() == [*whole, load_tokenizer(tokenizer).eos_token_id]
    parted = _read(tmp_path, *QUESTIONS, tokenizer=tokenizer, separator="\n")
    assert _parts(parted, tokenizer, 1) == [(False, f"{begin}the question\n"), (True, f"the answer is: no!{END}")]


def test_a_token_of_question_and_answer_is_learned_and_an_end_is_not_doubled(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    (joint,) = load_tokenizer(tokenizer)(" the")["input_ids"]
    got = _read(tmp_path, {"prompt": "is t", "completion": f"he{END}"}, tokenizer=tokenizer)
    assert got.sample(0)[0][-2:].tolist() == [joint, load_tokenizer(tokenizer).eos_token_id]
    assert _parts(got, tokenizer) == [(False, "is"), (True, f" the{END}")]


@pytest.mark.parametrize("answers", ["all", "each", "last"])
@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "unmarked"])
def test_the_assistants_turns_are_learned(tmp_path: Path, template: str, answers: Any) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", template)
    got = _read(tmp_path, {"messages": [*CHAT, USER]}, tokenizer=tokenizer, answers=answers)
    # What follows the last word of a turn belongs to it where the template does not say otherwise.
    line = "" if template == MARKED else "\n"
    turns = [f"yes, it is{END}{line}", f"the answer was: no ünïcödé 🙂{END}{line}"]
    samples = {"all": [([*CHAT, USER], turns)], "each": [(CHAT[:3], turns[:1]), (CHAT, turns[1:])]}
    samples["last"] = samples["each"][1:]
    assert len(got) == len(samples[answers])
    for index, (messages, learned) in enumerate(samples[answers]):
        assert [text for is_learned, text in _parts(got, tokenizer, index) if is_learned] == learned
        whole = load_tokenizer(tokenizer).apply_chat_template(
            messages, return_assistant_tokens_mask=template == MARKED, return_dict=True
        )
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
    tokenizer = make_tokenizer(tmp_path / "tokenizer", template, trim_offsets=True)
    chat = [USER, {"role": "assistant", "content": " yes "}, USER, {"role": "assistant", "content": "no"}]
    got = _read(tmp_path, {"messages": chat}, tokenizer=tokenizer)
    assert [text for learned, text in _parts(got, tokenizer) if learned] == [f" yes {end}", f"no{end}"]


def test_long_samples_lose_their_end_and_those_without_an_answer_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    long_answer = {"prompt": "is it?", "completion": "zqzqzqzqzqzq"}
    long_question = {"prompt": "zqzqzqzqzqzq", "completion": "yes"}
    with caplog.at_level(logging.WARNING):
        got = _read(tmp_path, QUESTIONS[0], long_answer, long_question, tokenizer=tokenizer, seq_length=8)
    assert _parts(got, tokenizer, 1)[-1] == (True, "zqzqzqzq"[: sum(got.sample(1)[1])])
    assert got.lengths.tolist()[1:] == [8]
    assert "2 of 3 samples" in caplog.text
    assert "1 lost their end, and 1 are left out" in caplog.text
    needed = 12 + 1  # a token for each letter of the question, and one to learn
    with pytest.raises(DataError, match=f"seq_length=12 leaves nothing .* any of the 1 .* to {needed} at the very"):
        _read(tmp_path, long_question, tokenizer=tokenizer, seq_length=needed - 1)
    assert len(_read(tmp_path, long_question, tokenizer=tokenizer, seq_length=needed)) == 1


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
    assert (len(fixed), fixed.rows([0])["input_ids"].shape, fixed.efficiency) == (2, (1, 8), 0.5)
    packed = InstructionSamples(_instructions(3, 5), 8, pack_by=1234)
    assert (len(packed), packed.efficiency) == (1, 1.0)
    assert {name: tensor.tolist() for name, tensor in packed.rows([0]).items()} == {
        "input_ids": [[4, 5, 6, 7, 8, 1, 2, 3]],
        "labels": [[-100, -100, 6, 7, 8, -100, -100, 3]],
        "attention_mask": [[1, 1, 1, 1, 1, 2, 2, 2]],
        "position_ids": [[0, 1, 2, 3, 4, 0, 1, 2]],
    }


# ---- wrong input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"question": "is it?", "answer": "yes"}, "must have a 'prompt' and a 'completion', .* is {'answer': 'yes'"),
        ({"prompt": "is it?", "completion": 3}, "must have a 'prompt' and a 'completion', two strings"),
        ({"prompt": "is it?", "completion": " "}, "an empty 'completion', so there is nothing to learn"),
        ({"messages": "is it?"}, "must have a 'prompt'"),
        ({"messages": [{"from": "human", "value": "is it?"}]}, "must have a 'prompt'"),
        ({"messages": [USER, {"role": "bot", "content": "yes"}]}, "no answer, .* its roles are 'user', 'bot', and"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "no answer, or an empty one"),
        ({"messages": [{"role": "assistant", "content": "yes"}]}, "nothing comes before it"),
    ],
)
def test_a_malformed_record_is_named_by_its_line(tmp_path: Path, record: dict[str, Any], says: str) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", UNMARKED)
    with pytest.raises(DataError, match=rf"data\.jsonl, line 2:? .*{says}"):
        _read(tmp_path, QUESTIONS[0], record, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (STRICT, "does not take a conversation of system, user, .*Only user and assistant roles are supported!"),
        (FORGETFUL, "leaves out what the role 'system' says; use another"),
        (UNMARKED[:-11] + "<think>{% endif %}", "the answer in message 3 cannot be found"),
        (REASONING, "the answer in message 3 cannot be found.* put {% generation %} .*, or set answers=each"),
        (None, "the tokenizer has no chat template, .* use the tokenizer of a chat model"),
    ],
    ids=["strict", "forgetful", "thinking", "reasoning", "none"],
)
def test_a_template_that_cannot_render_or_hides_answers_is_named(
    tmp_path: Path, template: str | None, says: str
) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", template)
    with pytest.raises(DataError, match=rf"data\.jsonl, line 1:? .*{says}"):
        _read(tmp_path, {"messages": CHAT}, tokenizer=tokenizer)


def test_each_answer_is_found_where_a_template_rewrites_the_earlier_ones(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", REASONING)
    got = _read(tmp_path, {"messages": CHAT[1:]}, tokenizer=tokenizer, answers="each")
    answers = [_parts(got, tokenizer, index)[-1] for index in (0, 1)]
    assert answers == [(True, f"<think></think>{CHAT[turn]['content']}{END}\n") for turn in (2, 4)]


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
        found = InstructionSamples(cached, changed.seq_length).fingerprint
        assert found == InstructionSamples(read_instructions(changed), changed.seq_length).fingerprint
        return found

    first = fingerprint(options)
    assert first == fingerprint(options)
    assert len(reads) == 1
    for changed in (replace(options, seq_length=32), replace(options, answers="last")):
        assert fingerprint(changed) != first
    make_tokenizer(Path(options.tokenizer), MARKED)
    assert fingerprint(options) != first
    os.utime(options.path, ns=(1, 1))
    fingerprint(options)
    assert len(reads) == 5
