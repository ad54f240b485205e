"""Where steps of one shape are taken without being asked for."""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.convert.registry import model_config
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.pipeline import uses_static_cache
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
        (GPU, "llama", 2, True, True),
        (CPU, "llama", 64, True, True),
        (GPU, "llama", 64, False, False),
    ],
)
def test_gpus_replay_every_model_whose_steps_are_alike(
    device: torch.device, model: str, new_tokens: int, asked: bool | None, expected: bool
) -> None:
    assert _uses(device, model, new_tokens, asked) is expected


def test_steps_that_differ_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"frequencies \(dynamic\)"):
        _uses(GPU, "llama_dynamic", 64, True)


def _uses(device: torch.device, name: str, new_tokens: int, asked: bool | None) -> bool:
    model_type, fields = MODELS[name]
    options = GenerationOptions(max_new_tokens=new_tokens, static_cache=asked)
    return uses_static_cache(options, model_config({"model_type": model_type, **fields}), device)
