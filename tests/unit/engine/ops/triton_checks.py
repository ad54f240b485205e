"""Tests that ``test_triton.py`` runs: values and gradients of the kernels in float32, compared with torch.

Only the order of additions differs, so the tolerance is a few units in the last place of float32.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from triton.runtime import interpreter

from lightning_megatron.engine.ops import fp8, loss, magnitudes
from lightning_megatron.engine.ops.adam import FusedAdam
from lightning_megatron.engine.ops.norms import Norm
from lightning_megatron.engine.ops.routing import Routing
from lightning_megatron.engine.ops.token_dispatch import sort_rows
from lightning_megatron.engine.ops.triton import cross_entropy
from lightning_megatron.engine.ops.triton.adam import adam_step, adam_table
from lightning_megatron.engine.ops.triton.expert_rows import copy_rows, row_sums, weighted_swiglu
from lightning_megatron.engine.ops.triton.fp8 import fp8_cast
from lightning_megatron.engine.ops.triton.grouped_gradient import add_grouped_gradient, add_to
from lightning_megatron.engine.ops.triton.head_norm import head_norm
from lightning_megatron.engine.ops.triton.norms import add_norm, add_sums
from lightning_megatron.engine.ops.triton.rope import rotate, split_and_rotate
from lightning_megatron.engine.ops.triton.router import route
from lightning_megatron.engine.ops.triton.row_order import sorted_order
from lightning_megatron.engine.ops.triton.swiglu import swiglu
from lightning_megatron.engine.patches import WEIGHT_GRADIENTS, replacements
from lightning_megatron.engine.runtime import emulated_cuda, patched

DEVICE = os.environ.get("KERNELS_DEVICE", "cpu")


@pytest.fixture(autouse=True)
def _patch_interpreter_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert loop bounds to int: Triton 3.6 relies on a conversion that numpy 2.4 removed."""
    patch = interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(
            tensor,
            "__index__",
            lambda self: int(self.handle.data.item()),
        )

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_index)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, requires_grad=True)


def _assert_same(
    got: Sequence[Tensor], expected: Sequence[Tensor], inputs: Sequence[Tensor]
) -> None:
    """Compare values, and gradients of ``inputs`` for the same non-contiguous upstream gradients."""
    upstream = [
        torch.randn_like(x.transpose(0, -2).contiguous()).transpose(0, -2) for x in expected
    ]
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(outputs, inputs, upstream) for outputs in (got, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


# ---- RoPE ------------------------------------------------------------------------------------------------------------


def _angles(length: int, rows: int, rotated: int) -> Tensor:
    half = 5.0 * torch.randn(length, rows, 1, rotated // 2, device=DEVICE)
    return torch.cat((half, half), -1)


def _rotate(t: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding as complex multiplication."""
    half = angles.shape[-1] // 2
    pairs = torch.complex(
        t[..., :half],
        t[..., half : 2 * half],
    ) * torch.exp(1j * angles[..., :half])
    return torch.cat(
        [
            pairs.real,
            pairs.imag,
            t[..., 2 * half :],
        ],
        -1,
    )


@pytest.mark.parametrize(
    ("shape", "groups", "queries", "width", "rotated", "angle_rows"),
    [
        ((3, 2), 2, 4, 16, 16, 1),
        ((2, 2), 3, 1, 24, 24, 2),  # no power of two; positions differ per row
        ((3, 1), 1, 6, 16, 16, 1),
        ((1, 2), 20, 1, 8, 8, 2),  # one token
    ],
)
def test_split_and_rotate_equals_complex_rotation(
    shape: tuple[int, int],
    groups: int,
    queries: int,
    width: int,
    rotated: int,
    angle_rows: int,
) -> None:
    mixed = _random(*shape, groups, (queries + 2) * width)
    angles = _angles(shape[0], angle_rows, rotated)
    widths = [queries * width, width, width]
    query, key, value = mixed.split(widths, dim=3)
    query = query.reshape(*shape, groups * queries, width)
    expected = _rotate(query, angles), _rotate(key, angles), value
    _assert_same(split_and_rotate(mixed, angles, angles, widths), expected, [mixed])


def test_rotate_of_strided_heads_equals_complex_rotation() -> None:
    rows = _random(3, 2, 5, 3 * 8)
    angles = _angles(3, 1, 8)
    t = rows[..., 8:16]  # strided, as keys between queries and values
    _assert_same(
        [rotate(t, angles)],
        [_rotate(t, angles)],
        [rows],
    )


# ---- sums of rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "width", "choices"),
    [
        (9, 40, 3),
        (4, 1100, 1),
        (0, 8, 2),
    ],
)
def test_row_sums_skip_missing_rows(rows: int, width: int, choices: int) -> None:
    x = torch.randn(rows, width, device=DEVICE)
    indices = torch.randint(
        0,
        rows + 1,
        (7, choices),
        device=DEVICE,
    )
    expected = torch.cat((x, x.new_zeros(1, width)))[indices].sum(1)
    torch.testing.assert_close(
        row_sums(x, indices),
        expected,
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize(("width", "choices"), [(40, 3), (2100, 1)])
def test_copy_rows_skips_missing_positions(width: int, choices: int) -> None:
    x = torch.randn(7, width, device=DEVICE)
    total = 7 * choices - 4
    positions = torch.randperm(7 * choices, device=DEVICE).clamp(max=total).view(7, choices)
    copied = copy_rows(x, positions, total)
    padded = torch.cat((copied, x.new_zeros(1, width)))
    exists = (positions < total)[..., None]
    assert copied.shape == (total, width)
    assert torch.equal(padded[positions], torch.where(exists, x[:, None], 0.0))


@pytest.mark.parametrize(("width", "count"), [(40, 5), (1100, 9), (8, 0)])
def test_weighted_swiglu_of_the_rows_that_exist_equals_torch(width: int, count: int) -> None:
    rows = _random(9, 2 * width)
    factors = _random(9)
    with torch.no_grad():
        rows[count:] = torch.nan
    last_end = torch.tensor([count], dtype=torch.int32, device=DEVICE)
    gate, up = rows[:count].chunk(2, dim=-1)
    activated = F.silu(gate) * up * factors[:count, None]
    got = weighted_swiglu(rows, factors, last_end)
    assert got.shape == (9, width)
    upstream = torch.randn(9, width, device=DEVICE)
    gradients = torch.autograd.grad(got, [rows, factors], upstream)
    references = torch.autograd.grad(activated, [rows, factors], upstream[:count])
    torch.testing.assert_close(got[:count], activated, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients, references, strict=True):
        torch.testing.assert_close(ours[:count], theirs[:count], rtol=1e-5, atol=2e-5)


def test_bfloat16_is_added_to_float32() -> None:
    total = torch.randn(5, 1000, device=DEVICE)
    x = torch.randn(5, 1000, device=DEVICE).bfloat16()
    expected = total + x
    add_to(total, x)
    assert torch.equal(total, expected)


# ---- gradients of experts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "rows", "columns"),
    [
        ((70, 0, 64, 1, 130), 192, 136),  # more than a tile, and not a whole number of them
        ((5, 3), 128, 256),
        ((0, 0), 8, 8),
    ],
)
def test_gradients_of_experts_are_added_in_float32(
    counts: tuple[int, ...],
    rows: int,
    columns: int,
) -> None:
    # Triton's interpreter multiplies no bf16.
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    ends = torch.tensor(counts).cumsum(0).to(DEVICE, torch.int32)
    num_rows = sum(counts) + 7
    gradients = torch.randn(num_rows, rows, device=DEVICE).to(dtype)
    tokens = torch.randn(num_rows, columns, device=DEVICE).to(dtype)
    for unwritten in (gradients, tokens):
        unwritten[sum(counts) :] = torch.nan
    total = torch.randn(len(counts), rows, columns, device=DEVICE)
    expected = total.clone()
    begin = 0
    for expert, count in enumerate(counts):
        of_expert = slice(begin, begin + count)
        expected[expert] += gradients[of_expert].float().t() @ tokens[of_expert].float()
        begin += count
    add_grouped_gradient(gradients, tokens, ends, total)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-4)


# ---- router ----------------------------------------------------------------------------------------------------------


def _routed(
    logits: Tensor,
    bias: Tensor | None,
    is_padding: Tensor | None,
    routing: Routing,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``route`` returns, by torch."""
    scores = torch.sigmoid(logits) if routing.is_sigmoid else logits.softmax(-1)
    selection = scores if bias is None else scores + bias
    experts = selection.topk(routing.topk).indices
    probs = scores.gather(1, experts)
    if routing.is_sigmoid:
        scores = scores / scores.sum(-1, keepdim=True)
    if routing.is_normalized:
        probs = probs / probs.sum(-1, keepdim=True).clamp(min=routing.min_sum)
    is_token = torch.ones(len(logits), 1, device=DEVICE)
    if is_padding is not None:
        is_token[is_padding] = 0.0
    chosen = torch.zeros_like(logits).scatter(1, experts, 1.0)
    return (
        probs * routing.scale,
        experts,
        (scores * is_token).sum(0),
        (chosen * is_token).sum(0),
    )


@pytest.mark.parametrize(
    ("tokens", "experts", "routing", "has_bias", "has_padding"),
    [
        (70, 12, Routing(topk=3, is_sigmoid=False, is_normalized=True, min_sum=0.0, scale=1.0), False, True),
        (40, 128, Routing(topk=8, is_sigmoid=True, is_normalized=True, min_sum=1e-20, scale=2.5), True, True),
        (33, 16, Routing(topk=1, is_sigmoid=False, is_normalized=False, min_sum=0.0, scale=1.0), False, False),
        # Of some tokens the divisor is the smallest one.
        (50, 8, Routing(topk=4, is_sigmoid=True, is_normalized=True, min_sum=2.6, scale=1.0), True, False),
    ],
)  # fmt: skip
def test_routing_equals_torch(
    tokens: int,
    experts: int,
    routing: Routing,
    has_bias: bool,
    has_padding: bool,
) -> None:
    logits = _random(tokens, experts)
    bias = torch.randn(experts, device=DEVICE) if has_bias else None
    # A column of a mask, as rows that are transposed may be.
    is_padding = (torch.rand(tokens, 3, device=DEVICE) < 0.3)[:, 1] if has_padding else None
    got = route(logits, bias, is_padding, routing)
    expected = _routed(logits, bias, is_padding, routing)
    assert torch.equal(got.experts, expected[1])
    assert torch.equal(got.counts, expected[3])
    got.counts.zero_()  # as an all-reduce changes them
    _assert_same(
        (got.probs, got.score_sums[None]),
        (expected[0], expected[2][None]),
        [logits],
    )


def test_equal_and_undefined_scores_choose_different_experts() -> None:
    logits = torch.zeros(2, 6, device=DEVICE)
    logits[0, 3] = 1.0
    logits[1] = torch.nan
    routing = Routing(topk=3, is_sigmoid=False, is_normalized=True, min_sum=0.0, scale=1.0)
    probs, experts, *_ = route(logits, None, None, routing)
    assert experts.tolist() == [[3, 0, 1], [0, 1, 2]]
    assert probs[1].isnan().all()


# ---- order of rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "choices", "count", "others"),
    [
        (150, 3, 5, 2),
        (64, 8, 128, 0),
        (130, 2, 2, 1),
        (1, 1, 1, 0),
        (0, 2, 3, 0),
    ],
)
def test_counted_order_is_the_stable_one(
    rows: int,
    choices: int,
    count: int,
    others: int,
) -> None:
    """``others`` destinations are none."""
    choice = torch.rand(rows, count + others).argsort(1)[:, :choices].clamp(max=count)
    total = int((choice < count).sum())
    expected = sort_rows(choice, count, total)  # on the CPU, by torch
    got = sorted_order(choice.to(DEVICE), count, total)
    for ours, theirs in zip(got, (expected.positions, expected.ends), strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours.cpu(), theirs)


# ---- addition and norm -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_rms", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("probability", [0.0, 0.25])
def test_add_norm_equals_torch(is_rms: bool, has_bias: bool, probability: float) -> None:
    x = _random(7, 2, 40)
    residual = _random(7, 2, 40)
    weight = _random(40)
    shift = _random(40)
    bias = _random(40)
    norm_bias = None if is_rms else shift
    got = add_norm(
        x,
        bias if has_bias else None,
        residual,
        weight,
        norm_bias,
        1e-5,
        probability,
    )
    added = x + bias if has_bias else x
    if probability > 0.0:
        kept = (got[0] - residual).abs() > 1e-6
        assert 0.6 < kept.float().mean() < 0.9
        added = torch.where(kept, added / (1 - probability), 0.0)
    total = residual + added
    normed = (
        F.rms_norm(total, (40,), weight, 1e-5)
        if is_rms
        else F.layer_norm(total, (40,), weight, shift, 1e-5)
    )
    inputs = [
        x,
        residual,
        weight,
        *([] if is_rms else [shift]),
        *([bias] if has_bias else []),
    ]
    _assert_same(got, (total, normed), inputs)


@pytest.mark.parametrize("is_rms", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_gradients_without_a_hook_are_added_to_the_buffers(is_rms: bool, has_bias: bool) -> None:
    x = _random(5, 2, 40)
    residual = _random(5, 2, 40)
    weight = _random(40)
    shift = None if is_rms else _random(40)
    bias = _random(40) if has_bias else None
    parameters = (weight, shift, bias)
    present = [each for each in parameters if each is not None]

    def gradients() -> list[Tensor]:
        outputs = add_norm(x, bias, residual, weight, shift, 1e-5, 0.0)
        torch.autograd.backward(outputs, [torch.cos(each) for each in outputs])
        return [each.grad for each in (x, residual, *present) if each.grad is not None]

    by_autograd = gradients()
    for each in (x, residual, *present):
        each.grad = None
    buffers = [torch.randn_like(each) for each in present]
    before = [buffer.clone() for buffer in buffers]
    for parameter, buffer in zip(present, buffers, strict=True):
        vars(parameter).update(main_grad=buffer, is_reduced_in_backward=False)
    in_place = gradients()
    assert len(in_place) == 2
    added = [after - old for after, old in zip(buffers, before, strict=True)]
    for ours, theirs in zip([*in_place, *added], by_autograd, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_users_get_the_gradients_of_norms(kind: str) -> None:
    x = _random(5, 2, 40)
    weight = _random(40)
    vars(weight).update(main_grad=torch.zeros_like(weight), is_reduced_in_backward=False)
    calls: list[Tensor] = []
    getattr(weight, kind)(calls.append)
    _, normed = add_norm(x, None, x.detach(), weight, None, 1e-5, 0.0)
    normed.sum().backward()
    assert len(calls) == 1
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, F.rms_norm(2.0 * x, (40,), None, 1e-5).sum((0, 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_many_programs_are_added(dtype: torch.dtype) -> None:
    partial = torch.randn(3, 300, 70, device=DEVICE)  # some tiles each way, the last ones not full
    buffers = [torch.randn(70, device=DEVICE).to(dtype) for _ in range(3)]
    expected = [
        (old.float() + sums).to(dtype) for old, sums in zip(buffers, partial.sum(1), strict=True)
    ]
    add_sums(partial, *buffers)
    for ours, theirs in zip(buffers, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_norm_caches_the_result_of_its_own_sum_only() -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=24, num_attention_heads=2, use_cpu_initialization=True
    )
    norm = Norm(config, 24).to(DEVICE)
    hooked: list[torch.nn.Module] = []
    norm.register_forward_pre_hook(lambda module, inputs: hooked.append(module))
    x = _random(5, 2, 24)
    residual = _random(5, 2, 24)
    bias = _random(24)
    total = norm.add(x, bias, residual, 0.0)
    assert hooked == [norm]  # overlapped communication gathers the weights in this hook
    torch.testing.assert_close(total, x + bias + residual)
    normed = norm(total)
    assert "AddNorm" in type(normed.grad_fn).__name__
    # Computed by torch: the first call consumed the cached result.
    torch.testing.assert_close(
        normed,
        norm(total),
        rtol=1e-5,
        atol=1e-5,
    )
    norm.add(x, bias, residual, 0.0)
    torch.testing.assert_close(
        norm(x),
        F.layer_norm(
            x,
            (24,),
            norm.weight,
            norm.bias,
        ),
    )


@pytest.mark.parametrize(
    ("heads", "width"),
    [(3, 16), (1, 24), (5, 128)],  # 24: no power of two
)
def test_norm_of_heads_that_are_a_view_equals_torch(heads: int, width: int) -> None:
    mixed = _random(40, 3, heads + 2, width)
    x = mixed[:, :, 1:-1]
    weight = _random(width)
    expected = F.rms_norm(x, (width,), weight, 1e-5)
    _assert_same([head_norm(x, weight, 1e-5)], [expected], [mixed, weight])


# ---- cross-entropy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 96, 5000])
def test_cross_entropy_of_a_vocabulary_shard_equals_torch(first: int) -> None:
    logits = 4.0 * torch.randn(3, 2, 4100, device=DEVICE)
    logits[..., 4000:] = -torch.inf  # padding of the vocabulary
    logits[0, 0] = -torch.inf
    labels = torch.tensor([[0, 100], [4050, 8000], [96, 4095]], device=DEVICE)
    expected = loss.row_statistics(logits, labels, first)
    got = cross_entropy.row_statistics(logits, labels, first)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    log_sum = torch.randn(3, 2, device=DEVICE)
    upstream = torch.randn(2, 3, device=DEVICE).t()
    torch.testing.assert_close(
        cross_entropy.logits_gradient(logits, labels, first, log_sum, upstream),
        loss.logits_gradient(logits, labels, first, log_sum, upstream),
        rtol=1e-5,
        atol=1e-5,
    )


def test_cross_entropy_of_a_row_with_nan_is_nan() -> None:
    logits = torch.randn(1, 2, 50, device=DEVICE)
    logits[0, 1, 7] = torch.nan
    labels = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    largest, total, own = cross_entropy.row_statistics(logits, labels, 0)
    losses = largest + total.log() - own
    assert losses.isnan().tolist() == [[False, True]]


# ---- Adam ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
def test_adam_kernel_clips_updates_and_copies(decoupled: bool, found_inf: float | None) -> None:
    shapes = [(5000,), (3,), (8192, 2)]
    weights, gradients, firsts, seconds = (
        [torch.rand(s, device=DEVICE) for s in shapes] for _ in range(4)
    )
    lows: list[Tensor | None] = [
        torch.zeros(s, dtype=torch.bfloat16, device=DEVICE) for s in shapes
    ]
    lows[1] = None
    lists = (weights, gradients, firsts, seconds)
    expected: Any = [[x.clone() for x in tensors] for tensors in lists]
    options = {
        "lr": 0.01,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "step": 3,
    }
    scale = torch.tensor([4.0], device=DEVICE)
    overflow = None if found_inf is None else torch.tensor([found_inf], device=DEVICE)
    key = tuple(tuple(0 if x is None else x.data_ptr() for x in kind) for kind in (*lists, lows))
    table = adam_table(
        key,
        [x.numel() for x in weights],
        weights[0].device,
    )
    adam_step(table, torch.bfloat16, options, scale, overflow, decoupled=decoupled)
    if not found_inf:
        torch._foreach_div_(expected[1], 4.0)
        update: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
        update(
            *expected, [], [torch.tensor(3.0, device=DEVICE)] * 3, lr=0.01, beta1=0.9, beta2=0.95, weight_decay=0.1,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
    for which in (0, 2, 3):
        torch.testing.assert_close(
            lists[which],
            expected[which],
            rtol=1e-5,
            atol=1e-6,
        )
    for low, weight in zip(lows, weights, strict=True):
        if low is not None:
            # Triton's interpreter truncates where a GPU rounds.
            copied = torch.zeros_like(weight) if found_inf else weight
            torch.testing.assert_close(
                low.float(),
                copied,
                rtol=2**-8 if DEVICE == "cuda" else 2**-7,
                atol=0.0,
            )


def test_optimizer_updates_model_parameters_that_moved() -> None:
    weight = torch.nn.Parameter(torch.rand(3000, device=DEVICE))
    weight.grad = torch.rand(3000, device=DEVICE)
    optimizer = FusedAdam([weight], lr=0.1)
    (group,) = optimizer.param_groups
    group["step"] = 1

    def step() -> None:
        optimizer._update_by_triton(group, optimizer._inputs_on_device(group), (0, None))

    step()
    assert not optimizer.has_copied
    for _ in range(2):  # the bf16 parameters move
        low = torch.zeros(3000, dtype=torch.bfloat16, device=DEVICE)
        optimizer.model_params = {weight: low}
        step()
        assert optimizer.has_copied
        torch.testing.assert_close(
            low.float(),
            weight.detach(),
            rtol=2**-7,
            atol=0.0,
        )


# ---- fp8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(50, 96), (300, 144)])
@pytest.mark.parametrize(
    "dtype",
    [fp8.E4M3, fp8.E5M2],
    ids=str,
)
def test_fp8_cast_of_matrix_and_transpose_equals_torch(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    # Triton's interpreter does not round to fp8 as GPUs do, so use integers up to 7, which are exact.
    x = torch.randint(-7, 8, shape).bfloat16().to(DEVICE)
    x[0, 0] = 7
    amax = torch.full((1,), 7.0, device=DEVICE)
    for rows, columns in (
        (True, True),
        (True, False),
        (False, True),
    ):
        expected = fp8._cast(x, dtype, amax, rows=rows, columns=columns)
        outputs = [None if each is None else torch.full_like(each, 1) for each in expected[:2]]
        scale = fp8_cast(x, amax, 1e-30, *outputs)
        for each, other in zip((*outputs, scale), expected, strict=True):
            if each is None or other is None:
                assert each is other
            else:
                assert torch.equal(each.float(), other.float())


# ---- SwiGLU and magnitudes -------------------------------------------------------------------------------------------


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize("width", [40, 2500])
def test_swiglu_equals_torch(width: int) -> None:
    x = _random(7, 2 * width)
    activated = swiglu(x)
    _assert_same([activated], [_swiglu(x)], [x])
    # Nobody asked for it.
    assert not hasattr(activated, "known_magnitude")


def test_swiglu_of_no_rows_has_gradients() -> None:
    x = _random(0, 16)
    activated = swiglu(x)
    (gradient,) = torch.autograd.grad(activated, x, torch.ones_like(activated))
    assert activated.shape == (0, 8)
    assert gradient.shape == (0, 16)


def _read_again(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Tensors that ``largest_magnitude`` reads from now on, not knowing their magnitude."""
    tensors: list[Tensor] = []
    read = torch.linalg.vector_norm

    def spy(x: Tensor, *options: Any, **named: Any) -> Tensor:
        tensors.append(x)
        largest: Tensor = read(x, *options, **named)
        return largest

    monkeypatch.setattr(torch.linalg, "vector_norm", spy)
    return tensors


def _assert_known(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that the magnitude of ``x`` is known, and what it is."""
    with monkeypatch.context() as patch:
        read = _read_again(patch)
        known = magnitudes.largest_magnitude(x)
        assert not read
    assert torch.equal(known, x.detach().float().abs().max().reshape(1))


class _Linear(torch.autograd.Function):
    """Identity of an fp8 linear: keeps the gradient that arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradients: list[Tensor]) -> Tensor:
        ctx.gradients = gradients
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        ctx.gradients.append(upstream[0].contiguous())
        return upstream[0].clone(), None


def _linear(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Marked copy of ``x``, by way of the views of Megatron's linears, and the gradients that it will get."""
    gradients: list[Tensor] = []
    output: Tensor = _Linear.apply(x.flatten(0, -2), gradients)  # type: ignore[no-untyped-call]
    output = output.view(x.shape)
    magnitudes.mark(output)
    return output, gradients


@pytest.mark.parametrize("probability", [0.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_magnitudes_of_add_norm_are_known(
    dtype: torch.dtype, probability: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, residual, weight, bias = (
        torch.randn(*shape, device=DEVICE, dtype=dtype).requires_grad_()
        for shape in ((35, 2, 40), (35, 2, 40), (40,), (40,))
    )
    output, gradients = _linear(x)
    total, normed = add_norm(output, bias, residual, weight, None, 1e-5, probability)
    _assert_known(normed.flatten(0, 1), monkeypatch)
    torch.autograd.backward((total, normed), (torch.randn_like(total), torch.randn_like(normed)))
    _assert_known(gradients[0], monkeypatch)


def test_magnitude_of_a_layer_norms_gradient_is_that_of_its_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = _random(9, 2, 40)  # the kernel's rows have 64 columns
    output, gradients = _linear(x)
    weight, shift = (torch.ones(40, device=DEVICE) for _ in range(2))
    total, normed = add_norm(output, None, torch.zeros_like(x), weight, shift, 1e-5, 0.0)
    # A gradient that the norm takes out.
    torch.autograd.backward((total, normed), (torch.zeros_like(x), torch.full_like(x, 100.0)))
    _assert_known(gradients[0], monkeypatch)


def test_magnitudes_of_swiglu_and_rope_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(35, 2, 96, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    output, gradients = _linear(x)
    activated = swiglu(output.view(-1, 96))
    _assert_known(activated.view(35, 2, 48), monkeypatch)
    activated.backward(torch.randn_like(activated))
    _assert_known(gradients[0], monkeypatch)

    output, gradients = _linear(x)
    angles = _angles(35, 1, 8)
    parts = split_and_rotate(output.view(35, 2, 3, 32), angles, angles, [16, 8, 8])
    torch.autograd.backward(parts, [torch.randn_like(part) for part in parts])
    _assert_known(gradients[0], monkeypatch)


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -3e38])
def test_nonfinite_elements_are_the_largest(value: float) -> None:
    x = torch.randn(9, 64, device=DEVICE)
    x[4, 3] = value
    x[4, 35] = 1e30
    magnitudes.mark(x)
    activated = swiglu(x)
    got = magnitudes.largest_magnitude(activated)
    assert hasattr(activated, "known_magnitude")
    torch.testing.assert_close(got, activated.abs().max().reshape(1), equal_nan=True)


def test_magnitude_of_changed_values_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read = _read_again(monkeypatch)
    x = torch.randn(6, 64, device=DEVICE)
    magnitudes.mark(x)
    activated = swiglu(x)
    assert torch.equal(magnitudes.largest_magnitude(activated), activated.abs().max().reshape(1))
    assert not read
    part = activated[:3]
    assert torch.equal(magnitudes.largest_magnitude(part), part.abs().max().reshape(1))
    activated.view(3, 64).mul_(2.0)  # through a view
    assert torch.equal(magnitudes.largest_magnitude(activated), activated.abs().max().reshape(1))
    activated.data = torch.randn_like(activated)
    assert torch.equal(magnitudes.largest_magnitude(activated), activated.abs().max().reshape(1))
    assert len(read) == 3


def test_gradient_that_autograd_sums_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(6, 64, device=DEVICE).requires_grad_()
    output, gradients = _linear(x)
    read = _read_again(monkeypatch)
    (swiglu(output).sum() + 100.0 * output.sum()).backward()
    expected = gradients[0].abs().max().reshape(1)
    assert expected > 90.0
    assert torch.equal(magnitudes.largest_magnitude(gradients[0]), expected)
    assert len(read) == 1


def test_unmarked_input_is_not_measured() -> None:
    x = _random(7, 2, 40)
    _, normed = add_norm(x, None, x, torch.ones(40, device=DEVICE), None, 1e-5, 0.0)
    assert not hasattr(normed, "known_magnitude")


# ---- inference mode --------------------------------------------------------------------------------------------------


def _evaluated() -> list[Tensor]:
    """Results of the kernels of a forward pass, for the same inputs each time."""
    torch.manual_seed(1)
    x = torch.randn(6, 2, 96, device=DEVICE)
    magnitudes.mark(x)
    weight = torch.ones(96, device=DEVICE)
    total, normed = add_norm(x, None, x, weight, weight, 1e-5, 0.0)
    activated = swiglu(x.view(-1, 96))
    angles = _angles(6, 1, 8)
    heads = split_and_rotate(x.view(6, 2, 3, 32), angles, angles, [16, 8, 8])
    keys = head_norm(heads[1], weight[:8], 1e-5)
    routing = Routing(topk=2, is_sigmoid=True, is_normalized=True, min_sum=0.0, scale=1.0)
    routed = route(x.view(-1, 96), weight, None, routing)
    order = sort_rows(routed.experts, 96, 24)
    rows = copy_rows(x.view(-1, 96), order.positions, order.total)
    factors = torch.ones(len(rows), device=DEVICE)
    of_experts = weighted_swiglu(rows, factors, order.ends[-1:])
    statistics = cross_entropy.row_statistics(x, torch.zeros(6, 2, device=DEVICE).long(), 0)
    largest = [magnitudes.largest_magnitude(each) for each in (normed, activated.view(6, -1))]
    return [total, normed, activated, *heads, keys, *routed, of_experts, *statistics, *largest]


def test_kernels_run_in_inference_mode() -> None:
    """On GPUs Lightning evaluates in it."""
    with torch.no_grad():
        expected = _evaluated()
    with torch.inference_mode():
        got = _evaluated()
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours, theirs)


# ---- a layer of linears ----------------------------------------------------------------------------------------------


@pytest.fixture
def _megatron() -> Iterator[None]:
    """One rank of tensor parallelism, on the CPU by gloo."""
    with contextlib.ExitStack() as stack:
        if DEVICE == "cpu":
            stack.enter_context(emulated_cuda())
        stack.enter_context(patched(replacements(WEIGHT_GRADIENTS)))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(7, force_reset_rng=True)
        yield
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _fp8_linear(
    kind: type[ColumnParallelLinear | RowParallelLinear], rows: int, columns: int
) -> Any:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=True,
        use_cpu_initialization=DEVICE == "cpu",
    )
    options: dict[str, Any] = {"gather_output": False}
    if kind is RowParallelLinear:
        options = {"input_is_parallel": True}
    linear: Any = kind(
        columns,
        rows,
        config=config,
        init_method=torch.nn.init.normal_,
        bias=False,
        skip_bias_add=True,
        **options,
    )
    linear.weight.main_grad = torch.zeros(rows, columns, device=DEVICE)
    linear._forward_impl = fp8.Fp8Linear(linear)
    return linear


@pytest.mark.usefixtures("_megatron")
def test_fp8_linears_of_a_layer_read_only_what_attention_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = (16, 2)
    fc1 = _fp8_linear(ColumnParallelLinear, 192, 64)
    fc2 = _fp8_linear(RowParallelLinear, 64, 96)
    qkv = _fp8_linear(ColumnParallelLinear, 96, 64)
    proj = _fp8_linear(RowParallelLinear, 64, 64)
    weight = torch.ones(64, dtype=torch.bfloat16, device=DEVICE)
    angles = _angles(16, 1, 16)
    x, upstream = (torch.randn(*tokens, 64, device=DEVICE).bfloat16() for _ in range(2))
    results: list[list[Tensor]] = []

    def run() -> list[Tensor]:
        """Addends of MLP and attention, twice as microbatches of a step; returns all gradients."""
        linears = [fc1, fc2, qkv, proj]
        inputs = x.clone().requires_grad_()
        with fp8.quantized_weights([linear._forward_impl for linear in linears]):
            for _ in range(2):
                hidden = fc2(swiglu(fc1(inputs)[0].view(-1, 192)).view(*tokens, 96))[0]
                total, normed = add_norm(hidden, None, inputs, weight, None, 1e-5, 0.0)
                mixed = qkv(normed)[0].view(*tokens, 1, 96)
                query, key, value = split_and_rotate(mixed, angles, angles, [64, 16, 16])
                attended = query.flatten(2) + (key + value).flatten(2).repeat(1, 1, 4)
                total, normed = add_norm(proj(attended)[0], None, total, weight, None, 1e-5, 0.0)
                torch.autograd.backward((total, normed), (upstream, upstream))
        return [*(linear.weight.main_grad.clone() for linear in linears), inputs.grad]

    with monkeypatch.context() as patch:
        read = _read_again(patch)
        results.append(run())
    # Four weights once; the input and what attention computes, which none of these kernels wrote, in each microbatch.
    assert len(read) == 4 + 2 * 2
    with monkeypatch.context() as patch:
        patch.setattr(magnitudes, "attach", lambda x, bits: None)
        read = _read_again(patch)
        results.append(run())
    assert len(read) == 4 + 2 * 8
    for known, read_again in zip(*results, strict=True):
        assert torch.equal(known, read_again)
