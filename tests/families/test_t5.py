"""T5 and mT5: two stacks on one pipeline, relative positions, heads tied and untied as in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.families.parity import IN_EVERY_RUN, LAYOUTS, VOCAB_SIZE, Rows, check_family, pretrained_module
from tests.families.t5_models import mt5, t5, t5_1_1, t5_config
from tests.parity.training import Layout

FURTHER_LAYOUTS = (
    Layout(pp=4, num_microbatches=2),
    pytest.param(Layout(dp=2, pp=2, num_microbatches=2), marks=pytest.mark.exhaustive),
)
RECOMPUTED = (
    pytest.param(
        Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2, recompute="full"), marks=pytest.mark.exhaustive
    ),
    Layout(pp=2, vpp=2, num_microbatches=2, recompute="full", recompute_method="block"),
)


def _pairs(*, with_decoder_mask: bool = True, side: str = "right") -> Rows:
    """Rows with padding in both sequences; each has another number of targets."""
    generator = torch.Generator().manual_seed(5)
    lengths = ((16, 10), (9, 4), (5, 7), (12, 1))
    rows = []
    for length, target_length in lengths:
        tokens = torch.randint(2, VOCAB_SIZE, (16,), generator=generator)
        labels = torch.randint(2, VOCAB_SIZE, (10,), generator=generator)
        mask = torch.zeros(16, dtype=torch.long)
        mask[slice(None, length) if side == "right" else slice(-length, None)] = 1
        is_target = torch.arange(10) < target_length
        row = {"input_ids": tokens, "attention_mask": mask, "labels": labels.masked_fill(~is_target, -100)}
        rows.append(row | ({"decoder_attention_mask": is_target.long()} if with_decoder_mask else {}))
    return rows


@pytest.mark.parametrize("layout", [*IN_EVERY_RUN[3:], *FURTHER_LAYOUTS, *RECOMPUTED], ids=str)
def test_t5_equals_hugging_face_in_every_layout(layout: Layout) -> None:
    check_family(t5(), layout, _pairs())


def test_gated_untied_t5_equals_hugging_face() -> None:
    check_family(t5_1_1(), LAYOUTS[3], _pairs(side="left"))


def test_mt5_equals_hugging_face() -> None:
    check_family(mt5(), LAYOUTS[3], _pairs(with_decoder_mask=False))


def test_the_decoder_may_be_given_its_own_input() -> None:
    generator = torch.Generator().manual_seed(6)
    rows = [{**row, "decoder_input_ids": torch.randint(0, VOCAB_SIZE, (10,), generator=generator)} for row in _pairs()]
    check_family(t5(), Layout(tp=2), rows)


def test_without_masks_every_token_is_seen() -> None:
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in _pairs()]
    check_family(t5(), Layout(pp=2, num_microbatches=4), rows)


# ---- what config and weights say together ---------------------------------------------------------------------------


def test_the_output_layer_is_the_embedding_unless_the_files_have_another(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    t5().save_pretrained(tmp_path / "tied")
    t5_1_1().save_pretrained(tmp_path / "untied")
    assert pretrained_module(str(tmp_path / "tied")).model_config.share_embeddings_and_output_weights
    assert not pretrained_module(str(tmp_path / "untied")).model_config.share_embeddings_and_output_weights

    # Old files have the copies, too.
    weights = load_file(tmp_path / "tied" / "model.safetensors")
    weights["lm_head.weight"] = weights["shared.weight"].clone()
    save_file(weights, tmp_path / "tied" / "model.safetensors", metadata={"format": "pt"})
    assert pretrained_module(str(tmp_path / "tied")).model_config.share_embeddings_and_output_weights


def test_a_model_from_a_config_alone_is_tied_as_in_transformers() -> None:
    from transformers import T5ForConditionalGeneration

    from lightning_megatron.convert.registry import model_config

    config = t5_config("T5Config", tie_word_embeddings=False)
    theirs = T5ForConditionalGeneration(config)
    assert theirs.lm_head.weight is theirs.shared.weight
    ours = model_config(config)
    assert ours.share_embeddings_and_output_weights
    assert not ours.scale_decoder_outputs


@pytest.mark.parametrize(
    ("name", "activation", "is_gated"),
    [
        ("relu", "relu", False),
        ("gelu", "gelu", False),
        ("gelu_new", "gelu_tanh", False),
        ("gated-gelu", "gelu_tanh", True),
        ("gated-silu", "silu", True),
    ],
)
def test_every_kind_of_mlp_is_described(name: str, activation: str, is_gated: bool) -> None:
    from lightning_megatron.convert.registry import model_config

    described = model_config(t5_config("T5Config", feed_forward_proj=name))
    assert (described.activation, described.gated_linear_unit) == (activation, is_gated)


def test_an_activation_that_is_not_computed_is_refused_by_name() -> None:
    from lightning_megatron.convert.registry import model_config
    from lightning_megatron.errors import ConfigError

    with pytest.raises(ConfigError, match="'tanh' is not supported"):
        model_config(t5_config("T5Config", feed_forward_proj="tanh"))


def test_umt5_whose_layers_have_tables_of_their_own_is_an_unknown_family() -> None:
    from lightning_megatron.convert.registry import model_config
    from lightning_megatron.errors import ConfigError

    with pytest.raises(ConfigError, match="'umt5' is not a known model family"):
        model_config({"model_type": "umt5"})
