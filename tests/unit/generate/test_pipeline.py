"""Where steps of one shape are taken without being asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatron.convert.registry import model_config
from lightning_megatron.generate.generator import LiveModel
from lightning_megatron.generate.inputs import Inputs
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.pipeline import uses_static_cache
from lightning_megatron.generate.texts import EndTokens
from lightning_megatron.models.config import ModelConfig
from tests.generate.models import MODELS

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "model", "new_tokens", "asked", "expected"),
    [
        *((GPU, name, 64, None, name != "llama_dynamic") for name in MODELS),
        (CPU, "llama", 64, None, False),
        # Fewer tokens gain nothing.
        (GPU, "llama", 7, None, False),
        (GPU, "llama", 8, None, True),
        (CPU, "llama", 64, True, True),
        (GPU, "llama", 64, False, False),
    ],
)
def test_gpus_replay_every_model_whose_steps_are_alike(
    device: torch.device, model: str, new_tokens: int, asked: bool | None, expected: bool
) -> None:
    options = GenerationOptions(max_new_tokens=new_tokens, static_cache=asked)
    assert uses_static_cache(options, _model(model), device) is expected


@pytest.mark.parametrize(
    ("is_own", "asked", "expected"), [(True, None, True), (False, None, False), (False, True, True)]
)
def test_steps_of_others_models_are_recorded_on_request_alone(is_own: bool, asked: bool | None, expected: bool) -> None:
    topology: Any = None
    model = LiveModel(chunks=(), config=_model("llama"), topology=topology, device=GPU, is_own=is_own)
    options = GenerationOptions(max_new_tokens=64, static_cache=asked)
    prompts = Inputs(input_ids=torch.ones(1, 2, dtype=torch.long))
    _, _, rules = model._planned(prompts, options, EndTokens())
    assert rules.options.static_cache is expected


def _model(name: str) -> ModelConfig:
    model_type, fields = MODELS[name]
    return model_config({"model_type": model_type, **fields})
