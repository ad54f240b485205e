"""GPT-BigCode: one key and value for all heads, or one for each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.families.gpt_rows import FOUR_RANKS, INTERLEAVED, assert_refused
from tests.families.parity import VOCAB_SIZE, check_family, padded_sentences, tiny_model
from tests.parity.training import Layout


def _model(**fields: Any) -> Any:
    from transformers import AutoModelForCausalLM, GPTBigCodeConfig

    arguments = {
        "vocab_size": VOCAB_SIZE,
        "n_layer": 4,
        "n_embd": 32,
        "n_head": 4,
        "n_inner": 48,
        "n_positions": 24,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    return tiny_model(AutoModelForCausalLM, GPTBigCodeConfig(**{**arguments, **fields}))


@pytest.mark.parametrize("layout", [FOUR_RANKS, pytest.param(Layout(tp=4), marks=pytest.mark.exhaustive)], ids=str)
def test_one_key_and_value_for_all_heads_equal_hugging_face(layout: Layout) -> None:
    check_family(_model(), layout, padded_sentences())


def test_a_key_and_value_for_each_head_equal_hugging_face() -> None:
    model = _model(
        multi_query=False,
        tie_word_embeddings=False,
        scale_attn_weights=False,
        attention_softmax_in_fp32=False,
        scale_attention_softmax_in_fp32=False,
        activation_function="gelu",
    )
    check_family(model, INTERLEAVED, padded_sentences(side="left"))


def test_fields_that_would_change_the_result_are_refused() -> None:
    assert_refused("gpt_bigcode", "add_cross_attention=True", add_cross_attention=True)
    assert_refused("gpt_bigcode", "activation 'quick_gelu'", activation_function="quick_gelu")
