"""GPTs with other positions and heads than their family's: equal to another family, and equal on all layouts."""

import itertools
from dataclasses import asdict, replace
from typing import Any

import pytest

from lightning_megatron.convert.registry import model_config
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import with_variant
from tests.marks import exhaustive
from tests.models import NO_DROPOUT
from tests.parity.training import FOUR_RANKS, Case, Layout, loader_of, module_of, train_module
from tests.ranks import run_ranks

POSITIONS = ("absolute", "rotary", "alibi")
HEADS = ("multihead", "multiquery")

_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 24,
    "n_head": 4,
    "vocab_size": 83,
}
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
"""A Falcon that differs from GPT-2 only in its positions."""


def _computed_fields(model: Any) -> dict[str, Any]:
    """Config fields without those of the family name, initial weights and dropout."""
    cleared = replace(model, family="", scaled_residual_init=True, attention_output_dropout=None)
    return asdict(cleared)


_FALCON = {"model_type": "falcon", **_LIKE_GPT2}


@pytest.mark.parametrize(
    ("positions", "heads", "fields", "changes"),
    [
        ("rotary", "multihead", {**_FALCON, "multi_query": False}, {}),
        ("rotary", "multiquery", {**_FALCON, "multi_query": True}, {}),
        ("alibi", None, {**_FALCON, "multi_query": False, "alibi": True}, {"alibi_scaled": False}),  # Bloom's biases
        ("absolute", "multiquery", {**_GPT2, **NO_DROPOUT, "model_type": "gpt_bigcode",
         "activation_function": "gelu_new"}, {}),
    ],
)  # fmt: skip
def test_gpt2_variant_equals_config_of_compared_family(
    positions: str,
    heads: str | None,
    fields: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    ours = with_variant(model_config({**_GPT2, **NO_DROPOUT}), positions, heads)
    assert _computed_fields(ours) == _computed_fields(replace(model_config(fields), **changes))


def test_only_rotary_positions_keep_rope_scaling() -> None:
    # Otherwise yarn's attention factor would scale the scores of a model without rotary positions.
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    model = model_config({"model_type": "llama", "rope_parameters": rope})
    assert with_variant(model, "rotary", "multiquery").rope_scaling == model.rope_scaling
    assert with_variant(model, "alibi", None).rope_scaling is None


@pytest.mark.parametrize(
    ("fields", "positions", "heads", "message"),
    [
        (_GPT2, "learned", None, "position_embedding_type='learned'.*absolute, rotary, alibi"),
        (_GPT2, None, "grouped", "attention_head_type='grouped'.*multihead, multiquery"),
        ({"model_type": "t5"}, "rotary", None, "are for GPTs"),
    ],
)
def test_unknown_variant_is_refused(
    fields: dict[str, Any], positions: Any, heads: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_variant(model_config(fields), positions, heads)


@pytest.mark.parametrize(
    "model",
    [exhaustive("gpt2"), "llama"],
)
def test_every_combination_equals_one_process_and_differs_from_others(model: str) -> None:
    # First losses compare the forward pass from equal random weights, later ones the gradients.
    (expected,) = run_ranks(_combination_losses, 1, model, Layout())
    for rank in run_ranks(_combination_losses, 4, model, FOUR_RANKS):
        for combination, losses in rank.items():
            assert losses == pytest.approx(expected[combination], rel=5e-6), combination
    first_losses = {losses[0] for losses in expected.values()}
    assert len(first_losses) == len(POSITIONS) * len(HEADS)


def _combination_losses(model: str, layout: Layout) -> dict[tuple[str, str], list[float]]:
    case = Case(layout=layout, model=model, steps=2)
    losses = {}
    for positions, heads in itertools.product(POSITIONS, HEADS):
        module = module_of(case, position_embedding_type=positions, attention_head_type=heads)
        losses[positions, heads] = train_module(module, case, loader_of(case)).losses
    return losses
