"""Instruction data: targets are exactly the answers with any tokenizer and chat template; packing; token cache."""

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
from lightning_megatron.data.instruction_records import InstructionOptions
from lightning_megatron.data.instruction_rows import InstructionSamples, pack
from lightning_megatron.data.instructions import (
    Instructions,
    cached_instructions,
    read_instructions,
)
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.errors import DataError
from tests.tokenizers import END, FORGETFUL, MARKED, REASONING, STRICT, UNMARKED, make_tokenizer

QUESTIONS = [
    {"prompt": "is it?", "completion": " yes"},
    {"prompt": "the question", "completion": "the answer is: no!"},
]
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
    """Samples of ``records``, and their tokenizer."""
    tokenizer = make_tokenizer(folder / "tokenizer", template, trim_offsets=trim_offsets, bos=bos)
    fields = {
        "path": _write(folder, *records),
        "tokenizer": tokenizer,
        "seq_length": 200,
        **options,
    }
    return read_instructions(InstructionOptions(**fields)), load_tokenizer(tokenizer)


def _parts(
    instructions: Instructions,
    tokenizer: Any,
    index: int = 0,
) -> list[tuple[bool, str]]:
    """Runs of tokens with the same loss mask: whether they are targets, and their text."""
    tokens, is_answer = instructions.sample(index)
    cuts = np.flatnonzero(np.diff(is_answer)) + 1
    masks = np.split(is_answer, cuts)
    parts = zip(masks, np.split(tokens, cuts), strict=True)
    return [
        (bool(mask[0]), tokenizer.decode(part, clean_up_tokenization_spaces=False))
        for mask, part in parts
    ]


def _targets(*read: Any) -> list[str]:
    return [text for is_target, text in _parts(*read) if is_target]


@pytest.mark.parametrize(
    ("trim_offsets", "bos"),
    [
        (False, False),
        (True, False),
        (True, True),
    ],
)
def test_completion_and_end_token_are_targets(
    tmp_path: Path, trim_offsets: bool, bos: bool
) -> None:
    kind: dict[str, Any] = {"trim_offsets": trim_offsets, "bos": bos}
    samples, tokenizer = _read(tmp_path, *QUESTIONS, **kind)
    begin = "<s>" if bos else ""
    assert _parts(samples, tokenizer) == [(False, f"{begin}is it?"), (True, f" yes{END}")]
    # The tokens are transformers' encoding of the complete text.
    expected = tokenizer("the questionthe answer is: no!")["input_ids"]
    assert samples.sample(1)[0].tolist() == [*expected, tokenizer.eos_token_id]
    separated = _read(tmp_path, *QUESTIONS, separator="\n", **kind)
    assert _parts(*separated, 1) == [
        (False, f"{begin}the question\n"),
        (True, f"the answer is: no!{END}"),
    ]


def test_token_across_prompt_and_completion_is_a_target(tmp_path: Path) -> None:
    samples, tokenizer = _read(tmp_path, {"prompt": "is t", "completion": f"he{END}"})
    (joint,) = tokenizer(" the")["input_ids"]
    assert samples.sample(0)[0][-2:].tolist() == [joint, tokenizer.eos_token_id]
    assert _parts(samples, tokenizer) == [(False, "is"), (True, f" the{END}")]


@pytest.mark.parametrize("answers", ["all", "each", "last"])
@pytest.mark.parametrize(
    "template",
    [MARKED, UNMARKED],
    ids=["marked", "unmarked"],
)
def test_assistant_turns_are_targets(tmp_path: Path, template: str, answers: str) -> None:
    samples, tokenizer = _read(
        tmp_path, {"messages": [*CHAT, USER]}, template=template, answers=answers
    )
    # Without generation marks in the template, the newline that ends a turn belongs to it.
    line = "" if template == MARKED else "\n"
    turns = [f"yes, it is{END}{line}", f"the answer was: no ünïcödé 🙂{END}{line}"]
    expected = {
        "all": [([*CHAT, USER], turns)],
        "each": [(CHAT[:3], turns[:1]), (CHAT, turns[1:])],
    }
    expected["last"] = expected["each"][1:]
    assert len(samples) == len(expected[answers])
    for index, (messages, targets) in enumerate(expected[answers]):
        assert _targets(samples, tokenizer, index) == targets
        options = {"return_assistant_tokens_mask": template == MARKED, "return_dict": True}
        encoded = tokenizer.apply_chat_template(messages, **options)
        assert samples.sample(index)[0].tolist() == encoded["input_ids"]
        if template == MARKED and answers == "all":
            assert samples.sample(index)[1].tolist() == encoded["assistant_masks"]


@pytest.mark.parametrize(
    "template",
    [MARKED, UNMARKED],
    ids=["marked", "unmarked"],
)
@pytest.mark.parametrize("end", [END, " "])
def test_answers_with_outer_spaces_are_targets_with_any_tokenizer(
    tmp_path: Path, template: str, end: str
) -> None:
    """Where token offsets exclude spaces, transformers' own mask is empty or does not end."""
    template = template.replace("{{ '\\n' }}", "").replace(END, end)
    chat = [
        USER,
        {"role": "assistant", "content": " yes "},
        USER,
        {"role": "assistant", "content": "no"},
    ]
    read = _read(tmp_path, {"messages": chat}, template=template, trim_offsets=True)
    assert _targets(*read) == [f" yes {end}", f"no{end}"]


def test_answers_are_found_if_the_template_rewrites_earlier_turns(tmp_path: Path) -> None:
    read = _read(
        tmp_path,
        {"messages": CHAT[1:], "tools": [TOOL]},
        template=REASONING,
        answers="each",
        seq_length=300,
    )
    targets = [text for index in (0, 1) for text in _targets(*read, index)]
    assert targets == [f"<think></think>{CHAT[turn]['content']}{END}\n" for turn in (2, 4)]


def test_long_samples_are_truncated_and_samples_without_targets_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long_answer = {"prompt": "is it?", "completion": "zqzqzqzqzqzq"}
    long_question = {"prompt": "zqzqzqzqzqzq", "completion": "yes"}
    with caplog.at_level(logging.WARNING):
        samples, tokenizer = _read(
            tmp_path,
            QUESTIONS[0],
            long_answer,
            long_question,
            seq_length=8,
        )
    assert _targets(samples, tokenizer, 1) == ["zqzqzqzq"[: sum(samples.sample(1)[1])]]
    assert samples.lengths.tolist()[1:] == [8]
    assert "2 of 3 samples" in caplog.text
    assert "1 lost their end, and 1 are left out" in caplog.text
    with pytest.raises(
        DataError, match="seq_length=12 leaves nothing of the answers of the 1 samples"
    ):
        _read(tmp_path, long_question, seq_length=12)


# ---- rows -----------------------------------------------------------------------------------------------------------


def _instructions(*lengths: int) -> Instructions:
    """Tokens 1, 2, 3, ... through all samples; all but the first two of each are targets."""
    starts = np.cumsum([0, *lengths])
    positions = np.concatenate([np.arange(length) for length in lengths])
    tokens = np.arange(
        1,
        starts[-1] + 1,
        dtype=np.int32,
    )
    return Instructions(
        tokens=tokens,
        is_answer=positions > 1,
        starts=starts,
        padding_token=np.array(99),
    )


def test_unpacked_rows_hold_one_padded_sample() -> None:
    rows = InstructionSamples(
        _instructions(3, 5),
        8,
        pad_to_multiple_of=2,
    ).rows([1, 0])
    assert {name: tensor.tolist() for name, tensor in rows.items()} == {
        "input_ids": [[4, 5, 6, 7, 8, 99], [1, 2, 3, 99, 99, 99]],
        "labels": [[-100, -100, 6, 7, 8, -100], [-100, -100, 3, -100, -100, -100]],
        "attention_mask": [[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]],
        "position_ids": [[0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 0, 0]],
    }
    assert all(tensor.dtype == torch.int64 for tensor in rows.values())
    fixed = InstructionSamples(_instructions(3, 5), 8)
    assert (len(fixed), fixed.rows([0])["input_ids"].shape) == (2, (1, 8))


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_weights_of_answers_that_are_not_learned_do_not_matter(tmp_path: Path) -> None:
    unlearned = {"role": "assistant", "content": "no", "weight": 0}
    learned = {"role": "assistant", "content": "yes", "weight": 1}
    record = {"messages": [USER, unlearned, USER, learned]}
    instructions, _ = _read(tmp_path, record, template=MARKED, answers="last")
    assert len(instructions) == 1


@pytest.mark.parametrize(
    ("record", "template", "message"),
    [
        (
            {"question": "?", "answer": "yes"},
            None,
            "expected 'prompt' and 'completion', .* got {'answer': 'yes'",
        ),
        (
            {"prompt": "is it?", "completion": " "},
            None,
            "an empty 'completion', so there is nothing to learn",
        ),
        ({"messages": [{"from": "human", "value": "is it?"}]}, UNMARKED, "expected 'prompt' and"),
        (
            {"messages": [USER, {"role": "bot", "content": ""}]},
            UNMARKED,
            "no answer, .* its roles are 'user', 'bot'",
        ),
        (
            {"messages": [{"role": "assistant", "content": "yes"}]},
            UNMARKED,
            "nothing comes before it",
        ),
        (
            {"messages": CHAT},
            STRICT,
            "does not take a conversation of system, user, .*Only user and assistant roles",
        ),
        ({"messages": CHAT}, FORGETFUL, "leaves out a message of the role 'system'; use another"),
        (
            {"messages": [USER, CALL]},
            UNMARKED,
            "the chat template leaves out the tool 'weather'; use another",
        ),
        (
            {"messages": CHAT, "tools": [TOOL]},
            UNMARKED,
            "the chat template leaves out the tool 'weather'; use another",
        ),
        (
            {"messages": CHAT},
            "{{ 1 // 0 }}",
            r"does not take a conversation of .* \(integer division",
        ),
        (
            {"messages": CHAT},
            REASONING,
            "the answer in message 3 cannot .* put {% generation %} .*, or set answers=",
        ),
        (
            {"messages": CHAT},
            None,
            "the tokenizer has no chat template, .* use the tokenizer of a chat model",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "yes", "weight": 0}]},
            MARKED,
            "weight=0 of message 2: expected 1, as all answers are learned alike; leave",
        ),
        (
            {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}},
            MARKED,
            "chat_template_kwargs={'enable_thinking': False}: expected none",
        ),
    ],
)
def test_malformed_or_hidden_record_is_refused_with_its_line(
    tmp_path: Path,
    record: dict[str, Any],
    template: str | None,
    message: str,
) -> None:
    with pytest.raises(DataError, match=rf"data\.jsonl, line 2:? .*{message}"):
        _read(tmp_path, QUESTIONS[0], record, template=template)


# ---- packing and cache ----------------------------------------------------------------------------------------------

CAPACITY = 20


def _best_fit_decreasing(lengths: list[int]) -> list[list[int]]:
    """Lengths in each row, placing one sample at a time."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= CAPACITY]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    return rows


@given(
    lengths=st.lists(st.integers(1, CAPACITY), max_size=60),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_packing_is_best_fit_decreasing(lengths: list[int], seed: int) -> None:
    members, starts = pack(
        np.array(lengths, dtype=np.int64),
        CAPACITY,
        seed,
    )
    parts = np.split(members, starts[1:-1])
    rows = [part.tolist() for part in parts][: len(starts) - 1]

    assert sorted(member for row in rows for member in row) == list(range(len(lengths)))
    # The order of equally full rows is free; it changes neither the number of rows nor their fill.
    fill = [sum(lengths[member] for member in row) for row in rows]
    assert sorted(fill) == sorted(map(sum, _best_fit_decreasing(lengths)))


def test_token_cache_is_used_until_file_tokenizer_or_options_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[InstructionOptions] = []

    def read_and_count(options: InstructionOptions) -> Instructions:
        reads.append(options)
        return read_instructions(options)

    monkeypatch.setattr(records, "read_instructions", read_and_count)
    tokenizer = make_tokenizer(tmp_path / "tokenizer", UNMARKED)
    options = InstructionOptions(
        path=_write(tmp_path, {"messages": CHAT}), tokenizer=tokenizer, seq_length=64
    )

    def fingerprint(changed: InstructionOptions) -> str:
        cached = cached_instructions(changed, str(tmp_path / "cache"))
        return InstructionSamples(cached, changed.seq_length).fingerprint

    first = fingerprint(options)
    assert [first, first] == [
        fingerprint(options),
        InstructionSamples(read_instructions(options), 64).fingerprint,
    ]
    assert len(reads) == 1
    assert fingerprint(replace(options, answers="last")) != first
    make_tokenizer(Path(options.tokenizer), MARKED)
    assert fingerprint(options) != first
    config = Path(options.tokenizer) / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "split_special_tokens": True}))
    fingerprint(options)
    assert len(reads) == 4
    os.utime(options.path, ns=(1, 1))
    fingerprint(options)
    assert len(reads) == 5
