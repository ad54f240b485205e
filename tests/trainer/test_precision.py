"""Dtypes of weights, gradients and moments in each precision, and overflows in fp16."""

from typing import Any, Literal

import pytest
import torch

from tests.checkpoint.runs import Run, callback, fit
from tests.marks import on_gpus
from tests.parity.comparison import all_equal
from tests.parity.sharding import shards
from tests.parity.training import TP2_PP2, Case, loader_of, module_of, trainer_of
from tests.ranks import run_ranks

WEIGHTS = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
}


def _dtypes() -> dict[str, dict[str, set[torch.dtype]]]:
    """By precision, the dtypes of all training state on this rank."""
    dtypes = {}
    for precision in WEIGHTS:
        run = Run(
            trainer={"precision": precision, "max_steps": 2},
            optimizer={"initial_loss_scale": 2.0**10} if precision == "16-mixed" else {},
        )
        trainer, _ = fit(run)
        parameters = list(trainer.lightning_module.model_chunks.parameters())
        (part,) = trainer.strategy.optimizers[0].parts
        masters = [p for group in part.optimizer.param_groups for p in group["params"]]
        states = part.optimizer.state.values()
        moments = [value for state in states for value in state.values() if value.numel() > 1]
        dtypes[precision] = {
            "weights": {p.dtype for p in parameters},
            "main gradients": {p.main_grad.dtype for p in parameters},
            "master weights": {p.dtype for p in masters},
            "moments": {value.dtype for value in moments},
        }
    return dtypes


def test_gradients_master_weights_and_moments_are_always_fp32() -> None:
    others = dict.fromkeys(("main gradients", "master weights", "moments"), {torch.float32})
    for dtypes in run_ranks(_dtypes, 2):
        for precision, dtype in WEIGHTS.items():
            assert dtypes[precision] == {"weights": {dtype}, **others}


# ---- fp16 -----------------------------------------------------------------------------------------------------------

FIRST_SCALE = 2.0**22
OVERFLOW_AT = 6
"""Gradients times 2**22 exceed fp16's maximum of 65504, times 2**16 they do not."""


def _steps_in_fp16(accelerator: Literal["cpu", "gpu"]) -> list[dict[str, Any]]:
    """Report of each step, with a warm-up, so that the learning rate differs in every step.

    In one step only the last rank gets infinite gradients.
    """
    from lightning_megatron import LRSchedule

    steps: list[dict[str, Any]] = []
    weights: list[list[torch.Tensor]] = []

    def record_weights(trainer: Any, module: Any, *_: Any) -> None:
        weights.append([shard.data for shard in shards(module)])

    def overflow(trainer: Any, module: Any, optimizer: Any) -> None:
        if len(steps) == OVERFLOW_AT and trainer.global_rank == trainer.world_size - 1:
            for parameter in module.model_chunks.parameters():
                parameter.main_grad.fill_(torch.inf)

    def record_step(trainer: Any, module: Any, *_: Any) -> None:
        record_weights(trainer, module)
        report = trainer.strategy.optimizer_report
        # The loss scale after the step, the learning rate for the next one.
        steps.append(
            {
                "skipped": report.skipped,
                "scale": report.loss_scale,
                "lr": trainer.optimizers[0].param_groups[0]["lr"],
                "changed": not all_equal(*weights[-2:]),
            }
        )

    hooks = {
        "on_train_start": record_weights,
        "on_before_optimizer_step": overflow,
        "on_train_batch_end": record_step,
    }
    optimizer = (
        ("initial_loss_scale", FIRST_SCALE),
        ("loss_scale_window", 4),
        ("eps", 1e-3),
    )
    case = Case(
        layout=TP2_PP2,
        steps=14,
        labels="uneven",
        optimizer=optimizer,
        accelerator=accelerator,
        precision="16-mixed",
    )
    schedule = LRSchedule(warmup_steps=9, init_lr=case.lr / 10)
    trainer = trainer_of(case, callbacks=[callback(**hooks)])
    trainer.fit(module_of(case, lr_schedule=schedule), loader_of(case))
    return steps


def _loss_scales(skipped: list[bool]) -> list[float]:
    """Loss scale after each step: halved by overflows after the first (hysteresis 2), doubled by four good steps."""
    scale = FIRST_SCALE
    good = 0
    tolerated = 1
    scales = []
    for overflow in skipped:
        good = 0 if overflow else good + 1
        if overflow and not tolerated:
            scale /= 2
        elif overflow:
            tolerated = 0
        elif good == 4:
            scale = scale * 2
            good = 0
            tolerated = 1
        scales.append(scale)
    return scales


@pytest.mark.parametrize("accelerator", ["cpu", on_gpus(4, "gpu")])
def test_overflow_on_any_rank_changes_only_the_loss_scale(accelerator: str) -> None:
    for steps in run_ranks(_steps_in_fp16, 4, accelerator):
        skipped = [step["skipped"] for step in steps]
        assert skipped[:2] == [True, True]
        assert skipped[OVERFLOW_AT - 1 : OVERFLOW_AT + 2] == [False, True, False]
        assert [step["scale"] for step in steps] == _loss_scales(skipped)
        updates = 0
        for step in steps:
            updates += not step["skipped"]
            assert step["changed"] == (not step["skipped"])
            # Warm-up over nine updates from a tenth to the full rate.
            assert step["lr"] == pytest.approx(Case().lr * min(1 + updates, 10) / 10)
