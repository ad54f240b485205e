"""fp8 linears beside products of quantized and dequantized fp32 tensors, on one rank and split over two."""

from typing import Any

import pytest
import torch

from lightning_megatron.engine.fillers import fp8
from lightning_megatron.errors import ConfigError
from tests.parity.comparison import relative_error
from tests.ranks import run_ranks

FORMATS = (fp8.E4M3, fp8.E5M2)

ROUNDED = 4e-3
"""Of bf16, 2^-9 at most each time: the product, and the sum of two ranks' products."""
EXACT = 1e-5
"""Of fp32 sums in another order."""


def _dequantized(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is left of ``x``, in fp32."""
    scale = x.float().abs().max() / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype).float() * scale


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_matrix_and_its_transpose_have_one_scale_and_full_range(dtype: torch.dtype) -> None:
    x = torch.randn(20, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = fp8.quantize(x, dtype)
    assert found.rows.float().abs().max() == torch.finfo(dtype).max
    half_a_step = {fp8.E4M3: 2**-4, fp8.E5M2: 2**-3}[dtype]
    torch.testing.assert_close(found.rows.float() * found.scale, x.float(), rtol=half_a_step, atol=1e-4)
    # Filled up to a multiple of 16, which a product over tokens needs, with what adds nothing.
    assert found.columns.shape == (48, 32)
    assert torch.equal(found.columns.float()[:, :20], found.rows.float().t())
    assert not found.columns.float()[:, 20:].any()
    assert torch.equal(fp8.Fp8Linear.transposed(None, found.rows).float(), found.columns.float())


@pytest.mark.parametrize("size", [0.0, 1e-20, float("nan"), float("inf")])
def test_very_small_gradients_keep_their_size_and_what_is_not_finite_stays_so(size: float) -> None:
    x = torch.full((16, 16), size).bfloat16()
    found = fp8.quantize(x, fp8.E5M2)
    kept = found.rows.float() * found.scale
    assert torch.equal(kept.isfinite(), x.isfinite())
    torch.testing.assert_close(kept.nan_to_num(), x.float().nan_to_num(posinf=0.0))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(512, 768), (1000, 336), (4096, 14336)], ids=str)
def test_the_kernels_are_bit_equal_to_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (torch.randn(shape, device="cuda") * torch.randn(shape[0], 1, device="cuda").exp()).bfloat16()
    largest = x.abs().amax().float().reshape(1).cpu()
    found, expected = fp8.quantize(x, dtype), fp8._cast(x.cpu(), dtype, largest, rows=True, columns=True)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each.float().cpu(), other.float(), rtol=0, atol=0)


# ---- linears ---------------------------------------------------------------------------------------------------------

TOKENS, IN, OUT = 24, 64, 96
"""8 tokens of each of 3 rows: 24, and 12 on each of two ranks, are no multiples of 16."""


def _tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight [out, in], inputs [2, s, b, in] and gradients [2, s, b, out] of two microbatches, of uneven sizes."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(OUT, IN, generator=generator) * 0.1
    inputs = torch.randn(2, 8, 3, IN, generator=generator) * torch.arange(1, 9)[:, None, None]
    gradients = torch.randn(2, 8, 3, OUT, generator=generator) * 1e-4
    gradients[:, 2] *= 50
    return weight.bfloat16(), inputs.bfloat16(), gradients.bfloat16()


def _run_linear(
    kind: str, sequence_parallel: bool, is_aligned: bool = True, main_grad: torch.dtype = torch.float32
) -> dict[str, Any]:
    """On each rank: two microbatches of a step through one linear, this rank's parts of all results."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from lightning_megatron.engine.patches import WEIGHT_GRADIENTS, replacements
    from lightning_megatron.engine.runtime import emulated_cuda, patched

    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()
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
        common = {"config": config, "init_method": config.init_method, "bias": kind == "column", "skip_bias_add": False}
        if kind == "column":
            linear = ColumnParallelLinear(IN, OUT, **common, gather_output=False)
        else:
            linear = RowParallelLinear(IN, OUT, **{**common, "skip_bias_add": True}, input_is_parallel=True)
        weight, inputs, gradients = _tensors()
        whole = 0 if sequence_parallel else None
        split_in, split_out = (whole, -1) if kind == "column" else (-1, whole)
        inputs, gradients = (
            torch.stack([each if axis is None else each.chunk(tp, axis)[rank] for each in both])
            for both, axis in ((inputs, split_in), (gradients, split_out))
        )
        with torch.no_grad():
            linear.weight.copy_(weight.chunk(tp, 0 if kind == "column" else 1)[rank])
        # What the step before has left, where the first microbatch writes.
        buffer = torch.full((2 * linear.weight.numel(),), 5.0 if is_aligned else 0.0, dtype=main_grad)
        first = -buffer.data_ptr() % 256 // buffer.itemsize + (not is_aligned)
        linear.weight.main_grad = buffer[first : first + linear.weight.numel()].view_as(linear.weight)
        linear._forward_impl = taken = fp8.Fp8Linear(linear)
        found: dict[str, Any] = {"y": [], "dx": []}
        with fp8.quantized_weights([taken]):
            for x, dy in zip(inputs, gradients, strict=True):
                x = x.clone().requires_grad_()
                y, _ = linear(x)
                y.backward(dy)
                found["y"].append(y.detach())
                found["dx"].append(x.grad)
                found["weight_address"] = [*found.get("weight_address", []), taken.weight.rows.data_ptr()]
        found["dw"] = linear.weight.main_grad
        found["bias"] = None if linear.bias is None else linear.bias.grad
        with torch.no_grad():
            found["y in bf16"] = linear(inputs[0])[0]
        parallel_state.destroy_model_parallel()
    return found


def _parts(kind: str, of_ranks: list[dict[str, Any]], name: str, i: int, sequence_parallel: bool) -> torch.Tensor:
    """The whole of what the ranks hold."""
    parts = [found[name][i].float() for found in of_ranks]
    if (name == "y") == (kind == "column"):
        return torch.cat(parts, -1)
    if sequence_parallel:
        return torch.cat(parts, 0)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_linear_multiplies_what_is_left_of_its_operands(kind: str, tp: int, sequence_parallel: bool) -> None:
    of_ranks = run_ranks(_run_linear, tp, kind, sequence_parallel)
    weight, inputs, gradients = _tensors()
    # Shards of weights and of what is inside a block have scales of their own; what is gathered has one.
    axis = 0 if kind == "column" else 1
    weights = [_dequantized(shard, fp8.E4M3) for shard in weight.chunk(tp, axis)]
    of_weights = [torch.zeros_like(shard) for shard in weights]
    for i, (x, dy) in enumerate(zip(inputs.flatten(1, 2), gradients.flatten(1, 2), strict=True)):
        xs = [_dequantized(part, fp8.E4M3) for part in (x.chunk(tp, 1) if kind == "row" else [x] * tp)]
        dys = [_dequantized(part, fp8.E5M2) for part in (dy.chunk(tp, 1) if kind == "column" else [dy] * tp)]
        y = [each @ shard.t() for each, shard in zip(xs, weights, strict=True)]
        dx = [each @ shard for each, shard in zip(dys, weights, strict=True)]
        y = torch.cat(y, 1) if kind == "column" else sum(y)
        dx = torch.cat(dx, 1) if kind == "row" else sum(dx)
        for rank in range(tp):
            of_weights[rank] += dys[rank].t() @ xs[rank]
        for name, expected in (("y", y), ("dx", dx)):
            found = _parts(kind, of_ranks, name, i, sequence_parallel).flatten(0, 1)
            assert relative_error(found, expected) < ROUNDED, name
    for found, expected in zip(of_ranks, of_weights, strict=True):
        assert relative_error(found["dw"], expected) < EXACT
        assert len(set(found["weight_address"])) == 1, "the weight is quantized once for both microbatches"
    # Outside of a step the product is that of bf16, with the communication that the linear has taken over.
    outside = _parts(kind, [{"y": [found["y in bf16"]]} for found in of_ranks], "y", 0, sequence_parallel)
    assert relative_error(outside.flatten(0, 1), inputs[0].flatten(0, 1).float() @ weight.float().t()) < ROUNDED
    if kind == "column":
        biases = torch.cat([found["bias"] for found in of_ranks]).float()
        assert relative_error(biases, gradients.float().sum((0, 1, 2))) < ROUNDED


def test_a_gradient_buffer_that_cublas_cannot_write_to_is_added_to() -> None:
    (aligned,) = run_ranks(_run_linear, 1, "column", False)
    (not_aligned,) = run_ranks(_run_linear, 1, "column", False, False)
    assert relative_error(not_aligned["dw"], aligned["dw"]) < EXACT
    (in_bf16,) = run_ranks(_run_linear, 1, "column", False, True, torch.bfloat16)  # grad_reduce_in_fp32=False
    assert relative_error(in_bf16["dw"].float(), aligned["dw"]) < ROUNDED


# ---- what can be combined --------------------------------------------------------------------------------------------


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    model: Any = None
    with pytest.raises(ConfigError, match="fp8: expected a GPU of compute capability 8.9 .*got NVIDIA A100 with 8.0"):
        fp8.check_fp8(model, 1, torch.bfloat16, torch.device("cuda"))


def test_layers_without_megatrons_linears_are_refused() -> None:
    with pytest.raises(ConfigError, match="fp8: expected Megatron's parallel linears, got none"):
        fp8.use_fp8(torch.nn.ModuleList([torch.nn.Linear(16, 16)]))
