"""T5 and mT5 equal Hugging Face: two stacks in one pipeline, relative positions, tied and untied heads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.families.parity import Rows, check_family, pretrained_module
from tests.families.t5_models import mt5, t5, t5_1_1, t5_config
from tests.marks import exhaustive
from tests.models import VOCAB_SIZE
from tests.parity.hugging_face import tensors_of
from tests.parity.sharding import Tensors
from tests.parity.training import (
    FOUR_RANKS,
    INTERLEAVED,
    MODELS,
    TP2,
    TP2_SP,
    Case,
    Layout,
    module_of,
    trainer_of,
)
from tests.ranks import RankError, run_ranks


def _pairs(
    *,
    with_decoder_mask: bool = True,
    side: str = "right",
    num_targets: int = 10,
) -> Rows:
    """Rows with padding in both sequences and different numbers of targets."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for length, target_length in (
        (16, num_targets),
        (9, 4),
        (5, 7),
        (12, 1),
    ):
        tokens = torch.randint(2, VOCAB_SIZE, (16,), generator=generator)
        labels = torch.randint(2, VOCAB_SIZE, (num_targets,), generator=generator)
        mask = torch.zeros(16, dtype=torch.long)
        real = slice(None, length) if side == "right" else slice(-length, None)
        mask[real] = 1
        is_target = torch.arange(num_targets) < target_length
        row = {
            "input_ids": tokens,
            "attention_mask": mask,
            "labels": labels.masked_fill(~is_target, -100),
        }
        rows.append(
            row | ({"decoder_attention_mask": is_target.long()} if with_decoder_mask else {})
        )
    return rows


_PARTS = (("distribute_saved_activations", True),)
DISTRIBUTED = Layout(
    tp=2, pp=2, num_microbatches=2, recompute="full", transformer_config_overrides=_PARTS
)
CASES: dict[str, tuple[Any, Layout, Rows]] = {
    f"t5-{FOUR_RANKS}": (t5, FOUR_RANKS, _pairs()),
    "gated, untied": (t5_1_1, FOUR_RANKS, _pairs(side="left")),
    "mt5": (mt5, FOUR_RANKS, _pairs(with_decoder_mask=False)),
    "the decoder's own input": (t5, TP2, [
        {**row, "decoder_input_ids": row["input_ids"][:10]} for row in _pairs()
    ]),
    "saved in parts": (t5, DISTRIBUTED, _pairs()),
    "no masks": (t5, Layout(pp=2, num_microbatches=4), [
        {name: row[name] for name in ("input_ids", "labels")} for row in _pairs()
    ]),
    "heads exchanged": (t5, Layout(cp=2, cp_comm_type="a2a", pp=2, num_microbatches=2,), _pairs(num_targets=8)),
}  # fmt: skip
"""Model, layout and rows."""
RARER_CASES: dict[str, tuple[Any, Layout, Rows]] = {
    f"{model.__name__}-{layout}": (model, layout, _pairs(num_targets=8))
    for model, layout in (
        (t5, INTERLEAVED),
        (t5, Layout(pp=4, num_microbatches=2)),
        (
            t5,
            Layout(
                pp=2,
                vpp=2,
                num_microbatches=2,
                recompute="full",
                recompute_method="block",
            ),
        ),
        (
            t5,
            Layout(
                cp=2,
                cp_comm_type="all_gather",
                tp=2,
                sequence_parallel=True,
            ),
        ),
        (t5, Layout(cp=4)),
        (t5, Layout(cp=4, cp_comm_type="all_gather")),
        (
            mt5,
            Layout(
                cp=2,
                cp_comm_type="a2a",
                tp=2,
                sequence_parallel=True,
            ),
        ),
        (
            t5,
            Layout(
                cp=2,
                cp_comm_type="a2a",
                pp=2,
                vpp=2,
                num_microbatches=2,
                recompute="full",
            ),
        ),
    )
}


@pytest.mark.parametrize(
    "case",
    [*CASES, *map(exhaustive, RARER_CASES)],
)
def test_t5_equals_hugging_face(case: str) -> None:
    model, layout, rows = {**CASES, **RARER_CASES}[case]
    check_family(model(), layout, rows)


# ---- tied and untied output layers ---------------------------------------------------------------------------------


def test_output_layer_equal_to_embedding_is_tied(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    # As in old files, which hold the tied weight twice.
    t5().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["shared.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert pretrained_module(str(tmp_path)).model_config.share_embeddings_and_output_weights


def test_new_model_is_tied_as_in_transformers() -> None:
    from transformers import T5ForConditionalGeneration

    from lightning_megatron.convert.registry import model_config

    config = t5_config("T5Config", tie_word_embeddings=False)
    theirs = T5ForConditionalGeneration(config)
    assert theirs.lm_head.weight is theirs.shared.weight
    ours = model_config(config)
    assert ours.share_embeddings_and_output_weights
    assert not ours.scale_decoder_outputs


# ---- random weights and refusals ------------------------------------------------------------------------------------


def _random_weights(fields: dict[str, Any]) -> Tensors:
    from lightning_megatron import MegatronModule

    module = MegatronModule(model=fields)
    trainer_of(Case()).validate(
        module,
        DataLoader(_pairs()),  # type: ignore[arg-type]
        verbose=False,
    )
    return tensors_of(module)


def test_initial_weights_are_as_large_as_in_transformers() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    fields = {
        **MODELS["t5"],
        "d_model": 96,
        "d_ff": 200,
        "feed_forward_proj": "gated-gelu",
        "initializer_factor": 0.5,
    }
    (ours,) = run_ranks(_random_weights, 1, fields)
    theirs = dict(T5ForConditionalGeneration(T5Config(**fields)).named_parameters())
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        expected = theirs[name].detach()
        # 32 values in a table, thousands elsewhere: four times the standard error of two standard deviations.
        rtol = 4 / expected.numel() ** 0.5
        assert weight.square().mean().sqrt().item() == pytest.approx(
            expected.square().mean().sqrt().item(),
            rel=rtol,
        )


def _fit(layout: Layout, num_labels: int) -> None:
    row = {
        name: torch.ones(n, dtype=torch.long)
        for name, n in (("input_ids", 8), ("labels", num_labels))
    }
    case = Case(model="t5", steps=1, layout=layout)
    trainer_of(case).fit(module_of(case), DataLoader([row] * 4, batch_size=4))  # type: ignore[arg-type]


def _override(name: str, value: Any) -> Layout:
    recompute: Any = "selective" if name == "recompute_modules" else None
    return Layout(recompute=recompute, transformer_config_overrides=((name, value),))


@pytest.mark.parametrize(
    ("layout", "num_labels", "message"),
    [
        (
            _override("recompute_modules", ["core_attn"]),
            8,
            "'core_attn' cannot train T5's attention bias",
        ),
        (
            Layout(pp=4, vpp=2, num_microbatches=4),
            8,
            "8 chunks are more than the 7 layers",
        ),
        (TP2_SP, 7, "length of labels=7: expected a multiple of 2"),
    ],
    ids=str,
)
def test_unsupported_t5_settings_are_refused(layout: Layout, num_labels: int, message: str) -> None:
    with pytest.raises(RankError) as refusal:
        run_ranks(_fit, layout.world_size, layout, num_labels)
    assert refusal.value.error_type == "ConfigError"
    assert message in str(refusal.value)
