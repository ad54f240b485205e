"""fp8 training: close to bf16, equal on every layout, exact resume, checkpoints interchangeable with bf16."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import (
    LLAMA,
    Run,
    differences,
    read_tensors,
    train,
    train_with_checkpoints,
)
from tests.marks import exhaustive
from tests.parity.comparison import relative_error
from tests.parity.training import (
    DP2,
    PP2,
    TP2_SP,
    Case,
    Layout,
    Outcome,
    loader_of,
    module_of,
    outcome,
    train_module,
    trainer_of,
)
from tests.ranks import run_ranks
from tests.trainer.test_freezing import train_frozen

BF16 = Case(precision="bf16-mixed")
WIDE_MLP = (("intermediate_size", 64),)
"""MLP size of which half is a multiple of 16."""

LOSS_ATOL = 0.1
"""Tolerance to bf16 for losses of about 5; measured up to 0.06 over ten steps at this learning rate."""

TIMES_BF16 = 20.0
"""Tolerance of gradients in units of bf16's error: fp8 rounds values 8 (activations, weights) to 32 (gradients) times
as coarsely, but only in linears; measured 4 to 12 over these models' tensors."""


def _fp8_outcome(case: Case, **layout: Any) -> Outcome:
    return outcome(replace(case, layout=Layout(fp8="tensorwise", **layout)))


def _assert_close_losses(actual: Outcome, bf16: Outcome) -> None:
    assert actual.losses == pytest.approx(bf16.losses, abs=LOSS_ATOL)


@pytest.mark.parametrize("model", ["gpt2", "llama", "t5"])
def test_fp8_is_close_to_bf16(model: str) -> None:
    fields = WIDE_MLP if model == "llama" else ()
    case = replace(BF16, model=model, model_fields=fields)
    exact = outcome(replace(case, precision="32-true"))
    bf16 = outcome(case)
    fp8 = _fp8_outcome(case)
    assert fp8.losses[0] != bf16.losses[0]
    _assert_close_losses(fp8, bf16)
    for key, gradient in exact.gradients.items():
        error = relative_error(fp8.gradients[key], gradient)
        assert error < TIMES_BF16 * relative_error(bf16.gradients[key], gradient), key


@pytest.mark.parametrize(
    ("layout", "same_as"),
    [
        (PP2, Layout(num_microbatches=2)),
        (Layout(recompute="full"), Layout()),
        (Layout(dp=2, distributed_optimizer=False), DP2),
        exhaustive(Layout(recompute="selective"), Layout()),
        exhaustive(Layout(dp=2, overlap_communication=True), DP2),
    ],
    ids=str,
)
def test_layouts_without_tensor_sharding_equal_one_process(layout: Layout, same_as: Layout) -> None:
    # The same number of microbatches, as each has its own scales. A different summation order may change a rounding.
    actual, expected = (
        outcome(replace(BF16, layout=replace(x, fp8="tensorwise"))) for x in (layout, same_as)
    )
    torch.testing.assert_close(
        actual.losses,
        expected.losses,
        rtol=1e-4,
        atol=0.0,
    )
    for key, gradient in expected.gradients.items():
        assert relative_error(actual.gradients[key], gradient) < 1e-3, key


def test_sequence_parallel_quantizes_like_full_sequence() -> None:
    full = _fp8_outcome(BF16, tp=2)
    sharded = _fp8_outcome(BF16, tp=2, sequence_parallel=True)
    # Before the first update only norms' sums over ranks, in bf16, differ.
    assert sharded.losses[0] == pytest.approx(full.losses[0], rel=1e-6)
    for key, gradient in full.gradients.items():
        assert relative_error(sharded.gradients[key], gradient) < 0.05, key
    _assert_close_losses(sharded, outcome(BF16))


def test_fp8_leaves_frozen_layers_unchanged() -> None:
    layout = TP2_SP
    bf16, fp8 = (
        run_ranks(train_frozen, 2, replace(BF16, layout=x), "lower half")[0][0]
        for x in (layout, replace(layout, fp8="tensorwise"))
    )
    layers = {name: weight for name, weight in fp8.weights.items() if ".h." in name}
    changed = {
        name.split(".")[2]
        for name, weight in layers.items()
        if not torch.equal(weight, fp8.initial_weights[name])
    }
    assert changed == {"2", "3"}
    _assert_close_losses(fp8, bf16)


def _logits_and_losses(case: Case, folder: str) -> dict[str, Any]:
    """Validation loss and logits of the same weights with an fp8 and with a bf16 strategy."""
    from lightning_megatron import MegatronModule

    module = module_of(case)
    train_module(module, case, loader_of(case))
    module.save_pretrained(folder)
    ids = torch.arange(1, 11).view(2, 5)
    results: dict[str, Any] = {}
    layouts = {"fp8": case.layout, "bf16": replace(case.layout, fp8=None)}
    for name, layout in layouts.items():
        trainer = trainer_of(replace(case, layout=layout))
        loaded = MegatronModule(model=folder, pretrained=True)
        (metrics,) = trainer.validate(loaded, loader_of(case), verbose=False)
        results[name] = metrics["val_loss"], loaded.logits(ids)
    return results


def test_validation_uses_fp8_and_logits_use_bf16(tmp_path: Path) -> None:
    case = replace(
        BF16,
        layout=Layout(tp=2, sequence_parallel=True, fp8="tensorwise"),
        steps=1,
    )
    results = run_ranks(_logits_and_losses, 2, case, str(tmp_path / "model"))[0]
    fp8_loss, logits = results["fp8"]
    bf16_loss, expected = results["bf16"]
    assert fp8_loss != bf16_loss
    assert fp8_loss == pytest.approx(bf16_loss, abs=LOSS_ATOL)
    assert torch.equal(logits, expected)


# ---- checkpoints -----------------------------------------------------------------------------------------------------

EVERY_TWO = {"every_n_train_steps": 2}
FP8 = Run(
    strategy={"fp8": "tensorwise"},
    trainer={"precision": "bf16-mixed", "max_steps": 4},
)


def test_resume_is_exact_and_checkpoints_equal_bf16(tmp_path: Path) -> None:
    fp8 = FP8.but(
        strategy={"tp": 2, "sequence_parallel": True},
        model=LLAMA,
    )
    runs = {
        "fp8": fp8,
        "bf16": fp8.but(strategy={"fp8": None}),
    }
    full = {
        name: run_ranks(train_with_checkpoints, 2, run, tmp_path / name, EVERY_TWO)
        for name, run in runs.items()
    }
    paths = {name: tmp_path / name / "step=2.ckpt" for name in runs}
    shapes = [
        {key: (tensor.shape, tensor.dtype) for key, tensor in read_tensors(path).items()}
        for path in paths.values()
    ]
    assert shapes[0] == shapes[1]
    for saved, name in (
        ("fp8", "fp8"),
        ("fp8", "bf16"),
        ("bf16", "fp8"),
    ):
        resumed = run_ranks(train, 2, runs[name].but(ckpt_path=str(paths[saved])))
        for expected, actual in zip(full[name], resumed, strict=True):
            assert list(actual.steps) == [3, 4]
            if name == saved:
                assert actual.steps == {step: expected.steps[step] for step in (3, 4)}
                assert differences(expected.state, actual.state) == []
