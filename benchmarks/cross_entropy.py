"""Which cross-entropy is fastest, and what does it keep? Forward and backward of each on one GPU, and its error."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

from lightning_megatron.engine.slots.compiled_loss import compiled_loss

SHAPES = ((4096, 4, 128256), (1024, 24, 50304), (1024, 24, 25216), (4096, 2, 64128))
"""[s, b, v/tp] of llama-1b, gpt2-large, and the shards of gpt2-large and Llama-3-8B at tp=2."""

PerTokenLoss = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
"""(logits [s, b, v/tp], labels [s, b], tp_group) -> loss [s, b], fp32."""

_REPEATS = 15
_CHECKED_ROWS = 64


def liger_loss(logits: torch.Tensor, labels: torch.Tensor, tp_group: Any) -> torch.Tensor:
    """liger-kernel's vocab-parallel cross-entropy."""
    from liger_kernel.ops.vocab_parallel_cross_entropy import LigerVocabParallelCEFunction

    loss: torch.Tensor = LigerVocabParallelCEFunction.apply(
        logits, labels, tp_group, -100, 0.0, "megatron", "partition"
    )
    return loss


def _milliseconds(step: Callable[[], object]) -> float:
    for _ in range(4):
        step()
    times = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in times))


def _measure(name: str, per_token_loss: PerTokenLoss, shape: tuple[int, int, int]) -> str:
    logits = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 2).requires_grad_()
    labels = torch.randint(0, shape[-1], shape[:2], device="cuda")
    group = dist.group.WORLD

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        loss = per_token_loss(logits, labels, group)
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
        return loss.detach(), gradient

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss, gradient = step()
    peak = torch.cuda.max_memory_allocated() - before
    exact = logits[:_CHECKED_ROWS].detach().double().requires_grad_()
    losses = F.cross_entropy(exact.flatten(0, 1), labels[:_CHECKED_ROWS].flatten(), reduction="none")
    (reference,) = torch.autograd.grad(losses.sum(), exact)
    loss_error = (loss[:_CHECKED_ROWS].flatten() - losses).norm() / losses.norm()
    gradient_error = (gradient[:_CHECKED_ROWS] - reference).norm() / reference.norm()
    errors = f"error of the loss {loss_error:.1e}, of the gradient {gradient_error:.1e}"
    del loss, gradient, exact, losses, reference
    return f"{name:9} {shape}: {_milliseconds(step):7.3f} ms, {peak / 2**30:6.2f} GiB at the peak, {errors}"


def main() -> int:
    """Print one line for each implementation and shape."""
    from megatron.core import parallel_state

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    for shape in SHAPES:
        for name, function in (
            ("native", fused_vocab_parallel_cross_entropy),
            ("liger", liger_loss),
            ("compiled", compiled_loss),
        ):
            print(_measure(name, function, shape), flush=True)
            torch.cuda.empty_cache()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
