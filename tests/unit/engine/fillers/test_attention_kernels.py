"""Attention's kernels beside dense masks and in float64: by blocks (FlexAttention), by runs, and split over keys."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch.nn.attention.flex_attention import BlockMask

from lightning_megatron.engine.fillers import attention
from lightning_megatron.engine.fillers.attention import SDPAttention, attend_capped
from lightning_megatron.engine.fillers.masks import (
    BLOCK,
    MASKED_SCORE,
    Alibi,
    AlibiKind,
    Pattern,
    added_scores,
    block_mask,
    hidden_keys,
    key_biases,
    pattern_of,
    relative,
)

HEADS, WIDTH = 4, 16


def _segments(length: int, rows: int = 3, in_runs: bool = False) -> torch.Tensor:
    """Documents with padding at the end, padding at the beginning, and numbers without any order or in runs."""
    segments = torch.ones(rows, length, dtype=torch.int64)
    segments[0, length // 3 :] = 2
    segments[0, length // 2 :] = 3
    segments[0, -length // 8 :] = 0
    segments[1, : length // 5] = 0
    if not in_runs:
        segments[2] = torch.randint(0, 4, (length,), generator=torch.Generator().manual_seed(length))
    return segments


# ---- by blocks ------------------------------------------------------------------------------------------------------


PATTERNS = [
    pattern_of(300, 300, causal=True, window=None, cross=False),
    pattern_of(300, 300, causal=False, window=None, cross=False),
    pattern_of(700, 700, causal=True, window=130, cross=False),
    pattern_of(384, 384, causal=True, window=256, cross=False),
    pattern_of(130, 400, causal=True, window=90, cross=False),
    pattern_of(140, 300, causal=False, window=None, cross=True),
]


def _blocks(counts: torch.Tensor | None, indices: torch.Tensor | None) -> torch.Tensor:
    """bool [b, nq, nk], of the kernels' lists."""
    assert counts is not None
    assert indices is not None
    listed = torch.arange(indices.shape[-1]) < counts[..., None]
    return torch.zeros_like(listed).scatter_(-1, indices.long(), listed)[:, 0]


@pytest.mark.parametrize("has_segments", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_blocks_are_listed_whole_or_in_part_as_the_dense_mask_says(pattern: Pattern, has_segments: bool) -> None:
    segments = _segments(pattern.num_keys) if has_segments else None
    mask: BlockMask = block_mask(segments, pattern, torch.device("cpu"))
    hidden = hidden_keys(segments, pattern, torch.device("cpu"))
    dense = torch.ones(1, 1, pattern.num_queries, pattern.num_keys, dtype=torch.bool) if hidden is None else ~hidden
    dense = dense.expand(mask.kv_num_blocks.shape[0], 1, pattern.num_queries, pattern.num_keys)[:, 0]
    missing = [-n % BLOCK for n in (pattern.num_keys, pattern.num_queries)]
    padded = F.pad(dense, (0, missing[0], 0, missing[1]))
    tiles = padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    whole = _blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
    part = _blocks(mask.kv_num_blocks, mask.kv_indices)
    assert torch.equal(whole, tiles.all(4).all(2))
    assert not (whole & part).any()
    assert (tiles.any(4).any(2) <= (whole | part)).all()
    # The backward pass goes by columns.
    assert torch.equal(_blocks(mask.full_q_num_blocks, mask.full_q_indices).mT, whole)
    assert torch.equal(_blocks(mask.q_num_blocks, mask.q_indices).mT, part)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("pattern", "has_segments", "kind"),
    [
        (PATTERNS[0], True, "bloom"),
        (PATTERNS[4], True, "falcon"),
        (PATTERNS[2], False, None),
        (PATTERNS[0], True, "capped"),
    ],
    ids=str,
)
def test_single_pairs_are_scored_as_the_dense_mask_says(
    pattern: Pattern, has_segments: bool, kind: AlibiKind | Literal["capped"] | None
) -> None:
    generator = torch.Generator().manual_seed(3)
    cpu, rows = torch.device("cpu"), 3
    q = torch.randn(rows, HEADS, pattern.num_queries, WIDTH, generator=generator)
    k, v = (torch.randn(rows, 2, pattern.num_keys, WIDTH, generator=generator) for _ in range(2))
    segments = _segments(pattern.num_keys, rows) if has_segments else None
    biases = None
    if kind not in (None, "capped"):
        alibi = Alibi(kind=kind, num_heads=8, first_head=4, num_local_heads=HEADS, scale=0.25)
        biases = key_biases(alibi, segments, pattern.num_keys, cpu)
    mask = block_mask(segments, pattern, cpu)
    with torch.no_grad():
        got = attention.attend_by_blocks(q, k, v, mask, pattern, 0.5 if kind == "capped" else biases, 0.3)
    bias = None if biases is None else relative(biases, pattern.num_queries)
    hidden = hidden_keys(segments, pattern, cpu)
    scores = None if hidden is None and bias is None else added_scores(hidden, bias, q.dtype)
    if kind == "capped":
        expected = attend_capped(q, k, v, scores, 0.0, 0.3, 0.5)
    else:
        expected = F.scaled_dot_product_attention(q, k, v, scores, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


class _Calls:
    """How often layers attended by blocks."""

    count = 0


@pytest.fixture
def by_blocks(monkeypatch: pytest.MonkeyPatch) -> _Calls:
    calls, original = _Calls(), attention.attend_by_blocks
    # torch falls back to scores of s x s without a word if a function needs too many graphs.
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)

    def counted(*args: Any) -> torch.Tensor:
        calls.count += 1
        return original(*args)

    monkeypatch.setattr(attention, "attend_by_blocks", counted)
    return calls


def _layer(groups: int, causal: bool = True, kind: str = "self", width: int = 64, **options: Any) -> SDPAttention:
    heads = {"num_attention_heads": 8, "num_query_groups": groups, "kv_channels": width}
    config = TransformerConfig(num_layers=1, hidden_size=8 * width, attention_dropout=0.0, **heads)
    return SDPAttention(config, 1, AttnMaskType.causal if causal else AttnMaskType.padding, kind, **options)


def _qkv(queries: int, keys: int, groups: int, rows: int, width: int = 64) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(queries + keys)
    shapes = [(queries, rows, 8, width), (keys, rows, groups, width), (keys, rows, groups, width)]
    return [torch.randn(*s, device="cuda", generator=generator).bfloat16().requires_grad_() for s in shapes]


def _assert_equals_cpu(layer: SDPAttention, qkv: list[torch.Tensor], segments: torch.Tensor | None) -> None:
    out = layer(*qkv, None if segments is None else segments.cuda())
    on_cpu = [x.detach().float().cpu().requires_grad_() for x in qkv]
    expected = layer(*on_cpu, segments)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    # bfloat16 keeps eight bits; outputs and gradients are of order one to ten.
    torch.testing.assert_close(out.float().cpu(), expected, rtol=2e-2, atol=2e-2)
    grads = torch.autograd.grad((out.float() * weight.cuda()).sum(), qkv)
    for grad, reference in zip(grads, torch.autograd.grad((expected * weight).sum(), on_cpu), strict=True):
        torch.testing.assert_close(grad.float().cpu(), reference, rtol=5e-2, atol=0.1)


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
    ],
    ids=str,
)
def test_the_compiled_kernels_agree_with_the_cpu(
    options: dict[str, Any], groups: int, has_segments: bool, by_blocks: _Calls
) -> None:
    # The second length makes the graphs dynamic; no length but the first is a multiple of a block.
    for length in (640, 700, 1000, 523):
        segments = _segments(length) if has_segments else None
        _assert_equals_cpu(_layer(groups, **options), _qkv(length, length, groups, 3), segments)
    needs_blocks = has_segments or options.keys() & {"sliding_window", "alibi"}
    assert by_blocks.count == (4 if needs_blocks else 0)


@pytest.mark.gpu
def test_cross_attention_is_by_blocks_too(by_blocks: _Calls) -> None:
    segments = (_segments(900)[:2] != 0).long()
    _assert_equals_cpu(_layer(8, False, "cross"), _qkv(600, 900, 8, 2), segments)
    assert by_blocks.count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"alibi": "bloom"}, {"sliding_window": 4096}], ids=str)
def test_a_long_row_takes_memory_in_proportion_to_its_length(options: dict[str, Any], by_blocks: _Calls) -> None:
    length, megabyte = 32768, 2**20
    segments = torch.ones(1, length, dtype=torch.int64, device="cuda")
    segments[0, 20000:] = 2
    qkv, layer = _qkv(length, length, 2, 1), _layer(2, **options)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer(*qkv, segments).float().square().sum().backward()
    peak = torch.cuda.max_memory_allocated() - before
    # Output, its gradient in float32, and gradients of q, k, v: some multiples of 32 MB. One byte per pair is 1024 MB.
    assert peak < 512 * megabyte
    assert by_blocks.count == 1


# ---- by runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "bounds"),
    [
        ([[1, 1, 2, 0], [0, 3, 3, 3], [3, 3, 3, 3]], [0, 2, 3, 4, 5, 8, 12]),  # no run crosses a row
        ([[0, 1, 0, 2]], [0, 1, 2, 3, 4]),  # padding may be in pieces
        ([[1, 2, 1, 0]], None),  # a segment may not: dense masks do it
    ],
)
def test_runs_are_where_numbers_change(rows: list[list[int]], bounds: list[int] | None) -> None:
    found = attention.runs_of(torch.tensor(rows))
    assert (None if found is None else found.bounds.tolist()) == bounds
    if found is not None:
        assert found.longest == int(found.bounds.diff().max())


def _tensors(length: int, groups: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((3, 4, length, 32), (3, groups, length, 32), (3, groups, length, 32))
    return [torch.randn(shape, generator=generator).cuda().bfloat16().requires_grad_() for shape in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "groups"), [(96, 4), (300, 2), (640, 1)])
def test_values_and_gradients_equal_those_of_a_dense_mask_in_float32(length: int, groups: int, causal: bool) -> None:
    segments, pattern = (
        _segments(length, in_runs=True).cuda(),
        pattern_of(length, length, causal=causal, window=None, cross=False),
    )
    tokens = (segments != 0)[:, None, :, None]
    tensors = _tensors(length, groups)
    precise = [tensor.detach().float().requires_grad_() for tensor in tensors]
    repeated = [precise[0], *(tensor.repeat_interleave(4 // groups, dim=1) for tensor in precise[1:])]
    scores = added_scores(hidden_keys(segments, pattern, segments.device), None, torch.float32)
    expected = F.scaled_dot_product_attention(*repeated, scores)
    found = attention.runs_of(segments)
    assert found is not None
    assert attention.can_use_varlen(tensors[0], tensors[1], pattern)

    got = attention.attend_to_runs(*tensors, found, causal=causal, dropout=0.0, scale=None)

    upstream = torch.randn_like(expected) * tokens
    expected_gradients = torch.autograd.grad(expected, precise, upstream)
    gradients = torch.autograd.grad(got, tensors, upstream.to(got.dtype))
    # bf16 has 8 bits: half a percent of the largest value, as of any kernel that rounds once.
    assert _distance(got * tokens, expected * tokens) < 1e-2
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        assert _distance(mine, theirs) < 2e-2


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm())


# ---- split over keys ------------------------------------------------------------------------------------------------

ROWS, GROUPS, REPEATS, LENGTH = 2, 3, 4, 512


def _case(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and values of a cache of which they are the first part, and scores that hide whole parts."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(ROWS, GROUPS, REPEATS, WIDTH, generator=generator)
    k, v = (torch.randn(ROWS, GROUPS, LENGTH + 128, WIDTH, generator=generator)[:, :, :LENGTH] for _ in range(2))
    scores = torch.zeros(ROWS, 1, 1, LENGTH)
    scores[0, ..., 300:] = scores[1, ..., :140] = MASKED_SCORE
    return [x.to(device, dtype) for x in (q, k, v, scores)]


def _expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: torch.Tensor, scale: float) -> torch.Tensor:
    """In fp64, as the formula says."""
    q, k, v, scores = (x.double().cpu() for x in (q, k, v, scores))
    return (q @ k.mT * scale + scores).softmax(-1) @ v


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_parts_give_on_a_gpu_what_all_keys_give_at_once_and_none_waits(
    dtype: torch.dtype, atol: float, rows: int
) -> None:
    """In 16 bits the result of size 1 is rounded to 8 digits, twice."""
    q, k, v, scores = (x[:rows] for x in _case("cuda", dtype))
    parts = attention.num_key_parts(q, k)
    assert parts == LENGTH // attention.SMALLEST_PART
    attention.attend_in_parts(q, k, v, scores, parts, scale=0.3)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = attention.attend_in_parts(q, k, v, scores, parts, scale=0.3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(actual.double().cpu(), _expected(q, k, v, scores, 0.3), rtol=0.0, atol=atol)
