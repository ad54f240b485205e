"""Does every family come back from a legacy checkpoint of any layout bit by bit, with its config?"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_megatron.convert.conversion import convert
from lightning_megatron.convert.options import ConvertOptions
from tests.convert.directories import MODELS, save_as, tiny, tiny_llama
from tests.convert.legacy.written import options

_tiny = functools.cache(tiny)
_LAYOUTS: tuple[dict[str, Any], ...] = ({"tp": 2, "pp": 2}, {"tp": 4}, {"pp": 3})


def _layouts() -> list[Any]:
    cases: list[Any] = []
    for name in MODELS:
        if name in ("t5", "mt5"):  # of three heads
            cases += [(name, {"tp": 3, "pp": 2}), (name, {"pp": 4})]
        elif name.startswith("megatron-bert"):  # of two layers
            cases.append((name, {"tp": 2, "pp": 2}))
        else:
            cases += [
                pytest.param(name, layout, marks=[pytest.mark.exhaustive] * (index != len(name) % 3))
                for index, layout in enumerate(_LAYOUTS)
            ]
    return cases


def _assert_same_directory(found: Path, expected: dict[str, torch.Tensor]) -> None:
    tensors = load_file(found / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype is tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize(("name", "layout"), _layouts(), ids=str)
def test_every_family_comes_back_from_every_layout(tmp_path: Path, name: str, layout: dict[str, Any]) -> None:
    model = _tiny(name)
    expected = save_as(model, tmp_path / "hf", "safetensors")
    convert(options(tmp_path / "hf", tmp_path / "legacy", **layout))
    convert(ConvertOptions(load_path=tmp_path / "legacy", save_path=tmp_path / "back", to="hf"))

    _assert_same_directory(tmp_path / "back", expected)
    config = type(model.config).from_pretrained(tmp_path / "back").to_dict()
    assert config == type(model.config).from_pretrained(tmp_path / "hf").to_dict()
    if (tmp_path / "hf" / "generation_config.json").is_file():
        ours, theirs = ((tmp_path / each / "generation_config.json").read_text() for each in ("back", "hf"))
        assert ours == theirs


def test_a_llama_comes_back_from_chunks_and_from_a_distributed_optimizer(tmp_path: Path) -> None:
    expected = save_as(tiny_llama(), tmp_path / "hf", "safetensors")
    convert(options(tmp_path / "hf", tmp_path / "legacy", pp=2, vpp=2, tp=2))
    for file in list((tmp_path / "legacy").rglob("model_optim_rng.pt")):  # as Megatron-LM of 2022 named them
        (own := file.parent.with_name(f"{file.parent.name}_000")).mkdir()
        (own / "optim.pt").touch()
        file.rename(file.with_name("model_rng.pt"))
    convert(ConvertOptions(load_path=tmp_path / "legacy", save_path=tmp_path / "back", to="hf"))
    _assert_same_directory(tmp_path / "back", expected)


def test_a_t5_keeps_an_output_layer_of_its_own(tmp_path: Path) -> None:
    tensors = save_as(_tiny("t5"), tmp_path / "hf", "safetensors")
    tensors["lm_head.weight"] = tensors["shared.weight"] + 1  # as T5 v1.1 has it, whatever its config says
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    convert(options(tmp_path / "hf", tmp_path / "legacy", pp=3))
    convert(ConvertOptions(load_path=tmp_path / "legacy", save_path=tmp_path / "back", to="hf"))
    _assert_same_directory(tmp_path / "back", tensors)
