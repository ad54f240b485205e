"""Do moments and float32 copies of legacy optimizers belong to the weights that they were made for?"""

from __future__ import annotations

import argparse
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


def _adam_after_rounding(model: Mapping[str, Any], is_half: bool) -> dict[str, Any]:
    """As after any step: the weights are the rounded float32 copies."""
    state = _adam(model, is_half)
    named = list(_in_order_of_modules(model))
    decays, others = ([each for _, each in named if (each.dim() > 1) == kind] for kind in (True, False))
    masters = state["fp32_from_fp16_params"]
    for weight, master in zip(decays + others, masters[0] + masters[1], strict=True):
        weight.copy_(master)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("kind", "tp", "stages"),
    [
        ("bert", 1, even(2)),
        ("bert", 2, even(2, 2)),
        ("llama", 1, even(2)),
        ("llama", 2, even(2, 2)),
        ("llama", 2, (((0,), (1,)),)),  # two chunks
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


def test_moments_of_the_first_releases(tmp_path: Path) -> None:
    def optimizer(model: Mapping[str, Any], is_half: bool) -> dict[str, Any]:
        state = _adam(model, is_half)
        return {"optimizer_state_dict": state["optimizer"], "fp32_from_fp16": state["fp32_from_fp16_params"]}

    names = {"stack": "transformer", "attention": "attention", "version": None, "is_zip": False}
    for folder, fields in (("old", {**names, "optimizer": optimizer}), ("new", {**names, "optimizer": _adam})):
        layout = Layout(**{"stages": even(2), "dtype": torch.float16, **fields})
        _, chunk, arguments = _models("bert", layout)
        write(tmp_path / folder, layout, chunk, arguments)
    old, new = open_legacy(tmp_path / "old"), open_legacy(tmp_path / "new")

    assert old.tensors == new.tensors
    assert {key.state for key in old.tensors} == {"weight", "param", "exp_avg", "exp_avg_sq"}
    for key, spec in old.tensors.items():
        assert torch.equal(old.read(key, 0, spec.shape[0]), new.read(key, 0, spec.shape[0]))


def _with_groups_of_another_kind(model: Mapping[str, Any], is_half: bool) -> Mapping[str, Any]:
    state = _adam(model, is_half)
    first, second = state["param_groups"]
    first["params"], second["params"] = first["params"][1:], [first["params"][0], *second["params"]]
    return state


def _of_another_optimizer(model: Mapping[str, Any], is_half: bool) -> Mapping[str, Any]:
    state = _adam(model, is_half)
    return state | {"state": {number: {"momentum_buffer": each["exp_avg"]} for number, each in state["state"].items()}}


def _without_a_parameter(model: Mapping[str, Any], is_half: bool) -> Mapping[str, Any]:
    state = _adam(model, is_half)
    return state | {"param_groups": state["param_groups"][:1]}


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (_with_groups_of_another_kind, "holds neither all matrices nor all biases and norms"),
        (_of_another_optimizer, "there is a NoneType where a moment"),
        (_without_a_parameter, "parameters in its groups"),
        (lambda model, is_half: [_adam(model, is_half)] * 2, "it is that of several optimizers"),
        (lambda model, is_half: {"state": {0: 1}, "param_groups": 3}, "there is a int where a list"),
    ],
)
def test_what_is_not_clear_is_left_out_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, optimizer: Any, reason: str
) -> None:
    layout = Layout(stages=even(2), optimizer=optimizer)
    model, chunk, arguments = _models("llama", layout)
    write(tmp_path, layout, chunk, arguments)

    read = open_legacy(tmp_path)

    assert {key.state for key in read.tensors} == {"weight"}
    assert read.training is not None
    assert (read.training.iteration, read.training.has_optimizer) == (40, False)
    (record,) = caplog.records
    assert reason in record.getMessage()


def test_moments_in_files_of_their_own_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = Layout(stages=even(2))
    model, chunk, arguments = _models("llama", layout)
    rank = write(tmp_path, layout, chunk, arguments) / "mp_rank_00"
    (rank / "model_optim_rng.pt").rename(rank / "model_rng.pt")
    (rank.parent / "mp_rank_00_000").mkdir()
    torch.save({}, rank.parent / "mp_rank_00_000" / "optim.pt")

    assert {key.state for key in open_legacy(tmp_path).tensors} == {"weight"}
    assert "the optimizer state of" in caplog.text


def _spread(folder: Path, copies: int, *, is_reversed: bool = True) -> None:
    """Move the moments of every rank into a file of their own, as the distributed optimizer of 2023 gathered them."""
    for file in folder.glob("mp_rank_*/model_optim_rng.pt"):
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(file, weights_only=True)
        adam, masters = state["optimizer"]["optimizer"], state["optimizer"]["fp32_from_fp16_params"]
        kinds: dict[str, Any] = {"param": masters[0] + masters[1]}
        for kind in ("exp_avg", "exp_avg_sq"):
            kinds[kind] = [adam["state"][number][kind] for number in range(len(kinds["param"]))]
        named = list(_in_order_of_modules(state["model"]))
        groups = [[i for i, (_, each) in enumerate(named) if (each.dim() > 1) == decays] for decays in (True, False)]
        place = {module: number for number, module in enumerate(groups[0] + groups[1])}
        order = [place[module] for module in range(len(named))][:: -1 if is_reversed else 1]
        buffer = {kind: torch.cat([each[number].flatten() for number in order]) for kind, each in kinds.items()}
        buffer = {kind: torch.nn.functional.pad(each, (0, -len(each) % copies)) for kind, each in buffer.items()}
        torch.save({0: {torch.float32: buffer}}, file.with_name("distrib_optim.pt"))
        for group in adam["param_groups"]:
            del group["params"]
        state["optimizer"] = {"optimizer": {"param_groups": adam["param_groups"]}}
        torch.save(state, file)


@pytest.mark.parametrize(("tp", "stages"), [(1, even(2)), (2, even(2, 2))])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_gathered_moments_are_those_of_their_weights(tmp_path: Path, kind: str, tp: int, stages: Stages) -> None:
    layout = Layout(
        stages=stages, tp=tp, dtype=torch.bfloat16, optimizer=_adam_after_rounding, arguments={"data_parallel_size": 64}
    )
    model, chunk, arguments = _models(kind, layout)
    folder = write(tmp_path / "legacy", layout, chunk, arguments)
    together = open_legacy(folder)
    expected = {key: together.read(key, 0, spec.shape[0]) for key, spec in together.tensors.items()}

    _spread(folder, copies=64)
    read = open_legacy(folder)

    assert set(read.tensors) == set(expected)
    assert {key.state for key in expected} == {"weight", "param", "exp_avg", "exp_avg_sq"}
    for key, tensor in expected.items():
        assert torch.equal(read.read(key, 0, len(tensor)), tensor), key
    assert read.training is not None
    assert [group["wd_mult"] for group in read.training.param_groups] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "is_reversed", "reason"),
    [
        ({}, True, "it is not known how many copies"),
        ({"data_parallel_size": 2}, True, "numbers for parameters of"),
        ({"data_parallel_size": 64}, False, "are not in the order of the weights"),
    ],
)
def test_gathered_moments_in_an_unknown_order_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arguments: dict[str, Any], is_reversed: bool, reason: str
) -> None:
    layout = Layout(stages=even(2), dtype=torch.bfloat16, optimizer=_adam_after_rounding, arguments=arguments)
    model, chunk, of_model = _models("llama", layout)
    folder = write(tmp_path, layout, chunk, of_model)
    _spread(folder, copies=64, is_reversed=is_reversed)

    assert {key.state for key in open_legacy(folder).tensors} == {"weight"}
    (record,) = caplog.records
    assert reason in record.getMessage()
