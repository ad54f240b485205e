"""Preference data: pairs of records with any tokenizer and chat template, their rows, and the token cache."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_megatron.data.instruction_records import InstructionOptions
from lightning_megatron.data.instructions import Instructions, read_instructions
from lightning_megatron.data.preferences import (
    PreferenceSamples,
    cached_preferences,
    read_preferences,
)
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.errors import DataError
from tests.tokenizers import END, MARKED, UNMARKED, make_tokenizer

PAIR = {"prompt": "is it?", "chosen": " yes, it is", "rejected": " no"}
SYSTEM = {"role": "system", "content": "the answer is yes"}
USER = {"role": "user", "content": "is it?"}
YES = {"role": "assistant", "content": "yes, it is"}
NO = {"role": "assistant", "content": "no"}
CHAT = {"prompt": [SYSTEM, USER], "chosen": [YES], "rejected": [NO]}
WHOLE = {"chosen": [SYSTEM, USER, YES], "rejected": [SYSTEM, USER, NO]}


def _options(folder: Path, *records: Any, template: str | None = None, **options: Any) -> Any:
    path = folder / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    tokenizer = make_tokenizer(folder / "tokenizer", template)
    fields = {"path": str(path), "tokenizer": tokenizer, "seq_length": 200, **options}
    return InstructionOptions(**fields)


def _texts(answers: Instructions, options: InstructionOptions) -> list[tuple[str, str]]:
    """Prompt and answer of each sample, as text."""
    tokenizer = load_tokenizer(options.tokenizer)
    texts = []
    for index in range(len(answers)):
        tokens, is_answer = answers.sample(index)
        parts = [tokens[~is_answer], tokens[is_answer]]
        prompt, answer = (
            tokenizer.decode(part, clean_up_tokenization_spaces=False) for part in parts
        )
        texts.append((prompt, answer))
    return texts


def test_texts_are_those_of_two_instructions(tmp_path: Path) -> None:
    options = _options(
        tmp_path,
        PAIR,
        {**PAIR, "chosen": "yes!"},
        separator="\n",
    )
    pairs = read_preferences(options)
    assert _texts(pairs, options) == [
        ("is it?\n", f" yes, it is{END}"),
        ("is it?\n", f" no{END}"),
        ("is it?\n", f"yes!{END}"),
        ("is it?\n", f" no{END}"),
    ]
    single = _options(tmp_path, {"prompt": "is it?", "completion": " no"}, separator="\n")
    expected = read_instructions(single).sample(0)
    for ours, theirs in zip(pairs.sample(1), expected, strict=True):
        assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize(
    "template",
    [MARKED, UNMARKED],
    ids=["marked", "unmarked"],
)
@pytest.mark.parametrize(
    "record",
    [CHAT, WHOLE, {**WHOLE, "prompt": "is it?", "score_chosen": 9.0}],
    ids=["prompt and answers", "whole conversations", "with the prompt repeated"],
)
def test_chats_are_learned_from_the_first_difference_on(
    record: dict[str, Any], template: str, tmp_path: Path
) -> None:
    options = _options(tmp_path, record, template=template)
    (prompt, chosen), (same_prompt, rejected) = _texts(read_preferences(options), options)
    # Without marks an answer ends with what the template writes after it.
    end = END if template == MARKED else f"{END}\n"
    assert (chosen, rejected) == (f"yes, it is{end}", f"no{end}")
    assert prompt.startswith(f"<|system|>\nthe answer is yes{END}\n<|user|>\nis it?")
    assert prompt == same_prompt


def test_earlier_turns_of_the_assistant_belong_to_the_prompt(tmp_path: Path) -> None:
    begin = [USER, YES, USER]
    record = {"chosen": [*begin, YES, USER, NO], "rejected": [*begin, NO]}
    options = _options(tmp_path, record, template=MARKED)
    texts = _texts(read_preferences(options), options)
    assert [answer for _, answer in texts] == [f"yes, it is{END}no{END}", f"no{END}"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "is it?", "chosen": "yes"}, "pairs.jsonl, line 1: expected 'prompt', 'chosen'"),
        ({**PAIR, "prompt": [USER]}, "expected 'prompt', 'chosen' and 'rejected', strings or lists"),
        ({**PAIR, "rejected": [NO]}, "expected 'prompt', 'chosen' and 'rejected', strings or lists"),
        ({**PAIR, "chosen": " "}, "pairs.jsonl, line 1, chosen has an empty 'completion'"),
        ({"chosen": [YES], "rejected": [NO]}, "expected 'chosen' and 'rejected' to begin with the same"),
        ({**WHOLE, "prompt": "was it?"}, "'prompt' if there is one, got a prompt of 'was it?' and 2"),
        ({**CHAT, "rejected": [USER]}, "pairs.jsonl, line 1, rejected has no answer"),
        ({**WHOLE, "rejected": [SYSTEM, USER]}, "pairs.jsonl, line 1, rejected has no answer"),
        ({"chosen": ["yes"], "rejected": ["yes", "no"]}, "to begin with the same messages"),
        ({**CHAT, "chat_template_kwargs": {"a": 1}}, "line 1, chosen: chat_template_kwargs={'a': 1}:"),
    ],
)  # fmt: skip
def test_wrong_records_are_refused_with_their_line(
    record: dict[str, Any], message: str, tmp_path: Path
) -> None:
    options = _options(tmp_path, record, template=MARKED)
    with pytest.raises(DataError, match=message.replace("?", r"\?")) as error:
        read_preferences(options)
    assert "\n" not in str(error.value)


def test_pairs_that_lose_an_answer_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = {**PAIR, "chosen": " yes, it is. " * 9}
    lost = {**PAIR, "prompt": "the question? " * 9}
    options = _options(tmp_path, PAIR, long, lost, seq_length=16)
    with caplog.at_level(logging.WARNING):
        pairs = read_preferences(options)
    assert len(pairs) == 4
    assert pairs.lengths.tolist()[2] == 16
    assert "2 of 3 pairs" in caplog.text
    assert "1 lost the end of an answer, and 1 are left out" in caplog.text
    with pytest.raises(
        DataError, match="seq_length=16 leaves nothing of an answer in each of the 1 p"
    ):
        read_preferences(_options(tmp_path, lost, seq_length=16))


def test_rows_have_the_keys_of_the_train_step(tmp_path: Path) -> None:
    options = _options(
        tmp_path,
        PAIR,
        {**PAIR, "rejected": " no, " * 6},
        seq_length=64,
    )
    pairs = read_preferences(options)
    logps = np.array([[-1.5, -2.5], [-3.5, -4.5]], dtype=np.float32)
    samples = PreferenceSamples(pairs, 64, reference_logps=logps)
    assert len(samples) == 2
    rows = samples.rows([1, 0])
    assert rows["reference_chosen_logps"].tolist() == [-3.5, -1.5]
    assert rows["reference_rejected_logps"].tolist() == [-4.5, -2.5]
    for number, name in enumerate(("chosen", "rejected")):
        tokens, is_answer = pairs.sample(2 + number)
        mask = rows[f"{name}_attention_mask"][0].bool()
        assert rows[f"{name}_input_ids"].shape == (2, 64)
        assert rows[f"{name}_input_ids"][0][mask].tolist() == tokens.tolist()
        assert mask.sum() == len(tokens)
        labels = rows[f"{name}_labels"][0]
        assert labels[labels != -100].tolist() == tokens[is_answer].tolist()
        assert (labels[~mask] == -100).all()
    short = PreferenceSamples(pairs, 64, pad_to_multiple_of=8, has_labels=False)
    longest = max(pairs.lengths[:2])
    assert short.rows([0])["chosen_input_ids"].shape == (1, -(-longest // 8) * 8)
    assert short.rows([0]).keys() == {
        f"{name}_{key}"
        for name in ("chosen", "rejected")
        for key in ("input_ids", "attention_mask")
    }
    assert short.fingerprint == samples.fingerprint
    swapped = {**PAIR, "chosen": PAIR["rejected"], "rejected": PAIR["chosen"]}
    other = read_preferences(_options(tmp_path, swapped, PAIR))
    assert PreferenceSamples(other, 64).fingerprint != samples.fingerprint


def test_tokens_are_cached_apart_from_those_of_instructions(tmp_path: Path) -> None:
    options = _options(tmp_path, PAIR)
    first = cached_preferences(options, str(tmp_path / "cache"))
    (folder,) = (tmp_path / "cache").glob("preferences-*")
    assert (
        cached_preferences(options, str(tmp_path / "cache")).folder == first.folder == str(folder)
    )
    assert first.tokens.tolist() == read_preferences(options).tokens.tolist()
