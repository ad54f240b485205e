"""What ``test_triton.py`` runs: the kernels in float32 beside torch's functions, values and gradients.

Only the order of additions differs, so a few units in the last place of float32 are allowed.
"""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from triton.runtime import interpreter

from lightning_megatron.engine.fillers import fp8, triton_kernels
from lightning_megatron.engine.fillers.adam import FusedAdam
from lightning_megatron.engine.fillers.kernels import Norm
from lightning_megatron.engine.fillers.triton_kernels import add_norm, add_to, rotate, row_sums, split_and_rotate

DEVICE = os.environ.get("KERNELS_DEVICE", "cpu")


@pytest.fixture(autouse=True)
def _loops_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 asks numpy for an integer in a way that numpy 2.4 no longer answers: bounds of loops."""
    patch = interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_index)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, requires_grad=True)


def _assert_same(got: Sequence[Tensor], expected: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Values, and the gradients of ``inputs`` for the same upstream gradients, which lie in memory in another order."""
    upstream = [torch.randn_like(x.transpose(0, -2).contiguous()).transpose(0, -2) for x in expected]
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(outputs, inputs, upstream) for outputs in (got, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


# ---- RoPE ------------------------------------------------------------------------------------------------------------


def _angles(length: int, rows: int, rotated: int) -> Tensor:
    half = 5.0 * torch.randn(length, rows, 1, rotated // 2, device=DEVICE)
    return torch.cat((half, half), -1)


def _turned(t: Tensor, angles: Tensor) -> Tensor:
    """Rotation as multiplication of complex numbers."""
    half = angles.shape[-1] // 2
    pairs = torch.complex(t[..., :half], t[..., half : 2 * half]) * torch.exp(1j * angles[..., :half])
    return torch.cat([pairs.real, pairs.imag, t[..., 2 * half :]], -1)


@pytest.mark.parametrize(
    ("shape", "groups", "queries", "width", "rotated", "angle_rows"),
    [
        ((3, 2), 2, 4, 16, 16, 1),
        ((2, 2), 3, 1, 24, 24, 2),  # no power of two; positions of each row
        ((3, 1), 1, 6, 16, 16, 1),
        ((1, 2), 20, 1, 8, 8, 2),  # one token
    ],
)
def test_the_split_rotates_queries_and_keys(
    shape: tuple[int, int], groups: int, queries: int, width: int, rotated: int, angle_rows: int
) -> None:
    mixed = _random(*shape, groups, (queries + 2) * width)
    angles = _angles(shape[0], angle_rows, rotated)
    widths = [queries * width, width, width]
    query, key, value = mixed.split(widths, dim=3)
    query = query.reshape(*shape, groups * queries, width)
    expected = _turned(query, angles), _turned(key, angles), value
    _assert_same(split_and_rotate(mixed, angles, angles, widths), expected, [mixed])


def test_heads_of_their_own_are_rotated() -> None:
    rows, angles = _random(3, 2, 5, 3 * 8), _angles(3, 1, 8)
    t = rows[..., 8:16]  # as keys lie among queries and values
    _assert_same([rotate(t, angles)], [_turned(t, angles)], [rows])


# ---- sums of rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "width", "choices"), [(9, 40, 3), (4, 1100, 1), (0, 8, 2)])
def test_rows_are_summed_and_missing_ones_are_none(rows: int, width: int, choices: int) -> None:
    x = torch.randn(rows, width, device=DEVICE)
    places = torch.randint(0, rows + 1, (7, choices), device=DEVICE)
    expected = torch.cat((x, x.new_zeros(1, width)))[places].sum(1)
    torch.testing.assert_close(row_sums(x, places), expected, rtol=1e-6, atol=1e-6)


def test_numbers_of_16_bits_are_added_to_those_of_32() -> None:
    total, x = torch.randn(5, 1000, device=DEVICE), torch.randn(5, 1000, device=DEVICE).bfloat16()
    expected = total + x
    add_to(total, x)
    assert torch.equal(total, expected)


# ---- addition and norm -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_rms", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("probability", [0.0, 0.25])
def test_the_sum_and_its_norm(is_rms: bool, has_bias: bool, probability: float) -> None:
    x, residual, weight, shift, bias = _random(7, 2, 40), _random(7, 2, 40), _random(40), _random(40), _random(40)
    norm_bias = None if is_rms else shift
    got = add_norm(x, bias if has_bias else None, residual, weight, norm_bias, 1e-5, probability)
    added = x + bias if has_bias else x
    if probability > 0.0:
        kept = (got[0] - residual).abs() > 1e-6
        assert 0.6 < kept.float().mean() < 0.9
        added = torch.where(kept, added / (1 - probability), 0.0)
    total = residual + added
    normed = F.rms_norm(total, (40,), weight, 1e-5) if is_rms else F.layer_norm(total, (40,), weight, shift, 1e-5)
    inputs = [x, residual, weight, *([] if is_rms else [shift]), *([bias] if has_bias else [])]
    _assert_same(got, (total, normed), inputs)


def test_a_norm_that_has_added_knows_the_norm_of_that_sum_alone() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=24, num_attention_heads=2, use_cpu_initialization=True)
    norm = Norm(config, 24).to(DEVICE)
    gathered: list[torch.nn.Module] = []
    norm.register_forward_pre_hook(lambda module, inputs: gathered.append(module))
    x, residual, bias = _random(5, 2, 24), _random(5, 2, 24), _random(24)
    total = norm.add(x, bias, residual, 0.0)
    assert gathered == [norm]  # overlapped communication must have brought the weights
    torch.testing.assert_close(total, x + bias + residual)
    normed = norm(total)
    assert "AddNorm" in type(normed.grad_fn).__name__
    torch.testing.assert_close(normed, norm(total), rtol=1e-5, atol=1e-5)  # computed by torch: the first call took it
    norm.add(x, bias, residual, 0.0)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (24,), norm.weight, norm.bias))


# ---- Adam ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
def test_one_pass_clips_steps_and_copies(decoupled: bool, found_inf: float | None) -> None:
    shapes = [(5000,), (3,), (8192, 2)]
    weights, gradients, firsts, seconds = ([torch.rand(s, device=DEVICE) for s in shapes] for _ in range(4))
    lows: list[Tensor | None] = [torch.zeros(s, dtype=torch.bfloat16, device=DEVICE) for s in shapes]
    lows[1] = None
    lists = (weights, gradients, firsts, seconds)
    expected = [[x.clone() for x in tensors] for tensors in lists]
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 3}
    scale = torch.tensor([4.0], device=DEVICE)
    found = None if found_inf is None else torch.tensor([found_inf], device=DEVICE)
    key = tuple(tuple(0 if x is None else x.data_ptr() for x in kind) for kind in (*lists, lows))
    table = triton_kernels.adam_table(key, [x.numel() for x in weights], weights[0].device)
    triton_kernels.adam_step(table, torch.bfloat16, options, scale, found, decoupled=decoupled)
    if not found_inf:
        torch._foreach_div_(expected[1], 4.0)
        (torch._fused_adamw_ if decoupled else torch._fused_adam_)(
            *expected, [], [torch.tensor(3.0, device=DEVICE)] * 3, lr=0.01, beta1=0.9, beta2=0.95, weight_decay=0.1,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
    for which in (0, 2, 3):
        torch.testing.assert_close(lists[which], expected[which], rtol=1e-5, atol=1e-6)
    for low, weight in zip(lows, weights, strict=True):
        if low is not None:
            # Triton's interpreter truncates where a GPU rounds.
            copied = torch.zeros_like(weight) if found_inf else weight
            torch.testing.assert_close(low.float(), copied, rtol=2**-8 if DEVICE == "cuda" else 2**-7, atol=0.0)


def test_the_optimizer_updates_copies_where_they_are() -> None:
    weight = torch.nn.Parameter(torch.rand(3000, device=DEVICE))
    weight.grad = torch.rand(3000, device=DEVICE)
    optimizer = FusedAdam([weight], lr=0.1)
    (group,) = optimizer.param_groups
    group["step"] = 1

    def stepped() -> None:
        optimizer._step_triton(group, *optimizer._kernel_inputs(group))

    stepped()
    assert not optimizer.has_copied
    for _ in range(2):  # the copies move
        low = torch.zeros(3000, dtype=torch.bfloat16, device=DEVICE)
        optimizer.model_params = {weight: low}
        stepped()
        assert optimizer.has_copied
        torch.testing.assert_close(low.float(), weight.detach(), rtol=2**-7, atol=0.0)


# ---- fp8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(50, 96), (300, 144)])
@pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2], ids=str)
def test_a_matrix_and_its_transpose_are_cast_as_torch_casts(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    # Triton's interpreter does not round to fp8 as GPUs do: whole numbers up to 7, of which none is rounded.
    x = torch.randint(-7, 8, shape).bfloat16().to(DEVICE)
    x[0, 0] = 7
    amax = torch.full((1,), 7.0, device=DEVICE)
    for rows, columns in ((True, True), (True, False), (False, True)):
        expected = fp8._cast(x, dtype, amax, rows=rows, columns=columns)
        found = [None if each is None else torch.full_like(each, 1) for each in expected[:2]]
        scale = triton_kernels.fp8_cast(x, amax, 1e-30, *found)
        for each, other in zip((*found, scale), expected, strict=True):
            assert (each is None and other is None) or torch.equal(each.float(), other.float())
