"""Router of experts in one kernel each way: scores, the choice of experts, its probabilities, and sums over tokens.

torch needs twenty kernels forward and as many backward, of which ``topk`` alone takes longer than this. A program reads
the logits of a few tokens once; the backward pass computes their scores again. Sums over tokens, for the auxiliary
loss, are in a fixed order: of each program's tokens first.

H200, 16,384 tokens, 8 of 128 experts, us, torch and this: forward 230, 63 with the sums; backward 61, 24; the host 640,
526.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_megatron.engine.ops.routing import Routing
from lightning_megatron.engine.ops.triton.launch_sizes import power_of_two, warps_of_columns

_TOKENS = 16
"""Per program."""


@triton.jit
def _scores(logits, row, column, inside, EXPERTS: tl.constexpr, SIGMOID: tl.constexpr):
    """Scores of tokens, [tokens, columns]; 0 behind the last expert."""
    offset = row[:, None] * EXPERTS + column[None, :]
    logit = tl.load(logits + offset, inside, 0.0)
    is_expert = (column < EXPERTS)[None, :]
    if SIGMOID:
        score = tl.where(is_expert, 1.0 / (1.0 + tl.exp(-logit)), 0.0)
    else:
        logit = tl.where(is_expert, logit, float("-inf"))
        score = tl.exp(logit - tl.max(logit, 1)[:, None])
        score /= tl.sum(score, 1)[:, None]
    return score


@triton.jit
def _counted(is_padding, row, exists):
    """Whether tokens count in sums over tokens, [tokens]."""
    counted = exists
    if is_padding is not None:
        counted = counted & (tl.load(is_padding + row, exists, 1) == 0)
    return counted


@triton.jit
def _route(
    logits,
    bias,
    is_padding,
    probs,
    experts,
    score_sums,
    counts,
    tokens,
    min_sum,
    scale,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOPK: tl.constexpr,
    CHOICES: tl.constexpr,
    TOKENS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    choice = tl.arange(0, CHOICES)
    exists = row < tokens
    is_expert = column < EXPERTS
    inside = exists[:, None] & is_expert[None, :]
    score = _scores(logits, row, column, inside, EXPERTS, SIGMOID)
    selection = score
    if bias is not None:
        selection += tl.load(bias + column, is_expert, 0.0)[None, :]
    # NaN is the largest number, as in torch: an index must be valid.
    selection = tl.where(selection == selection, selection, float("inf"))
    selection = tl.where(is_expert[None, :], selection, float("-inf"))
    prob = tl.zeros((TOKENS, CHOICES), tl.float32)
    expert = tl.zeros((TOKENS, CHOICES), tl.int32)
    is_chosen = tl.zeros((TOKENS, COLUMNS), tl.int1)
    for i in tl.static_range(TOPK):
        largest = tl.max(selection, 1)[:, None]
        index = tl.min(tl.where(selection == largest, column[None, :], EXPERTS - 1), 1)[:, None]
        is_this = column[None, :] == index
        value = tl.sum(tl.where(is_this, score, 0.0), 1)[:, None]
        prob = tl.where(choice[None, :] == i, value, prob)
        expert = tl.where(choice[None, :] == i, index, expert)
        is_chosen = is_chosen | is_this
        selection = tl.where(is_this, float("-inf"), selection)
    if NORMALIZED:
        prob /= tl.maximum(tl.sum(prob, 1), min_sum)[:, None]
    offset = row[:, None] * TOPK + choice[None, :]
    is_choice = exists[:, None] & (choice < TOPK)[None, :]
    tl.store(probs + offset, prob * scale, is_choice)
    tl.store(experts + offset, expert.to(tl.int64), is_choice)
    if SIGMOID:
        score /= tl.sum(score, 1)[:, None]
    counted = _counted(is_padding, row, exists)[:, None]
    sums = tl.sum(tl.where(counted, score, 0.0), 0)
    count = tl.sum((counted & is_chosen).to(tl.float32), 0)
    partial = tl.program_id(0) * EXPERTS + column
    tl.store(score_sums + partial, sums, is_expert)
    tl.store(counts + partial, count, is_expert)


@triton.jit
def _route_backward(
    logits,
    is_padding,
    experts,
    d_probs,
    d_sums,
    d_logits,
    tokens,
    min_sum,
    scale,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOPK: tl.constexpr,
    TOKENS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
):
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    exists = row < tokens
    is_expert = column < EXPERTS
    inside = exists[:, None] & is_expert[None, :]
    score = _scores(logits, row, column, inside, EXPERTS, SIGMOID)
    d_score = tl.zeros((TOKENS, COLUMNS), tl.float32)
    if d_probs is not None:
        is_chosen = tl.zeros((TOKENS, COLUMNS), tl.int1)
        for i in tl.static_range(TOPK):
            index = tl.load(experts + row * TOPK + i, exists, 0)
            d_prob = tl.load(d_probs + row * TOPK + i, exists, 0.0) * scale
            is_this = column[None, :] == index[:, None]
            d_score = tl.where(is_this, d_prob[:, None], d_score)
            is_chosen = is_chosen | is_this
        if NORMALIZED:
            total = tl.sum(tl.where(is_chosen, score, 0.0), 1)
            divisor = tl.maximum(total, min_sum)
            mean = tl.sum(d_score * score, 1) / divisor
            # A constant divisor has no gradient.
            mean = tl.where(total < min_sum, 0.0, mean)
            d_score = tl.where(is_chosen, (d_score - mean[:, None]) / divisor[:, None], 0.0)
    if d_sums is not None:
        d_sum = tl.load(d_sums + column, is_expert, 0.0)[None, :]
        if SIGMOID:
            divisor = tl.sum(score, 1)[:, None]
            d_sum = (d_sum - tl.sum(d_sum * score, 1)[:, None] / divisor) / divisor
        d_score += tl.where(_counted(is_padding, row, exists)[:, None], d_sum, 0.0)
    if SIGMOID:
        d_logit = d_score * score * (1.0 - score)
    else:
        d_logit = score * (d_score - tl.sum(d_score * score, 1)[:, None])
    tl.store(d_logits + row[:, None] * EXPERTS + column[None, :], d_logit, inside)


class Routed(NamedTuple):
    """Experts of tokens, and sums over the tokens that are not padding."""

    probs: Tensor
    """[tokens, topk], fp32."""
    experts: Tensor
    """[tokens, topk], int64: by falling score; of equal scores the first expert's."""
    score_sums: Tensor
    """[experts], fp32: sum of the tokens' scores, sigmoids divided by the token's sum of them."""
    counts: Tensor
    """[experts], fp32: number of tokens for which the expert is chosen."""


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        bias: Tensor | None,
        is_padding: Tensor | None,
        routing: Routing,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tokens, num_experts = logits.shape
        programs = triton.cdiv(tokens, _TOKENS)
        probs = logits.new_empty(tokens, routing.topk)
        experts = torch.empty_like(probs, dtype=torch.int64)
        partial = logits.new_empty(2, programs, num_experts)
        ctx.routing = routing
        columns = power_of_two(num_experts)
        ctx.flags = {
            "EXPERTS": num_experts,
            "COLUMNS": columns,
            "TOPK": routing.topk,
            "TOKENS": _TOKENS,
            "SIGMOID": routing.is_sigmoid,
            "NORMALIZED": routing.is_normalized,
            "num_warps": warps_of_columns(columns),
        }
        _route[(programs,)](
            logits,
            bias,
            is_padding,
            probs,
            experts,
            partial[0],
            partial[1],
            tokens,
            routing.min_sum,
            routing.scale,
            **ctx.flags,
            CHOICES=power_of_two(routing.topk),
        )
        # Not views of one tensor: ``counts`` is all-reduced in place.
        score_sums = partial[0].sum(dim=0)
        counts = partial[1].sum(dim=0)
        ctx.save_for_backward(logits, is_padding, experts)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(experts, counts)
        return probs, experts, score_sums, counts

    @staticmethod
    def backward(
        ctx: Any,
        *upstream: Tensor | None,
    ) -> tuple[Tensor, None, None, None]:
        logits, is_padding, experts = ctx.saved_tensors
        d_probs, _, d_sums, _ = upstream
        d_logits = torch.empty_like(logits)
        _route_backward[(triton.cdiv(len(logits), _TOKENS),)](
            logits,
            is_padding,
            experts,
            None if d_probs is None else d_probs.contiguous(),
            None if d_sums is None else d_sums.contiguous(),
            d_logits,
            len(logits),
            ctx.routing.min_sum,
            ctx.routing.scale,
            **ctx.flags,
        )
        return d_logits, None, None, None


def route(
    logits: Tensor,
    bias: Tensor | None,
    is_padding: Tensor | None,
    routing: Routing,
) -> Routed:
    """Choose the experts of each token.

    Args:
        logits: [tokens, experts], fp32.
        bias: [experts], fp32: added to the scores by which experts are chosen; None for none.
        is_padding: [tokens], bool: tokens that do not count in the sums; None for none.
        routing: How experts are chosen.
    """
    if is_padding is not None:
        is_padding = is_padding.contiguous()
    outputs = _Route.apply(logits.contiguous(), bias, is_padding, routing)
    return Routed(*outputs)
