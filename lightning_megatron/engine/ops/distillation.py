"""Kullback-Leibler divergence of a student from its teacher, over a vocabulary that is sharded over a TP group.

Logits are never gathered: ranks exchange five numbers per token (three with the teacher's top-k logits), and the
gradient of a shard needs no communication. On a GPU both passes are compiled, so that no float32 copy of the logits is
written.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.engine.ops.compiled import compiled_for


def _scaled_softmax(
    logits: Tensor,
    temperature: float,
    log_sum: Tensor,
) -> Tensor:
    """A shard's probabilities at a temperature: [s, b, v/tp], float32.

    Args:
        logits: [s, b, v/tp].
        temperature: The temperature.
        log_sum: [s, b]: log-sum-exp of the full vocabulary's logits at the temperature.
    """
    scores = logits.float() / temperature
    return (scores - log_sum.unsqueeze(-1)).exp()


def _shard_statistics(
    student: Tensor,
    teacher: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """A shard's statistics per token: [2, s, b] largest logits, and [3, s, b] sums relative to them.

    The sums are those of the student's and the teacher's exponentials, and of the teacher's times the difference of the
    teacher's and the student's logits.
    """
    scores = student.float() / temperature
    goals = teacher.float() / temperature
    # A shard of only padding is all -inf, and -inf - (-inf) is NaN.
    smallest = torch.finfo(torch.float32).min
    largest = scores.amax(-1).clamp(min=smallest)
    largest_goal = goals.amax(-1).clamp(min=smallest)
    exponentials = (scores - largest.unsqueeze(-1)).exp()
    weights = (goals - largest_goal.unsqueeze(-1)).exp()
    differences = torch.where(weights > 0, goals - scores, 0.0)
    dot = (weights * differences).sum(-1)
    sums = torch.stack([exponentials.sum(-1), weights.sum(-1), dot])
    return torch.stack([largest, largest_goal]), sums


def _shard_gradient(
    student: Tensor,
    teacher: Tensor,
    log_sums: Tensor,
    upstream: Tensor,
    temperature: float,
) -> Tensor:
    """Gradient of the student's logits, in their dtype: the difference of the probabilities, by the temperature."""
    probabilities = _scaled_softmax(student, temperature, log_sums[0])
    goals = _scaled_softmax(teacher, temperature, log_sums[1])
    factors = upstream.float() / temperature
    gradient = (probabilities - goals) * factors.unsqueeze(-1)
    return gradient.to(student.dtype)


class VocabParallelDivergence(torch.autograd.Function):
    """KL(teacher || student) of each token at a temperature; collective over the TP group."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor,
        temperature: float,
        tp_group: Any,
    ) -> Tensor:
        """Divergences [s, b], float32, of logits [s, b, v/tp] from the teacher's."""
        statistics = compiled_for(student, _shard_statistics)
        largest, sums = statistics(student, teacher, temperature)
        if dist.get_world_size(tp_group) > 1:
            of_shard = largest.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group)
            rescaling = (of_shard - largest).exp()
            sums = sums * rescaling[[0, 1, 1]]
            dist.all_reduce(sums, group=tp_group)
        log_sums = largest + sums[:2].log()
        ctx.temperature = temperature
        ctx.save_for_backward(student, teacher, log_sums)
        mean_difference = sums[2] / sums[1]
        divergence: Tensor = mean_difference - log_sums[1] + log_sums[0]
        return divergence

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        """The gradient of the student's logits; no communication."""
        student, teacher, log_sums = ctx.saved_tensors
        differentiate = compiled_for(student, _shard_gradient)
        gradient = differentiate(student, teacher, log_sums, upstream[0], ctx.temperature)
        return gradient, None, None, None


def token_divergences(
    student: Tensor,
    teacher: Tensor,
    temperature: float,
    tp_group: Any,
) -> Tensor:
    """KL(teacher || student) of each token: [s, b], float32, the same on every TP rank.

    Args:
        student: Logits, [s, b, v/tp]; vocabulary padding is -inf.
        teacher: Likewise, of the same vocabulary.
        temperature: Both are divided by it.
        tp_group: The TP group.
    """
    divergences: Tensor = VocabParallelDivergence.apply(  # type: ignore[no-untyped-call]
        student, teacher, temperature, tp_group
    )
    return divergences


# ---- the teacher's top-k logits -------------------------------------------------------------------------------------


def _own_columns(
    ids: Tensor,
    first: int,
    width: int,
) -> tuple[Tensor, Tensor]:
    """Column of each token in a shard that begins with token ``first``, 0 for others, and whether it is there."""
    columns = ids - first
    is_here = (columns >= 0) & (columns < width)
    return columns.masked_fill(~is_here, 0), is_here


def _top_statistics(
    student: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: int,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """A shard's statistics per token: largest logit [s, b], and [2, s, b] its sum of exponentials and the mean logit.

    The mean is that under the teacher's probabilities, of the tokens in the shard.
    """
    scores = student.float() / temperature
    smallest = torch.finfo(torch.float32).min
    largest = scores.amax(-1).clamp(min=smallest)
    total = (scores - largest.unsqueeze(-1)).exp().sum(-1)
    index, is_here = _own_columns(ids, first, student.shape[-1])
    own = torch.where(is_here, scores.gather(-1, index), 0.0)
    mean = (weights * own).sum(-1)
    return largest, torch.stack([total, mean])


def _top_gradient(
    student: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: int,
    log_sum: Tensor,
    upstream: Tensor,
    temperature: float,
) -> Tensor:
    """Gradient of the student's logits, in their dtype."""
    probabilities = _scaled_softmax(student, temperature, log_sum)
    index, is_here = _own_columns(ids, first, student.shape[-1])
    goals = torch.where(is_here, weights, 0.0)
    difference = probabilities.scatter_add(-1, index, -goals)
    factors = upstream.float() / temperature
    gradient = difference * factors.unsqueeze(-1)
    return gradient.to(student.dtype)


class VocabParallelTopDivergence(torch.autograd.Function):
    """KL(teacher || student) of each token, the teacher's probabilities being those of k tokens; collective over TP."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        ids: Tensor,
        weights: Tensor,
        temperature: float,
        tp_group: Any,
    ) -> Tensor:
        """Divergences [s, b], float32, of logits [s, b, v/tp] from probabilities [s, b, k] of tokens [s, b, k]."""
        ctx.first = dist.get_rank(tp_group) * student.shape[-1]
        statistics = compiled_for(student, _top_statistics)
        largest, sums = statistics(student, ids, weights, ctx.first, temperature)
        if dist.get_world_size(tp_group) > 1:
            of_shard = largest.clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp_group)
            total, mean = sums.unbind()
            rescaling = (of_shard - largest).exp()
            sums = torch.stack([total * rescaling, mean])
            dist.all_reduce(sums, group=tp_group)
        log_sum = largest + sums[0].log()
        ctx.temperature = temperature
        ctx.save_for_backward(student, ids, weights, log_sum)
        negative_entropy = torch.special.xlogy(weights, weights).sum(-1)
        divergence: Tensor = negative_entropy - sums[1] + log_sum
        return divergence

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        """The gradient of the student's logits; no communication."""
        student, ids, weights, log_sum = ctx.saved_tensors
        differentiate = compiled_for(student, _top_gradient)
        gradient = differentiate(
            student,
            ids,
            weights,
            ctx.first,
            log_sum,
            upstream[0],
            ctx.temperature,
        )
        return gradient, None, None, None, None


def token_top_divergences(
    student: Tensor,
    ids: Tensor,
    logits: Tensor,
    temperature: float,
    tp_group: Any,
) -> Tensor:
    """KL(teacher || student) of each token, with the teacher's probabilities over its k most likely tokens alone.

    Args:
        student: Logits, [s, b, v/tp]; vocabulary padding is -inf.
        ids: The teacher's tokens, [s, b, k] int64; negative for none.
        logits: Their logits, [s, b, k]; softmax over these k gives the teacher's probabilities.
        temperature: All logits are divided by it.
        tp_group: The TP group.

    Returns:
        [s, b], float32, the same on every TP rank.
    """
    goals = logits.float().masked_fill(ids < 0, -torch.inf)
    weights = torch.softmax(goals / temperature, dim=-1)
    divergences: Tensor = VocabParallelTopDivergence.apply(  # type: ignore[no-untyped-call]
        student, ids, weights, temperature, tp_group
    )
    return divergences
