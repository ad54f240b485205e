"""Llama: RMSNorm, gated MLP, rotary positions, fewer key/value heads than queries."""

from __future__ import annotations

from typing import Any

import pytest

from tests.families.parity import LAYOUTS, VOCAB_SIZE, check_family, padded_sentences, tiny_model
from tests.parity.training import Layout


def _model(**fields: Any) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    arguments = {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 24,
        "rms_norm_eps": 1e-5,
    }
    return tiny_model(AutoModelForCausalLM, LlamaConfig(**{**arguments, **fields}))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_llama_equals_hugging_face_in_every_layout(layout: Layout) -> None:
    check_family(_model(), layout, padded_sentences())


def test_more_ranks_than_key_value_heads_share_the_heads() -> None:
    check_family(_model(num_key_value_heads=1), Layout(tp=4), padded_sentences())


def test_tied_biased_llama_equals_hugging_face() -> None:
    model = _model(tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    check_family(model, Layout(tp=2, dp=2), padded_sentences(side="left"))
