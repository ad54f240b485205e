"""How are segments, windows and ALiBi attended to without an s x s tensor? FlexAttention, compiled, on CUDA.

What a block of 128 queries may see of a block of 128 keys is told from the least and the greatest segment number in
each, so the mask takes O(s) numbers plus one per pair of blocks, and blocks of other documents are not computed.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import types
from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from lightning_megatron.engine.slots.attention_masks import Pattern, sides

BLOCK = 128
"""Tokens per block of the mask; the kernels' own default."""

SHORTEST = 512
"""Below this many queries or keys a dense mask is small, and compiling takes longer than it saves."""


_NUMBERS = itertools.count()


def can_attend(q: Tensor, k: Tensor) -> bool:
    """Whether the compiled kernels take these queries and keys ([b, np, s, hn])."""
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and min(q.shape[2], k.shape[2]) >= SHORTEST
        and 16 <= q.shape[3] <= 256
        and _has_kernels(q.device)
    )


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, pattern: Pattern, biases: Tensor | None, scale: float | None
) -> Tensor:
    """Weighted sums of the values: [b, np, sq, hn].

    Args:
        q: [b, np, sq, hn].
        k: [b, ng, sk, hn].
        v: [b, ng, sk, hn].
        mask: Of ``block_mask``.
        pattern: What ``mask`` was made from.
        biases: ALiBi: what each key's position adds, [b, np, sk] or [np, sk] fp32.
        scale: What the scores are multiplied by; None for 1 / sqrt(hn).
    """
    of_queries = None if biases is None else biases[..., pattern.first_query :]
    function = _compiled(_kind(q, k, pattern, biases, scale)) if q.is_cuda else _attend
    out: Tensor = function(q, k, v, mask, biases, of_queries, scale)
    return out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    of_keys: Tensor | None,
    of_queries: Tensor | None,
    scale: float | None,
) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if of_keys is None or of_queries is None:
        plain: Tensor = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
        return plain
    per_row = of_keys.dim() == 3

    def add_bias(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if per_row:
            return score + (of_keys[row, head, key] - of_queries[row, head, query])
        return score + (of_keys[head, key] - of_queries[head, query])

    out: Tensor = flex_attention(q, k, v, score_mod=add_bias, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out


def _kind(q: Tensor, k: Tensor, pattern: Pattern, biases: Tensor | None, scale: float | None) -> Hashable:
    """What a graph is compiled for, except lengths: two layers of a kind share one."""
    heads = (q.shape[0], q.shape[1], k.shape[1], q.shape[3], q.dtype, scale)
    seen = (pattern.causal, pattern.window, pattern.cross, None if biases is None else biases.dim())
    return (*heads, *seen, torch.is_grad_enabled())


@functools.cache
def _compiled(kind: Hashable) -> Callable[..., Tensor]:
    """Compiled once per kind of attention, for all lengths: the second length makes the graph dynamic.

    Each kind has a code object of its own, because torch counts graphs by it and gives up, uncompiled, after eight.
    """
    name = f"_attend_{next(_NUMBERS)}"
    function = types.FunctionType(_attend.__code__.replace(co_name=name), globals(), name)
    compiled: Callable[..., Tensor] = torch.compile(function)
    return compiled


def block_mask(segments: Tensor | None, pattern: Pattern, device: torch.device) -> BlockMask:
    """Which blocks are computed: none of ``[sq, sk]`` is ever stored but per block.

    Args:
        segments: [b, sk]; None for one mask for all rows.
        pattern: What is hidden besides.
        device: Where the mask shall be.
    """
    seen, whole = _positions_of_blocks(pattern, device)
    numbers = None if segments is None else sides(segments, pattern)
    if numbers is not None:
        queries, keys = (_ranges(x) for x in numbers)
        (q_min, q_max), (k_min, k_max) = ((x[:, :, None] for x in queries), (x[:, None, :] for x in keys))
        seen = seen & (q_min <= k_max) & (k_min <= q_max)
        whole = whole & (q_min == q_max) & (k_min == k_max) & (q_min == k_min)
    partial_count, partial = _ordered(seen & ~whole)
    whole_count, whole_indices = _ordered(whole)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial,
        whole_count,
        whole_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(numbers, pattern),
        seq_lengths=(pattern.num_queries, pattern.num_keys),
    )


@functools.lru_cache(maxsize=16)
def block_mask_without_segments(pattern: Pattern, device: torch.device) -> BlockMask:
    """``block_mask`` of a window or of causality alone, made once: it takes four numbers per pair of blocks."""
    with torch.inference_mode(False), torch.no_grad():
        return block_mask(None, pattern, device)


def _mask_mod(numbers: tuple[Tensor, Tensor] | None, pattern: Pattern) -> Callable[..., Tensor]:
    """Whether a query sees a key, for single pairs: what the kernels evaluate inside of blocks."""
    causal, window, shift = pattern.causal, pattern.window, pattern.first_query
    of_queries, of_keys = numbers if numbers is not None else (None, None)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = query >= 0
        if of_queries is not None and of_keys is not None:
            visible = of_queries[row, query] == of_keys[row, key]
        if causal:
            visible = visible & (key <= query + shift)
        if window is not None:
            visible = visible & (query + shift - key < window)
        return visible

    return sees


def _positions_of_blocks(pattern: Pattern, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where any pair of two blocks is seen, and where every pair is, by their places alone: bool [1, nq, nk]."""
    (q_first, q_last), (k_first, k_last) = (
        (first, (first + BLOCK - 1).clamp(max=length - 1))
        for length in (pattern.num_queries, pattern.num_keys)
        for first in [torch.arange(0, length, BLOCK, device=device)]
    )
    # The kernels look at the ends of the sequences only in blocks that they do not take for whole.
    whole = ((q_last - q_first == BLOCK - 1)[:, None]) & (k_last - k_first == BLOCK - 1)
    seen = torch.ones_like(whole)
    q_first, q_last = (x[:, None] + pattern.first_query for x in (q_first, q_last))
    if pattern.causal:
        seen, whole = seen & (k_first <= q_last), whole & (k_last <= q_first)
    if pattern.window is not None:
        seen, whole = seen & (q_first - k_last < pattern.window), whole & (q_last - k_first < pattern.window)
    return seen[None], whole[None]


def _ranges(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest number of each block: [b, blocks] each, of [b, s]."""
    length = numbers.shape[1]
    places = torch.arange(-(-length // BLOCK) * BLOCK, device=numbers.device).clamp(max=length - 1)
    blocks = numbers[:, places].unflatten(1, (-1, BLOCK))
    return blocks.amin(-1), blocks.amax(-1)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, and which: [b, 1, nq] and [b, 1, nq, nk] int32, those first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return blocks.sum(-1).int()[:, None].contiguous(), order[:, None].contiguous()
