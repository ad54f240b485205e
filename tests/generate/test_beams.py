"""Beams find the texts that Hugging Face finds, whatever ends a search and however texts are weighed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.generate.models import Call, continued, hugging_face, prompts
from tests.parity.training import Layout

SEARCHES: tuple[dict[str, Any], ...] = (
    {"num_beams": 2},
    {"num_beams": 4, "num_return_sequences": 4, "early_stopping": True},
    {"num_beams": 4, "length_penalty": 1.5, "early_stopping": "never", "num_return_sequences": 3},
    {"num_beams": 4, "length_penalty": -1.0, "num_return_sequences": 3},
    {"num_beams": 4, "length_penalty": 0.0, "early_stopping": "never"},
    {"num_beams": 20, "length_penalty": 1.5, "num_return_sequences": 2},
    {"num_beams": 3, "repetition_penalty": 1.4, "min_new_tokens": 6, "num_return_sequences": 3},
)


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, pp=2), pytest.param(Layout(dp=2), marks=pytest.mark.exhaustive)], ids=str
)
def test_each_kind_of_search_finds_what_hugging_face_finds(layout: Layout) -> None:
    ids, mask = prompts(lengths=(7, 3, 5))
    # Tokens that are likely somewhere, so that some beams end and some do not.
    likely = hugging_face("llama").generate(
        ids, attention_mask=mask, max_new_tokens=12, eos_token_id=-1, pad_token_id=1
    )
    ends = [int(likely[0, 9]), int(likely[1, 12]), int(likely[2, 10])]
    calls, expected = [], []
    for options in SEARCHES:
        common = {**options, "max_new_tokens": 11, "pad_token_id": 1}
        call = Call(model="llama", input_ids=ids, attention_mask=mask, options=common)
        for eos in (ends[:1], ends):
            calls.append(replace(call, options={**common, "eos_token_id": tuple(eos)}))
            hf = hugging_face("llama").generate(ids, attention_mask=mask, do_sample=False, eos_token_id=eos, **common)
            expected.append(hf)
    lengths = {hf.shape[1] for hf in expected}
    assert len(lengths) > 1, "no search ended before the others"
    for call, actual, hf in zip(calls, continued(calls, layout), expected, strict=True):
        assert actual.tolist() == hf.tolist(), call.options


def test_several_texts_are_drawn_of_each_prompt() -> None:
    ids, mask = prompts(lengths=(4, 7))
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 6, "num_return_sequences": 3, "eos_token_id": ()}
    call = Call(model="gpt2", input_ids=ids, attention_mask=mask, options=options)
    (alone,) = continued([call], Layout())
    assert alone.shape == (6, 13)
    assert torch.equal(alone[:, :7], ids.repeat_interleave(3, dim=0))
    assert len({tuple(row) for row in alone[:, 7:].tolist()}) == 6
    (shared,) = continued([call], Layout(dp=2))
    assert torch.equal(alone, shared)


def test_there_may_be_fewer_prompts_than_copies_and_stages() -> None:
    ids, _ = prompts(lengths=(5,), width=5)
    options: dict[str, Any] = {"max_new_tokens": 5, "num_beams": 2}
    expected = hugging_face("qwen2").generate(ids, do_sample=False, pad_token_id=0, eos_token_id=-1, **options)
    call = Call(model="qwen2", input_ids=ids, options={**options, "eos_token_id": ()})
    for layout in (Layout(dp=3), Layout(pp=4)):
        (actual,) = continued([call], layout)
        assert actual.tolist() == expected.tolist(), layout
