"""Where steps of one shape are taken without being asked for."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from lightning_megatron.convert.registry import model_config
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.pipeline import uses_static_cache
from lightning_megatron.models.config import ModelConfig
from tests.generate.models import MODELS

_UNLIKE = ("llama_dynamic", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
"""Frequencies by the text's length, and experts whose tokens the host counts."""
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "model", "new_tokens", "asked", "expected"),
    [
        *((GPU, name, 64, None, name not in _UNLIKE) for name in MODELS),
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


def _model(name: str) -> ModelConfig:
    model_type, fields = MODELS[name]
    return model_config(AutoConfig.for_model(model_type, **fields))
