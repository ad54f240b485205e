"""Gated delta nets in models: long rows, packed documents, adapters and refusals; the rest is in other files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron.convert.registry import model_config
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.models.config import with_variant
from lightning_megatron.models.layout import check_layout
from lightning_megatron.steps.batch_checks import check_token_inputs
from tests.families.parity import check_family, padded_sentences, pretrained_module
from tests.families.test_experts import mixture
from tests.families.test_gpts import FAMILIES, LINEAR_ATTENTION, gpt_model
from tests.marks import exhaustive
from tests.models import VOCAB_SIZE
from tests.parity.training import (
    FOUR_RANKS,
    INTERLEAVED,
    RECOMPUTED,
    TP2,
    Case,
    Layout,
    trainer_of,
)
from tests.ranks import run_ranks

_QWEN: dict[str, Any] = {"model_type": "qwen3_5_text", **FAMILIES["qwen3_5_text"][1]}
_LONG = padded_sentences((150, 70, 64, 131), seq_length=150)
"""Rows of several chunks, and of parts of one."""
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "partial_rotary_factor": 0.5,
}
_RECOMPUTED_ATTENTION = Layout(
    recompute="selective", transformer_config_overrides=(("recompute_modules", ["core_attn"]),)
)


@pytest.mark.parametrize(
    "layout",
    [Layout(), exhaustive(RECOMPUTED), exhaustive(_RECOMPUTED_ATTENTION)],
    ids=str,
)
def test_rows_of_several_chunks_equal_hugging_face(layout: Layout) -> None:
    model = gpt_model("qwen3_5_text", {"max_position_embeddings": 150})
    check_family(model, layout, _LONG)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "changes", "layout", "side"),
    [
        ("qwen3_5_text", {"rope_parameters": _YARN}, TP2, "right"),
        ("qwen3_5_text", {"tie_word_embeddings": True, "attention_bias": True}, FOUR_RANKS, "left"),
        # transformers' cache wants at least one layer with attention.
        (
            "qwen3_5_text",
            {"layer_types": ["linear_attention"] * 4, "use_cache": False},
            INTERLEAVED,
            "right",
        ),
        ("qwen3_5_text", {"layer_types": ["full_attention"] * 4}, FOUR_RANKS, "right"),
        # More ranks than key/value heads: the gates of a rank are those of its queries.
        ("qwen3_5_text", {"linear_num_key_heads": 4}, Layout(tp=4, sequence_parallel=True), "left"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, Layout(), "right"),
        (
            "qwen3_5_text",
            {},
            Layout(
                tp=2,
                sequence_parallel=True,
                recompute="selective",
            ),
            "left",
        ),
        (
            "qwen3_next",
            {},
            Layout(
                tp=2,
                sequence_parallel=True,
                ep=2,
            ),
            "right",
        ),
        ("qwen3_next", {"tie_word_embeddings": True, "num_experts": 0}, INTERLEAVED, "left"),
        (
            "qwen3_next",
            {"norm_topk_prob": False},
            Layout(
                ep=2,
                dp=2,
                recompute="full",
            ),
            "left",
        ),
        ("qwen3_5_moe_text", {}, FOUR_RANKS, "left"),
    ],
)
def test_variants_equal_hugging_face(
    family: str, changes: dict[str, Any], layout: Layout, side: str
) -> None:
    if family in FAMILIES:
        model = gpt_model(family, changes)
    else:
        model = mixture(family, output_router_logits=False, router_aux_loss_coef=0.0, **changes)
    check_family(model, layout, padded_sentences(side=side))


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_5_text", FOUR_RANKS), exhaustive("qwen3_next", Layout())],
)
def test_adapters_equal_peft(family: str, layout: Layout) -> None:
    if family in FAMILIES:
        model = gpt_model(family, {})
    else:
        model = mixture(family, output_router_logits=False, router_aux_loss_coef=0.0)
    check_family(model, layout, padded_sentences(), adapters=True)


# ---- documents ------------------------------------------------------------------------------------------------------

_BOUNDS = ((0, 5, 70, 71, 100), (0, 64, 90, 100))
"""Beginnings of the documents of each row, and its end."""


def _packed() -> tuple[Tensor, Tensor]:
    """Tokens and segments of packed rows, [2, 100]; padding stands within and after documents."""
    tokens = torch.randint(1, VOCAB_SIZE, (2, 100), generator=torch.Generator().manual_seed(3))
    segments = torch.zeros_like(tokens)
    for row, bounds in enumerate(_BOUNDS):
        for number, begin in enumerate(bounds[:-1]):
            # Numbers may go down.
            segments[row, begin:] = 9 - number
    segments[0, 95:] = 0
    segments[1, 70:73] = 0
    return tokens, segments


def _logits(directory: str) -> Tensor:
    module = pretrained_module(directory)
    case = Case(layout=FOUR_RANKS)
    loader: DataLoader[Any] = DataLoader(padded_sentences(), batch_size=4)  # type: ignore[arg-type]
    trainer_of(case).validate(module, loader, verbose=False)
    logits: Tensor = module.logits(*_packed())
    return logits


def test_packed_documents_equal_documents_alone(tmp_path: Path) -> None:
    tokens, segments = _packed()
    model = gpt_model("qwen3_5_text", {"max_position_embeddings": 100})
    model.save_pretrained(tmp_path)
    expected = torch.zeros(*tokens.shape, VOCAB_SIZE)
    for row, bounds in enumerate(_BOUNDS):
        for begin, end in zip(bounds, bounds[1:], strict=False):
            part = (slice(row, row + 1), slice(begin, end))
            mask = (segments[part] != 0).long()
            with torch.no_grad():
                expected[part] = model(
                    tokens[part],
                    attention_mask=mask,
                    use_cache=False,
                ).logits
    is_token = segments != 0
    for actual in run_ranks(_logits, 4, str(tmp_path)):
        torch.testing.assert_close(
            actual[is_token],
            expected[is_token],
            rtol=0.0,
            atol=2e-5,
        )


def test_segments_that_go_on_after_others_are_refused() -> None:
    model = model_config(_QWEN)
    _, segments = _packed()
    check_token_inputs({"attention_mask": segments}, 2, 100, model)
    segments[1, -1] = 9
    with pytest.raises(DataError, match=r"attention_mask\[1\]: expected each segment's tokens one"):
        check_token_inputs({"attention_mask": segments}, 2, 100, model)
    llama = model_config({"model_type": "llama"})
    check_token_inputs({"attention_mask": segments}, 2, 100, llama)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' of this qwen3_5_text config changes the resu"),
        ({"attn_output_gate": False}, "attn_output_gate=False of this qwen3_5_text config chang"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads=3 does not divide linear_num_value_"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0 must be at least 1"),
        (
            {"layer_types": ["linear_attention", "sliding_attention"], "num_hidden_layers": 2},
            "layer_types has 'sliding_attention', which is not supported; use 'full_attention' or ",
        ),
        ({"model_type": "qwen3_5"}, "it reads images, too; use its text_config, of model_type='q"),
    ],
)
def test_configs_that_are_not_computed_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config({**_QWEN, **fields})


def test_layouts_that_split_states_are_refused() -> None:
    model = model_config(_QWEN)
    check_layout(model, ParallelConfig(tp=2, pp=2))
    with pytest.raises(ConfigError, match="cp=2: expected 1 for a qwen3_5_text model, whose lay"):
        check_layout(model, ParallelConfig(cp=2))
    assert LINEAR_ATTENTION["linear_num_key_heads"] == 2
    with pytest.raises(ConfigError, match="tp=4 does not divide linear_num_key_heads=2"):
        check_layout(model, ParallelConfig(tp=4))
    with pytest.raises(ConfigError, match="position_embedding_type='alibi': expected 'rotary'"):
        with_variant(model, "alibi", None)
