"""fit, validate and test in any order, several Trainers in one process, and what they leave behind."""

import contextlib
import os
from dataclasses import replace
from typing import Any

import pytest

from tests.checkpoint.runs import callback
from tests.leaks import Baseline
from tests.parity.training import Case, Layout, common_result, loader_of, module_of, trainer_of
from tests.ranks import run_ranks

FOUR_RANKS = Layout(tp=2, pp=2, num_microbatches=2)
CASE = Case(layout=FOUR_RANKS, steps=3)


def _run(case: Case, phases: tuple[str, ...]) -> list[float]:
    """The loss of each evaluation, and the last training loss of each fit."""
    module, trainer, losses = module_of(case), trainer_of(case), []
    for phase in phases:
        evaluated = loader_of(replace(case, steps=2))
        if phase == "fit":
            trainer.fit(module, loader_of(case), evaluated)
            losses.append(trainer.callback_metrics["train_loss"].item())
        else:
            (metrics,) = getattr(trainer, phase)(module, evaluated, verbose=False)
            losses.append(metrics["val_loss" if phase == "validate" else "test_loss"])
    return losses


@pytest.mark.parametrize(
    ("layout", "precision", "accelerator"),
    [
        (FOUR_RANKS, "32-true", "cpu"),
        (Layout(dp=2, overlap_communication=True), "bf16-mixed", "cpu"),
        pytest.param(Layout(dp=2), "bf16-mixed", "gpu", marks=pytest.mark.gpu(2)),
    ],
)
def test_phases_may_come_in_any_order(layout: Layout, precision: str, accelerator: Any) -> None:
    case = replace(CASE, layout=layout, precision=precision, accelerator=accelerator)
    untrained, fitted, trained, tested = common_result(_run, case, ("validate", "fit", "validate", "test"))
    assert trained == tested != untrained
    # On GPUs some kernels add in another order each time.
    expected = pytest.approx([untrained, fitted, trained], rel=0.0 if accelerator == "cpu" else 1e-3, abs=0.0)
    assert common_result(_run, case, ("test", "fit", "test")) == expected


def _two_fits_of_one_module(case: Case) -> tuple[float, float]:
    module = module_of(case)
    trainer_of(case).fit(module, loader_of(case))
    (metrics,) = trainer_of(case).validate(module, loader_of(case), verbose=False)
    # One batch, so that its training loss is the loss of the epoch.
    whole_epoch = replace(case, steps=1, global_batch_size=case.steps * case.global_batch_size)
    second = trainer_of(whole_epoch)
    second.fit(module, loader_of(whole_epoch))
    return metrics["val_loss"], second.callback_metrics["train_loss"].item()


def test_a_second_fit_of_a_module_goes_on_from_its_weights() -> None:
    validated, trained = common_result(_two_fits_of_one_module, replace(CASE, layout=Layout(dp=2)))
    assert trained == pytest.approx(validated, rel=1.5e-6)


def _several_layouts(cases: list[Case]) -> list[float]:
    """The last training loss of each case, one after the other in this process."""
    return [_run(case, ("fit", "validate"))[0] for case in cases]


def test_trainers_of_other_layouts_follow_each_other_in_one_process() -> None:
    layouts = [FOUR_RANKS, Layout(tp=2, dp=2, sequence_parallel=True), FOUR_RANKS]
    for first, other, again in run_ranks(_several_layouts, 4, [replace(CASE, layout=layout) for layout in layouts]):
        assert (again, other) == (first, pytest.approx(first, rel=1.5e-6))


def _hooks_of_a_step(case: Case) -> tuple[list[str], list[float]]:
    """The hooks that are called, and the last losses: of a module that clips by itself, is told, clips once, never."""
    from lightning_megatron import MegatronModule

    class Clipping(MegatronModule):
        clipped_steps = case.steps

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            if self.global_step < self.clipped_steps:
                self.clip_gradients(optimizer, gradient_clip_val=0.25, gradient_clip_algorithm="norm")

    class ClippingOnce(Clipping):
        clipped_steps = 1

    called: list[str] = []
    names = ("on_after_backward", "on_before_backward", "on_before_optimizer_step", "on_before_zero_grad")
    watch = callback(**{name: lambda *_, name=name: called.append(name) for name in names})
    clips = (0.25, None, None)
    trainers = [trainer_of(case, callbacks=[watch]), *(trainer_of(replace(case, clip=clip)) for clip in clips)]
    for trainer, kind in zip(trainers, (Clipping, None, ClippingOnce, None), strict=True):
        trainer.fit(module_of(case, kind), loader_of(case))
    return called, [trainer.callback_metrics["train_loss"].item() for trainer in trainers]


def test_the_hooks_of_a_step_are_called_in_lightnings_order_and_may_clip() -> None:
    called, (by_hand, told, once, unclipped) = common_result(_hooks_of_a_step, replace(CASE, layout=Layout(pp=2)))
    backward = ["on_before_backward", "on_after_backward"]
    assert called == ["on_before_zero_grad", *backward, "on_before_optimizer_step"] * CASE.steps
    assert by_hand == told
    assert len({told, once, unclipped}) == 3


def _left_behind(case: Case, fails: bool) -> list[str]:
    """What a run has changed for good; a rank function that leaves a patch fails by itself (tests/leaks.py).

    Between two steps, where a user's code may run, torch is as it was: Megatron and Lightning alone are patched.
    """
    from lightning_megatron import MegatronModule

    class Ending(MegatronModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1 and fails:
                raise RuntimeError("in the middle of an epoch")
            return loss

    found: list[str] = []
    look = callback(on_train_batch_end=lambda *_: found.extend(x for x in before.leaks() if x.startswith("torch")))
    module, trainer = module_of(case, Ending), trainer_of(case, callbacks=[look])
    before, environment = Baseline(), dict(os.environ)  # seed_everything has written the environment
    with pytest.raises(RuntimeError, match="in the middle") if fails else contextlib.nullcontext():
        trainer.fit(module, loader_of(case), loader_of(replace(case, steps=2)))
    variables = os.environ.keys() | environment.keys()
    # Torch tells its own parts where their caches are when it loads them.
    found += [v for v in variables if os.environ.get(v) != environment.get(v) and not v.startswith("TORCHINDUCTOR_")]
    return [*found, *before.leaks()]


@pytest.mark.parametrize(("fails", "precision"), [(False, "32-true"), (True, "bf16-mixed")])
def test_torch_megatron_and_the_environment_are_as_before(fails: bool, precision: str) -> None:
    assert common_result(_left_behind, replace(CASE, layout=Layout(tp=2), precision=precision), fails) == []
