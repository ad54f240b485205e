"""Qwen 2: biases on queries, keys and values only, and windows in some of the layers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.families.gpt_rows import FOUR_RANKS, INTERLEAVED, assert_refused
from tests.families.parity import VOCAB_SIZE, check_family, padded_sentences, tiny_model
from tests.parity.training import Layout


def _model(**fields: Any) -> Any:
    from transformers import AutoModelForCausalLM, Qwen2Config

    arguments = {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 24,
        "tie_word_embeddings": True,
    }
    return tiny_model(AutoModelForCausalLM, Qwen2Config(**{**arguments, **fields}))


WINDOWED = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}


@pytest.mark.parametrize("layout", [pytest.param(Layout(), marks=pytest.mark.exhaustive), FOUR_RANKS], ids=str)
def test_qwen2_equals_hugging_face(layout: Layout) -> None:
    check_family(_model(), layout, padded_sentences())


def test_the_later_layers_have_windows_wherever_they_are() -> None:
    check_family(_model(**WINDOWED), FOUR_RANKS, padded_sentences(side="left"))


def test_layer_types_say_which_layers_have_windows() -> None:
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    check_family(_model(**WINDOWED, layer_types=types), INTERLEAVED, padded_sentences())


def test_a_window_that_is_not_used_is_none() -> None:
    from lightning_megatron.convert.registry import model_config

    assert model_config({"model_type": "qwen2", "sliding_window": 6, "max_window_layers": 0}).sliding_window is None
    everywhere = model_config({"model_type": "qwen2", **WINDOWED, "max_window_layers": 99})
    assert everywhere.sliding_window is None


def test_fields_that_would_change_the_result_are_refused() -> None:
    assert_refused("qwen2", "activation 'quick_gelu'", hidden_act="quick_gelu")
    assert_refused(
        "qwen2", "layer_types has 'chunked_attention'", num_hidden_layers=1, layer_types=["chunked_attention"]
    )
    assert_refused("qwen2", "use_sliding_window is not True", num_hidden_layers=1, layer_types=["sliding_attention"])
