"""Replacing only the loss (by that of an example), the batch, the forward pass or the model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.custom_train_step import KeyTokenTrainStep
from tests.checkpoint.runs import callback
from tests.parity.training import (
    PP2_DP2,
    TP2_PP2,
    Case,
    Layout,
    Outcome,
    common_result,
    join_outcomes,
    loader_of,
    module_of,
    train_module,
)
from tests.ranks import RankError, run_ranks

CASE = Case(
    layout=PP2_DP2,
    steps=2,
    global_batch_size=8,
    labels="uneven",
)


def _losses(case: Case, parts: tuple[str, ...]) -> list[list[float]]:
    """Losses of runs, each with one part replaced."""
    from lightning_megatron import GPTTrainStep
    from lightning_megatron.engine.settings import EngineSettings
    from lightning_megatron.models.build import build_chunks
    from lightning_megatron.models.config import ModelConfig
    from lightning_megatron.steps.base import Batch, LossFunc, LossTerm

    class ZeroTokens(GPTTrainStep):
        def get_batch(self, data_iterator: Iterator[Batch]) -> Batch:
            batch = super().get_batch(data_iterator)
            return {**batch, "tokens": torch.zeros_like(batch["tokens"])}

    class Unmasked(GPTTrainStep):
        def forward_step(
            self, data_iterator: Iterator[Batch], model: torch.nn.Module
        ) -> tuple[Any, LossFunc]:
            batch = self.get_batch(data_iterator)
            output = model(batch["tokens"], None, None, labels=batch["targets"])
            return output, self.mean_of_all

        def mean_of_all(self, losses: torch.Tensor) -> dict[str, LossTerm]:
            return {"lm_loss": LossTerm(losses.sum(), torch.tensor(losses.numel()))}

    class Uncounted(Unmasked):
        def counts(self, batch: Batch) -> None:
            return None

    def with_relu(model: ModelConfig, settings: EngineSettings) -> torch.nn.ModuleList:
        return build_chunks(replace(model, activation="relu"), settings)

    options: dict[str, dict[str, Any]] = {
        "nothing": {},
        "loss_func": {"train_step": KeyTokenTrainStep(key_tokens=[3, 30, 60], alpha=0.5)},
        "get_batch": {"train_step": ZeroTokens()},
        "forward_step": {"train_step": Uncounted()},
        "targets": {"train_step": Unmasked()},
        "model": {"model_provider": with_relu},
        "config": {},
    }
    relu = replace(case, model_fields=(("activation_function", "relu"),))
    losses = []
    for part in parts:
        module = module_of(relu if part == "config" else case, **options[part])
        losses.append(train_module(module, case, loader_of(case)).losses)
    return losses


def test_replacing_one_part_equals_one_process() -> None:
    replaced = ("loss_func", "get_batch", "forward_step")
    parts = ("nothing", *replaced, "model", "config")
    original, *sharded, provider, config = common_result(_losses, CASE, parts)
    on_one_process = common_result(_losses, CASE.on_one_process, replaced)
    for losses, expected in zip(sharded, on_one_process, strict=True):
        assert losses == pytest.approx(expected, rel=1.5e-6)
        assert losses[0] != pytest.approx(original[0], rel=1e-3)
    assert provider == config != original


def _train_own_model(case: Case, folder: Path, resume: bool = False) -> Outcome:
    """Train the example's model, and save it; or go on from what was saved, for as many steps."""
    from examples.own_model import convolutional_model

    module = module_of(case, model_provider=convolutional_model)
    path = folder / "own.ckpt"
    if resume:
        steps = replace(case, steps=2 * case.steps)
        return train_module(module, steps, loader_of(steps), ckpt_path=path)
    saver = callback(on_train_end=lambda trainer, _: trainer.save_checkpoint(path))
    return train_module(module, case, loader_of(case), callbacks=[saver])


def test_example_model_equals_one_process_and_resumes_there(tmp_path: Path) -> None:
    case = replace(CASE, layout=TP2_PP2, model="llama")
    one = case.on_one_process
    whole = join_outcomes(run_ranks(_train_own_model, 1, one, tmp_path / "whole"))
    sharded = join_outcomes(run_ranks(_train_own_model, 4, case, tmp_path))
    assert sharded.losses == pytest.approx(whole.losses, rel=1e-5)
    assert sharded.grad_norms == pytest.approx(whole.grad_norms, rel=1e-5)
    assert sharded.weights.keys() == whole.weights.keys()
    for name, weight in whole.weights.items():
        torch.testing.assert_close(
            sharded.weights[name],
            weight,
            rtol=1e-4,
            atol=1e-5,
        )
        assert not torch.equal(whole.initial_weights[name], weight)
    resumed = join_outcomes(run_ranks(_train_own_model, 1, one, tmp_path, True))
    assert len(resumed.losses) == case.steps
    for name, weight in resumed.initial_weights.items():
        assert torch.equal(weight, sharded.weights[name])


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, sequence_parallel=True), Layout(cp=2)],
    ids=str,
)
def test_example_model_refuses_parts_of_sequences(layout: Layout, tmp_path: Path) -> None:
    case = replace(CASE, layout=layout, model="llama")
    with pytest.raises(RankError, match="expected whole sequences, whose tokens a convolution"):
        run_ranks(_train_own_model, 2, case, tmp_path)


def test_target_counts_that_differ_from_loss_are_refused() -> None:
    message = r"Unmasked\.counts: expected the numbers of targets that loss_func returns"
    with pytest.raises(RankError, match=message):
        common_result(_losses, CASE, ("targets",))


def test_example_loss_equals_manual_computation() -> None:
    step = KeyTokenTrainStep(key_tokens=[7, 9], alpha=0.5)
    batch = {
        "tokens": torch.tensor(
            [
                [7, 1, 9, 7],
                [1, 2, 3, 4],
                [9, 0, 0, 0],
            ]
        ),
        "loss_mask": torch.tensor(
            [
                [1.0, 1.0, 0.0, 0.0],
                [1.0, 1.0, 1.0, 1.0],
                [0.0, 0.0, 0.0, 0.0],
            ]
        ),
    }
    losses = torch.tensor(
        [
            [2.0, 4.0, 100.0, 100.0],
            [1.0, 2.0, 3.0, 6.0],
            [50.0, 50.0, 50.0, 50.0],
        ]
    )
    term = step.loss_func(batch, losses)["lm_loss"]
    # First row: mean (2 + 4) / 2 = 3, three key tokens: times 2.5. Second: (1 + 2 + 3 + 6) / 4 = 3. Third: no targets.
    assert term.sum.item() == pytest.approx(3 * 2.5 + 3)
    assert term.targets.item() == step.counts(batch)["lm_loss"].item() == 2
