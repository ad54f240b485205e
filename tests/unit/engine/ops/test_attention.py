"""Core attention cases that families and layouts do not cover: block masks, padding, large biases, GPU kernels.

The rest is compared with Hugging Face's models in tests/families, and with one process in tests/parity.
"""

import importlib.metadata
import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from lightning_megatron.engine.ops import attention, masks, sinks, split_k
from lightning_megatron.engine.ops.attention import SDPAttention
from lightning_megatron.engine.ops.flash_attention_4 import (
    attend_flash_attention_4,
    has_flash_attention_4,
    slope_exponent,
)
from lightning_megatron.engine.ops.masks import (
    BLOCK,
    MASKED_SCORE,
    Pattern,
    block_mask,
    hidden_keys,
)
from lightning_megatron.engine.ops.varlen_attention import attend_varlen, segment_runs
from lightning_megatron.errors import ConfigError

HEADS = 8
CPU = torch.device("cpu")


def _layer(
    mask: str = "causal",
    kind: str = "self",
    groups: int = 2,
    width: int = 64,
    **options: Any,
) -> SDPAttention:
    heads = {"num_attention_heads": HEADS, "num_query_groups": groups, "kv_channels": width}
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * width, attention_dropout=0.0, **heads
    )
    return SDPAttention(config, 1, AttnMaskType[mask], kind, **options)


def _qkv(
    queries: int,
    keys: int,
    groups: int = 2,
    rows: int = 3,
    width: int = 64,
    device: str = "cpu",
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries + keys)
    shapes = [
        (queries, rows, HEADS, width),
        (keys, rows, groups, width),
        (keys, rows, groups, width),
    ]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return [
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in shapes
    ]


def _segments(
    length: int,
    rows: int = 3,
    in_runs: bool = False,
) -> Tensor:
    """Segment ids: documents with padding at the end, padding at the start, and random ids or a single run."""
    segments = torch.ones(rows, length, dtype=torch.int64)
    segments[0, length // 3 :] = 2
    segments[0, length // 2 :] = 3
    segments[0, -length // 8 :] = 0
    segments[1, : length // 5] = 0
    if not in_runs:
        segments[2] = torch.randint(
            0,
            4,
            (length,),
            generator=torch.Generator().manual_seed(length),
        )
    return segments


def _with_narrow_values(qkv: list[Tensor], width: int) -> list[Tensor]:
    """Queries, keys and values, of which the values are cut to ``width`` columns."""
    query, key, value = qkv
    return [query, key, value[..., :width].detach().requires_grad_()]


@pytest.mark.parametrize("has_segments", [False, True])
@pytest.mark.parametrize("queries", [1, 12])
def test_values_may_be_narrower_than_keys(queries: int, has_segments: bool) -> None:
    query, key, wide = _qkv(queries, 12)
    value = wide[..., :40].detach().requires_grad_()
    segments = _segments(12, in_runs=True) if has_segments else None
    actual = _layer()(query, key, value, segments)
    expected = _layer()(
        query,
        key,
        wide,
        segments,
    ).unflatten(2, (HEADS, -1))
    torch.testing.assert_close(actual, expected[..., :40].flatten(2))
    weight = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((actual * weight).sum(), [query, key, value])
    others = expected[..., :40].flatten(2)
    theirs = torch.autograd.grad((others * weight).sum(), [query, key, wide])
    torch.testing.assert_close(ours[:2], theirs[:2])
    torch.testing.assert_close(ours[2], theirs[2][..., :40])


def test_rows_of_padding_only_give_finite_results() -> None:
    qkv = _qkv(12, 12)
    layers = (
        _layer(),
        _layer("padding"),
        _layer("padding", "cross"),
        _layer(alibi="bloom"),
        _layer(sliding_window=2),
    )
    for mask in (
        torch.zeros(3, 12, dtype=torch.int64),
        torch.ones(
            3,
            1,
            1,
            12,
            dtype=torch.bool,
        ),
    ):
        for layer in layers:
            out = layer(*qkv, mask)
            assert all(torch.isfinite(x).all() for x in (out, *torch.autograd.grad(out.sum(), qkv)))


def test_alibi_biases_of_near_keys_are_exact_in_bf16() -> None:
    qkv = _qkv(1000, 1000, rows=1, width=8)
    layer = _layer(alibi="bloom", width=8).eval()
    rounded = layer(*(x.bfloat16() for x in qkv), None).float()
    # The error of rounding q, k, v and the output; a bias rounded at position 1000 would be off by up to 1.
    assert (layer(*qkv, None) - rounded).abs().mean() < 0.01


@pytest.mark.parametrize(
    "first",
    [0, 1],
    ids=["all", "keys and values"],
)
def test_split_k_attention_is_not_used_with_gradients(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "num_key_splits", lambda q, k: 2)  # as on a GPU
    qkv = _qkv(1, 256, HEADS)
    mask = torch.ones(3, 256, dtype=torch.int64)
    mask[:, :9] = 0
    layer = _layer("padding", "cross", HEADS)
    qkv = [x.detach().requires_grad_(i >= first) for i, x in enumerate(qkv)]
    actual = torch.autograd.grad(
        layer(*qkv, mask).square().sum(),
        qkv[first:],
    )
    q, k, v = (x.permute(1, 2, 0, 3) for x in qkv)
    hidden = (mask == 0)[:, None, None]
    expected = (q @ k.mT / 8).masked_fill(hidden, MASKED_SCORE).softmax(-1) @ v
    for ours, theirs in zip(
        actual,
        torch.autograd.grad(expected.square().sum(), qkv[first:]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_empty_sliding_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="sliding_window=0"):
        _layer(sliding_window=0)


# ---- block masks ----------------------------------------------------------------------------------------------------

PATTERNS = [
    Pattern(num_queries=queries, num_keys=keys, causal=causal, window=window, cross=cross)
    for queries, keys, causal, window, cross in (
        (300, 300, True, None, False),
        (300, 300, False, None, False),
        (700, 700, True, 130, False),
        (384, 384, True, 256, False),
        (130, 400, True, 90, False),
        (140, 300, False, None, True),
    )
]


def _blocks(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Full blocks, and partial blocks that kernels mask pair by pair: bool [b, nq, nk] each."""
    masks = []
    for counts, indices in (
        (mask.full_kv_num_blocks, mask.full_kv_indices),
        (mask.kv_num_blocks, mask.kv_indices),
    ):
        assert counts is not None
        assert indices is not None
        listed = torch.arange(indices.shape[-1]) < counts[..., None]
        masks.append(torch.zeros_like(listed).scatter_(-1, indices.long(), listed)[:, 0])
    return masks[0], masks[1]


@pytest.mark.parametrize("has_segments", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_block_mask_equals_torchs(pattern: Pattern, has_segments: bool) -> None:
    segments = _segments(pattern.num_keys) if has_segments else None
    mask = block_mask(segments, pattern, CPU)
    rows = None if segments is None else len(segments)
    full, partial = _blocks(mask)
    expected = create_block_mask(
        mask.mask_mod, rows, None, pattern.num_queries, pattern.num_keys, "cpu", BLOCK
    )
    expected_full, expected_partial = _blocks(expected)
    assert torch.equal(full, expected_full)
    assert not (full & partial).any()
    assert (expected_partial <= partial).all()


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("pattern", "has_segments", "options"),
    [
        (PATTERNS[0], True, {"alibi": "bloom"}),
        (PATTERNS[4], True, {"alibi": "falcon"}),
        (PATTERNS[2], False, {}),
        (PATTERNS[0], True, {"softcap": 0.5}),
        (PATTERNS[0], True, {"has_sinks": True}),
        (PATTERNS[2], False, {"has_sinks": True}),
    ],
    ids=str,
)
def test_flex_attention_equals_dense_masks(
    pattern: Pattern, has_segments: bool, options: dict[str, Any]
) -> None:
    layer = _layer(width=16, softmax_scale=0.3, **options)
    layer.config.num_attention_heads = 2 * HEADS
    layer.tp_rank = 1
    q, k, v = (
        x.detach().permute(1, 2, 0, 3)
        for x in _qkv(pattern.num_queries, pattern.num_keys, width=16)
    )
    segments = _segments(pattern.num_keys) if has_segments else None
    flex = layer._attend_flex(q, k, v, segments, pattern)
    torch.testing.assert_close(
        flex,
        layer._attend_masked(q, k, v, segments, pattern, 0.0),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("rows", "bounds"),
    [
        (
            [
                [1, 1, 2, 0],
                [0, 3, 3, 3],
                [3, 3, 3, 3],
            ],
            [0, 2, 3, 4, 5, 8, 12],
        ),  # no run crosses a row
        ([[0, 1, 0, 2]], [0, 1, 2, 3, 4]),  # padding may be in several runs
        ([[1, 2, 1, 0]], None),  # a segment may not; dense masks handle it
    ],
)
def test_segment_runs_start_where_ids_change(
    rows: list[list[int]], bounds: list[int] | None
) -> None:
    runs = segment_runs(torch.tensor(rows))
    assert (None if runs is None else runs.cu_seqlens.tolist()) == bounds
    if runs is not None:
        assert runs.max_seqlen == int(runs.cu_seqlens.diff().max())


# ---- sinks -----------------------------------------------------------------------------------------------------------


def _layer_with_sinks(**options: Any) -> SDPAttention:
    layer = _layer(width=16, softmax_scale=0.3, has_sinks=True, **options)
    assert layer.sinks is not None
    with torch.no_grad():
        layer.sinks.scores.copy_(torch.linspace(-3, 3, HEADS))
    return layer


def _unfused_with_sinks(
    qkv: list[Tensor],
    scores_of_sinks: Tensor,
    hidden: Tensor,
    dropout: float = 0.0,
) -> Tensor:
    """Attention whose scores have one more column, that of the sinks, without a value."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in qkv)
    repeats = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(repeats, dim=1)
    v = v.repeat_interleave(repeats, dim=1)
    scores = (0.3 * q @ k.mT).masked_fill(hidden, MASKED_SCORE)
    column = scores_of_sinks[:, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    weights = F.dropout(weights, dropout)
    return (
        (weights @ v)
        .permute(
            2,
            0,
            1,
            3,
        )
        .flatten(2)
    )


@pytest.mark.parametrize(
    ("queries", "has_segments", "window"),
    [
        (24, False, None),
        (24, True, None),
        (24, True, 5),
        (24, False, 5),
        (1, False, None),
        (1, True, 5),
    ],
)
def test_attention_with_sinks_and_its_gradients_equal_softmax_with_another_column(
    queries: int, has_segments: bool, window: int | None
) -> None:
    layer = _layer_with_sinks(sliding_window=window)
    assert layer.sinks is not None
    of_sinks = layer.sinks.scores
    qkv = _qkv(queries, 24, width=16)
    pattern = Pattern(num_queries=queries, num_keys=24, causal=True, window=window)
    segments = _segments(24) if has_segments else None
    hidden = hidden_keys(segments, pattern, CPU)
    assert hidden is not None
    inputs = [*qkv, of_sinks]
    expected = _unfused_with_sinks(qkv, of_sinks, hidden)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    reference = torch.autograd.grad((expected * weight).sum(), inputs)
    actual = layer(*qkv, segments)
    gradients = torch.autograd.grad((actual * weight).sum(), inputs)
    torch.testing.assert_close([actual, *gradients], [expected, *reference])


@pytest.mark.parametrize(
    ("kernel", "has_mask"),
    [
        (sinks._CudnnKernel(True, 0.3), False),
        (sinks._FlashKernel(True, 0.3), False),
        (sinks._EfficientKernel(True, 0.3), False),
        (sinks._EfficientKernel(False, 0.3), True),
    ],
    ids=str,
)
def test_kernels_of_gpus_take_log_sums_with_sinks(kernel: sinks._Kernel, has_mask: bool) -> None:
    """Shapes alone, on meta tensors; values are compared on GPUs."""
    groups = 2 if kernel.has_groups else HEADS
    options: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    q = torch.empty(3, HEADS, 40, 64, **options)
    keys = torch.empty(3, groups, 40, 64, **options)
    added = torch.empty(3, 1, 40, 40, **options) if has_mask else None
    without, log_sums, *others = kernel.forward(q, keys, keys, added)
    scores = torch.empty(HEADS, 1, device="meta")
    output, total = sinks._forward_with_sinks(without, log_sums, scores)
    results = (output, total, *others)
    d_q, d_k, d_v = kernel.backward(
        torch.empty_like(output),
        (q, keys, keys),
        added,
        results,
    )
    assert d_q.shape == q.shape
    assert d_k.shape == d_v.shape == keys.shape
    assert sinks._gradient_of_sinks(output, output, total, scores).shape == scores.shape


def test_dropout_with_sinks_drops_weights_of_keys() -> None:
    layer = _layer_with_sinks(attention_dropout=0.5)
    assert layer.sinks is not None
    qkv = _qkv(24, 24, width=16)
    pattern = Pattern(num_queries=24, num_keys=24, causal=True)
    hidden = hidden_keys(None, pattern, CPU)
    assert hidden is not None
    torch.manual_seed(1)
    actual = layer(*qkv, None)
    torch.manual_seed(1)
    expected = _unfused_with_sinks(qkv, layer.sinks.scores, hidden, dropout=0.5)
    torch.testing.assert_close(actual, expected)
    assert not torch.allclose(actual, layer.eval()(*qkv, None))


# ---- on GPUs --------------------------------------------------------------------------------------------------------


class _Calls:
    """Number of calls per kernel."""

    blocks = runs = 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> _Calls:
    counts = _Calls()
    attend_flex = SDPAttention._attend_flex
    # Otherwise torch silently falls back to s x s scores if a function needs too many graphs.
    # Without a check: torch's config hides a setting that was deleted, until it is set again.
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True, raising=False)

    def counted_blocks(*args: Any) -> Tensor:
        counts.blocks += 1
        return attend_flex(*args)

    def counted_runs(*args: Any, **options: Any) -> Tensor:
        counts.runs += 1
        return attend_varlen(*args, **options)

    monkeypatch.setattr(SDPAttention, "_attend_flex", counted_blocks)
    monkeypatch.setattr(attention, "attend_varlen", counted_runs)
    return counts


def _assert_equals_cpu(
    layer: SDPAttention,
    qkv: list[Tensor],
    mask: Tensor | None,
) -> None:
    """Compare output and gradients with fp32 on the CPU, which families compare with transformers; ignore padding."""
    out = layer(*qkv, None if mask is None else mask.cuda())
    on_cpu = [x.detach().float().cpu().requires_grad_() for x in qkv]
    expected = layer(*on_cpu, mask)
    visible = torch.ones(1)
    if mask is not None and mask.dim() == 2 and not layer.is_cross:
        visible = (mask != 0).t()[:, :, None].float()
    weight = visible * torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    # bfloat16 keeps eight bits; outputs and gradients are of order one to ten.
    torch.testing.assert_close(
        out.float().cpu() * visible,
        expected * visible,
        rtol=2e-2,
        atol=2e-2,
    )
    grads = torch.autograd.grad(
        (out.float() * weight.cuda()).sum(),
        qkv,
    )
    for grad, reference in zip(
        grads,
        torch.autograd.grad((expected * weight).sum(), on_cpu),
        strict=True,
    ):
        torch.testing.assert_close(
            grad.float().cpu(),
            reference,
            rtol=5e-2,
            atol=0.1,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [HEADS, 1])
@pytest.mark.parametrize(
    "length", [64, 192]
)  # 192 % 128 == 64: where cuDNN's backward with a mask returned NaN
def test_short_rows_and_dense_masks_equal_the_cpu(groups: int, length: int, calls: _Calls) -> None:
    hidden = torch.zeros(3, 1, 1, length, dtype=torch.bool)
    hidden[1, ..., -5:] = True
    for mask in (None, hidden):
        _assert_equals_cpu(
            _layer(groups=groups),
            _qkv(length, length, groups, device="cuda"),
            mask,
        )
    assert calls.blocks == calls.runs == 0


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "padding"])
@pytest.mark.parametrize(
    ("length", "groups"),
    [
        (96, 8),
        (300, 2),
        (500, 1),
    ],
)
def test_varlen_attention_equals_the_cpu(
    length: int, groups: int, mask: str, calls: _Calls
) -> None:
    layer = _layer(mask, groups=groups, width=32)
    segments = _segments(length, in_runs=True)
    _assert_equals_cpu(
        layer,
        _qkv(length, length, groups, width=32, device="cuda"),
        segments,
    )
    assert (calls.blocks, calls.runs) == (0, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("has_segments", [False, True])
@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({}, 8),
        ({}, 2),
        ({"alibi": "falcon"}, 1),
        ({"alibi": "bloom", "sliding_window": 200}, 2),
        ({"softmax_scale": 0.3}, 2),
        ({"softcap": 2.0}, 2),
    ],
    ids=str,
)
def test_flex_attention_equals_the_cpu(
    options: dict[str, Any], groups: int, has_segments: bool, calls: _Calls
) -> None:
    # The second length makes graphs dynamic; only the first length is a multiple of the block size.
    for length in (640, 700, 1000, 523):
        segments = _segments(length) if has_segments else None
        layer = _layer(groups=groups, **options)
        _assert_equals_cpu(layer, _qkv(length, length, groups, device="cuda"), segments)
    needs_blocks = has_segments or options.keys() & {"sliding_window", "alibi", "softcap"}
    assert calls.blocks == (4 if needs_blocks else 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({}, 2),
        ({"softmax_scale": 0.3}, 8),
        ({"sliding_window": 200}, 2),
        ({"alibi": "bloom"}, 8),
        ({"alibi": "bloom", "sliding_window": 200}, 8),
    ],
    ids=str,
)
def test_flash_attention_4_equals_the_cpu(
    options: dict[str, Any],
    groups: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_flash_attention_4():
        pytest.skip("needs flash-attn-4 and a Hopper GPU")
    lengths = []

    def counted(q: Tensor, *others: Any) -> Tensor:
        lengths.append(q.shape[2])
        return attend_flash_attention_4(q, *others)

    monkeypatch.setattr(attention, "attend_flash_attention_4", counted)
    for length in (640, 523):
        layer = _layer(groups=groups, width=128, **options)
        qkv = _qkv(length, length, groups, width=128, device="cuda")
        _assert_equals_cpu(layer, qkv, None)
    assert lengths == [640, 523]


@pytest.mark.parametrize("is_installed", [False, True])
def test_flash_attention_2s_module_is_not_taken_for_4s(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package == "flash-attn-4" and not is_installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return "4.0.0b36"

    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert has_flash_attention_4.__wrapped__() == is_installed


@pytest.mark.parametrize("num_heads", [1, 6, 8, 71])
def test_slopes_by_flash_attention_4s_formula_are_those_of_the_paper(num_heads: int) -> None:
    exponents = [slope_exponent(head, num_heads) for head in range(num_heads)]
    expected = masks.slopes(num_heads).double()
    torch.testing.assert_close(torch.tensor(exponents).double().exp2(), expected, rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_segments", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "window"),
    [
        (1, 130, None),
        (90, 90, None),
        (90, 90, 20),
        (700, 700, None),
        (700, 700, 200),
    ],
)
def test_attention_with_sinks_equals_the_cpu(
    queries: int,
    keys: int,
    window: int | None,
    has_segments: bool,
    dtype: torch.dtype,
) -> None:
    on_cpu = _layer_with_sinks(sliding_window=window)
    on_gpu = _layer_with_sinks(sliding_window=window).cuda()
    assert on_cpu.sinks is not None
    assert on_gpu.sinks is not None
    segments = _segments(keys, in_runs=True) if has_segments else None
    rounded = [x.detach().to(dtype).float() for x in _qkv(queries, keys, width=16)]
    qkv = [x.requires_grad_() for x in rounded]
    on_device = [x.detach().to("cuda", dtype).requires_grad_() for x in rounded]
    expected = on_cpu(*qkv, segments)
    actual = on_gpu(*on_device, None if segments is None else segments.cuda())
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    if segments is not None:
        weight *= (segments[:, -queries:] != 0).t()[:, :, None]
    reference = torch.autograd.grad((expected * weight).sum(), [*qkv, on_cpu.sinks.scores])
    gradients = torch.autograd.grad(
        (actual.float() * weight.cuda()).sum(), [*on_device, on_gpu.sinks.scores]
    )
    # The gradients of sinks are sums of a few numbers that bfloat16 rounds to eight bits, with one query of three rows.
    tolerance = 4e-2
    if dtype is torch.float32:
        tolerance = 1e-3
    for ours, theirs in zip(gradients, reference, strict=True):
        error = (ours.float().cpu() - theirs).norm() / theirs.norm()
        assert error < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("queries", "keys", "has_segments"),
    [
        (256, 256, False),
        (192, 192, False),
        (96, 96, True),
        (700, 700, True),
        (1, 256, True),
    ],
)
def test_values_narrower_than_keys_equal_the_cpu(
    queries: int, keys: int, has_segments: bool, calls: _Calls
) -> None:
    layer = _layer(groups=HEADS, width=192, softmax_scale=0.05)
    qkv = _with_narrow_values(
        _qkv(
            queries,
            keys,
            HEADS,
            width=192,
            device="cuda",
        ),
        128,
    )
    segments = _segments(keys, in_runs=True) if has_segments else None
    _assert_equals_cpu(layer, qkv, segments)
    packed = has_segments and queries > 1
    assert calls.blocks + calls.runs == packed


@pytest.mark.gpu
def test_cross_attention_uses_flex_attention(calls: _Calls) -> None:
    segments = (_segments(900)[:2] != 0).long()
    _assert_equals_cpu(
        _layer("padding", "cross", groups=8),
        _qkv(600, 900, 8, 2, device="cuda"),
        segments,
    )
    assert calls.blocks == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"alibi": "bloom"}, {"sliding_window": 4096}],
    ids=str,
)
def test_memory_is_linear_in_the_row_length(options: dict[str, Any], calls: _Calls) -> None:
    length = 32768
    megabyte = 2**20
    segments = torch.ones(1, length, dtype=torch.int64, device="cuda")
    segments[0, 20000:] = 2
    qkv = _qkv(length, length, rows=1, device="cuda")
    layer = _layer(**options)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer(*qkv, segments).float().square().sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    # Output, its float32 gradient, and gradients of q, k, v: a few multiples of 32 MB. One byte per pair is 1024 MB.
    assert peak < 512 * megabyte
    assert calls.blocks == 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "atol"),
    [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)],
)
@pytest.mark.parametrize("rows", [1, 2])
def test_split_k_attention_is_exact_without_host_synchronization(
    dtype: torch.dtype, atol: float, rows: int
) -> None:
    """One query per row compared with fp64. In bf16 a result near 1 is rounded to 8 bits, twice."""
    groups = 3
    repeats = 4
    length = 512
    width = 16
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(rows, groups, repeats, width, generator=generator)
    k, v = (
        torch.randn(rows, groups, length + 128, width, generator=generator)[:, :, :length]
        for _ in range(2)
    )
    scores = torch.zeros(rows, 1, 1, length)
    scores[0, ..., 300:] = scores[-1, ..., :140] = MASKED_SCORE  # complete splits
    inputs = [x.to("cuda", dtype) for x in (q, k, v, scores)]
    splits = split_k.num_key_splits(inputs[0], inputs[1])
    assert splits == length // split_k.SPLIT_SIZE
    attend = partial(split_k.attend_split_k, splits=splits, scale=0.3)
    attend(*inputs)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = attend(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    q, k, v, scores = (x.double().cpu() for x in inputs)
    expected = (q @ k.mT * 0.3 + scores).softmax(-1) @ v
    torch.testing.assert_close(
        actual.double().cpu(),
        expected,
        rtol=0.0,
        atol=atol,
    )
