"""Stop strings end rows where Hugging Face's generate ends them, on every rank of every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.families.parity import VOCAB_SIZE
from tests.generate.models import Call, continued, hugging_face, prompts, run_with_models, set_up
from tests.generate.readable import byte_level_tokenizer
from tests.parity.training import Case, Layout

STRINGS = ("é", "bc", "stop", "0.1.2")
NEW = 12
ENDLESS: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": 1}


def _tokenizer(said: dict[int, bytes]) -> Any:
    """One with which tokens read as ``said``, and all others in a way that ends nothing."""
    return byte_level_tokenizer({token: said.get(token, f"<{token}>".encode()) for token in range(VOCAB_SIZE)})


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, pp=2), pytest.param(Layout(dp=2), marks=pytest.mark.exhaustive)], ids=str
)
def test_texts_end_where_hugging_faces_do(layout: Layout) -> None:
    ids, mask = prompts(lengths=(7, 4, 6, 5))
    hf, common = hugging_face("mistral"), {"attention_mask": mask, "do_sample": False, **ENDLESS}
    new = hf.generate(ids, eos_token_id=-1, **common)[:, 7:].tolist()
    # A character of two tokens; inside of one; half in the prompt; over three, and the last says more.
    said = {new[0][4]: b"x\xc3", new[0][5]: b"\xa9", new[1][3]: b"abcd", int(ids[2, -1]): b"st", new[2][0]: b"opera"}
    said |= {new[3][1]: b" 0.", new[3][2]: b"1.", new[3][3]: b"2.3"}
    assert len(said) == 8
    strings = {"stop_strings": STRINGS, "tokenizer": _tokenizer(said)}
    beams = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}
    plain = Call(
        model="mistral", input_ids=ids, attention_mask=mask, options={**ENDLESS, **strings, "eos_token_id": ()}
    )
    calls, expected, end = [], [], new[0][2]
    # One that ends texts, too, and a length that only holds back the latter.
    for options in ({}, {"eos_token_id": end}, {"eos_token_id": end, "min_new_tokens": 5}, beams):
        calls.append(replace(plain, options={**plain.options, **options}))
        expected.append(hf.generate(ids, **{"eos_token_id": -1, **common, **strings, **options}))
    alone = [row[: row.index(1) if 1 in row else None] for row in expected[0][:, 7:].tolist()]
    assert [len(row) for row in alone] == [6, 4, 1, 4]
    assert [row.index(1) if 1 in row else None for row in expected[1][:1, 7:].tolist()] == [3]
    assert set(expected[2][2, 8:].tolist()) == {1}
    assert expected[3][:, -1].eq(1).any()
    for call, actual, theirs in zip(calls, continued(calls, layout), expected, strict=True):
        assert actual.tolist() == theirs.tolist(), call.options


def test_a_t5s_texts_do() -> None:
    ids, mask = prompts("right", lengths=(7, 4))
    common = {"decoder_input_ids": torch.tensor([[2, 5], [2, 6]]), "max_new_tokens": 8, "pad_token_id": 3}
    hf = {"attention_mask": mask, "use_cache": False, "do_sample": False, "eos_token_id": -1}
    plain = hugging_face("t5_1_1").generate(ids, **hf, **common).tolist()
    said = {5: b"sto", plain[0][2]: b"p", plain[1][4]: b"stop"}
    strings = {"stop_strings": "stop", "tokenizer": _tokenizer(said)}
    expected = hugging_face("t5_1_1").generate(ids, **hf, **common, **strings)
    assert expected[:, 3:].tolist() == [[3, 3], plain[1][3:5]]
    options = {**common, **strings, "eos_token_id": ()}
    (actual,) = continued([Call(model="t5_1_1", input_ids=ids, attention_mask=mask, options=options)], Layout(pp=2))
    assert actual.tolist() == expected.tolist()


def test_ranks_whose_tokenizers_differ_are_told() -> None:
    call = Call(model="gpt2", input_ids=torch.tensor([[5, 6]]))
    for refusal in run_with_models(_refused, Layout(tp=2), [call]):
        assert "asks with other prompts or options" in refusal


def _refused(directory: str, case: Case, calls: list[Call]) -> str:
    from lightning_megatron.errors import ConfigError

    module = set_up(directory, case, "gpt2")
    tokenizer = _tokenizer({5 + module.trainer.global_rank: b"stop"})
    with pytest.raises(ConfigError) as refusal:
        module.generate(calls[0].input_ids, stop_strings="stop", tokenizer=tokenizer)
    return str(refusal.value)
