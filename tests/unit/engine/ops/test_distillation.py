"""Divergence over a sharded vocabulary equals torch's over the full one, with padding and in 16 bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks

VOCAB_SIZE = 5
TEMPERATURE = 1.5


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of student and teacher [2, 3, 5], and upstream gradients [2, 3]."""
    generator = torch.Generator().manual_seed(1)
    student, teacher = (4 * torch.randn(2, 2, 3, VOCAB_SIZE, generator=generator)).to(dtype)
    return student, teacher, torch.rand(2, 3, generator=generator)


def _expected(dtype: torch.dtype, top: int | None) -> tuple[Tensor, Tensor]:
    student, teacher, upstream = _inputs(dtype)
    student = student.float().requires_grad_()
    goals = teacher.float() / TEMPERATURE
    if top is not None:
        least = goals.topk(top).values[..., -1:]
        goals = goals.masked_fill(goals < least, -torch.inf)
    probabilities = goals.softmax(-1)
    log_ratio = probabilities.clamp(min=1e-30).log() - (student / TEMPERATURE).log_softmax(-1)
    divergences = (probabilities * log_ratio).sum(-1)
    (divergences * upstream).sum().backward()
    assert student.grad is not None
    return divergences.detach(), student.grad


def _on_rank(
    dtype: torch.dtype,
    width: int,
    top: int | None,
) -> tuple[Tensor, Tensor]:
    """Divergences, and the gradient of this rank's ``width`` columns; those beyond the vocabulary are padding."""
    import torch.distributed as dist

    from lightning_megatron.engine.ops.distillation import token_divergences, token_top_divergences

    dist.init_process_group("gloo")
    group: Any = dist.group.WORLD
    student, teacher, upstream = _inputs(dtype)
    padding = (0, width * dist.get_world_size() - VOCAB_SIZE)
    values, ids = teacher.topk(top or 1)
    shards = []
    for logits in (student, teacher):
        padded = torch.nn.functional.pad(
            logits,
            padding,
            value=-torch.inf,
        )
        shards.append(padded.split(width, dim=-1)[dist.get_rank()].contiguous())
    own = shards[0].requires_grad_()
    if top is None:
        divergences = token_divergences(own, shards[1], TEMPERATURE, group)
    else:
        none = torch.full_like(ids[..., :1], -1)
        ids = torch.cat([ids, none], dim=-1)
        values = torch.cat([values, torch.full_like(values[..., :1], 99.0)], dim=-1)
        divergences = token_top_divergences(own, ids, values, TEMPERATURE, group)
    (divergences * upstream).sum().backward()
    assert own.grad is not None
    dist.destroy_process_group()
    return divergences.detach(), own.grad


@pytest.mark.parametrize(
    "top",
    [None, 3],
    ids=["all", "top"],
)
@pytest.mark.parametrize(
    ("dtype", "ranks", "width"),
    [
        (torch.float32, 1, 5),
        (torch.float32, 2, 3),
        (torch.float32, 2, 6),  # the second shard is all padding
        (torch.bfloat16, 2, 4),
    ],
    ids=["one rank", "padded", "a shard of padding", "bf16"],
)
def test_divergence_and_gradient(
    dtype: torch.dtype, ranks: int, width: int, top: int | None
) -> None:
    divergences, gradient = _expected(dtype, top)
    results = run_ranks(_on_rank, ranks, dtype, width, top)
    for values, _ in results:
        torch.testing.assert_close(values, divergences, rtol=1e-5, atol=1e-6)
    full = torch.cat([part for _, part in results], dim=-1)
    assert full.dtype is dtype
    assert (full[..., VOCAB_SIZE:] == 0).all()
    rtol, atol = 1e-5, 1e-6
    if dtype is torch.bfloat16:
        rtol, atol = 1e-2, 1e-3
    torch.testing.assert_close(
        full[..., :VOCAB_SIZE].float(),
        gradient,
        rtol=rtol,
        atol=atol,
    )
