"""MXFP4 weights of gpt-oss are read as transformers dequantizes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron.convert.dequantized import open_dequantized
from lightning_megatron.convert.registry import read_json
from lightning_megatron.errors import CheckpointError
from tests.families.parity import padded_sentences, pretrained_module
from tests.families.test_experts import mixture
from tests.parity.training import Case, Layout, trainer_of
from tests.ranks import run_ranks

_QUANTIZED: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
}
_METHOD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def _quantized_directory(path: Path) -> None:
    """A tiny gpt-oss with all four-bit numbers, and scales that no dtype of 16 bits rounds."""
    mixture("gpt_oss", **_QUANTIZED).bfloat16().save_pretrained(path)
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        scales = (experts, rows, columns // 32)
        random = torch.randint(0, 256, (*scales, 16), generator=generator)
        tensors[f"{name}_blocks"] = random.to(torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(
            100, 122, scales, generator=generator, dtype=torch.uint8
        )
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {**read_json(path), "quantization_config": _METHOD}
    (path / "config.json").write_text(json.dumps(config))


def load_and_save(source: str, target: str) -> None:
    loader: DataLoader[Any] = DataLoader(padded_sentences(), batch_size=4)  # type: ignore[arg-type]
    module = pretrained_module(source)
    layout = Layout(ep=2, dp=2)
    trainer_of(Case(layout=layout, steps=1)).validate(
        module,
        loader,
        verbose=False,
    )
    module.save_pretrained(target)


def test_mxfp4_weights_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    source = tmp_path / "source"
    target = tmp_path / "target"
    _quantized_directory(source)
    dequantized = AutoModelForCausalLM.from_pretrained(
        source,
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.bfloat16,
    )
    run_ranks(load_and_save, 2, str(source), str(target))
    saved = load_file(target / "model.safetensors")
    expected = dequantized.state_dict()
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        assert saved[name].equal(tensor.float()), name
    assert "quantization_config" not in read_json(target)


def test_weight_that_is_stored_unpacked_too_is_refused(tmp_path: Path) -> None:
    _quantized_directory(tmp_path)
    file = tmp_path / "model.safetensors"
    name = "model.layers.0.mlp.experts.down_proj"
    save_file(load_file(file) | {name: torch.ones(4, 32, 64)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"expected one tensor that is '{name}', got two"):
        open_dequantized(tmp_path)
