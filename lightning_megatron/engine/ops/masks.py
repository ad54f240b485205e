"""Attention masks: segments, causality, sliding windows and ALiBi, dense or as FlexAttention's block masks.

A mask is an integer tensor [b, sk] of segment ids: 0 is padding, and tokens see only tokens of their own segment.
Hugging Face's 0/1 padding masks have this form; the documents of a packed row are 1, 2, 3 and so on. A padding token
sees only itself: some kernels return NaN for a query that sees no key, and any other key would be wasted computation.

A block mask is derived from the minimum and maximum segment id of each block of 128 queries or keys, so it needs O(s)
memory plus one entry per pair of blocks, and blocks of other documents are skipped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.weak import WeakTensorKeyDictionary

MASKED_SCORE = -10000.0
"""Additive mask value of a hidden key, as in Megatron (transformer/utils.py:attention_mask_func).

Finite, because BERT masks every key of a padded query, and a softmax over only -inf is NaN in some kernels; large
enough that exp() of it is exactly 0 beside any real score; small enough for float16.
"""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Part of a mask that does not depend on tokens. The last query is at the last key: earlier keys may be cached."""

    num_queries: int
    """sq."""
    num_keys: int
    """sk."""
    causal: bool
    """Whether later keys are hidden from a query."""
    window: int | None = None
    """Sliding window: latest keys that a query sees, its own included, fewer than ``num_keys``; None for all."""
    cross: bool = False
    """Whether queries are of another sequence than keys (cross-attention), so that segments only mark padding keys."""

    @property
    def hides(self) -> bool:
        """Whether any key is hidden from any query."""
        return self.causal or self.window is not None

    @property
    def first_query(self) -> int:
        """Key position of the first query."""
        return self.num_keys - self.num_queries


def segment_ids(segments: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Segment ids of queries [b, sq] and keys [b, sk], int32: a query sees the keys that have its id."""
    if pattern.cross:
        keys = (segments != 0).int()
        return keys.new_ones(keys.shape[0], pattern.num_queries), keys
    keys = segments.int()
    unique = torch.arange(
        -1,
        -1 - pattern.num_keys,
        -1,
        dtype=torch.int32,
        device=keys.device,
    )
    keys = torch.where(keys == 0, unique, keys)
    return keys[:, pattern.first_query :], keys


def hidden_keys(
    mask: Tensor | None,
    pattern: Pattern,
    device: torch.device,
) -> Tensor | None:
    """Boolean mask, True for hidden keys: [b or 1, 1, sq or 1, sk]; None if no key is hidden.

    Args:
        mask: Segments, [b, sk]; or hidden keys to add to the pattern's, in the form of the result; None for neither.
        pattern: Causality and window.
        device: Device of the result.
    """
    if mask is not None and mask.dim() == 2:
        return _hidden_by_pattern(mask, pattern, device)
    if not pattern.hides:
        return mask
    hidden = _hidden_by_pattern(None, pattern, device)
    return hidden if mask is None else mask | hidden


def _hidden_by_pattern(
    segments: Tensor | None,
    pattern: Pattern,
    device: torch.device,
) -> Tensor:
    num_rows = 1
    ids = None
    if segments is not None:
        num_rows = len(segments)
        ids = segment_ids(segments, pattern)
    # If visibility depends on the key's segment alone, one query represents all.
    is_alike = pattern.cross and not pattern.hides
    rows = torch.arange(num_rows, device=device)[:, None, None]
    queries = torch.arange(1 if is_alike else pattern.num_queries, device=device)[:, None]
    keys = torch.arange(pattern.num_keys, device=device)
    sees = _mask_mod(ids, pattern)
    return ~sees(rows, None, queries, keys)[:, None]


def additive_mask(
    hidden: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Additive attention mask: the bias, and MASKED_SCORE for hidden keys, [b or 1, np or 1, sq or 1, sk]."""
    if hidden is None:
        assert bias is not None, "expected a mask or a bias, got neither"
        return bias.to(dtype)
    if bias is None:
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill_(hidden, MASKED_SCORE)
    # Overwritten, not added: a large bias plus MASKED_SCORE could unhide the key, or overflow in float16.
    return bias.to(dtype).masked_fill(hidden, MASKED_SCORE)


class TensorCache:
    """Cache of values derived from a tensor, shared by all layers and dropped with the tensor."""

    def __init__(self) -> None:
        """Start empty."""
        self._entries: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def get(
        self,
        tensor: Tensor,
        name: Hashable,
        make: Callable[[Tensor], _T],
    ) -> _T:
        """Return the value that ``make`` derives from ``tensor``, computed once per ``name``.

        Args:
            tensor: Held weakly and identified by its memory: recomputation passes another object with the same memory.
            name: Distinguishes the values derived from one tensor.
            make: Gets a tensor equal to ``tensor``, which its result may refer to without keeping ``tensor`` alive.
        """
        values = self._values_of(tensor)
        # In-place writes change the version. Inference tensors have none, and are short-lived.
        version = None if tensor.is_inference() else tensor._version
        key = (name, version)
        if key not in values:
            # Values cached in validation may be used in training, where inference tensors cannot be saved for backward.
            with torch.inference_mode(False), torch.no_grad():
                values[key] = make(tensor.detach())
        value: _T = values[key]
        return value

    def _values_of(self, tensor: Tensor) -> dict[Hashable, Any]:
        memory = _memory_key(tensor)
        values: dict[Hashable, Any]
        for other, values in self._entries.items():
            if _memory_key(other) == memory:
                return values
        values = self._entries[tensor] = {}
        return values


def _memory_key(x: Tensor) -> Hashable:
    """Identity of the memory that a living tensor views."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, x.is_inference()


# ---- FlexAttention's block masks -------------------------------------------------------------------------------------

BLOCK = 128
"""Tokens per block of a block mask; FlexAttention's default."""


def block_mask(
    segments: Tensor | None,
    pattern: Pattern,
    device: torch.device,
) -> BlockMask:
    """FlexAttention's list of blocks to compute; its memory is per pair of blocks, never [sq, sk].

    Args:
        segments: [b, sk]; None for one mask for all rows.
        pattern: Causality and window.
        device: Device of the result.
    """
    queries = torch.arange(pattern.num_queries, device=device)[None]
    keys = torch.arange(pattern.num_keys, device=device)[None]
    q_first, q_last, k_first, k_last = _block_ranges(queries + pattern.first_query, keys)
    # The kernels check the ends of the sequences only in partial blocks.
    full = (q_last - q_first == BLOCK - 1) & (k_last - k_first == BLOCK - 1)
    seen = torch.ones_like(full)
    if pattern.causal:
        seen = seen & (k_first <= q_last)
        full = full & (k_last <= q_first)
    if pattern.window is not None:
        seen = seen & (q_first - k_last < pattern.window)
        full = full & (q_last - k_first < pattern.window)
    ids = None
    if segments is not None:
        ids = segment_ids(segments, pattern)
        q_min, q_max, k_min, k_max = _block_ranges(*ids)
        seen = seen & (q_min <= k_max) & (k_min <= q_max)
        full = full & (q_min == q_max) & (k_min == k_max) & (q_min == k_min)
    partial_count, partial_indices = _block_indices(seen & ~full)
    full_count, full_indices = _block_indices(full)
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_indices,
        full_count,
        full_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(ids, pattern),
        seq_lengths=(pattern.num_queries, pattern.num_keys),
    )


@functools.cache
def block_mask_without_segments(pattern: Pattern, device: torch.device) -> BlockMask:
    """Cached ``block_mask`` of causality or a window alone: four numbers per pair of blocks, 16 KB for 4,096 tokens.

    Entries are never evicted: CUDA graphs read them at the captured addresses.
    """
    with torch.inference_mode(False), torch.no_grad():
        return block_mask(None, pattern, device)


def _mask_mod(ids: tuple[Tensor, Tensor] | None, pattern: Pattern) -> Callable[..., Tensor]:
    """FlexAttention's ``mask_mod``, for index tensors of any shapes that broadcast: whether a query sees a key."""
    causal = pattern.causal
    window = pattern.window
    shift = pattern.first_query
    query_ids, key_ids = (None, None) if ids is None else ids

    def sees(
        row: Tensor,
        head: Any,
        query: Tensor,
        key: Tensor,
    ) -> Tensor:
        visible = row >= 0
        if query_ids is not None and key_ids is not None:
            visible = query_ids[row, query] == key_ids[row, key]
        if causal:
            visible = visible & (key <= query + shift)
        if window is not None:
            visible = visible & (query + shift - key < window)
        return visible

    return sees


def _block_ranges(queries: Tensor, keys: Tensor) -> list[Tensor]:
    """Minimum and maximum per block of ``queries`` [b, sq], [b, nq, 1] each, then of ``keys`` [b, sk], [b, 1, nk]."""
    ranges = []
    for values, axis in ((queries, 2), (keys, 1)):
        length = values.shape[1]
        padded_length = -(-length // BLOCK) * BLOCK
        positions = torch.arange(padded_length, device=values.device).clamp(max=length - 1)
        blocks = values[:, positions].unflatten(1, (-1, BLOCK))
        ranges.append(blocks.amin(-1).unsqueeze(axis))
        ranges.append(blocks.amax(-1).unsqueeze(axis))
    return ranges


def _block_indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of key blocks of each query block, [b, 1, nq], and their indices first, [b, 1, nq, nk]; int32."""
    counts = blocks.sum(-1).int()
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[:, None].contiguous(), order[:, None].contiguous()


# ---- ALiBi -----------------------------------------------------------------------------------------------------------
# Press et al. 2022, Train Short, Test Long (arXiv 2108.12409), section 3, and its reference code for head counts that
# are not a power of two.

AlibiKind = Literal["bloom", "falcon"]
"""Bloom adds the bias to the scaled scores; Falcon rounds it to bfloat16 and scales it with the scores."""


@dataclass(frozen=True, kw_only=True)
class Alibi:
    """ALiBi of one rank's heads."""

    kind: AlibiKind
    """Model family whose variant is used."""
    num_heads: int
    """Heads of the full model, which determine the slopes."""
    first_head: int
    """Index of this rank's first head; its heads are consecutive."""
    num_local_heads: int
    """Number of this rank's heads, np/tp."""
    scale: float
    """Softmax scale, which multiplies Falcon's biases, too."""


def largest_power_of_two(num_heads: int) -> int:
    """Number of the heads, the first ones, whose slopes are those of a power of two."""
    power: int = 2 ** math.floor(math.log2(num_heads))
    return power


def slopes(num_heads: int) -> Tensor:
    """Bias that each head subtracts per token of distance: [np], fp32, on the CPU."""
    power = largest_power_of_two(num_heads)

    def series(count: int, exponents: Tensor) -> Tensor:
        return torch.tensor(2.0 ** -(8.0 / count)).pow(exponents)

    first = series(
        power,
        torch.arange(1, power + 1, dtype=torch.int32),
    )
    rest = series(
        2 * power,
        torch.arange(
            1,
            2 * (num_heads - power) + 1,
            2,
            dtype=torch.int32,
        ),
    )
    return torch.cat([first, rest])


@functools.lru_cache(maxsize=8)
def _local_slopes(alibi: Alibi, device: torch.device) -> Tensor:
    """Slopes of this rank's heads, [np/tp], fp32, copied to the device once."""
    local = slopes(alibi.num_heads)[alibi.first_head :][: alibi.num_local_heads]
    return local.to(device)


def key_biases(
    alibi: Alibi,
    segments: Tensor | None,
    num_keys: int,
    device: torch.device,
) -> Tensor:
    """ALiBi bias of each key's position: [b, np/tp, sk] fp32, without a mask [np/tp, sk].

    Positions count the non-padding tokens of a row. They do not restart at its second document: that only adds a
    constant per query, which does not change the softmax.

    Args:
        alibi: Heads and variant.
        segments: [b, sk], 0 is padding; None for no mask.
        num_keys: sk.
        device: Device of the result.
    """
    if segments is None:
        positions = torch.arange(num_keys, device=device)
    else:
        is_token = (segments != 0).long()
        positions = (is_token.cumsum(-1) - 1) * is_token
        positions = positions[:, None]
    per_head = _local_slopes(alibi, device)[:, None]
    if alibi.kind == "bloom":
        return per_head * positions
    # As in Hugging Face's Falcon, positions are rounded to bfloat16 before the product, too.
    return (per_head.bfloat16() * positions).float() * alibi.scale


def relative_biases(biases: Tensor, num_queries: int) -> Tensor:
    """ALiBi bias of each query-key pair, 0 for a token and itself: [b or 1, np/tp, sq, sk].

    Near keys get small values, which half precision resolves; the biases of their positions alone are large.

    Args:
        biases: Result of ``key_biases``.
        num_queries: sq; the last query is at the last key.
    """
    of_queries = biases[..., biases.shape[-1] - num_queries :]
    pairs = biases[..., None, :] - of_queries[..., :, None]
    return pairs if pairs.dim() == 4 else pairs[None]
