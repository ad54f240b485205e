"""bf16 on several GPUs is as near to Hugging Face in fp32 as Hugging Face's own bf16."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from tests.families.parity import FamilyAnswer, Rows, answer_of_family
from tests.families.wide_models import NAMES, wide_model
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
        answers: list[FamilyAnswer] = run_ranks(answer_of_family, layout.world_size, directory, case, rows, None, None)
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
