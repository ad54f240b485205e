"""Beams find the texts that Hugging Face finds, and the scores of all texts are those of Hugging Face."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.generate.models import (
    NO_END,
    Call,
    asked,
    by_hugging_face,
    compare,
    hugging_face,
    prompts,
    run_with_models,
    set_up,
)
from tests.parity.training import Case, Layout

SEARCHES: tuple[dict[str, Any], ...] = (
    {"num_beams": 2},
    {"num_beams": 4, "num_return_sequences": 4, "early_stopping": True},
    {"num_beams": 4, "length_penalty": 1.5, "early_stopping": "never", "num_return_sequences": 3},
    {"num_beams": 4, "length_penalty": -1.0, "num_return_sequences": 3},
    {"num_beams": 4, "length_penalty": 0.0, "early_stopping": "never"},
    {"num_beams": 20, "length_penalty": 1.5, "num_return_sequences": 2},
    {"num_beams": 3, "repetition_penalty": 1.4, "min_new_tokens": 6, "num_return_sequences": 3},
)
LAYOUTS = [Layout(tp=2, pp=2), pytest.param(Layout(dp=2), marks=pytest.mark.exhaustive)]
_ATOL = 1e-4
"""fp32 sums over the vocabulary and over at most six tokens, in another order of additions."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_kind_of_search_finds_what_hugging_face_finds(layout: Layout) -> None:
    rows = prompts(lengths=(7, 3, 5))
    # Tokens that are likely somewhere, so that some beams end and some do not.
    likely = by_hugging_face(asked("llama", rows, max_new_tokens=12, **NO_END))
    ends = (int(likely[0, 9]), int(likely[1, 12]), int(likely[2, 10]))
    common = {"max_new_tokens": 11, "pad_token_id": 1}
    calls = [asked("llama", rows, **o, **common, eos_token_id=eos) for o in SEARCHES for eos in (ends[:1], ends)]
    assert len({by_hugging_face(call).shape[1] for call in calls}) > 1, "no search ended before the others"
    compare(calls, layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_scores_equal_hugging_face(layout: Layout) -> None:
    rows = prompts(lengths=(7, 4, 6))
    common: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 1}
    end = int(by_hugging_face(asked("llama", rows, **common, **NO_END))[0, 9])
    options, beams = {**common, "eos_token_id": (end,)}, {"num_beams": 3, "num_return_sequences": 2}
    told = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    one: Any = by_hugging_face(asked("llama", rows, **options, **told))
    several: Any = by_hugging_face(asked("llama", rows, **options, **beams, **told))
    of_beams = hugging_face("llama").compute_transition_scores(several.sequences, several.scores, several.beam_indices)
    assert of_beams[:, -1].eq(0.0).any(), "no text ended before the others"
    new = one.sequences[:, 7:]
    is_behind = ((new == end).cumsum(-1) - (new == end).long()) > 0
    alone = torch.stack(one.logits, dim=1).log_softmax(-1).gather(-1, new[..., None])[..., 0].masked_fill(is_behind, 0)
    expected = ((one.sequences, alone, alone.sum(-1)), (several.sequences, of_beams, several.sequences_scores))
    calls = [asked("llama", rows, **options), asked("llama", rows, **options, **beams)]
    for answers in run_with_models(_scored, layout, calls):
        for actual, (sequences, log_probabilities, scores) in zip(answers, expected, strict=True):
            assert torch.equal(actual.sequences, sequences)
            torch.testing.assert_close(actual.log_probabilities, log_probabilities, rtol=0.0, atol=_ATOL)
            torch.testing.assert_close(actual.scores, scores, rtol=0.0, atol=_ATOL)


def _scored(directory: str, case: Case, calls: list[Call]) -> list[Any]:
    module = set_up(directory, case, "llama")
    return [module.generate_with_scores(c.input_ids, c.attention_mask, **c.options) for c in calls]
