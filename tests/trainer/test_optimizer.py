"""Options of the optimizer, and Lightning's and torch's schedulers, on the way to the weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import callback
from tests.parity.comparison import assert_same_tensors
from tests.parity.sharding import Tensors
from tests.parity.training import (
    Case,
    Layout,
    Outcome,
    RankOutcome,
    joined_outcome,
    loader_of,
    module_of,
    train,
    trainer_of,
)
from tests.ranks import run_ranks

TWO_STAGES = Layout(pp=2, num_microbatches=2)
TWO_COPIES = Layout(tp=2, dp=2)
LR, WEIGHT_DECAY = 5e-3, 0.3


# ---- one step by hand -----------------------------------------------------------------------------------------------


def _decayed(name: str, weight: torch.Tensor) -> float:
    """The weight decay of a tensor of the whole model, whose layers are stacked along the first axis."""
    return WEIGHT_DECAY if weight.dim() - name.startswith("decoder.layers.") > 1 else 0.0


def _one_step(run: Outcome) -> Tensors:
    """The first step of plain gradient descent."""
    return {
        name: weight - LR * (run.gradients[name] + _decayed(name, weight) * weight)
        for name, weight in run.initial_weights.items()
    }


def _train_with_multipliers(case: Case) -> RankOutcome:
    from lightning_megatron.engine.optimizer import GroupMultipliers

    multipliers = {
        "*position_embeddings*": GroupMultipliers(lr_mult=0.0),
        "*linear_fc1.weight": GroupMultipliers(lr_mult=0.5, wd_mult=2.0),
        "*layernorm.weight": GroupMultipliers(wd_mult=1.0),
    }
    return train(replace(case, optimizer=(*case.optimizer, ("multipliers", multipliers))))


def test_multipliers_scale_learning_rate_and_decay_of_the_weights_they_name() -> None:
    optimizer = (("name", "sgd"), ("weight_decay", WEIGHT_DECAY))
    case = Case(layout=TWO_COPIES, steps=1, lr=LR, optimizer=optimizer)
    run = joined_outcome(run_ranks(_train_with_multipliers, 4, case))
    expected = _one_step(run)
    for name, weight in run.initial_weights.items():
        gradient = run.gradients[name]
        if "position_embeddings" in name:
            expected[name] = weight
        elif name.endswith("linear_fc1.weight"):
            expected[name] = weight - 0.5 * LR * (gradient + 2.0 * WEIGHT_DECAY * weight)
        elif name.endswith(("layer_norm_weight", "layernorm.weight")):
            expected[name] = weight - LR * (gradient + WEIGHT_DECAY * weight)
    assert_same_tensors(run.weights, expected, atol=1e-6)


# ---- schedulers -----------------------------------------------------------------------------------------------------


def _module_with_scheduler(case: Case, kind: str) -> Any:
    """A module whose ``configure_optimizers`` is the user's own."""
    from torch.optim import lr_scheduler

    from lightning_megatron import MegatronModule

    class WithScheduler(MegatronModule):
        def configure_optimizers(self) -> Any:
            optimizer = self.megatron.build_optimizer(self.optimizer_options, self.lr)
            if kind == "plateau":
                # Nothing improves by 100: one bad epoch is enough.
                scheduler: Any = lr_scheduler.ReduceLROnPlateau(
                    optimizer, factor=0.1, patience=0, threshold=100.0, threshold_mode="abs"
                )
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
            scheduler = _one_cycle(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return module_of(case, WithScheduler)


def _one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)


def _torch_rates() -> list[float]:
    """What the same scheduler does to one of torch's own optimizers."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler, rates = _one_cycle(optimizer), []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def _rates(case: Case, kind: str, epochs: int) -> tuple[list[float], float]:
    """The learning rate that each step used, and the one logged last."""
    from lightning_megatron import LRSchedule

    rates: list[float] = []

    def keep(trainer: Any, *_: Any) -> None:
        (rate,) = {group["lr"] for group in trainer.strategy.optimizers[0].inner.param_groups}
        rates.append(rate)

    own = kind != "linear"
    schedule = LRSchedule(style="linear", warmup_steps=2, min_lr=LR / 10)
    module = _module_with_scheduler(case, kind) if own else module_of(case, lr_schedule=schedule)
    limits = {"max_steps": -1, "max_epochs": epochs} if own or epochs > 1 else {}
    trainer = trainer_of(case, callbacks=[callback(on_train_batch_start=keep)], **limits)
    trainer.fit(module, loader_of(case), loader_of(replace(case, steps=1)))
    return rates, trainer.callback_metrics["lr"].item()


def test_a_torch_scheduler_does_what_it_does_to_a_torch_optimizer() -> None:
    for rates, _ in run_ranks(_rates, 2, Case(layout=TWO_STAGES, steps=4, lr=LR), "one_cycle", 1):
        assert rates == pytest.approx(_torch_rates())


def test_the_rate_is_reduced_on_a_plateau_on_all_ranks() -> None:
    for rates, _ in run_ranks(_rates, 2, Case(layout=TWO_STAGES, steps=1, lr=LR), "plateau", 4):
        assert rates == pytest.approx([LR, LR, 0.1 * LR, 0.01 * LR])


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_schedule_of_the_module_ends_with_the_run(epochs: int) -> None:
    # Warm-up 0, 1/2, then from 1 to a tenth in the 4 steps that are left of 6; the last value is for a step 7.
    expected = [LR * share for share in (0, 0.5, 1, 0.775, 0.55, 0.325, 0.1)]
    for used, logged in run_ranks(_rates, 2, Case(layout=TWO_STAGES, steps=6 // epochs, lr=LR), "linear", epochs):
        assert [*used, logged] == pytest.approx(expected)
