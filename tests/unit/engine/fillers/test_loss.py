"""Vocab-parallel cross-entropy beside a dense softmax over the vocabulary without padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_megatron.engine.fillers.kernels import token_losses
from lightning_megatron.models.gpt import hide_padded_vocab_

VOCAB, S, B = 11, 6, 3


def _case(padded: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [s, b, padded], the padding the largest of all, labels of which two do not count, and loss weights."""
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(S, B, padded, generator=generator)
    logits[..., VOCAB:] = 50.0
    labels = torch.randint(0, VOCAB, (S, B), generator=generator)
    labels[0, 0], labels[5, 2] = -100, -1
    return logits.to(dtype), labels, torch.randn(S, B, generator=generator)


def _dense(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and the gradient of their weighted sum, in float64 over the true vocabulary."""
    x = logits[..., :VOCAB].double().requires_grad_()
    counted = labels.masked_fill(labels < 0, -100)
    losses = F.cross_entropy(x.permute(1, 2, 0), counted.T, ignore_index=-100, reduction="none").T
    (gradient,) = torch.autograd.grad((losses * weights).sum(), x)
    return losses.detach(), F.pad(gradient, (0, logits.shape[-1] - VOCAB))


def _ours(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, tp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    from megatron.core import parallel_state

    leaf = logits.clone().requires_grad_()
    # The product stands for the output layer: its result is no leaf, as in a model.
    shard = hide_padded_vocab_(leaf * 1.0, VOCAB, tp_rank)
    losses = token_losses(shard, labels, parallel_state.get_tensor_model_parallel_group())
    (gradient,) = torch.autograd.grad((losses * weights).sum(), leaf)
    return losses.detach(), gradient


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """With one rank's groups, on a GPU without the emulated CUDA of ``one_rank``."""
    request.getfixturevalue("one_rank" if request.param == "cpu" else "one_gpu")
    return str(request.param)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("padded", [VOCAB, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_rank_equals_a_dense_softmax(padded: int, dtype: torch.dtype, device: str) -> None:
    logits, labels, weights = (x.to(device) for x in _case(padded, dtype))
    losses, gradient = _ours(logits, labels, weights, 0)
    expected_losses, expected_gradient = _dense(logits, labels, weights)
    assert losses.dtype == torch.float32
    assert gradient.dtype == dtype
    # The softmax is computed in float32; only the gradient is rounded to the dtype of the logits.
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-5, atol=1e-5)
    tolerance = max(1e-5, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=tolerance, atol=tolerance)
    assert not gradient[..., VOCAB:].any()
    assert losses[0, 0] == losses[5, 2] == 0
    assert not gradient[[0, 5], [0, 2]].any()


@pytest.fixture
def world() -> Iterator[Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def one_gpu(world: Any) -> Iterator[None]:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


def test_the_compiled_loss_keeps_no_float32_copy_of_the_logits(world: Any) -> None:
    logits, labels, _ = _case(VOCAB, torch.bfloat16)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        token_losses(logits.requires_grad_(), labels, world)
    assert [x.dtype for x in kept if x.shape == logits.shape] == [torch.bfloat16]
