"""Do moments and float32 copies of legacy optimizers belong to the weights that they were made for?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.convert.legacy.reading import open_legacy
from lightning_megatron.convert.stored.base import StoredModel
from lightning_megatron.convert.stored.hugging_face import open_hugging_face
from tests.convert.directories import tiny_bert, tiny_llama
from tests.convert.legacy.layouts import (
    Chunk,
    Layout,
    Stages,
    bert,
    bert_arguments,
    even,
    llama,
    llama_arguments,
    write,
)

BETAS = (0.9, 0.95)


def _in_order_of_modules(model: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters as Megatron-LM's modules were made: the head's copy of the embedding before other heads."""
    last = [name for name in model if name in ("lm_head", "binary_head")]
    for name in [name for name in model if name not in last] + last:
        if isinstance(model[name], torch.Tensor):
            yield name, model[name]
        else:
            yield from ((f"{name}.{inner}", each) for inner, each in _flat(model[name]))


def _flat(nested: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in nested.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        else:
            yield from ((f"{name}.{inner}", each) for inner, each in _flat(value))


def _adam(model: Mapping[str, Any], is_half: bool) -> dict[str, Any]:
    """A real Adam after one step, on the float32 copies if the model is of 16 bits; gradients follow from weights."""
    named = list(_in_order_of_modules(model))
    decays = [each for name, each in named if not (name.endswith(".bias") or each.dim() == 1)]
    others = [each for name, each in named if name.endswith(".bias") or each.dim() == 1]
    groups = [[torch.nn.Parameter(each.float().clone()) for each in group] for group in (decays, others)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "wd_mult": 1.0}, {"params": groups[1], "wd_mult": 0.0, "weight_decay": 0.0}],
        lr=0.01,
        betas=BETAS,
    )
    for group in groups:
        for parameter in group:
            parameter.grad = parameter.detach() / 2
    optimizer.step()
    state = optimizer.state_dict()
    if is_half:
        return {"optimizer": state, "fp32_from_fp16_params": [[p.detach() for p in group] for group in groups]}
    for parameter, weight in zip(groups[0] + groups[1], decays + others, strict=True):
        weight.copy_(parameter.detach())
    return state


def _expected(weight: torch.Tensor, decays: bool) -> dict[str, torch.Tensor]:
    parameter = torch.nn.Parameter(weight.float().clone())
    optimizer = torch.optim.AdamW([parameter], lr=0.01, betas=BETAS, weight_decay=0.01 if decays else 0.0)
    parameter.grad = parameter.detach() / 2
    optimizer.step()
    return {"param": parameter.detach(), **optimizer.state[parameter]}


def _models(kind: str, layout: Layout) -> tuple[Any, Chunk, dict[str, Any]]:
    if kind == "bert":
        model = tiny_bert("PreTraining")
        return model, bert(model, layout, has_pooler=True, has_binary_head=True), bert_arguments(model)
    model = tiny_llama(num_hidden_layers=2)
    return model, llama(model, layout), llama_arguments(model)


@pytest.mark.parametrize(
    ("kind", "tp", "stages", "dtype"),
    [
        ("bert", 2, even(2, 2), torch.float32),
        pytest.param("llama", 2, (((0,), (1,)),), torch.float16, marks=pytest.mark.exhaustive),  # two chunks
    ],
)
def test_moments_and_copies_are_those_of_their_weights(
    tmp_path: Path, kind: str, dtype: torch.dtype, tp: int, stages: Stages
) -> None:
    layout = Layout(stages=stages, tp=tp, dtype=dtype, version=3.0 if kind == "llama" else 0, optimizer=_adam)
    model, chunk, arguments = _models(kind, layout)
    write(tmp_path / "legacy", layout, chunk, arguments)
    model.save_pretrained(tmp_path / "hf")
    reference: StoredModel = open_hugging_face(tmp_path / "hf")

    read = open_legacy(tmp_path / "legacy")

    assert len(read.tensors) == 4 * len(reference.tensors)
    for key, spec in reference.tensors.items():
        weight = reference.read(key, 0, spec.shape[0]).to(dtype)
        expected = _expected(weight, decays=len(spec.shape) > 1)
        for state in ("param", "exp_avg", "exp_avg_sq"):
            of_state = key._replace(state=state)
            assert read.tensors[of_state].dtype == torch.float32
            assert torch.equal(read.read(of_state, 0, spec.shape[0]), expected[state]), of_state
    assert read.training is not None
    assert (read.training.iteration, read.training.consumed_samples) == (40, 640)
    assert read.training.lr_scheduler == {"max_lr": 1e-3, "num_steps": 640, "lr_decay_style": "linear"}
    assert [(group["wd_mult"], group["weight_decay"], group["step"]) for group in read.training.param_groups] == [
        (1.0, 0.01, 1),
        (0.0, 0.0, 1),
    ]
    assert all((group["lr"], group["betas"]) == (0.01, BETAS) for group in read.training.param_groups)
