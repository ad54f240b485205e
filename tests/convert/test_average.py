"""The mean of checkpoints is the mean by hand, in every format, dtype and number, and of adapters."""

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_megatron.errors import CheckpointError
from tests.convert.directories import converted, save_as, tensors_in, tiny
from tests.convert.test_distributed_foreign import stacked, write_distributed
from tests.marks import exhaustive
from tests.ranks import run_ranks

Arrays = dict[str, np.ndarray]

_SCALES = (1.0, -0.3, 2.5)
"""Standard deviations of the checkpoints, all different, so that no single one is near the mean."""


def _average(
    sources: Sequence[Path],
    target: Path,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Average ``sources``; the result as a Hugging Face directory."""
    converted(sources[0], target, *sources[1:], **options)
    if options.get("to", "hf") != "hf":
        target = converted(target, target.with_name(f"{target.name} as hf"))
    return tensors_in(target)


def _write_models(
    folder: Path,
    dtype: torch.dtype,
    family: str = "qwen2",
) -> list[Path]:
    """Three models of one family with different weights in ``dtype``, as Hugging Face directories."""
    generator = torch.Generator().manual_seed(1)
    model = tiny(family).to(dtype)
    paths = []
    for number, scale in enumerate(_SCALES):
        for weight in model.parameters():
            weight.data = (scale * torch.randn(weight.shape, generator=generator)).to(dtype)
        paths.append(folder / f"model {number}")
        save_as(model, paths[-1], "safetensors")
    return paths


def _arrays(path: Path) -> Arrays:
    return {name: tensor.double().numpy() for name, tensor in tensors_in(path).items()}


def _assert_mean(
    actual: dict[str, torch.Tensor],
    checkpoints: Sequence[Arrays],
    dtype: torch.dtype,
) -> None:
    """Assert that each tensor is the fp64 mean, rounded to ``dtype``, up to the rounding of fp32 sums."""
    assert actual.keys() == checkpoints[0].keys()
    for name, tensor in actual.items():
        stack = np.stack([arrays[name] for arrays in checkpoints])
        rounding = torch.finfo(dtype).eps * np.abs(stack.mean(axis=0))
        summing = torch.finfo(torch.float32).eps * np.abs(stack).sum(axis=0)
        error = np.abs(tensor.double().numpy() - stack.mean(axis=0))
        smallest = (
            torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        )  # of subnormals, of fp16 alone
        assert tensor.dtype is dtype, name
        assert (error <= rounding + summing + smallest).all(), f"{name}: off by up to {error.max()}"


# ---- formats --------------------------------------------------------------------------------------------------------


def _as_ckpt(source: Path, target: Path) -> Path:
    return converted(source, target, to="megatron", tp=2)


def _as_legacy(source: Path, target: Path) -> Path:
    return converted(source, target, to="megatron-legacy", tp=2, pp=2)


def _as_hugging_face(source: Path, target: Path) -> Path:
    return source


def _as_torch_dist(source: Path, target: Path) -> Path:
    config = json.loads((source / "config.json").read_text())
    arguments = argparse.Namespace(
        num_attention_heads=config["num_attention_heads"],
        attention_dropout=0.0,
        hidden_dropout=0.0,
        swiglu=True,
        position_embedding_type="rope",
        normalization="RMSNorm",
        norm_epsilon=config["rms_norm_eps"],
        max_position_embeddings=config["max_position_embeddings"],
        untie_embeddings_and_output_weights=False,
    )
    return write_distributed(
        target, stacked(source), {"args": arguments, "checkpoint_version": 3.0}
    )


READ: tuple[Callable[[Path, Path], Path], ...] = (
    _as_hugging_face,
    _as_ckpt,
    _as_torch_dist,
    _as_legacy,
)
WRITTEN = ("hf", "megatron", "megatron-legacy")


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, exhaustive(torch.float16)],
    ids=str,
)
def test_mean_of_every_format_and_dtype_equals_the_mean_by_hand(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    models = _write_models(tmp_path, dtype)
    arrays = [_arrays(path) for path in models]
    targets = itertools.cycle(WRITTEN)
    for number, write_first in enumerate(READ):
        write_second = READ[(number + 1) % len(READ)]
        first = write_first(models[0], tmp_path / f"{number} first")
        second = write_second(models[1], tmp_path / f"{number} second")
        for count in (2, 3):
            sources = [first, second, models[2]][:count]
            mean = _average(sources, tmp_path / f"{number} mean of {count}", to=next(targets))
            _assert_mean(mean, arrays[:count], dtype)


def test_weights_of_64_bits_are_summed_in_64_bits(tmp_path: Path) -> None:
    models = _write_models(tmp_path, torch.float64)
    arrays = [_arrays(path) for path in models]
    for name, tensor in _average(models, tmp_path / "mean").items():
        expected = np.mean(
            [each[name] for each in arrays],
            axis=0,
        )
        np.testing.assert_allclose(
            tensor.numpy(),
            expected,
            rtol=1e-14,
            atol=1e-14,
            err_msg=name,
        )


def test_equal_checkpoints_have_themselves_as_mean(tmp_path: Path) -> None:
    model = _write_models(tmp_path, torch.float32)[0]
    for name, tensor in _average([model] * 4, tmp_path / "mean").items():
        assert torch.equal(tensor, tensors_in(model)[name])


def test_dtype_option_and_mixed_dtypes(tmp_path: Path) -> None:
    (tmp_path / "bf16").mkdir()
    low = _write_models(tmp_path / "bf16", torch.bfloat16)[0]
    high = _write_models(tmp_path, torch.float32)[1]
    arrays = [_arrays(low), _arrays(high)]
    _assert_mean(
        _average([low, high], tmp_path / "as the first"),
        arrays,
        torch.bfloat16,
    )
    _assert_mean(
        _average([high, low], tmp_path / "as the other"),
        arrays[::-1],
        torch.float32,
    )
    _assert_mean(
        _average([low, high], tmp_path / "as told", dtype="fp32"),
        arrays,
        torch.float32,
    )


@pytest.mark.parametrize("family", ["gpt2", "t5", "bloom", "megatron-bert-PreTraining"])
def test_families_with_tied_and_repeated_weights(tmp_path: Path, family: str) -> None:
    models = _write_models(tmp_path, torch.float32, family)
    _assert_mean(
        _average(models, tmp_path / "mean"),
        [_arrays(path) for path in models],
        torch.float32,
    )


def _average_on_ranks(sources: list[Path], target: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        converted(
            sources[0],
            target,
            *sources[1:],
            tp=2,
            pp=2,
            vpp=2,
        )
    finally:
        dist.destroy_process_group()


def test_processes_of_torchrun_average_their_shards(tmp_path: Path) -> None:
    models = _write_models(tmp_path, torch.float32)
    run_ranks(
        _average_on_ranks,
        4,
        models,
        tmp_path / "mean",
    )
    _assert_mean(
        tensors_in(tmp_path / "mean"),
        [_arrays(path) for path in models],
        torch.float32,
    )


# ---- adapters -------------------------------------------------------------------------------------------------------

_RANK = 2
_ALPHA = 6


def _write_adapter(folder: Path, base: Path, seed: int) -> Path:
    """An adapter of the query projections, as ``peft`` writes it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in tensors_in(base).items():
        if name.endswith("q_proj.weight"):
            out_size, in_size = weight.shape
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(_RANK, in_size, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out_size, _RANK, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": _RANK,
        "lora_alpha": _ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
    }
    config |= {"base_model_name_or_path": str(base), "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_matrices_of_adapters_are_averaged_one_by_one(tmp_path: Path) -> None:
    base = _write_models(tmp_path, torch.float32)[0]
    adapters = [_write_adapter(tmp_path / f"adapter {seed}", base, seed) for seed in range(3)]
    matrices = [load_file(path / "adapter_model.safetensors") for path in adapters]
    arrays = [{name: tensor.double().numpy() for name, tensor in each.items()} for each in matrices]

    converted(
        adapters[0],
        tmp_path / "mean",
        *adapters[1:],
        to="peft",
    )
    _assert_mean(load_file(tmp_path / "mean" / "adapter_model.safetensors"), arrays, torch.float32)

    expected = _arrays(base)
    for name in expected:
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in arrays[0]:
            a, b = (
                np.mean([each[f"{prefix}.lora_{part}.weight"] for each in arrays], axis=0)
                for part in "AB"
            )
            expected[name] = expected[name] + _ALPHA / _RANK * b @ a
    for to in WRITTEN:
        for name, tensor in _average(
            adapters,
            tmp_path / to,
            to=to,
        ).items():
            np.testing.assert_allclose(
                tensor.numpy(),
                expected[name],
                rtol=1e-5,
                atol=1e-5,
                err_msg=name,
            )


def test_adapters_of_different_bases_are_not_averaged_into_one_adapter(tmp_path: Path) -> None:
    bases = _write_models(tmp_path, torch.float32)[:2]
    adapters = [_write_adapter(tmp_path / f"adapter {n}", base, n) for n, base in enumerate(bases)]
    with pytest.raises(
        CheckpointError,
        match=r"adapter 1: expected the base .*model 0 .*, got .*model 1; use to=hf",
    ):
        converted(
            adapters[0],
            tmp_path / "mean",
            *adapters[1:],
            to="peft",
        )
    assert not (tmp_path / "mean").exists()
