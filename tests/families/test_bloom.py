"""Bloom: linear biases that follow the mask, a norm on the embeddings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.families.gpt_rows import FOUR_RANKS, INTERLEAVED, assert_refused
from tests.families.parity import VOCAB_SIZE, check_family, padded_sentences, tiny_model
from tests.parity.training import Layout


def _model(**fields: Any) -> Any:
    from transformers import AutoModelForCausalLM, BloomConfig

    arguments = {"vocab_size": VOCAB_SIZE, "n_layer": 4, "hidden_size": 32, "n_head": 4, "layer_norm_epsilon": 1e-4}
    return tiny_model(AutoModelForCausalLM, BloomConfig(**{**arguments, **fields}))


@pytest.mark.parametrize(("layout", "side"), [(Layout(), "left"), (FOUR_RANKS, "right")], ids=str)
def test_bloom_equals_hugging_face(layout: Layout, side: str) -> None:
    check_family(_model(), layout, padded_sentences(side=side))


def test_numbers_of_heads_that_are_no_power_of_two_have_slopes_too() -> None:
    check_family(_model(n_head=6, hidden_size=48), Layout(tp=2), padded_sentences())


def test_without_a_mask_all_tokens_count() -> None:
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in padded_sentences(lengths=(16, 16, 16, 16))]
    check_family(_model(tie_word_embeddings=False), INTERLEAVED, rows)


def test_recomputed_layers_see_the_same_mask() -> None:
    layout = Layout(tp=2, sequence_parallel=True, recompute="selective")
    check_family(_model(pretraining_tp=2), layout, padded_sentences(side="left"))


def test_fields_that_would_change_the_result_are_refused() -> None:
    field = "apply_residual_connection_post_layernorm"
    assert_refused("bloom", f"{field}=True", **{field: True})
    assert_refused("bloom", "slow_but_exact=True with pretraining_tp=2", slow_but_exact=True, pretraining_tp=2)
