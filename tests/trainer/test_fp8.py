"""Training in fp8: near bf16, the same at every layout, resumed exactly, from and to checkpoints of bf16."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import LLAMA, Run, differences, read_tensors, train, train_with_checkpoints
from tests.parity.comparison import relative_error
from tests.parity.training import Case, Layout, Outcome, loader_of, module_of, outcome, train_module, trainer_of
from tests.ranks import run_ranks
from tests.trainer.test_freezing import train_frozen

BF16 = Case(precision="bf16-mixed")
WIDE_MLP = (("intermediate_size", 64),)
"""Whose half is a multiple of 16."""

NEAR = 0.1
"""In loss, of about 5; ten steps at this learning rate were up to 0.06 apart from those of bf16."""

TIMES_BF16 = 20.0
"""The error of a gradient in units of bf16's: a single number is rounded 8 (activations, weights) to 32 (gradients)
times as coarsely, but only in linears; measured 4 to 12 over these models' tensors."""


def _in_fp8(case: Case, **layout: Any) -> Outcome:
    return outcome(replace(case, layout=Layout(fp8="tensorwise", **layout)))


def _assert_near(found: Outcome, near: Outcome) -> None:
    assert found.losses == pytest.approx(near.losses, abs=NEAR)


@pytest.mark.parametrize(
    ("model", "fields"), [("gpt2", ()), ("llama", WIDE_MLP), ("t5", ())], ids=["gpt2", "llama", "t5"]
)
def test_a_run_stays_near_that_of_bf16(model: str, fields: tuple[tuple[str, Any], ...]) -> None:
    case = replace(BF16, model=model, model_fields=fields)
    exact, near, found = outcome(replace(case, precision="32-true")), outcome(case), _in_fp8(case)
    assert found.losses[0] != near.losses[0]
    _assert_near(found, near)
    for key, gradient in exact.gradients.items():
        error = relative_error(found.gradients[key], gradient)
        assert error < TIMES_BF16 * relative_error(near.gradients[key], gradient), key


@pytest.mark.parametrize(
    ("layout", "same_as"),
    [
        (Layout(pp=2, num_microbatches=2), Layout(num_microbatches=2)),
        (Layout(recompute="full"), Layout()),
        (Layout(dp=2, distributed_optimizer=False), Layout(dp=2)),
        pytest.param(
            *(Layout(pp=2, vpp=2, num_microbatches=2), Layout(num_microbatches=2)), marks=pytest.mark.exhaustive
        ),
        pytest.param(Layout(recompute="selective"), Layout(), marks=pytest.mark.exhaustive),
        pytest.param(Layout(dp=2, overlap_communication=True), Layout(dp=2), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_what_does_not_cut_a_tensor_changes_nothing(layout: Layout, same_as: Layout) -> None:
    # Microbatches have scales of their own: the same number of them. Sums in another order may round otherwise once.
    found, expected = (outcome(replace(BF16, layout=replace(each, fp8="tensorwise"))) for each in (layout, same_as))
    torch.testing.assert_close(found.losses, expected.losses, rtol=1e-4, atol=0.0)
    for key, gradient in expected.gradients.items():
        assert relative_error(found.gradients[key], gradient) < 1e-3, key


def test_a_gathered_sequence_is_quantized_as_a_whole_one() -> None:
    whole, parts = _in_fp8(BF16, tp=2), _in_fp8(BF16, tp=2, sequence_parallel=True)
    # What norms add up over ranks, in bf16, is all that differs before the first update.
    assert parts.losses[0] == pytest.approx(whole.losses[0], rel=1e-6)
    for key, gradient in whole.gradients.items():
        assert relative_error(parts.gradients[key], gradient) < 0.05, key
    _assert_near(parts, outcome(BF16))


def test_frozen_layers_stay_as_they_are() -> None:
    layout = Layout(tp=2, sequence_parallel=True)
    near, found = (
        run_ranks(train_frozen, 2, replace(BF16, layout=each), "lower half")[0][0]
        for each in (layout, replace(layout, fp8="tensorwise"))
    )
    moved = {name for name, weight in found.weights.items() if not torch.equal(weight, found.initial_weights[name])}
    assert {name.split(".")[2] for name in moved if ".h." in name} == {"2", "3"}
    _assert_near(found, near)


def _logits_and_losses(case: Case, folder: str) -> dict[str, Any]:
    """What an fp8 strategy and one of bf16 make of the same weights."""
    from lightning_megatron import MegatronModule

    module = module_of(case)
    train_module(module, case, loader_of(case))
    ids = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    module.save_pretrained(folder)
    found: dict[str, Any] = {}
    for name, layout in (("fp8", case.layout), ("bf16", replace(case.layout, fp8=None))):
        trainer = trainer_of(replace(case, layout=layout))
        read = MegatronModule(model=folder, pretrained=True)
        (validated,) = trainer.validate(read, loader_of(case), verbose=False)
        found[name] = validated["val_loss"], read.logits(torch.tensor(ids))
    return found


@pytest.mark.parametrize(
    "layout",
    [pytest.param(Layout(), marks=pytest.mark.exhaustive), Layout(tp=2, sequence_parallel=True)],
    ids=str,
)
def test_validation_is_in_fp8_and_what_is_generated_in_bf16(layout: Layout, tmp_path: Path) -> None:
    case = replace(BF16, layout=replace(layout, fp8="tensorwise"), steps=1)
    found = run_ranks(_logits_and_losses, layout.world_size, case, str(tmp_path / "model"))[0]
    (in_fp8, logits), (in_bf16, expected) = found["fp8"], found["bf16"]
    assert in_fp8 != in_bf16
    assert in_fp8 == pytest.approx(in_bf16, abs=NEAR)
    assert torch.equal(logits, expected)


# ---- checkpoints -----------------------------------------------------------------------------------------------------

EVERY_TWO = {"every_n_train_steps": 2}
FP8 = Run(strategy={"fp8": "tensorwise"}, trainer={"precision": "bf16-mixed", "max_steps": 4})


def test_a_run_is_resumed_exactly_and_checkpoints_are_those_of_bf16(tmp_path: Path) -> None:
    fp8 = FP8.but(strategy={"tp": 2, "sequence_parallel": True}, model=LLAMA)
    runs = {"fp8": fp8, "bf16": fp8.but(strategy={"fp8": None})}
    whole = {name: run_ranks(train_with_checkpoints, 2, run, tmp_path / name, EVERY_TWO) for name, run in runs.items()}
    kept = [read_tensors(tmp_path / name / "step=2.ckpt") for name in runs]
    shapes = [{key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()} for tensors in kept]
    assert shapes[0] == shapes[1]
    for saved, name in (("fp8", "fp8"), ("fp8", "bf16"), ("bf16", "fp8")):
        resumed = run_ranks(train, 2, runs[name].but(ckpt_path=str(tmp_path / saved / "step=2.ckpt")))
        for expected, found in zip(whole[name], resumed, strict=True):
            assert list(found.steps) == [3, 4]
            if name == saved:
                assert found.steps == {step: numbers for step, numbers in expected.steps.items() if step > 2}
                assert differences(expected.state, found.state) == []
