"""FlexAttention: attention with segments, windows and ALiBi, compiled, without a tensor of [s, s]."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

MIN_FLEX_LENGTH = 512
"""Minimum number of queries and keys: below it a dense mask is small, and compilation costs more than it saves."""

_FUNCTION_IDS = itertools.count()


def can_use_flex(q: Tensor, k: Tensor) -> bool:
    """Whether FlexAttention's compiled kernels support these queries and keys ([b, np, s, hn])."""
    return (
        has_kernels(q)
        and min(q.shape[2], k.shape[2]) >= MIN_FLEX_LENGTH
        and 16 <= q.shape[3] <= 256
    )


def has_kernels(q: Tensor) -> bool:
    """Whether a GPU has the kernels of FlexAttention and FlashAttention for the dtype of ``q``."""
    has_16_bits = q.dtype in (torch.float16, torch.bfloat16)
    return q.is_cuda and has_16_bits and _is_ampere_or_newer(q.device)


@functools.cache
def _is_ampere_or_newer(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    biases: tuple[Tensor, Tensor] | None,
    cap: float | None,
    scale: float | None,
) -> Tensor:
    """Attention by FlexAttention: [b, np, sq, hn].

    Args:
        q: [b, np, sq, hn].
        k: [b, ng, sk, hn].
        v: [b, ng, sk, hn].
        mask: Result of ``masks.block_mask``.
        biases: ALiBi biases of keys and of queries, whose difference is added to the scores, [b, np, s] or [np, s]
            fp32; None without ALiBi.
        cap: Soft cap of the scores, applied first, see ``attend_capped``; None for none.
        scale: Factor of the scores; None for 1 / sqrt(hn).
    """

    def modify(
        score: Tensor,
        row: Tensor,
        head: Tensor,
        query: Tensor,
        key: Tensor,
    ) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        if biases is None:
            return score
        key_biases, query_biases = biases
        if key_biases.dim() == 3:
            return score + (key_biases[row, head, key] - query_biases[row, head, query])
        return score + (key_biases[head, key] - query_biases[head, query])

    score_mod = None if biases is None and cap is None else modify
    grouped = q.shape[1] != k.shape[1]
    out: Tensor = flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=mask,
        scale=scale,
        enable_gqa=grouped,
    )
    return out


def flex_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    sinks: Tensor,
    scale: float | None,
) -> Tensor:
    """Attention with sinks (``sinks.py``) by FlexAttention, whose log-sum-exps have gradients: [b, np, sq, hn].

    Args:
        q: [b, np, sq, hn].
        k: [b, ng, sk, hn].
        v: [b, ng, sk, hn].
        mask: Result of ``masks.block_mask``.
        sinks: [np].
        scale: Factor of the scores; None for 1 / sqrt(hn).
    """
    grouped = q.shape[1] != k.shape[1]
    out, others = flex_attention(
        q,
        k,
        v,
        block_mask=mask,
        scale=scale,
        enable_gqa=grouped,
        return_aux=AuxRequest(lse=True),
    )
    assert others.lse is not None, "it was requested"
    return scale_by_sinks(out, others.lse, sinks[:, None])


def scale_by_sinks(output: Tensor, log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Attention with sinks, [b, np, sq, hn], from attention without.

    Args:
        output: [b, np, sq, hn], without sinks.
        log_sums: [b, np, sq], fp32: log-sum-exps of the scores.
        sinks: [np, sq or 1].
    """
    shares = torch.sigmoid(log_sums - sinks.float())
    return (output * shares[..., None]).to(output.dtype)


@functools.cache
def compiled_flex(
    kind: Hashable,
    function: Callable[..., Tensor] = flex,
) -> Callable[..., Tensor]:
    """``function``, compiled once per kind of attention for all lengths: the second length makes the graph dynamic.

    Each kind has its own code object: torch limits recompilations per code object to eight, then runs it uncompiled.
    """
    name = f"_flex_{next(_FUNCTION_IDS)}"
    copied = types.FunctionType(
        function.__code__.replace(co_name=name),
        globals(),
        name,
    )
    compiled: Callable[..., Tensor] = torch.compile(copied)
    return compiled
