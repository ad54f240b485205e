"""The objective of examples/custom_train_step.py computes what its description says, however a batch is cut."""

from __future__ import annotations

import pytest
import torch

from examples.custom_train_step import KeyTokenTrainStep
from tests.parity.training import Case, Layout, loader_of, module_of, train_module
from tests.ranks import run_ranks


def test_the_loss_is_what_one_gets_by_hand() -> None:
    step = KeyTokenTrainStep(key_tokens=[7, 9], alpha=0.5)
    batch = {
        "tokens": torch.tensor([[7, 1, 9, 7], [1, 2, 3, 4], [9, 0, 0, 0]]),
        "loss_mask": torch.tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]),
    }
    losses = torch.tensor([[2.0, 4.0, 100.0, 100.0], [1.0, 2.0, 3.0, 6.0], [50.0, 50.0, 50.0, 50.0]])
    term = step.loss_func(batch, losses)["lm_loss"]
    # First row: mean (2 + 4) / 2 = 3, three key tokens: times 2.5. Second: (1 + 2 + 3 + 6) / 4 = 3. Third: no targets.
    assert term.sum.item() == pytest.approx(3 * 2.5 + 3)
    assert term.targets.item() == 2
    assert step.counts(batch)["lm_loss"].item() == 2


def _train(case: Case) -> list[float]:
    module = module_of(case, train_step=KeyTokenTrainStep(key_tokens=[3, 30, 60], alpha=0.5))
    return train_module(module, case, loader_of(case)).losses


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, num_microbatches=3), Layout(pp=2, dp=2, num_microbatches=2), Layout(cp=2)], ids=str
)
def test_any_layout_and_any_cut_into_microbatches_give_the_same_losses(layout: Layout) -> None:
    case = Case(labels="uneven", steps=3, layout=layout)
    (reference,) = run_ranks(_train, 1, case.on_one_process)
    for losses in run_ranks(_train, layout.world_size, case):
        assert losses == pytest.approx(reference, rel=1.5e-6)  # as in tests/parity/comparison.py
