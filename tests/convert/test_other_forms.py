"""Model directories in other forms than ``save_pretrained`` writes: FP8 weights, further layers, larger models."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_megatron.convert.block_scaled import BlockScaledFiles, block_of
from lightning_megatron.convert.registry import read_json
from lightning_megatron.convert.weight_files import open_weights
from lightning_megatron.errors import CheckpointError
from tests.convert.directories import converted, tensors_in
from tests.convert.test_mxfp4 import load_and_save
from tests.families.test_experts import mixture
from tests.marks import needs_transformers
from tests.ranks import run_ranks

_BLOCK = 16
_WHOLE_BLOCKS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 32,
}
"""Sizes of a tiny DeepSeek-V3 that are multiples of a block."""
_TWO_KINDS = ["linear_attention", "full_attention"]
_QUANTIZED = re.compile(r".*(?:_proj|_proj_with_mqa)\.weight")


def _quantize(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """FP8 numbers and scales of a weight whose last blocks may be smaller."""
    rows, columns = weight.shape
    shape = (-(-rows // block), -(-columns // block))
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(rows + columns)) + 0.5
    full = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
    return (weight.float() / full).to(torch.float8_e4m3fn), scales


def _rewrite(path: Path, tensors: dict[str, Tensor], **fields: Any) -> None:
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {**read_json(path), **fields}
    (path / "config.json").write_text(json.dumps(config))


@needs_transformers("5.17", "transformers does not round to the dtype that is asked for")
def test_fp8_weights_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    source = tmp_path / "source"
    target = tmp_path / "target"
    mixture("deepseek_v3", **_WHOLE_BLOCKS).bfloat16().save_pretrained(source)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = tensor
        if _QUANTIZED.fullmatch(name):
            values, scales = _quantize(tensor, _BLOCK)
            tensors[name] = values
            tensors[f"{name}_scale_inv"] = scales
    method = {"quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK], "fmt": "e4m3"}
    _rewrite(source, tensors, quantization_config={**method, "activation_scheme": "dynamic"})
    dequantized = AutoModelForCausalLM.from_pretrained(
        source,
        quantization_config=FineGrainedFP8Config(
            weight_block_size=(_BLOCK, _BLOCK), dequantize=True
        ),
        dtype=torch.bfloat16,
    )
    run_ranks(load_and_save, 2, str(source), str(target))
    saved = type(dequantized).from_pretrained(target).state_dict()
    for name, tensor in dequantized.state_dict().items():
        assert saved[name].float().equal(tensor.float()), name
    assert "quantization_config" not in read_json(target)


def test_parts_of_fp8_weights_whose_last_blocks_are_smaller(tmp_path: Path) -> None:
    weight = torch.randn(37, 21, generator=torch.Generator().manual_seed(1))
    values, scales = _quantize(weight, _BLOCK)
    save_file({"w": values, "w_scale_inv": scales}, tmp_path / "model.safetensors")
    files = BlockScaledFiles(open_weights(tmp_path), (_BLOCK, _BLOCK))
    full = scales.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)[:37, :21]
    expected = (values.float() * full).bfloat16()
    assert list(files.tensors) == ["w"]
    boxes = (
        (slice(None),),
        (slice(5, 35), slice(17, 20)),
        (slice(16, 32), slice(None)),
        (slice(33, 37),),
    )
    for box in boxes:
        assert files.read("w", box).equal(expected[box])


def test_block_size_must_be_a_pair() -> None:
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}
    with pytest.raises(CheckpointError, match=r"weight_block_size=\[128\] .*: expected two"):
        block_of(config)


def test_layers_of_multi_token_prediction_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = mixture("deepseek_v3")
    model.save_pretrained(tmp_path / "source")
    expected = load_file(tmp_path / "source" / "model.safetensors")
    layers = model.config.num_hidden_layers
    tensors = {**expected, f"model.layers.{layers}.eh_proj.weight": torch.ones(2, 3)}
    _rewrite(tmp_path / "source", tensors, num_nextn_predict_layers=1)
    converted(tmp_path / "source", tmp_path / "saved")
    assert tensors_in(tmp_path / "saved").keys() == expected.keys()
    assert f"left out, as transformers does: layers {layers} of multi-token" in caplog.text


def test_language_models_are_read_from_files_of_larger_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Qwen 3.5 is published: experts in one tensor, images, and multi-token prediction."""
    model = mixture("qwen3_5_moe_text", num_hidden_layers=2, layer_types=_TWO_KINDS)
    model.save_pretrained(tmp_path / "source", save_original_format=False)
    source = tmp_path / "source"
    tensors = {
        name.replace("model.", "model.language_model."): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in tensors
    more = ("model.visual.patch_embed.weight", "mtp.fc.weight", "mtp.layers.0.mlp.gate.weight")
    tensors |= {name: torch.ones(2, 3) for name in more}
    _rewrite(source, tensors, mtp_num_hidden_layers=1)
    converted(source, tmp_path / "saved")
    saved = type(model).from_pretrained(tmp_path / "saved").state_dict()
    expected = model.state_dict()
    assert saved.keys() == expected.keys()
    assert all(saved[name].equal(tensor) for name, tensor in expected.items())
    assert "left out, as transformers does: layers 0 of multi-token prediction" in caplog.text
    assert "left out, as transformers does: 1 tensors of images" in caplog.text
