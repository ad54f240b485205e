"""Are the logits of every position those of Hugging Face, whole and in order on every rank?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.families.parity import VOCAB_SIZE
from tests.generate.models import Call, hugging_face, prompts, run_with_models, set_up
from tests.parity.training import Case, Layout
from tests.ranks import RankError

LAYOUTS = (
    Layout(),
    Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2),
    Layout(pp=2, vpp=2, num_microbatches=2),
    Layout(dp=3),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_logits_equal_hugging_face_on_every_rank(layout: Layout) -> None:
    calls = []
    for name, side in (("gpt2", "right"), ("qwen3", "left"), ("bloom", "left")):
        ids, mask = prompts(side)
        calls += [Call(model=name, input_ids=ids, attention_mask=mask), Call(model=name, input_ids=ids[:1])]
    answers = run_with_models(_logits, layout, calls)
    for index, call in enumerate(calls):
        with torch.no_grad():
            expected = hugging_face(call.model)(call.input_ids, attention_mask=call.attention_mask).logits
        real = torch.ones_like(call.input_ids) if call.attention_mask is None else call.attention_mask
        for answer in answers:
            assert answer[index].shape == (*call.input_ids.shape, VOCAB_SIZE)
            assert answer[index].dtype == torch.float32
            # As the families' tests: of size 1 to 10, out of four layers in another order of additions.
            torch.testing.assert_close(answer[index][real == 1], expected[real == 1], rtol=0.0, atol=2e-5)


def _logits(directory: str, case: Case, calls: list[Call]) -> list[torch.Tensor]:
    answers = []
    for name in dict.fromkeys(call.model for call in calls):
        module = set_up(directory, case, name)
        answers += [module.logits(c.input_ids, c.attention_mask) for c in calls if c.model == name]
    return answers


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([[1] * 41], "input_ids have 41 tokens per row, more than"),
        ([[1, 83]], "token 83"),
        ([1, 2], "give a tensor of"),
    ],
)
def test_rows_that_cannot_be_read_are_refused(tokens: Any, says: str) -> None:
    with pytest.raises(RankError, match=says):
        run_with_models(_logits, Layout(), [Call(model="gpt2", input_ids=torch.tensor(tokens))])
