"""bf16 on several GPUs is as close to Hugging Face in fp32 as Hugging Face's own bf16."""

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.cards import models
from tests.families.parity import (
    RankResult,
    Reference,
    padded_sentences,
    real_positions,
    reference_of,
    run_family,
    tiny_model,
)
from tests.families.test_experts import mixture
from tests.families.test_gpts import changes_of, gpt_model
from tests.families.test_megatron_bert import bert_model
from tests.marks import on_gpus
from tests.parity.comparison import relative_error
from tests.parity.sharding import Tensors
from tests.parity.training import CP2, FOUR_RANKS, TP2_SP, Case, Layout
from tests.ranks import run_ranks

LAYOUTS = (
    TP2_SP,
    CP2,
    FOUR_RANKS,
    Layout(tp=2, cp=2, sequence_parallel=True),
    Layout(cp=2, pp=2, cp_comm_type="all_gather", num_microbatches=2),
)
_TIMES_HUGGING_FACE = 2.0
"""A different order of roundings may double an error of a few rounding steps, not more."""


# Not 64 tokens: with a mask cuDNN returns NaN gradients if s % 128 == 64, in transformers as well (torch 2.11).
_ROWS = padded_sentences((96, 60, 25, 75), seq_length=96)
_HIDDEN = 256
_WIDE = {
    "n_embd": _HIDDEN,
    "hidden_size": _HIDDEN,
    "d_model": _HIDDEN,
    "word_embed_proj_dim": _HIDDEN,
    "n_inner": 2 * _HIDDEN,
    "intermediate_size": 2 * _HIDDEN,
    "d_ff": 2 * _HIDDEN,
    "ffn_dim": 2 * _HIDDEN,
    "n_positions": 96,
    "max_position_embeddings": 96,
    "head_dim": 64,
    "d_kv": 64,
    "sliding_window": 20,
}
"""Sizes wide enough for GPU kernels."""


def _make(name: str) -> Any:
    return models()[name]()[0]


MODELS: dict[str, Callable[[], Any]] = {
    **{name: partial(_make, name) for name in models()},
    "falcon_alibi": lambda: gpt_model("falcon", changes_of("falcon", "rw")),
    "megatron-bert": lambda: bert_model("MaskedLM"),
    # Of the widths of published models, whose kernels take values narrower than keys; all its layers are dense.
    "latent attention": lambda: mixture(
        "deepseek_v3",
        first_k_dense_replace=4,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        kv_lora_rank=64,
    ),
}


def wide_model(name: str) -> Any:
    """Return the Hugging Face model with wider layers, in fp32 on the CPU."""
    tiny: Any = MODELS[name]()
    config = copy.deepcopy(tiny.config)
    for field, value in config.to_dict().items():
        if field in _WIDE and value is not None:
            setattr(config, field, _WIDE[field])
    model = tiny_model(type(tiny), config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # As large as in the tiny models, whose width is 32; T5 does not scale its attention scores.
                scale = (32 / _HIDDEN) ** 0.5
                parameter *= scale / 8 if key.endswith("Attention.q.weight") else scale
    return model


def _hugging_face(name: str, dtype: str) -> Reference:
    return reference_of(wide_model(name).to(getattr(torch, dtype)).cuda(), _ROWS)


def _flat(
    model: Any,
    logits: torch.Tensor,
    gradients: Tensors,
) -> dict[str, torch.Tensor]:
    """Return logits at real positions and all gradients, flattened."""
    real = logits[..., : model.config.vocab_size][real_positions(model, _ROWS)]
    flat = [gradients[name].float().flatten() for name in sorted(gradients)]
    return {"logits": real, "gradients": torch.cat(flat)}


@pytest.mark.parametrize(
    "layout",
    [on_gpus(x.world_size, x, id=str(x)) for x in LAYOUTS],
)
@pytest.mark.parametrize("name", MODELS)
def test_bf16_error_is_close_to_hugging_faces(name: str, layout: Layout) -> None:
    (exact,) = run_ranks(_hugging_face, 1, name, "float32")
    (theirs,) = run_ranks(_hugging_face, 1, name, "bfloat16")
    model = wide_model(name)
    case = Case(layout=layout, steps=1, accelerator="gpu", precision="bf16-mixed")
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(Path(directory) / "source")
        results: list[RankResult] = run_ranks(
            run_family,
            layout.world_size,
            directory,
            case,
            _ROWS,
        )
    last = [result for result in results if result.outputs and result.cp_rank == 0]
    last.sort(key=lambda result: result.tp_rank)
    logits = torch.cat([result.outputs[0] for result in last], dim=-1)
    ours = _flat(model, logits, results[0].gradients)
    right = _flat(model, exact.outputs[0], exact.gradients)
    other = _flat(model, theirs.outputs[0], theirs.gradients)
    errors = {}
    for key, expected in right.items():
        errors[key] = (
            relative_error(ours[key], expected),
            relative_error(other[key], expected),
        )
    line = ", ".join(
        f"{key}: ours {a:.2e}, Hugging Face's bf16 {b:.2e}" for key, (a, b) in errors.items()
    )
    loss = results[0].loss
    print(f"\n{name} {layout}: {line}; loss {loss:.5f}, {theirs.loss:.5f}, exact {exact.loss:.5f}")
    for key, (mine, limit) in errors.items():
        assert mine < _TIMES_HUGGING_FACE * limit, f"{key}: {line}"
    assert loss == pytest.approx(exact.loss, rel=5e-3)  # bf16 has 8 bits
