"""Attention masks: segments, causality, sliding windows and ALiBi, dense or as FlexAttention's block masks.

A mask is an integer tensor [b, sk] of segment numbers: 0 is padding, tokens of one segment see each other, and nothing
else. Hugging Face's 0/1 padding masks are such tensors; the documents of a packed row are 1, 2, 3 and so on. A token of
padding sees itself alone: some kernels turn a row that sees nothing into NaN, and what it sees is computed in vain.

A block mask is told from the least and the greatest segment number of each 128 queries and 128 keys, so that it takes
O(s) numbers plus one per pair of blocks, and blocks of other documents are not computed.
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
"""Added to a masked score, as in Megatron (transformer/utils.py:attention_mask_func).

Finite, because BERT masks every key of a padded query, and a softmax over nothing but -inf is NaN in some kernels;
large enough that exp() of it is exactly 0 beside any real score; small enough for float16.
"""

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """What is hidden whatever the tokens are. The last query stands at the last key: earlier keys may be cached."""

    num_queries: int
    """sq."""
    num_keys: int
    """sk."""
    causal: bool
    """Whether a query sees no later key."""
    window: int | None = None
    """How many keys back a query sees, its own included, fewer than there are; None for all."""
    cross: bool = False
    """Whether queries are of another sequence than the keys, so that segments only tell which keys are padding."""

    @property
    def hides(self) -> bool:
        """Whether any key is hidden from any query."""
        return self.causal or self.window is not None

    @property
    def first_query(self) -> int:
        """The key position at which the first query stands."""
        return self.num_keys - self.num_queries


def sides(segments: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Numbers of the queries [b, sq] and of the keys [b, sk], int32, which are equal where a query sees a key."""
    if pattern.cross:
        keys = (segments != 0).int()
        return keys.new_ones(keys.shape[0], pattern.num_queries), keys
    keys = segments.int()
    alone = torch.arange(-1, -1 - pattern.num_keys, -1, dtype=torch.int32, device=keys.device)
    keys = torch.where(keys == 0, alone, keys)
    return keys[:, pattern.first_query :], keys


def hidden_keys(mask: Tensor | None, pattern: Pattern, device: torch.device) -> Tensor | None:
    """True where a key must not be seen: bool [b or 1, 1, sq or 1, sk]; None if all may be seen.

    Args:
        mask: Segments, [b, sk]; or what is hidden whatever the pattern is, in the form of the result; None for neither.
        pattern: What is hidden besides.
        device: Of the result.
    """
    hidden, segments = None, mask if mask is not None and mask.dim() == 2 else None
    if segments is not None or pattern.hides:
        numbers = None if segments is None else sides(segments, pattern)
        # Where a key's segment alone decides, one query stands for all.
        queries = torch.arange(pattern.num_queries if pattern.hides or not pattern.cross else 1, device=device)
        rows = torch.arange(1 if segments is None else len(segments), device=device)[:, None, None]
        sees = _mask_mod(numbers, pattern)
        hidden = ~sees(rows, None, queries[:, None], torch.arange(pattern.num_keys, device=device))[:, None]
    if mask is None or segments is not None:
        return hidden
    return mask if hidden is None else mask | hidden


def added_scores(hidden: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The bias plus MASKED_SCORE where a key must not be seen, [b or 1, np or 1, sq or 1, sk]."""
    if hidden is None:
        assert bias is not None, "without mask and bias the caller needs no scores"
        return bias.to(dtype)
    if bias is None:
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, MASKED_SCORE)
    # Overwritten, not added: the sum of a large bias and MASKED_SCORE could be seen again, or overflow in float16.
    return bias.to(dtype).masked_fill(hidden, MASKED_SCORE)


class PerMask:
    """What is made from a mask once, for all layers, and forgotten when the mask is."""

    def __init__(self) -> None:
        """Start empty."""
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def get(self, mask: Tensor, name: Hashable, make: Callable[[Tensor], _T]) -> _T:
        """What ``make`` returned for ``mask`` under ``name``.

        Args:
            mask: Remembered weakly, by its memory: recomputation passes another tensor object with the same memory.
            name: Tells apart what is made from one mask.
            make: Gets a tensor equal to ``mask``; what it returns may refer to that without keeping ``mask`` alive.
        """
        place = _place(mask)
        made: dict[Any, Any] | None = next((m for other, m in self._made.items() if _place(other) == place), None)
        if made is None:
            made = self._made[mask] = {}
        # A mask that was written to is another one. Tensors of inference mode are not counted, and live shortly.
        key = (name, None if mask.is_inference() else mask._version)
        if key not in made:
            # What is made while validating may be used in training, where inference tensors cannot be saved.
            with torch.inference_mode(False), torch.no_grad():
                made[key] = make(mask.detach())
        value: _T = made[key]
        return value


def _place(x: Tensor) -> Hashable:
    """Which numbers of the memory a living tensor shows."""
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, x.is_inference()


# ---- FlexAttention's block masks -------------------------------------------------------------------------------------

BLOCK = 128
"""Tokens per block of the mask; the kernels' own default."""


def block_mask(segments: Tensor | None, pattern: Pattern, device: torch.device) -> BlockMask:
    """Which blocks are computed: none of ``[sq, sk]`` is ever stored but per block.

    Args:
        segments: [b, sk]; None for one mask for all rows.
        pattern: What is hidden besides.
        device: Where the mask shall be.
    """
    queries, keys = (torch.arange(n, device=device)[None] for n in (pattern.num_queries, pattern.num_keys))
    q_first, q_last, k_first, k_last = _ranges(queries + pattern.first_query, keys)
    # The kernels look at the ends of the sequences only in blocks that they do not take for whole.
    whole = (q_last - q_first == BLOCK - 1) & (k_last - k_first == BLOCK - 1)
    seen = torch.ones_like(whole)
    if pattern.causal:
        seen, whole = seen & (k_first <= q_last), whole & (k_last <= q_first)
    if pattern.window is not None:
        seen, whole = seen & (q_first - k_last < pattern.window), whole & (q_last - k_first < pattern.window)
    numbers = None if segments is None else sides(segments, pattern)
    if numbers is not None:
        q_min, q_max, k_min, k_max = _ranges(*numbers)
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


@functools.cache
def block_mask_without_segments(pattern: Pattern, device: torch.device) -> BlockMask:
    """``block_mask`` of a window or of causality alone: four numbers per pair of blocks, 16 KB for 4,096 tokens.

    None is ever dropped: a recorded graph reads it where it lies.
    """
    with torch.inference_mode(False), torch.no_grad():
        return block_mask(None, pattern, device)


def _mask_mod(numbers: tuple[Tensor, Tensor] | None, pattern: Pattern) -> Callable[..., Tensor]:
    """Whether a query sees a key, for pairs of any one shape: what FlexAttention evaluates inside of blocks."""
    causal, window, shift = pattern.causal, pattern.window, pattern.first_query
    of_queries, of_keys = numbers if numbers is not None else (None, None)

    def sees(row: Tensor, head: Any, query: Tensor, key: Tensor) -> Tensor:
        visible = row >= 0
        if of_queries is not None and of_keys is not None:
            visible = of_queries[row, query] == of_keys[row, key]
        if causal:
            visible = visible & (key <= query + shift)
        if window is not None:
            visible = visible & (query + shift - key < window)
        return visible

    return sees


def _ranges(*numbers: Tensor) -> list[Tensor]:
    """Least and greatest number of each block: of queries [b, sq] [b, nq, 1] both, of keys [b, sk] [b, 1, nk] both."""
    found = []
    for of_tokens, axis in zip(numbers, (2, 1), strict=True):
        length = of_tokens.shape[1]
        places = torch.arange(-(-length // BLOCK) * BLOCK, device=of_tokens.device).clamp(max=length - 1)
        blocks = of_tokens[:, places].unflatten(1, (-1, BLOCK))
        found += [blocks.amin(-1).unsqueeze(axis), blocks.amax(-1).unsqueeze(axis)]
    return found


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, and which: [b, 1, nq] and [b, 1, nq, nk] int32, those first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return blocks.sum(-1).int()[:, None].contiguous(), order[:, None].contiguous()


# ---- ALiBi -----------------------------------------------------------------------------------------------------------
# Press et al. 2022, Train Short, Test Long (arXiv 2108.12409), section 3, and its reference code for numbers of heads
# that are no power of two.

AlibiKind = Literal["bloom", "falcon"]
"""Bloom adds the bias to the scaled scores; Falcon rounds it to bfloat16 and scales it with the scores."""


@dataclass(frozen=True, kw_only=True)
class Alibi:
    """The biases of one rank's heads."""

    kind: AlibiKind
    """Whose variant."""
    num_heads: int
    """Heads of the whole model: they tell the slopes."""
    first_head: int
    """The first head of this rank; its others follow."""
    num_local_heads: int
    """np/tp."""
    scale: float
    """What the scores are multiplied by; Falcon's biases are, too."""


def slopes(num_heads: int) -> Tensor:
    """What each head subtracts per token of distance: [np], fp32, on the CPU."""
    power = 2 ** math.floor(math.log2(num_heads))

    def series(count: int, exponents: Tensor) -> Tensor:
        return torch.tensor(2.0 ** -(8.0 / count)).pow(exponents)

    first = series(power, torch.arange(1, power + 1, dtype=torch.int32))
    rest = series(2 * power, torch.arange(1, 2 * (num_heads - power) + 1, 2, dtype=torch.int32))
    return torch.cat([first, rest])


@functools.lru_cache(maxsize=8)
def _local_slopes(alibi: Alibi, device: torch.device) -> Tensor:
    """[np/tp], fp32, copied to the device once."""
    return slopes(alibi.num_heads)[alibi.first_head :][: alibi.num_local_heads].to(device)


def key_biases(alibi: Alibi, segments: Tensor | None, num_keys: int, device: torch.device) -> Tensor:
    """What each key's position adds to its scores: [b, np/tp, sk] fp32, without a mask [np/tp, sk].

    Positions count the tokens that are no padding. A constant per query changes no softmax, so it does not matter that
    they go on counting in the second document of a row.

    Args:
        alibi: Which heads.
        segments: [b, sk], 0 is padding; None for no mask.
        num_keys: sk.
        device: Where the result shall be.
    """
    if segments is None:
        positions = torch.arange(num_keys, device=device)
    else:
        is_token = (segments != 0).long()
        positions = ((is_token.cumsum(-1) - 1) * is_token)[:, None]
    per_head = _local_slopes(alibi, device)[:, None]
    if alibi.kind == "bloom":
        return per_head * positions
    # As in Hugging Face's Falcon the positions, too, are rounded to bfloat16 before they are multiplied.
    return (per_head.bfloat16() * positions).float() * alibi.scale


def relative(biases: Tensor, num_queries: int) -> Tensor:
    """The biases of all pairs, 0 where a token looks at itself: [b or 1, np/tp, sq, sk].

    Near keys get small numbers, which half precision tells apart; the biases of their positions alone are large.

    Args:
        biases: As ``key_biases`` returns them.
        num_queries: sq; the last query stands at the last key.
    """
    pairs = biases[..., None, :] - biases[..., biases.shape[-1] - num_queries :, None]
    return pairs if pairs.dim() == 4 else pairs[None]
