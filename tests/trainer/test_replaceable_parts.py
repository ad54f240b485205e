"""Replacing the batch, the forward pass or the model alone (the loss: tests/test_custom_train_step.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.parity.training import Case, Layout, loader_of, module_of, train_module
from tests.ranks import run_ranks

CASE = Case(layout=Layout(pp=2, num_microbatches=2), steps=2, global_batch_size=4)


def _losses(case: Case, parts: tuple[str, ...]) -> list[list[float]]:
    """The losses of runs in each of which one part is replaced."""
    from lightning_megatron import GPTTrainStep
    from lightning_megatron.models.build import build_chunks
    from lightning_megatron.models.config import ModelConfig
    from lightning_megatron.models.transformer_config import EngineSettings
    from lightning_megatron.steps.base import Batch, LossFunc, LossTerm

    class ZeroTokens(GPTTrainStep):
        def get_batch(self, data_iterator: Iterator[Batch]) -> Batch:
            batch = super().get_batch(data_iterator)
            return {**batch, "tokens": torch.zeros_like(batch["tokens"])}

    class Unmasked(GPTTrainStep):
        def forward_step(self, data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[Any, LossFunc]:
            batch = self.get_batch(data_iterator)
            output = model(batch["tokens"], None, None, labels=batch["targets"])
            return output, lambda losses: {"lm_loss": LossTerm(losses.sum(), torch.tensor(losses.numel()))}

        def counts(self, batch: Batch) -> None:
            return None

    def with_relu(model: ModelConfig, settings: EngineSettings) -> torch.nn.ModuleList:
        return build_chunks(replace(model, activation="relu"), settings)

    options: dict[str, dict[str, Any]] = {
        "nothing": {},
        "get_batch": {"train_step": ZeroTokens()},
        "forward_step": {"train_step": Unmasked()},
        "model": {"model_provider": with_relu},
    }
    return [train_module(module_of(case, **options[part]), case, loader_of(case)).losses for part in parts]


def test_the_batch_the_forward_pass_or_the_model_alone() -> None:
    original, *on_two, with_relu = run_ranks(_losses, 2, CASE, ("nothing", "get_batch", "forward_step", "model"))[1]
    (on_one,) = run_ranks(_losses, 1, CASE.on_one_process, ("get_batch", "forward_step"))
    for ours, alone in zip(on_two, on_one, strict=True):
        assert ours == pytest.approx(alone, rel=1.5e-6)
        assert ours[0] != pytest.approx(original[0], rel=1e-3)
    relu = replace(CASE, model_fields=(("activation_function", "relu"),))
    assert run_ranks(_losses, 2, relu, ("nothing",)) == [[with_relu]] * 2
    assert with_relu != original
