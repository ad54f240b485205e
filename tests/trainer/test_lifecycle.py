"""fit, validate and test in any order, several Trainers in one process, and no side effects after them."""

import contextlib
import os
from dataclasses import replace
from typing import Any

import pytest

from tests.checkpoint.runs import callback
from tests.leaks import Baseline
from tests.marks import on_gpus
from tests.parity.training import (
    DP2,
    TP2,
    TP2_PP2,
    Case,
    Layout,
    common_result,
    loader_of,
    metrics_of,
    module_of,
    trainer_of,
)
from tests.ranks import run_ranks
from tests.recording import recorded_log

CASE = Case(layout=TP2_PP2, steps=3)


def _run(case: Case, phases: tuple[str, ...]) -> list[float]:
    """Run the phases; return the loss of each evaluation and the last training loss of each fit."""
    module = module_of(case)
    trainer = trainer_of(case)
    losses = []
    for phase in phases:
        val_loader = loader_of(replace(case, steps=2))
        if phase == "fit":
            trainer.fit(module, loader_of(case), val_loader)
            losses.append(metrics_of(trainer)["train_loss"])
        else:
            (metrics,) = getattr(trainer, phase)(module, val_loader, verbose=False)
            losses.append(metrics["val_loss" if phase == "validate" else "test_loss"])
    return losses


@pytest.mark.parametrize(
    ("layout", "precision", "accelerator"),
    [
        (TP2_PP2, "32-true", "cpu"),
        (Layout(dp=2, overlap_communication=True), "bf16-mixed", "cpu"),
        on_gpus(2, DP2, "bf16-mixed", "gpu"),
    ],
)
def test_fit_validate_and_test_run_in_any_order(
    layout: Layout, precision: str, accelerator: Any
) -> None:
    case = replace(CASE, layout=layout, precision=precision, accelerator=accelerator)
    untrained, fitted, trained, tested = common_result(
        _run, case, ("validate", "fit", "validate", "test")
    )
    assert trained == tested != untrained
    # On GPUs the summation order of some kernels varies from run to run.
    expected = pytest.approx(
        [untrained, fitted, trained],
        rel=0.0 if accelerator == "cpu" else 1e-3,
        abs=0.0,
    )
    assert common_result(_run, case, ("test", "fit", "test")) == expected


def _lines_about_callbacks(case: Case) -> list[str]:
    """Lightning's log lines that name callbacks, of several phases with both of its model summaries."""
    from lightning.pytorch.callbacks import ModelSummary, RichModelSummary

    summaries = [ModelSummary(), RichModelSummary()]
    trainer = trainer_of(case, callbacks=summaries, enable_model_summary=True)
    module = module_of(case)
    with recorded_log("lightning.pytorch.utilities.rank_zero") as log:
        for _ in range(2):
            trainer.fit(module, loader_of(case))
            trainer.validate(module, loader_of(case), verbose=False)
    lines = log.getvalue().splitlines()
    return [line for line in lines if "callbacks" in line and "configure" in line]


def test_nothing_is_said_about_callbacks_that_the_user_did_not_pass() -> None:
    (lines,) = run_ranks(_lines_about_callbacks, 1, Case(steps=1))
    assert [line for line in lines if "already configured with model summary" not in line] == []


def _fit_each(cases: list[Case]) -> list[float]:
    """Last training loss of each case, run one after the other in this process."""
    return [_run(case, ("fit", "validate"))[0] for case in cases]


def test_trainers_with_different_layouts_run_in_one_process() -> None:
    layouts = [
        TP2_PP2,
        Layout(tp=2, dp=2, sequence_parallel=True),
        TP2_PP2,
    ]
    cases = [replace(CASE, layout=layout) for layout in layouts]
    for first, other, again in run_ranks(_fit_each, 4, cases):
        assert again == first
        assert other == pytest.approx(first, rel=1.5e-6)


def _hooks_of_a_step(case: Case) -> tuple[list[str], list[float]]:
    """Hooks called, and last losses: clipping in the module's hook, by the Trainer, in one step only, and never."""
    from lightning_megatron import MegatronModule

    class Clipping(MegatronModule):
        clipped_steps = case.steps

        def configure_gradient_clipping(
            self,
            optimizer: Any,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            if self.global_step < self.clipped_steps:
                self.clip_gradients(
                    optimizer, gradient_clip_val=0.25, gradient_clip_algorithm="norm"
                )

    class ClippingOnce(Clipping):
        clipped_steps = 1

    called: list[str] = []
    names = (
        "on_after_backward",
        "on_before_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
    )
    recorder = callback(**{name: lambda *_, name=name: called.append(name) for name in names})
    losses = []
    for kind, clip, callbacks in (
        (Clipping, None, [recorder]),
        (None, 0.25, []),
        (ClippingOnce, None, []),
        (None, None, []),
    ):
        trainer = trainer_of(replace(case, clip=clip), callbacks=callbacks)
        trainer.fit(module_of(case, kind), loader_of(case))
        losses.append(metrics_of(trainer)["train_loss"])
    return called, losses


def test_step_hooks_run_in_lightnings_order_and_may_clip() -> None:
    called, (in_hook, by_trainer, once, unclipped) = common_result(
        _hooks_of_a_step, replace(CASE, layout=Layout(pp=2))
    )
    backward = ["on_before_backward", "on_after_backward"]
    assert called == ["on_before_zero_grad", *backward, "on_before_optimizer_step"] * CASE.steps
    assert in_hook == by_trainer
    assert len({by_trainer, once, unclipped}) == 3


def _leaks_of_run(case: Case, fails: bool) -> list[str]:
    """Patches and environment variables that remain after a run, and patches of torch between two steps.

    Between steps, where user code may run, only Megatron and Lightning are patched.
    """
    from lightning_megatron import MegatronModule

    class Ending(MegatronModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1 and fails:
                raise RuntimeError("in the middle of an epoch")
            return loss

    leaks: list[str] = []

    def check(*_: Any) -> None:
        leaks.extend(leak for leak in before.leaks() if leak.startswith("torch"))

    module = module_of(case, Ending)
    trainer = trainer_of(case, callbacks=[callback(on_train_batch_end=check)])
    # After seed_everything has set its variables.
    before = Baseline()
    environment = dict(os.environ)
    ending = pytest.raises(RuntimeError, match="in the middle")
    with ending if fails else contextlib.nullcontext():
        trainer.fit(module, loader_of(case), loader_of(replace(case, steps=2)))
    variables = os.environ.keys() | environment.keys()
    changed = {name for name in variables if os.environ.get(name) != environment.get(name)}
    # Torch sets the paths of its caches when it loads.
    leaks += [name for name in changed if not name.startswith("TORCHINDUCTOR_")]
    return [*leaks, *before.leaks()]


@pytest.mark.parametrize(
    ("fails", "precision"),
    [(False, "32-true"), (True, "bf16-mixed")],
)
def test_runs_leave_no_patches_or_environment_variables(fails: bool, precision: str) -> None:
    case = replace(CASE, layout=TP2, precision=precision)
    assert common_result(_leaks_of_run, case, fails) == []
