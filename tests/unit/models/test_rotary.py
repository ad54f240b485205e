"""Rotary frequencies equal Hugging Face's for every kind of scaling and every length."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lightning_megatron.convert.registry import model_config
from lightning_megatron.convert.rope import read_rope
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.rotary import inverse_frequencies, rope_softmax_scale

WIDTH = 24
CONTEXT = 160
FACTORS = {
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [2.0 + 0.3 * i for i in range(12)],
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}

CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "old name of the type": {"type": "linear", "factor": 3.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40},
    "yarn betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8, "beta_slow": 0.5},
    "yarn not rounded": {"rope_type": "yarn", "factor": 4.0, "truncate": False},
    "yarn attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7},
    "yarn mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    "longrope": {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 40},
    "longrope attention factor": {"rope_type": "longrope", **FACTORS, "attention_factor": 1.3},
    "llama3": {"rope_type": "llama3", **LLAMA3},
}


def _config(rope: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * WIDTH,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": 5000.0, **rope},
    )


@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_attention_factor_equal_hugging_faces(case: str) -> None:
    """Hugging Face's functions read the config; ours read the result of ``read_rope``."""
    config = _config(CASES[case])
    base, scaling = read_rope(config, config.rope_parameters)
    kind = config.rope_parameters["rope_type"]
    for seq_length in (None, 7, 40, 41, 160, 161, 1000):
        if kind == "default":
            expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
        else:
            expected, factor = ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=seq_length)
        assert torch.equal(inverse_frequencies(WIDTH, base, scaling, seq_length), expected)
    scale = rope_softmax_scale(None, WIDTH, scaling) or WIDTH**-0.5
    assert scale == pytest.approx(factor**2 / WIDTH**0.5, rel=1e-12)
    assert (rope_softmax_scale(0.3, WIDTH, scaling) or 0) == pytest.approx(
        0.3 * factor**2, rel=1e-12
    )


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "proportional", "factor": 2.0}, "rope_type='proportional'"),
        (
            {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0},
            "llama3.*low_freq_factor",
        ),
        ({**CASES["longrope"], "short_factor": [1.0]}, "expected 12 values, .* got 1 and 12"),
    ],
)
def test_unsupported_scaling_is_refused(rope: dict[str, Any], message: str) -> None:
    fields = {
        "hidden_size": 4 * WIDTH,
        "num_attention_heads": 4,
        "rope_parameters": {"rope_theta": 5000.0, **rope},
    }
    with pytest.raises(ConfigError, match=message):
        model_config({"model_type": "llama", **fields})
