"""fp8 linears compared with fp32 products of quantized and dequantized tensors, on one rank and with tp=2."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.convert.registry import model_config
from lightning_megatron.engine.ops import fp8
from lightning_megatron.engine.ops.cublaslt import add_product
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.checks import check_fp8
from tests.models import LLAMA
from tests.parity.comparison import relative_error
from tests.ranks import run_ranks

FORMATS = (fp8.E4M3, fp8.E5M2)

ROUNDED = 4e-3
"""Relative error of bf16, at most 2^-9 per rounding: the product, and the sum of two ranks' products."""
EXACT = 1e-5
"""Relative error of fp32 sums in another order."""


def _round_trip(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` after quantization and dequantization, in fp32."""
    scale = x.float().abs().max() / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype).float() * scale


# ---- quantization ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_matrix_and_transpose_share_one_full_range_scale(dtype: torch.dtype) -> None:
    x = torch.randn(
        20,
        48,
        generator=torch.Generator().manual_seed(1),
    ).bfloat16()
    quantized = fp8.quantize(x, dtype)
    assert quantized.rows.float().abs().max() == torch.finfo(dtype).max
    half_a_step = {fp8.E4M3: 2**-4, fp8.E5M2: 2**-3}[dtype]
    torch.testing.assert_close(
        quantized.rows.float() * quantized.scale,
        x.float(),
        rtol=half_a_step,
        atol=1e-4,
    )
    # Padded with zeros to a multiple of 16, as a product over tokens requires.
    assert quantized.columns.shape == (48, 32)
    assert torch.equal(quantized.columns.float()[:, :20], quantized.rows.float().t())
    assert not quantized.columns.float()[:, 20:].any()
    assert torch.equal(
        fp8.Fp8Linear.transposed(None, quantized.rows).float(),  # type: ignore[arg-type]
        quantized.columns.float(),
    )


@pytest.mark.parametrize(
    "size",
    [
        0.0,
        1e-20,
        float("nan"),
        float("inf"),
    ],
)
def test_tiny_and_nonfinite_gradients_survive_quantization(size: float) -> None:
    x = torch.full((16, 16), size).bfloat16()
    quantized = fp8.quantize(x, fp8.E5M2)
    dequantized = quantized.rows.float() * quantized.scale
    assert torch.equal(dequantized.isfinite(), x.isfinite())
    torch.testing.assert_close(dequantized.nan_to_num(), x.float().nan_to_num(posinf=0.0))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(512, 768), (1000, 336), (4096, 14336)],
    ids=str,
)
def test_kernels_are_bit_equal_to_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (
        torch.randn(shape, device="cuda") * torch.randn(shape[0], 1, device="cuda").exp()
    ).bfloat16()
    amax = x.abs().amax().float().reshape(1).cpu()
    quantized = fp8.quantize(x, dtype)
    expected = fp8._cast(
        x.cpu(),
        dtype,
        amax,
        rows=True,
        columns=True,
    )
    for each, other in zip(quantized, expected, strict=True):
        torch.testing.assert_close(
            each.float().cpu(),
            other.float(),
            rtol=0,
            atol=0,
        )


# ---- linears ---------------------------------------------------------------------------------------------------------

TOKENS = 24
IN = 64
OUT = 96
"""8 tokens of each of 3 rows; neither 24 nor 12 per rank of two is a multiple of 16."""


def _tensors() -> tuple[Tensor, Tensor, Tensor]:
    """Weight [out, in], inputs [2, s, b, in] and gradients [2, s, b, out] of two microbatches, of uneven sizes."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(OUT, IN, generator=generator) * 0.1
    inputs = torch.randn(2, 8, 3, IN, generator=generator) * torch.arange(1, 9)[:, None, None]
    gradients = torch.randn(2, 8, 3, OUT, generator=generator) * 1e-4
    gradients[:, 2] *= 50
    return weight.bfloat16(), inputs.bfloat16(), gradients.bfloat16()


def _run_linear(
    kind: str,
    sequence_parallel: bool,
    is_aligned: bool = True,
    main_grad: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Run two microbatches of a step through one linear; return this rank's shards of all results."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from lightning_megatron.engine.patches import WEIGHT_GRADIENTS, replacements
    from lightning_megatron.engine.runtime import emulated_cuda, patched

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tp = dist.get_world_size()
    with emulated_cuda(), patched(replacements(WEIGHT_GRADIENTS)):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=IN,
            num_attention_heads=2,
            tensor_model_parallel_size=tp,
            sequence_parallel=sequence_parallel,
            params_dtype=torch.bfloat16,
            gradient_accumulation_fusion=True,
        )
        common = {
            "config": config,
            "init_method": config.init_method,
            "bias": kind == "column",
            "skip_bias_add": False,
        }
        if kind == "column":
            linear = ColumnParallelLinear(IN, OUT, **common, gather_output=False)
        else:
            linear = RowParallelLinear(
                IN, OUT, **{**common, "skip_bias_add": True}, input_is_parallel=True
            )
        weight, inputs, gradients = _tensors()
        sequence = 0 if sequence_parallel else None
        split_in, split_out = (sequence, -1) if kind == "column" else (-1, sequence)
        inputs, gradients = (
            torch.stack([each if axis is None else each.chunk(tp, axis)[rank] for each in both])
            for both, axis in ((inputs, split_in), (gradients, split_out))
        )
        with torch.no_grad():
            linear.weight.copy_(weight.chunk(tp, 0 if kind == "column" else 1)[rank])
        # Left over from the previous step; the first microbatch overwrites it.
        buffer = torch.full(
            (2 * linear.weight.numel(),),
            5.0 if is_aligned else 0.0,
            dtype=main_grad,
        )
        first = -buffer.data_ptr() % 256 // buffer.itemsize + (not is_aligned)
        linear.weight.main_grad = buffer[first : first + linear.weight.numel()].view_as(
            linear.weight
        )
        linear._forward_impl = fp8_linear = fp8.Fp8Linear(linear)
        results: dict[str, Any] = {"y": [], "dx": []}
        with fp8.quantized_weights([fp8_linear]):
            for x, dy in zip(inputs, gradients, strict=True):
                x = x.clone().requires_grad_()
                y, _ = linear(x)
                y.backward(dy)
                assert fp8_linear.weight is not None
                results["y"].append(y.detach())
                results["dx"].append(x.grad)
                results["weight_address"] = [
                    *results.get("weight_address", []),
                    fp8_linear.weight.rows.data_ptr(),
                ]
        results["dw"] = linear.weight.main_grad
        results["bias"] = None if linear.bias is None else linear.bias.grad
        with torch.no_grad():
            results["y in bf16"] = linear(inputs[0])[0]
        parallel_state.destroy_model_parallel()
    return results


def _gather(
    kind: str,
    ranks: list[dict[str, Any]],
    name: str,
    i: int,
    sequence_parallel: bool,
) -> Tensor:
    """Concatenate the ranks' shards of a result."""
    shards: list[Tensor] = [results[name][i].float() for results in ranks]
    if (name == "y") == (kind == "column"):
        return torch.cat(shards, -1)
    if sequence_parallel:
        return torch.cat(shards, 0)
    assert all(torch.equal(shard, shards[0]) for shard in shards)
    return shards[0]


@pytest.mark.parametrize(
    ("tp", "sequence_parallel"),
    [
        (1, False),
        (2, False),
        (2, True),
    ],
)
@pytest.mark.parametrize("kind", ["column", "row"])
def test_linear_multiplies_its_quantized_operands(
    kind: str, tp: int, sequence_parallel: bool
) -> None:
    ranks = run_ranks(_run_linear, tp, kind, sequence_parallel)
    weight, inputs, gradients = _tensors()
    # Weight shards and activations split over tp have a scale per rank; gathered activations have one.
    axis = 0 if kind == "column" else 1
    weights = [_round_trip(shard, fp8.E4M3) for shard in weight.chunk(tp, axis)]
    weight_gradients = [torch.zeros_like(shard) for shard in weights]
    for i, (x, dy) in enumerate(zip(inputs.flatten(1, 2), gradients.flatten(1, 2), strict=True)):
        xs = [
            _round_trip(part, fp8.E4M3) for part in (x.chunk(tp, 1) if kind == "row" else [x] * tp)
        ]
        dys = [
            _round_trip(part, fp8.E5M2)
            for part in (dy.chunk(tp, 1) if kind == "column" else [dy] * tp)
        ]
        ys = [each @ shard.t() for each, shard in zip(xs, weights, strict=True)]
        dxs = [each @ shard for each, shard in zip(dys, weights, strict=True)]
        products = {
            "y": torch.cat(ys, 1) if kind == "column" else torch.stack(ys).sum(0),
            "dx": torch.cat(dxs, 1) if kind == "row" else torch.stack(dxs).sum(0),
        }
        for rank in range(tp):
            weight_gradients[rank] += dys[rank].t() @ xs[rank]
        for name, expected in products.items():
            actual = _gather(
                kind,
                ranks,
                name,
                i,
                sequence_parallel,
            ).flatten(0, 1)
            assert relative_error(actual, expected) < ROUNDED, name
    for results, expected in zip(ranks, weight_gradients, strict=True):
        assert relative_error(results["dw"], expected) < EXACT
        assert len(set(results["weight_address"])) == 1, (
            "the weight is quantized once for both microbatches"
        )
    # Outside of a step the product is in bf16, with the communication of the replaced forward pass.
    outside = _gather(
        kind,
        [{"y": [results["y in bf16"]]} for results in ranks],
        "y",
        0,
        sequence_parallel,
    )
    assert (
        relative_error(
            outside.flatten(0, 1),
            inputs[0].flatten(0, 1).float() @ weight.float().t(),
        )
        < ROUNDED
    )
    if kind == "column":
        biases = torch.cat([results["bias"] for results in ranks]).float()
        assert relative_error(biases, gradients.float().sum((0, 1, 2))) < ROUNDED


def test_unaligned_or_bf16_gradient_buffer_gets_the_same_gradient() -> None:
    (aligned,) = run_ranks(_run_linear, 1, "column", False)
    (not_aligned,) = run_ranks(_run_linear, 1, "column", False, False)
    assert relative_error(not_aligned["dw"], aligned["dw"]) < EXACT
    # As with grad_reduce_in_fp32=False.
    (in_bf16,) = run_ranks(
        _run_linear,
        1,
        "column",
        False,
        True,
        torch.bfloat16,
    )
    assert relative_error(in_bf16["dw"].float(), aligned["dw"]) < ROUNDED


@pytest.mark.gpu(1)
@pytest.mark.parametrize("shape", [(96, 64, 32), (6144, 4096, 8192)], ids=str)
def test_product_is_added_in_the_epilogue(shape: tuple[int, int, int]) -> None:
    n, m, tokens = shape
    gradient = fp8.quantize(torch.randn(tokens, n, device="cuda").bfloat16(), fp8.E5M2)
    inputs = fp8.quantize(torch.randn(tokens, m, device="cuda").bfloat16(), fp8.E4M3)
    total = torch.randn(n, m, device="cuda")
    left = gradient.columns.double() * gradient.scale
    right = inputs.columns.double() * inputs.scale
    expected = total + left @ right.t()
    scales = (gradient.scale, inputs.scale)
    # Tensor cores sum some products with fewer bits than fp32 has; how many is torch's choice, too.
    added = total + torch._scaled_mm(
        gradient.columns,
        inputs.columns.t(),
        *scales,
        out_dtype=torch.float32,
        use_fast_accum=False,
    )
    tolerance = 1.5 * relative_error(added, expected.float()) + EXACT * 10
    assert add_product(total, gradient.columns, inputs.columns, scales, fast=False)
    assert relative_error(total, expected.float()) < tolerance
    # Not aligned as cuBLASLt assumes: left to the caller.
    shifted = torch.zeros(n * m + 1, device="cuda")[1:].view(n, m)
    assert not add_product(shifted, gradient.columns, inputs.columns, scales, fast=False)
    assert not shifted.any()


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    model = model_config({"model_type": "llama", **LLAMA})
    with pytest.raises(
        ConfigError,
        match="fp8: expected a GPU of compute capability 8.9 .*got NVIDIA A100 with 8.0",
    ):
        check_fp8(model, 1, torch.bfloat16, torch.device("cuda"))


def test_model_without_megatron_linears_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp8: expected Megatron's parallel linears, got none"):
        fp8.use_fp8(torch.nn.ModuleList([torch.nn.Linear(16, 16)]))
