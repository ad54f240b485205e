"""Qwen 3: each head's queries and keys are normalized, by weights that every rank has and whose gradients are sums."""

from __future__ import annotations

from typing import Any

import pytest

from tests.families.gpt_rows import FOUR_RANKS, INTERLEAVED, assert_refused, sentences_with_positions
from tests.families.parity import VOCAB_SIZE, check_family, padded_sentences, tiny_model
from tests.parity.training import Layout


def _model(**fields: Any) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    arguments = {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 24,
    }
    return tiny_model(AutoModelForCausalLM, Qwen3Config(**{**arguments, **fields}))


@pytest.mark.parametrize("layout", [Layout(tp=2, sequence_parallel=True, recompute="full"), FOUR_RANKS], ids=str)
def test_qwen3_equals_hugging_face(layout: Layout) -> None:
    check_family(_model(), layout, padded_sentences())


def test_ranks_that_share_a_key_sum_the_gradients_of_its_norm() -> None:
    check_family(_model(), Layout(tp=4, sequence_parallel=True), padded_sentences())


def test_biases_tied_heads_windows_and_given_positions() -> None:
    fields = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    model = _model(attention_bias=True, tie_word_embeddings=True, **fields)
    check_family(model, INTERLEAVED, padded_sentences(side="left"))
    check_family(model, FOUR_RANKS, sentences_with_positions())


def test_fields_that_would_change_the_result_are_refused() -> None:
    assert_refused("qwen3", "activation 'quick_gelu'", hidden_act="quick_gelu")
    assert_refused(
        "qwen3", "layer_types has 'chunked_attention'", num_hidden_layers=1, layer_types=["chunked_attention"]
    )
