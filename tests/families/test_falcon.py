"""Falcon: attention beside the MLP or before it, one or two norms, three numbers of key/value heads, two positions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.families.gpt_rows import FOUR_RANKS, INTERLEAVED, assert_refused, sentences_with_positions
from tests.families.parity import VOCAB_SIZE, check_family, padded_sentences, tiny_model
from tests.parity.training import Layout
from tests.ranks import RankError, run_ranks

VARIANTS: dict[str, dict[str, Any]] = {
    "7b": {},
    "7b_with_biases": {"bias": True, "ffn_hidden_size": 72, "tie_word_embeddings": False},
    "40b": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "11b": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},
    "rw": {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    "alibi_and_one_key": {"alibi": True, "activation": "gelu_new"},
    "alibi_40b": {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2},
    "one_after_the_other": {"parallel_attn": False, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
}


def _model(**fields: Any) -> Any:
    from transformers import FalconConfig, FalconForCausalLM

    arguments = {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 24,
    }
    # Not by AutoModel, for which the harness chooses eager attention: transformers 5.23 adds ALiBi's biases twice there
    # (models/falcon/modeling_falcon.py: to the mask, and again to the scores), and once in its default attention.
    return tiny_model(FalconForCausalLM, FalconConfig(**{**arguments, **fields}))


@pytest.mark.parametrize("variant", ["7b_with_biases", "40b", "rw"])
def test_each_falcon_equals_hugging_face(variant: str) -> None:
    check_family(_model(**VARIANTS[variant]), FOUR_RANKS, padded_sentences())


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_falcon_equals_hugging_face_in_one_process_with_padding_on_the_left(variant: str) -> None:
    check_family(_model(**VARIANTS[variant]), Layout(), padded_sentences(side="left"))


@pytest.mark.parametrize("variant", ["40b", pytest.param("alibi_and_one_key", marks=pytest.mark.exhaustive)])
def test_more_ranks_than_key_value_heads_share_the_heads(variant: str) -> None:
    check_family(_model(**VARIANTS[variant]), Layout(tp=4), padded_sentences())


@pytest.mark.parametrize(("variant", "recompute"), [("7b_with_biases", "full"), ("40b", "selective")])
def test_parallel_layers_can_be_recomputed(variant: str, recompute: Any) -> None:
    layout = Layout(tp=2, sequence_parallel=True, recompute=recompute)
    check_family(_model(**VARIANTS[variant]), layout, padded_sentences(side="left"))


def test_parts_of_a_parallel_layer_that_it_does_not_recompute_are_refused() -> None:
    with pytest.raises(RankError, match="recompute_modules=.*'mlp'.* is not supported by a layer with parallel"):
        run_ranks(_recompute_the_mlp, 1)


def _recompute_the_mlp() -> None:
    from lightning.pytorch import Trainer

    from lightning_megatron import MegatronModule, MegatronStrategy

    model = {"model_type": "falcon", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    strategy = MegatronStrategy(recompute="selective", transformer_config_overrides={"recompute_modules": ["mlp"]})
    trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_checkpointing=False)
    trainer.validate(MegatronModule(model=model), padded_sentences())  # type: ignore[arg-type]


def test_given_positions_are_used() -> None:
    check_family(_model(), INTERLEAVED, sentences_with_positions())


def test_combinations_that_hugging_face_cannot_compute_are_refused() -> None:
    assert_refused("falcon", "parallel_attn=False", new_decoder_architecture=True, parallel_attn=False)
    assert_refused("falcon", "num_ln_in_parallel_attn=2", num_ln_in_parallel_attn=2)
    assert_refused("falcon", "num_ln_in_parallel_attn=3", num_ln_in_parallel_attn=3, new_decoder_architecture=True)
    assert_refused("falcon", "num_kv_heads=2", num_kv_heads=2, num_attention_heads=4, multi_query=False)
    assert_refused("falcon", "activation 'quick_gelu'", activation="quick_gelu")
