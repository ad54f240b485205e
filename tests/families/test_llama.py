"""Llama: RMSNorm, gated MLP, rotary positions, fewer key/value heads than queries."""

from __future__ import annotations

from typing import Any

import pytest

from tests.families.gpt_rows import FOUR_RANKS, INTERLEAVED, assert_refused, sentences_with_positions
from tests.families.parity import LAYOUTS, VOCAB_SIZE, check_family, padded_sentences, tiny_model
from tests.parity.training import Layout

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 3.0, "original_max_position_embeddings": 4},
    "longrope": {
        "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [2.0, 4.0, 6.0, 8.0],
        "original_max_position_embeddings": 8,
    },
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
}
"""Each scaling of rotary frequencies; the sequences are longer than the original contexts."""


def _model(**fields: Any) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    arguments = {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 12,
        "rms_norm_eps": 1e-5,
    }
    return tiny_model(AutoModelForCausalLM, LlamaConfig(**{**arguments, **fields}))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_llama_equals_hugging_face_in_every_layout(layout: Layout) -> None:
    check_family(_model(), layout, padded_sentences())


def test_padding_may_stand_on_the_left() -> None:
    check_family(_model(), FOUR_RANKS, padded_sentences(side="left"))


def test_more_ranks_than_key_value_heads_share_the_heads() -> None:
    check_family(_model(), Layout(tp=4, sequence_parallel=True), padded_sentences())


def test_tied_biased_llama_equals_hugging_face() -> None:
    model = _model(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    check_family(model, Layout(tp=2, dp=2), padded_sentences(side="left"))


def test_heads_may_be_wider_than_their_part_of_the_hidden_size_and_the_mlp_alone_have_biases() -> None:
    check_family(_model(head_dim=12, mlp_bias=True), FOUR_RANKS, padded_sentences())


# tests/unit/models/test_rotary.py compares the frequencies of all kinds.
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.exhaustive] * (kind not in ("dynamic", "llama3"))) for kind in SCALINGS],
)
def test_rotary_frequencies_are_scaled_as_hugging_face_scales_them(kind: str) -> None:
    model = _model(rope_parameters={"rope_type": kind, "rope_theta": 100.0, **SCALINGS[kind]})
    check_family(model, FOUR_RANKS, padded_sentences())
    check_family(model, INTERLEAVED, sentences_with_positions())


def test_fields_that_would_change_the_result_are_refused() -> None:
    assert_refused("llama", "pretraining_tp=2", pretraining_tp=2)
    assert_refused("llama", "activation 'quick_gelu'", hidden_act="quick_gelu")
    assert_refused("llama", "kv_channels=3 is odd", hidden_size=12, num_attention_heads=4)
