"""fit, validate and test in any order, several Trainers in one process, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import callback
from tests.parity.training import Case, Layout, loader_of, module_of, outcome, trainer_of
from tests.ranks import run_ranks

FOUR_RANKS = Layout(tp=2, pp=2, num_microbatches=2)
CASE = Case(layout=FOUR_RANKS, steps=3)


def _evaluated(case: Case) -> Any:
    return loader_of(replace(case, steps=2))


def _run(case: Case, phases: tuple[str, ...]) -> list[float]:
    """The loss of each evaluation, and the last training loss of each fit."""
    module, trainer, losses = module_of(case), trainer_of(case), []
    for phase in phases:
        if phase == "fit":
            trainer.fit(module, loader_of(case), _evaluated(case))
            losses.append(trainer.callback_metrics["train_loss"].item())
        else:
            evaluate = {"validate": trainer.validate, "test": trainer.test}[phase]
            (metrics,) = evaluate(module, _evaluated(case), verbose=False)
            losses.append(metrics["val_loss" if phase == "validate" else "test_loss"])
    return losses


def test_phases_may_come_in_any_order() -> None:
    untrained, fitted, trained, tested = _same_on_all(CASE, ("validate", "fit", "validate", "test"))
    alone = _same_on_all(CASE.on_one_process, ("validate", "fit", "validate", "test"))
    assert [untrained, fitted, trained, tested] == pytest.approx(alone, rel=1.5e-6)
    assert trained == tested != untrained
    assert _same_on_all(CASE, ("test", "validate", "fit", "test")) == [untrained, untrained, fitted, trained]


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu(2))])
def test_phases_may_come_in_any_order_in_bf16_too(accelerator: Any) -> None:
    layout = Layout(dp=2, overlap_communication=True)
    case = replace(CASE, layout=layout, precision="bf16-mixed", accelerator=accelerator)
    untrained, fitted, trained, tested = _same_on_all(case, ("validate", "fit", "validate", "test"))
    assert trained == tested != untrained
    # On GPUs some kernels add in another order each time.
    rel = 0.0 if accelerator == "cpu" else 1e-3
    assert _same_on_all(case, ("fit", "test")) == pytest.approx([fitted, trained], rel=rel, abs=0.0)


def _same_on_all(case: Case, phases: tuple[str, ...]) -> list[float]:
    first, *others = run_ranks(_run, case.layout.world_size, case, phases)
    assert all(other == first for other in others)
    return first


def _two_fits_of_one_module(case: Case) -> list[float]:
    losses: list[float] = []
    watch = callback(on_train_batch_end=lambda trainer, module, outputs, *_: losses.append(outputs["loss"].item()))
    module = module_of(case)
    trainer_of(case).fit(module, loader_of(case))
    (metrics,) = trainer_of(case).validate(module, loader_of(case), verbose=False)
    # One batch, so that its training loss is the loss of the epoch.
    whole_epoch = replace(case, steps=1, global_batch_size=case.steps * case.global_batch_size)
    trainer_of(whole_epoch, callbacks=[watch]).fit(module, loader_of(whole_epoch))
    return [metrics["val_loss"], *losses]


def test_a_second_fit_of_a_module_goes_on_from_its_weights() -> None:
    for validated, trained in run_ranks(_two_fits_of_one_module, 2, replace(CASE, layout=Layout(dp=2))):
        assert trained == pytest.approx(validated, rel=1.5e-6)


def _several_layouts(cases: list[Case]) -> list[float]:
    """The last training loss of each case, one after the other in this process."""
    return [_run(case, ("fit", "validate"))[0] for case in cases]


def test_trainers_of_other_layouts_follow_each_other_in_one_process() -> None:
    layouts = [FOUR_RANKS, Layout(tp=2, dp=2, sequence_parallel=True)]
    cases = [replace(CASE, layout=layout) for layout in [*layouts, FOUR_RANKS]]
    expected = outcome(CASE.on_one_process).losses[-1]
    for losses in run_ranks(_several_layouts, 4, cases):
        assert losses == pytest.approx([expected] * len(cases), rel=1.5e-6)
        assert losses[0] == losses[-1]


# ---- what is left behind --------------------------------------------------------------------------------------------


def _patched_attributes(with_megatron: bool = True) -> dict[str, Any]:
    """Everything that the strategy changes while it runs, or only what it changes while the engine works."""
    import importlib

    from lightning_megatron.engine.patches import CPU, patches

    found = {}
    for patch in (*(patches("cpu") if with_megatron else ()), *CPU):
        place: Any = importlib.import_module(patch.module)
        *path, name = patch.attribute.split(".")
        for part in path:
            place = getattr(place, part)
        found[f"{patch.module}.{patch.attribute}"] = vars(place).get(name)
    return found


def _torch_state() -> dict[str, Any]:
    return {
        "cuda": {name: value for name, value in vars(torch.cuda).items() if callable(value)},
        "default dtype": torch.get_default_dtype(),
        "modes": torch.overrides._len_torch_function_stack(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
    }


def _left_behind(case: Case, end: str) -> list[str]:
    """Names of everything that a run has changed for good."""
    from lightning_megatron import MegatronModule

    class Ending(MegatronModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1 and end == "error":
                raise RuntimeError("in the middle of an epoch")
            return loss

    module, trainer = module_of(case, Ending), trainer_of(case)  # seed_everything writes the environment
    patched, state, environment = _patched_attributes(), _torch_state(), dict(os.environ)
    with pytest.raises(RuntimeError, match="in the middle") if end == "error" else contextlib.nullcontext():
        trainer.fit(module, loader_of(case), _evaluated(case))
    trainer.strategy.teardown()
    names = [name for name, value in _patched_attributes().items() if value is not patched[name]]
    names += [name for name, value in _torch_state().items() if value != state[name]]
    variables = os.environ.keys() | environment.keys()
    # Torch tells its own parts where their caches are when it loads them.
    names += [v for v in variables if os.environ.get(v) != environment.get(v) and not v.startswith("TORCHINDUCTOR_")]
    return names


@pytest.mark.parametrize(("end", "precision"), [("ordinary", "32-true"), ("error", "bf16-mixed")])
def test_torch_megatron_and_the_environment_are_as_before(end: str, precision: str) -> None:
    assert run_ranks(_left_behind, 2, replace(CASE, layout=Layout(tp=2), precision=precision), end) == [[], []]


def _between_engine_calls(case: Case) -> list[str]:
    """What a callback sees of the engine's changes while training goes on."""
    patched, state, changed = _patched_attributes(False), _torch_state(), set()

    def look(*_: Any) -> None:
        changed.update(name for name, value in _patched_attributes(False).items() if value is not patched[name])
        changed.update(name for name in ("cuda", "modes") if _torch_state()[name] != state[name])

    trainer_of(case, callbacks=[callback(on_train_batch_end=look)]).fit(module_of(case), loader_of(case))
    return sorted(changed)


def test_users_code_between_two_steps_sees_torch_as_it_is() -> None:
    assert run_ranks(_between_engine_calls, 1, replace(CASE, layout=Layout())) == [[]]
