"""FlexAttention with block masks beside dense masks, and its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch.nn.attention.flex_attention import BlockMask

from lightning_megatron.engine.fillers import attention
from lightning_megatron.engine.fillers.attention import SDPAttention
from lightning_megatron.engine.fillers.masks import (
    BLOCK,
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


def _segments(length: int, rows: int = 3) -> torch.Tensor:
    """Documents with padding at the end, padding at the beginning, and numbers without any order."""
    segments = torch.ones(rows, length, dtype=torch.int64)
    segments[0, length // 3 :] = 2
    segments[0, length // 2 :] = 3
    segments[0, -length // 8 :] = 0
    segments[1, : length // 5] = 0
    segments[2] = torch.randint(0, 4, (length,), generator=torch.Generator().manual_seed(length))
    return segments


PATTERNS = [
    pattern_of(300, 300, causal=True, window=None, cross=False),
    pattern_of(256, 256, causal=True, window=None, cross=False),
    pattern_of(300, 300, causal=False, window=None, cross=False),
    pattern_of(700, 700, causal=True, window=130, cross=False),
    pattern_of(384, 384, causal=True, window=256, cross=False),
    pattern_of(130, 400, causal=True, window=None, cross=False),
    pattern_of(130, 400, causal=True, window=90, cross=False),
    pattern_of(140, 300, causal=False, window=None, cross=True),
    pattern_of(300, 140, causal=False, window=None, cross=True),
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


@pytest.mark.parametrize("length", [128, 300, 512])
def test_blocks_of_other_documents_and_of_padding_are_not_computed(length: int) -> None:
    segments = torch.ones(1, 4 * length, dtype=torch.int64)
    segments[0, length : 2 * length], segments[0, 2 * length :] = 2, 0
    pattern = pattern_of(4 * length, 4 * length, causal=True, window=None, cross=False)
    mask = block_mask(segments, pattern, torch.device("cpu"))
    seen = _blocks(mask.full_kv_num_blocks, mask.full_kv_indices) | _blocks(mask.kv_num_blocks, mask.kv_indices)
    computed = seen[0].sum().item()
    document = -(-length // BLOCK)
    # Two triangles and a diagonal, and what straddles two documents, of a triangle over the whole row.
    assert computed <= 2 * document * (document + 1) + 3 * (4 * document)
    assert not seen[0, -1, :-1].any()


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("pattern", "has_segments", "kind"),
    [
        (PATTERNS[0], True, "bloom"),
        (PATTERNS[0], False, "falcon"),
        (PATTERNS[2], True, None),
        (PATTERNS[3], False, None),
        (PATTERNS[6], True, "falcon"),
        (PATTERNS[7], True, None),
    ],
    ids=str,
)
def test_single_pairs_are_scored_as_the_dense_mask_says(
    pattern: Pattern, has_segments: bool, kind: AlibiKind | None
) -> None:
    generator = torch.Generator().manual_seed(3)
    cpu, rows = torch.device("cpu"), 3
    q = torch.randn(rows, HEADS, pattern.num_queries, WIDTH, generator=generator)
    k, v = (torch.randn(rows, 2, pattern.num_keys, WIDTH, generator=generator) for _ in range(2))
    segments = _segments(pattern.num_keys, rows) if has_segments else None
    biases = None
    if kind is not None:
        alibi = Alibi(kind=kind, num_heads=8, first_head=4, num_local_heads=HEADS, scale=0.25)
        biases = key_biases(alibi, segments, pattern.num_keys, cpu)
    mask = block_mask(segments, pattern, cpu)
    with torch.no_grad():
        got = attention.attend_by_blocks(q, k, v, mask, pattern, biases, 0.3)
    bias = None if biases is None else relative(biases, pattern.num_queries)
    hidden = hidden_keys(segments, pattern, cpu)
    scores = None if hidden is None and bias is None else added_scores(hidden, bias, q.dtype)
    expected = F.scaled_dot_product_attention(q, k, v, scores, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


# ---- compiled, on a GPU ---------------------------------------------------------------------------------------------


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
        ({"sliding_window": 200}, 1),
        ({"alibi": "bloom"}, 8),
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
