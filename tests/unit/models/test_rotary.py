"""Rotary frequencies are Hugging Face's, for every kind of scaling and every length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lightning_megatron.convert.gpt_tables import read_rope
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.rotary import angles_at, inverse_frequencies, rope_softmax_scale

WIDTH, CONTEXT = 24, 160
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(12)], "long_factor": [2.0 + 0.3 * i for i in range(12)]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 40}

CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "old name of the type": {"type": "linear", "factor": 3.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40},
    "yarn of the whole length": {"rope_type": "yarn", "factor": 4.0},
    "yarn betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8, "beta_slow": 0.5},
    "yarn not rounded": {"rope_type": "yarn", "factor": 4.0, "truncate": False},
    "yarn attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7},
    "yarn mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn one mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7},
    "yarn steps": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 1, "truncate": False},
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


def _theirs(config: LlamaConfig, seq_length: int | None) -> tuple[torch.Tensor, float]:
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=seq_length)


@pytest.mark.parametrize("seq_length", [None, 7, 40, 41, 160, 161, 1000])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_attention_factor_are_those_of_hugging_face(case: str, seq_length: int | None) -> None:
    config = _config(CASES[case])
    expected, attention_factor = _theirs(config, seq_length)
    base, scaling = read_rope(config.rope_parameters, CONTEXT)
    # One more rounding or less of float32, in the few operations of either side.
    torch.testing.assert_close(inverse_frequencies(WIDTH, base, scaling, seq_length), expected, rtol=5e-7, atol=0)
    scale = rope_softmax_scale(None, WIDTH, scaling) or WIDTH**-0.5
    assert scale == pytest.approx(attention_factor**2 / WIDTH**0.5, rel=1e-12)
    assert (rope_softmax_scale(0.3, WIDTH, scaling) or 0) == pytest.approx(0.3 * attention_factor**2, rel=1e-12)


@pytest.mark.parametrize("seq_length", [30, 60, 200])
@pytest.mark.parametrize("case", ["dynamic", "longrope", "yarn", "llama3"])
def test_scores_are_those_of_hugging_faces_model(case: str, seq_length: int) -> None:
    config = _config(CASES[case])
    positions = torch.arange(seq_length)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    base, scaling = read_rope(config.rope_parameters, CONTEXT)
    angles = angles_at(positions, inverse_frequencies(WIDTH, base, scaling, seq_length))[:, 0, 0]
    ratio = (rope_softmax_scale(None, WIDTH, scaling) or WIDTH**-0.5) * WIDTH**0.5
    # Angles up to 200 are rounded to 1e-5 on either side.
    torch.testing.assert_close(angles.cos() * ratio**0.5, cos[0], rtol=0, atol=5e-5)
    torch.testing.assert_close(angles.sin() * ratio**0.5, sin[0], rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "proportional", "factor": 2.0}, "rope_type='proportional'"),
        ({"rope_type": "default", "mrope_section": [4, 4, 4]}, "mrope_section"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ({"rope_type": "linear"}, "'linear' have no 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "'llama3' have no 'low_freq_factor'"),
    ],
)
def test_what_would_change_the_result_is_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rope(rope, CONTEXT)


def test_longrope_needs_a_factor_for_each_pair() -> None:
    _, scaling = read_rope(CASES["longrope"], CONTEXT)
    with pytest.raises(ConfigError, match="short_factor of rope_parameters has 12 numbers.* 16 pairs"):
        inverse_frequencies(32, 10000.0, scaling)


def test_nothing_said_is_nothing_scaled() -> None:
    assert read_rope(None, CONTEXT) == (10000.0, None)
    assert read_rope({"rope_type": "default", "partial_rotary_factor": 1.0, "factor": None}, CONTEXT) == (10000.0, None)
