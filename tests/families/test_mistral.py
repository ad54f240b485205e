"""Mistral: a window over the last tokens in every layer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.families.gpt_rows import FOUR_RANKS, assert_refused, sentences_with_positions
from tests.families.parity import VOCAB_SIZE, check_family, padded_sentences, tiny_model
from tests.parity.training import Layout


def _model(**fields: Any) -> Any:
    from transformers import AutoModelForCausalLM, MistralConfig

    arguments = {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 24,
        # The sentences have 16 tokens.
        "sliding_window": 5,
    }
    return tiny_model(AutoModelForCausalLM, MistralConfig(**{**arguments, **fields}))


@pytest.mark.parametrize(("layout", "side"), [(Layout(), "right"), (FOUR_RANKS, "left")], ids=str)
def test_mistral_equals_hugging_face(layout: Layout, side: str) -> None:
    check_family(_model(), layout, padded_sentences(side=side))


def test_the_window_counts_tokens_and_not_given_positions() -> None:
    check_family(_model(), Layout(tp=2), sentences_with_positions())


@pytest.mark.parametrize("window", [1, None])
def test_the_window_may_be_one_token_or_no_bound(window: int | None) -> None:
    check_family(_model(sliding_window=window), Layout(), padded_sentences())


def test_fields_that_would_change_the_result_are_refused() -> None:
    assert_refused("mistral", "activation 'quick_gelu'", hidden_act="quick_gelu")
    assert_refused("mistral", "num_key_value_heads|num_query_groups", num_attention_heads=4, num_key_value_heads=3)
