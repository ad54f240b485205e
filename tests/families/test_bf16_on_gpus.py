"""bf16 on several GPUs is as near to Hugging Face in fp32 as Hugging Face's own bf16."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.parity import VOCAB_SIZE, FamilyAnswer, Rows, answer_of_family, padded_sentences, tiny_model
from tests.families.t5_models import t5_config
from tests.families.test_gpts import FAMILIES, changes_of, gpt_model
from tests.parity.comparison import relative_error
from tests.parity.training import Case, Layout
from tests.ranks import run_ranks

LAYOUTS = (
    Layout(tp=2, sequence_parallel=True),
    Layout(cp=2),
    Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2),
    Layout(tp=2, cp=2, sequence_parallel=True),
    Layout(cp=2, pp=2, cp_comm_type="all_gather", num_microbatches=2),
)
_TIMES_HUGGING_FACE = 2.0
"""Another order of roundings may double an error of a few rounding steps, not more."""


# ---- models as wide as kernels of GPUs want them ---------------------------------------------------------------------

_SEQ_LENGTH = 96
"""Not 64: with a mask cuDNN has NaN gradients, in transformers too, where s % 128 == 64 (torch 2.11)."""
_LENGTHS = (96, 60, 25, 75)
_HIDDEN = 256
_WIDE = {
    **dict.fromkeys(("n_embd", "hidden_size", "d_model"), _HIDDEN),
    **dict.fromkeys(("n_inner", "intermediate_size", "d_ff", "ffn_dim"), 2 * _HIDDEN),
    "word_embed_proj_dim": _HIDDEN,
    **dict.fromkeys(("n_positions", "max_position_embeddings"), _SEQ_LENGTH),
    **dict.fromkeys(("head_dim", "d_kv"), 64),
    "sliding_window": 20,
}
_BERT = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
_BERT |= {name: _WIDE[name] for name in ("hidden_size", "intermediate_size", "max_position_embeddings")}

NAMES = (*FAMILIES, "falcon_alibi", "megatron-bert", "t5", "mt5")


def _wide(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: _WIDE[name] for name in fields if name in _WIDE}


def _model(name: str) -> Any:
    import transformers

    if name in FAMILIES:
        return gpt_model(name, _wide(FAMILIES[name][1]))
    if name == "falcon_alibi":
        return gpt_model("falcon", {**_wide(FAMILIES["falcon"][1]), **changes_of("falcon", "rw")})
    if name == "megatron-bert":
        config = transformers.MegatronBertConfig(vocab_size=VOCAB_SIZE, **_BERT)
        return tiny_model(transformers.MegatronBertForPreTraining, config)
    kind = name.upper()
    config = t5_config(f"{kind}Config", **{each: _WIDE[each] for each in ("d_model", "d_kv", "d_ff")})
    return tiny_model(getattr(transformers, f"{kind}ForConditionalGeneration"), config)


def wide_model(name: str) -> tuple[Any, Rows]:
    """The Hugging Face model, fp32 on the CPU, and a padded batch of four rows."""
    model = _model(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # As large as in the tiny models, whose width is 32; T5 does not scale its scores.
                scale = (32 / _HIDDEN) ** 0.5
                parameter *= scale / 8 if key.endswith("Attention.q.weight") else scale
    rows: Callable[[], Rows] = _pairs if model.config.is_encoder_decoder else _ROWS.get(name, _sentences)
    return model, rows()


def _sentences() -> Rows:
    return padded_sentences(_LENGTHS, _SEQ_LENGTH)


def _masked_pairs() -> Rows:
    """About half of the tokens are to be told; labels of the order of sentences."""
    hidden = torch.rand(len(_LENGTHS), _SEQ_LENGTH, generator=torch.Generator().manual_seed(6)) < 0.5
    return [
        {
            **row,
            "labels": row["labels"].masked_fill(hidden[i], -100),
            "token_type_ids": (torch.arange(_SEQ_LENGTH) > 8).long(),
            "next_sentence_label": torch.tensor(i % 2),
        }
        for i, row in enumerate(_sentences())
    ]


def _pairs() -> Rows:
    """Sources, and targets of half their length."""
    return [
        {
            "input_ids": row["input_ids"],
            "attention_mask": row["attention_mask"],
            "labels": row["labels"][: _SEQ_LENGTH // 2].clone(),
            "decoder_attention_mask": torch.ones(_SEQ_LENGTH // 2, dtype=torch.long),
        }
        for row in _sentences()
    ]


_ROWS: dict[str, Callable[[], Rows]] = {"megatron-bert": _masked_pairs}


# ---- the comparison --------------------------------------------------------------------------------------------------


def _hugging_face(name: str, dtype: str) -> dict[str, torch.Tensor]:
    """Logits at real positions, the loss and the gradients, on one GPU."""
    from transformers.core_model_loading import revert_weight_conversion

    model, rows = wide_model(name)
    model = model.to(getattr(torch, dtype)).cuda()
    batch = {key: torch.stack([row[key] for row in rows]).cuda() for key in rows[0]}
    output = model(**batch)
    output.loss.float().backward()
    logits = output.get("logits", output.get("prediction_logits"))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        "logits": logits[_real(rows)].detach().float().cpu(),
        "loss": output.loss.detach().float().cpu(),
        "gradients": _flat(revert_weight_conversion(model, gradients)),
    }


def _flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradients[name].float().flatten().cpu() for name in sorted(gradients)])


def _real(rows: Rows) -> torch.Tensor:
    key = "decoder_attention_mask" if "decoder_attention_mask" in rows[0] else "attention_mask"
    return torch.stack([row[key] for row in rows]).bool()


def _ours(name: str, layout: Layout) -> dict[str, torch.Tensor]:
    model, rows = wide_model(name)
    case = Case(layout=layout, steps=1, accelerator="gpu", precision="bf16-mixed")
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(Path(directory) / "source")
        answers: list[FamilyAnswer] = run_ranks(answer_of_family, layout.world_size, directory, case, rows)
    last = sorted((each for each in answers if each.outputs and each.cp_rank == 0), key=lambda each: each.tp_rank)
    logits = torch.cat([answer.outputs[0] for answer in last], dim=-1)[..., : model.config.vocab_size]
    return {
        "logits": logits[_real(rows)],
        "loss": torch.tensor(answers[0].loss),
        "gradients": _flat(answers[0].gradients),
    }


@pytest.mark.parametrize("layout", [pytest.param(x, marks=pytest.mark.gpu(x.world_size), id=str(x)) for x in LAYOUTS])
@pytest.mark.parametrize("name", NAMES)
def test_bf16_is_as_exact_as_hugging_faces(name: str, layout: Layout) -> None:
    (exact,), (theirs,) = (run_ranks(_hugging_face, 1, name, dtype) for dtype in ("float32", "bfloat16"))
    ours = _ours(name, layout)
    errors = {
        key: (relative_error(ours[key], exact[key]), relative_error(theirs[key], exact[key]))
        for key in ("logits", "gradients")
    }
    line = ", ".join(f"{key}: ours {a:.2e}, Hugging Face's bf16 {b:.2e}" for key, (a, b) in errors.items())
    print(f"\n{name} {layout}: {line}; loss {ours['loss']:.5f}, {theirs['loss']:.5f}, exact {exact['loss']:.5f}")
    for key, (mine, limit) in errors.items():
        assert mine < _TIMES_HUGGING_FACE * limit, f"{key}: {line}"
    assert ours["loss"].item() == pytest.approx(exact["loss"].item(), rel=5e-3)  # bf16 has 8 bits
