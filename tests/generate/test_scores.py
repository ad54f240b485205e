"""Log-probabilities and scores of texts are those of Hugging Face, on every rank of every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.generate.models import Call, hugging_face, prompts, run_with_models, set_up
from tests.parity.training import Case, Layout

# fp32 sums over the vocabulary and over at most six tokens, in another order of additions.
_ATOL = 1e-4


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, pp=2), pytest.param(Layout(dp=2), marks=pytest.mark.exhaustive)], ids=str
)
def test_scores_equal_hugging_face(layout: Layout) -> None:
    ids, mask = prompts(lengths=(7, 4, 6))
    hf = hugging_face("llama")
    common: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 1}
    asked = {"attention_mask": mask, "return_dict_in_generate": True, "output_scores": True, "do_sample": False}
    end = int(hf.generate(ids, attention_mask=mask, eos_token_id=-1, **common)[0, 9])
    greedy = hf.generate(ids, eos_token_id=end, output_logits=True, **common, **asked)
    beams = hf.generate(ids, eos_token_id=end, num_beams=3, num_return_sequences=2, **common, **asked)
    of_beams = hf.compute_transition_scores(beams.sequences, beams.scores, beams.beam_indices)
    assert of_beams[:, -1].eq(0.0).any(), "no text ended before the others"
    new = greedy.sequences[:, 7:]
    log_probabilities = torch.stack(greedy.logits, dim=1).log_softmax(-1).gather(-1, new[..., None])[..., 0]
    is_behind = ((new == end).cumsum(-1) - (new == end).long()) > 0
    options = {**common, "eos_token_id": end}
    calls = [
        Call(model="llama", input_ids=ids, attention_mask=mask, options=options),
        Call(
            model="llama",
            input_ids=ids,
            attention_mask=mask,
            options={**options, "num_beams": 3, "num_return_sequences": 2},
        ),
    ]
    for one, several in run_with_models(_scored, layout, calls):
        assert torch.equal(one.sequences, greedy.sequences)
        expected = log_probabilities.masked_fill(is_behind, 0.0)
        torch.testing.assert_close(one.log_probabilities, expected, rtol=0.0, atol=_ATOL)
        torch.testing.assert_close(one.scores, expected.sum(-1), rtol=0.0, atol=_ATOL)
        assert torch.equal(several.sequences, beams.sequences)
        torch.testing.assert_close(several.scores, beams.sequences_scores, rtol=0.0, atol=_ATOL)
        torch.testing.assert_close(several.log_probabilities, of_beams, rtol=0.0, atol=_ATOL)


def _scored(directory: str, case: Case, calls: list[Call]) -> list[Any]:
    module = set_up(directory, case, "llama")
    return [module.generate_with_scores(c.input_ids, c.attention_mask, **c.options) for c in calls]
