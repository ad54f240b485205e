"""GPT-2: learned positions, a tied head, matrices that Hugging Face keeps transposed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.families.gpt_rows import FOUR_RANKS, assert_refused, sentences_with_positions
from tests.families.parity import IN_EVERY_RUN, VOCAB_SIZE, check_family, padded_sentences, tiny_model
from tests.parity.training import Layout


def _model(**fields: Any) -> Any:
    from transformers import AutoModelForCausalLM, GPT2Config

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
    return tiny_model(AutoModelForCausalLM, GPT2Config(**{**arguments, **fields}))


@pytest.mark.parametrize("layout", IN_EVERY_RUN)
def test_gpt2_equals_hugging_face_in_every_layout(layout: Layout) -> None:
    check_family(_model(), layout, padded_sentences())


def test_padding_may_stand_on_the_left() -> None:
    check_family(_model(), FOUR_RANKS, padded_sentences(side="left"))


def test_given_positions_are_used() -> None:
    check_family(_model(), FOUR_RANKS, sentences_with_positions())


def test_untied_gpt2_with_other_choices_equals_hugging_face() -> None:
    model = _model(
        tie_word_embeddings=False,
        activation_function="gelu",
        scale_attn_weights=False,
        reorder_and_upcast_attn=True,
        n_inner=None,
        layer_norm_epsilon=1e-3,
    )
    check_family(model, FOUR_RANKS, padded_sentences())


def test_fields_that_would_change_the_result_are_refused() -> None:
    assert_refused("gpt2", "scale_attn_by_inverse_layer_idx=True", scale_attn_by_inverse_layer_idx=True)
    assert_refused("gpt2", "add_cross_attention=True", add_cross_attention=True)
    assert_refused("gpt2", "activation 'quick_gelu'", activation_function="quick_gelu")
    assert_refused("gpt2", "GPT2ForSequenceClassification", architectures=["GPT2ForSequenceClassification"])
