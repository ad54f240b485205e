"""Exactly the answers are learned, whatever tokenizer and template; rows hold each sample once and alone."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_megatron.data import instructions as records
from lightning_megatron.data.documents import read_parts
from lightning_megatron.data.instructions import (
    InstructionOptions,
    Instructions,
    InstructionSamples,
    RowOptions,
    check_instructions,
    read_instructions,
)
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.errors import ConfigError, DataError
from tests.ranks import ROOT
from tests.unit.data.chat_tokenizer import (
    END,
    FORGETFUL,
    MARKED,
    REASONING,
    STRICT,
    UNMARKED,
    WITH_TOOLS,
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


def test_the_examples_are_instructions(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", UNMARKED)
    for name, lines in (("instructions.jsonl", 40), ("conversations.jsonl", 6)):
        path = str(ROOT / "examples" / name)
        got = read_instructions(InstructionOptions(path=path, tokenizer=tokenizer, seq_length=512, separator="\n"))
        assert len(got) == lines


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


def test_a_token_of_answer_and_question_is_learned(tmp_path: Path) -> None:
    template = MARKED.replace("+ '<|end|>' }}{% endgeneration %}", "}}{% endgeneration %}he")
    tokenizer = make_tokenizer(tmp_path / "tokenizer", template)
    got = _read(tmp_path, {"messages": [USER, {"role": "assistant", "content": "is t"}]}, tokenizer=tokenizer)
    assert [text for learned, text in _parts(got, tokenizer) if learned] == ["is the"]


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "unmarked"])
def test_a_prompt_of_messages_is_not_learned(tmp_path: Path, template: str) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", template)
    got = _read(tmp_path, {"prompt": CHAT[:4], "completion": CHAT[4:]}, tokenizer=tokenizer)
    assert [text.strip() for learned, text in _parts(got, tokenizer) if learned] == [f"{CHAT[4]['content']}{END}"]


def test_tools_reach_the_template_and_a_turn_may_consist_of_calls(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", WITH_TOOLS.replace("message['content'] +", "message.content ~"))
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}
    got = _read(tmp_path, {"messages": [CHAT[1], calls], "tools": tools}, tokenizer=tokenizer)
    assert _parts(got, tokenizer)[0][1].startswith("[weather]<|user|>")


def test_plain_and_compressed_files_and_blank_lines_give_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zstandard = pytest.importorskip("zstandard")
    monkeypatch.setattr(records, "read_parts", lambda file: read_parts(file, 7))  # so that lines lie across reads
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    content = "\n".join(json.dumps(record) for record in QUESTIONS).encode() + b"\n\n"
    for name, data in (
        ("a.jsonl", content),
        ("b.jsonl.gz", gzip.compress(content)),
        ("c.jsonl.zst", zstandard.ZstdCompressor().compress(content)),
        ("d.txt", b"no records"),
    ):
        (tmp_path / name).write_bytes(data)
    options = InstructionOptions(path=str(tmp_path), tokenizer=tokenizer, seq_length=64)
    every = read_instructions(options)
    assert len(every) == 6
    for first in (0, 2, 4):
        part = every.part(range(first, first + 2))
        assert [part.sample(i)[0].tolist() for i in (0, 1)] == [every.sample(i)[0].tolist() for i in (0, 1)]
        assert part.fingerprint == every.part(range(0, 2)).fingerprint
    assert every.part(range(1, 3)).fingerprint != every.part(range(0, 2)).fingerprint


def test_long_samples_lose_their_end_and_those_without_an_answer_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    long_answer = {"prompt": "is it?", "completion": "zqzqzqzqzqzq"}
    long_question = {"prompt": "zqzqzqzqzqzq", "completion": "yes"}
    with caplog.at_level(logging.WARNING):
        got = _read(tmp_path, QUESTIONS[0], long_answer, long_question, tokenizer=tokenizer, seq_length=8)
    assert _parts(got, tokenizer, 1)[-1] == (True, "zqzqzqzq"[: sum(got.sample(1)[1])])
    assert (len(got), got.lengths.max()) == (2, 8)
    assert "2 of 3 samples" in caplog.text
    assert "1 lost their end, and 1 are left out" in caplog.text
    needed = 12 + 1  # a token for each letter of the question, and one to learn
    with pytest.raises(DataError, match=f"seq_length=12 leaves nothing .* any of the 1 .* to {needed} at the very"):
        _read(tmp_path, long_question, tokenizer=tokenizer, seq_length=needed - 1)
    assert len(_read(tmp_path, long_question, tokenizer=tokenizer, seq_length=needed)) == 1


# ---- rows -----------------------------------------------------------------------------------------------------------


def _instructions(*lengths: int, seq_length: int = 8) -> Instructions:
    """Tokens 1, 2, 3, ... through all samples; all but the first two of each are learned."""
    starts = np.cumsum([0, *lengths])
    positions = np.concatenate([np.arange(length) for length in lengths])
    return Instructions(
        tokens=np.arange(1, starts[-1] + 1, dtype=np.int32),
        is_answer=positions > 1,
        starts=starts,
        seq_length=seq_length,
        padding_token=99,
    )


def test_a_row_holds_one_sample_and_padding() -> None:
    rows = InstructionSamples(_instructions(3, 5), RowOptions(pad_to_multiple_of=2)).rows([1, 0])
    assert {name: tensor.tolist() for name, tensor in rows.items()} == {
        "input_ids": [[4, 5, 6, 7, 8, 99], [1, 2, 3, 99, 99, 99]],
        "labels": [[-100, -100, 6, 7, 8, -100], [-100, -100, 3, -100, -100, -100]],
        "attention_mask": [[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 0, 0]],
    }
    assert all(tensor.dtype == torch.int64 for tensor in rows.values())
    fixed = InstructionSamples(_instructions(3, 5), RowOptions())
    assert (len(fixed), fixed.rows([0])["input_ids"].shape, fixed.efficiency) == (2, (1, 8), 0.5)


def test_packed_samples_share_a_row() -> None:
    samples = InstructionSamples(_instructions(3, 5), RowOptions(packing=True))
    assert (len(samples), samples.efficiency) == (1, 1.0)
    assert {name: tensor.tolist() for name, tensor in samples.rows([0]).items()} == {
        "input_ids": [[4, 5, 6, 7, 8, 1, 2, 3]],
        "labels": [[-100, -100, 6, 7, 8, -100, -100, 3]],
        "attention_mask": [[1, 1, 1, 1, 1, 2, 2, 2]],
        "position_ids": [[0, 1, 2, 3, 4, 0, 1, 2]],
    }


def test_packed_rows_hold_every_sample_once_and_are_told_apart_by_their_fingerprint() -> None:
    lengths = np.random.default_rng(5).integers(2, 9, 200).tolist()
    packed = InstructionSamples(_instructions(*lengths), RowOptions(packing=True, seed=7))
    rows = packed.rows(range(len(packed)))
    is_token = rows["attention_mask"] > 0
    assert sorted(rows["input_ids"][is_token].tolist()) == list(range(1, sum(lengths) + 1))
    # Neighbours of one sample are neighbours in its row.
    tokens, numbers = rows["input_ids"], rows["attention_mask"]
    same = (numbers[:, 1:] == numbers[:, :-1]) & is_token[:, 1:]
    assert bool((tokens[:, 1:] == tokens[:, :-1] + 1)[same].all())
    assert bool((rows["labels"][rows["position_ids"] < 2] == -100).all())
    again, other, alone = (
        InstructionSamples(_instructions(*lengths), options)
        for options in (RowOptions(packing=True, seed=7), RowOptions(packing=True, seed=8), RowOptions())
    )
    assert packed.fingerprint == again.fingerprint
    assert len({packed.fingerprint, other.fingerprint, alone.fingerprint}) == 3


# ---- wrong input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"question": "is it?", "answer": "yes"}, "has the keys 'question', 'answer', neither 'prompt' and 'compl"),
        ({}, "has the keys none, neither"),
        (
            {"prompt": "is it?", "completion": 3},
            "a 'prompt' of type str and a 'completion' of type int; give two",
        ),
        ({"prompt": "is it?", "completion": CHAT[4:]}, "a 'prompt' of type str and a 'completion' of type list"),
        ({"prompt": "is it?", "completion": " "}, "an empty 'completion', so there is nothing to learn"),
        ({"messages": []}, "has no list of messages"),
        ({"messages": "is it?"}, "has no list of messages"),
        ({"messages": [{"from": "human", "value": "is it?"}]}, "message 1 has 'from', 'value' instead of 'role'"),
        ({"messages": ["is it?"]}, "message 1 has the type str instead of 'role'"),
        ({"messages": [{"role": "user", "content": 7}]}, "message 1 has a 'content' of type int"),
        ({"messages": [USER, {"role": "bot", "content": "yes"}]}, "no answer: its roles are 'user', 'bot', and only"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "empty answer in message 2"),
        ({"prompt": CHAT[:3], "completion": CHAT[3:4]}, "no answer: its roles are"),
        ({"messages": [{"role": "assistant", "content": "yes"}]}, "begins with the assistant's turn"),
    ],
)
def test_a_malformed_record_is_named_by_its_line(tmp_path: Path, record: dict[str, Any], says: str) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", UNMARKED)
    with pytest.raises(DataError, match=rf"data\.jsonl, line 2:? .*{says}"):
        _read(tmp_path, QUESTIONS[0], record, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (STRICT, CHAT, "does not take a conversation of system, user, .*Only user and assistant roles are supported!"),
        (FORGETFUL, CHAT, "leaves out what the role 'system' says; use a role"),
        (UNMARKED[:-11] + "<think>{% endif %}", CHAT, "up to message 3, in another way than within the whole"),
        (REASONING, CHAT, "up to message 3, in another way .* put {% generation %} .*, or set answers=each"),
        ("{{ messages[0]['content'].nothing.at_all }}", CHAT, "does not take a conversation of"),
        (None, CHAT, "the tokenizer has no chat template for them; use the tokenizer of a chat model"),
    ],
    ids=["strict", "forgetful", "thinking", "reasoning", "broken", "none"],
)
def test_a_template_that_cannot_render_or_hides_answers_is_named(
    tmp_path: Path, template: str | None, messages: Any, says: str
) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", template)
    with pytest.raises(DataError, match=rf"data\.jsonl, line 1:? .*{says}"):
        _read(tmp_path, {"messages": messages}, tokenizer=tokenizer)


def test_each_answer_is_found_where_a_template_rewrites_the_earlier_ones(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", REASONING)
    got = _read(tmp_path, {"messages": CHAT[1:]}, tokenizer=tokenizer, answers="each")
    answers = [_parts(got, tokenizer, index)[-1] for index in (0, 1)]
    assert answers == [(True, f"<think></think>{CHAT[turn]['content']}{END}\n") for turn in (2, 4)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"prompt": "a", "completion": "b"}\n{"prompt": \n', "line 2 is not JSON .*; correct or remove"),
        (b"[1, 2]\n", "line 1 holds a list, not a JSON object"),
        (b"\xff\xfe\n", "line 1 is not JSON"),
        (b"", "has no records; give a file with at least one"),
        (b"\n \n", "has no records"),
    ],
)
@pytest.mark.parametrize("read", [check_instructions, read_instructions])
def test_a_malformed_or_empty_file_is_named(tmp_path: Path, read: Any, content: bytes, says: str) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "data.jsonl").write_bytes(content)
    options = InstructionOptions(path=str(tmp_path / "data.jsonl"), tokenizer=tokenizer, seq_length=64)
    with pytest.raises(DataError, match=rf"data\.jsonl,? {says}"):
        read(options)


@pytest.mark.parametrize("read", [check_instructions, read_instructions])
def test_what_is_wrong_before_the_first_record_is_said_at_once(tmp_path: Path, read: Any) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", eos=None)
    path = _write(tmp_path, *QUESTIONS)
    good = {"path": path, "tokenizer": tokenizer, "seq_length": 64}
    (tmp_path / "empty").mkdir()
    for wrong, says in (
        ({}, "line 1 has a prompt and a completion, .* and the tokenizer has none; set eos_token"),
        ({"path": str(tmp_path / "nowhere.jsonl")}, "does not exist"),
        ({"path": str(tmp_path / "empty")}, "holds no"),
        ({"tokenizer": str(tmp_path / "nowhere")}, "does not exist"),
    ):
        with pytest.raises(DataError, match=says):
            read(InstructionOptions(**(good | wrong)))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}')[:-9])
    with pytest.raises(DataError, match="cut off; make or fetch it again"):
        read(InstructionOptions(path=str(tmp_path / "cut.jsonl.gz"), tokenizer=tokenizer, seq_length=64))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: InstructionOptions(path="a", tokenizer="b", seq_length=8, answers="first"),  # type: ignore[arg-type]
            "answers='first' is unknown; choose from all, each, last",
        ),
        (lambda: RowOptions(pad_to_multiple_of=0), "pad_to_multiple_of=0 must be at least 1"),
        (lambda: RowOptions(packing=True, pad_to_multiple_of=8), "packing=True fills rows of seq_length; leave one"),
        (
            lambda: InstructionSamples(_instructions(3), RowOptions(pad_to_multiple_of=3)),
            "pad_to_multiple_of=3 does not divide seq_length=8",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()
