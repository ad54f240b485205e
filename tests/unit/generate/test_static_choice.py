"""Where are steps of one shape taken without being asked for?"""

from __future__ import annotations

import pytest
import torch

from lightning_megatron.convert.registry import model_config
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.static_steps import uses_static_cache
from tests.generate.models import MODELS

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def _uses(device: torch.device, name: str = "llama", new_tokens: int = 64, static: bool | None = None) -> bool:
    model_type, fields = MODELS[name]
    options = GenerationOptions(max_new_tokens=new_tokens, static_cache=static)
    return uses_static_cache(options, model_config({"model_type": model_type, **fields}), device)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama_dynamic"])
def test_gpus_replay_every_model_whose_steps_are_alike(name: str) -> None:
    assert _uses(GPU, name)
    assert not _uses(CPU, name)


def test_what_gains_nothing_is_not_prepared_unless_asked_for() -> None:
    assert not _uses(GPU, new_tokens=7)
    assert _uses(GPU, new_tokens=8)
    assert _uses(GPU, new_tokens=2, static=True)
    assert _uses(CPU, static=True)
    assert not _uses(GPU, static=False)


def test_steps_that_differ_grow_their_caches_or_are_refused() -> None:
    assert not _uses(GPU, "llama_dynamic")
    with pytest.raises(ConfigError, match=r"frequencies \(dynamic\)"):
        _uses(GPU, "llama_dynamic", static=True)
