"""FlashAttention-4, an optional package, where it is faster than cuDNN's attention and FlexAttention.

``flash-attn-4`` (PyPI, a pre-release; kernels in CuTe that are compiled in the first step, a few seconds for each kind
of attention) for causal attention without a mask of segments: with ALiBi, with a window, and plain. H200, heads of 128,
two rows of 4,096 tokens, 32 heads of queries, forward + backward in ms:

- ALiBi, 32 heads of keys: 0.66 + 1.60; FlexAttention 1.65 x of plain; plain by cuDNN 0.58 + 1.70;
- a window of 1,024, 8 heads of keys: 0.39 + 1.11; FlexAttention 0.51 + 1.49;
- plain, 8 heads of keys: 0.54 + 1.65; cuDNN 0.61 + 1.72; one row of 8,192: 1.15 + 2.73; cuDNN 1.09 + 3.00.

Heads of 64 are slower than cuDNN's (12 rows of 1,024: 0.31 + 0.54; 0.17 + 0.55). The gradient of the queries is summed
by atomic additions, as cuDNN's is, unless torch's deterministic algorithms are on.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_megatron.engine.ops.masks import Alibi, Pattern, largest_power_of_two

_HEAD_WIDTH = 128
"""Of queries, keys and values: the width for which it is faster."""
_CAPABILITY = (9, 0)
"""GPUs on which it was measured: Hopper."""


class ScoreFunctions(NamedTuple):
    """What is done to each score, and to its gradient, by kernels in CuTe."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


@functools.cache
def has_flash_attention_4() -> bool:
    """Whether the package can be imported, which takes seconds, and this process's GPU is one for which it is used."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != _CAPABILITY:
        return False
    try:
        # FlashAttention-2 has a module of this name as well, with fewer arguments.
        importlib.metadata.version("flash-attn-4")
        importlib.import_module("flash_attn.cute")
    except Exception:  # a half-installed CUDA extension raises OSError, RuntimeError or worse
        return False
    return True


def can_use_flash_attention_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    alibi: Alibi | None,
) -> bool:
    """Whether it computes this attention, and faster; q, k and v are [b, n, s, hn], on CUDA."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return False
    is_causal = pattern.causal and pattern.num_queries == pattern.num_keys and not pattern.cross
    has_width = q.shape[3] == v.shape[3] == _HEAD_WIDTH
    # Falcon's biases are rounded to bfloat16, position by position.
    has_known_biases = alibi is None or alibi.kind == "bloom"
    return is_causal and has_width and has_known_biases and has_flash_attention_4()


def attend_flash_attention_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    alibi: Alibi | None,
    scale: float | None,
) -> Tensor:
    """Causal attention: [b, np, s, hn].

    Args:
        q: [b, np, s, hn].
        k: [b, ng, s, hn].
        v: [b, ng, s, hn].
        pattern: Its window is honoured.
        alibi: Biases of this rank's heads; None for none.
        scale: Factor of the scores; None for 1 / sqrt(hn).
    """
    # Imported here: the package is optional.
    from flash_attn.cute import flash_attn_func

    window: tuple[int | None, int | None] = (None, None)
    if pattern.window is not None:
        # The query itself is not counted.
        window = (pattern.window - 1, 0)
    functions: ScoreFunctions | tuple[None, None] = (None, None)
    if alibi is not None:
        functions = _alibi_functions(alibi.num_heads, alibi.first_head)
    forward, backward = functions
    # Slopes are those of a row's heads.
    separates_rows = alibi is not None
    arguments = [_rows_of_heads(x, separates_rows) for x in (q, k, v)]
    out: Tensor = flash_attn_func(
        *arguments,
        softmax_scale=scale,
        causal=True,
        window_size=window,
        score_mod=forward,
        score_mod_bwd=backward,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )[0]
    if separates_rows:
        return out.transpose(1, 2)
    rows, heads, length, width = q.shape
    return out.view(length, rows, heads, width).permute(1, 2, 0, 3)


def _rows_of_heads(x: Tensor, separates_rows: bool) -> Tensor:
    """Arguments in FlashAttention's layout, of [b, n, s, hn]: [b, s, n, hn], or one row of the heads of all rows.

    The engine's layout is [s, b, n, hn], and results are written contiguously in that of the arguments: of one row,
    [1, s, b * n, hn], nothing is copied, neither results nor gradients.
    """
    if separates_rows:
        return x.transpose(1, 2)
    return x.permute(2, 0, 1, 3).flatten(1, 2)[None]


def slope_exponent(head: Any, num_heads: int, where: Callable[..., Any] | None = None) -> Any:
    """Logarithm to base 2 of ``masks.slopes(num_heads)[head]``, of a number or of numbers of a kernel.

    Args:
        head: From 0.
        num_heads: Heads of the full model.
        where: Chooses between two values by a condition; None for numbers.
    """
    power = largest_power_of_two(num_heads)
    # A power of two of slopes, one step apart, and for further heads those that lie halfway between them.
    step = -8.0 / power
    first = (head + 1.0) * step
    further = (head - (power - 0.5)) * step
    if where is None:
        return first if head < power else further
    return where(head < float(power), first, further)


@functools.cache
def _alibi_functions(num_heads: int, first_head: int) -> ScoreFunctions:
    """Kernels that add the slope of a head times the distance; heads are those of a rank from ``first_head`` on."""
    from cutlass import Float32, cute

    # Without annotations, which the compiler would read as types of a kernel's arguments.
    @cute.jit
    def add_bias(score, row, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        number = (head + first_head).to(Float32)
        slope = cute.math.exp2(slope_exponent(number, num_heads, cute.where))
        return score + slope * (kv_idx - q_idx).to(Float32)

    @cute.jit
    def keep_gradient(gradient, score, row, head, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        return gradient

    return ScoreFunctions(add_bias, keep_gradient)
