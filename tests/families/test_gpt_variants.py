"""GPTs with other positions and heads than their family's: equal to another family, and alike in all layouts."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from lightning_megatron.convert.registry import model_config
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import with_variant
from tests.families.parity import FOUR_RANKS
from tests.parity.training import Case, Layout, loader_of, module_of, train_module
from tests.ranks import run_ranks

POSITIONS = ("absolute", "rotary", "alibi")
HEADS = ("multihead", "multiquery")

_GPT2: dict[str, Any] = {"model_type": "gpt2", "n_layer": 2, "n_embd": 24, "n_head": 4, "vocab_size": 83}
_NO_DROPOUT = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
_LIKE_GPT2: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "vocab_size": 83,
    "max_position_embeddings": 1024,
    "activation": "gelu_new",
    "bias": True,
    "parallel_attn": False,
}
"""A Falcon that differs from GPT-2 in its positions only."""


def _of_no_family(model: Any) -> dict[str, Any]:
    """What a model computes, without its name, its first weights and dropouts."""
    cleared = replace(model, family="", scaled_residual_init=True, attention_output_dropout=None)
    return asdict(cleared)


_FALCON = {"model_type": "falcon", **_LIKE_GPT2}


@pytest.mark.parametrize(
    ("positions", "heads", "fields", "changes"),
    [
        ("rotary", "multihead", {**_FALCON, "multi_query": False}, {}),
        ("rotary", "multiquery", {**_FALCON, "multi_query": True}, {}),
        ("alibi", None, {**_FALCON, "multi_query": False, "alibi": True}, {"alibi_scaled": False}),  # Bloom's biases
        ("absolute", "multiquery", {**_GPT2, **_NO_DROPOUT, "model_type": "gpt_bigcode",
         "activation_function": "gelu_new"}, {}),
    ],
)  # fmt: skip
def test_a_variant_of_gpt2_is_a_model_that_is_compared_with_hugging_face(
    positions: str, heads: str | None, fields: dict[str, Any], changes: dict[str, Any]
) -> None:
    ours = with_variant(model_config({**_GPT2, **_NO_DROPOUT}), positions, heads)
    assert _of_no_family(ours) == _of_no_family(replace(model_config(fields), **changes))


def test_only_rotary_positions_keep_the_scaling_of_their_frequencies() -> None:
    # Yarn's attention factor would else scale the scores of a model that rotates nothing.
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    model = model_config({"model_type": "llama", "rope_parameters": rope})
    assert with_variant(model, "rotary", "multiquery").rope_scaling == model.rope_scaling
    assert with_variant(model, "alibi", None).rope_scaling is None


@pytest.mark.parametrize(
    ("fields", "positions", "heads", "says"),
    [
        (_GPT2, "learned", None, "position_embedding_type='learned'.*absolute, rotary, alibi"),
        (_GPT2, None, "grouped", "attention_head_type='grouped'.*multihead, multiquery"),
        ({"model_type": "t5"}, "rotary", None, "are for GPTs"),
    ],
)
def test_what_is_no_variant_is_refused(fields: dict[str, Any], positions: Any, heads: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        with_variant(model_config(fields), positions, heads)


@pytest.mark.parametrize("model", [pytest.param("gpt2", marks=pytest.mark.exhaustive), "llama"])
def test_every_combination_is_the_same_on_four_ranks_and_like_no_other(model: str) -> None:
    # The first losses are of the same random weights, those of later steps tell whether the gradients were right.
    (alone,) = run_ranks(_losses_of_combinations, 1, model, Layout())
    for rank in run_ranks(_losses_of_combinations, 4, model, FOUR_RANKS):
        for combination, losses in rank.items():
            assert losses == pytest.approx(alone[combination], rel=5e-6), combination
    assert len({losses[0] for losses in alone.values()}) == len(POSITIONS) * len(HEADS)


def _losses_of_combinations(model: str, layout: Layout) -> dict[tuple[str, str], list[float]]:
    return {(positions, heads): _losses(model, layout, positions, heads) for positions in POSITIONS for heads in HEADS}


def _losses(model: str, layout: Layout, positions: str, heads: str) -> list[float]:
    case = Case(layout=layout, model=model, steps=2)
    module = module_of(case, position_embedding_type=positions, attention_head_type=heads)
    return train_module(module, case, loader_of(case)).losses
