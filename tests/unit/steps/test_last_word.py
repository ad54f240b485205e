"""A row is right exactly if every target is what argmax finds, wherever the vocabulary lies."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

_VOCAB = 12


def _logits() -> torch.Tensor:
    """[4, 50, 12] of few values, so that the largest is there several times, in one shard or in both."""
    logits = torch.randint(0, 4, (4, 50, _VOCAB), generator=torch.Generator().manual_seed(1)).float()
    logits[..., 9:] = -torch.inf  # padding
    logits[0, :10, :6] = -torch.inf
    return logits


def _predicted() -> torch.Tensor:
    from lightning_megatron.steps.base import predicted_tokens

    dist.init_process_group("gloo")
    width = _VOCAB // dist.get_world_size()
    shard = _logits()[..., dist.get_rank() * width : (dist.get_rank() + 1) * width]
    predicted = predicted_tokens(shard.to(torch.bfloat16), dist.group.WORLD)  # type: ignore[arg-type]
    dist.destroy_process_group()
    return predicted


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_of_several_largest_logits_the_first_counts_as_in_argmax(world_size: int) -> None:
    for predicted in run_ranks(_predicted, world_size):
        assert torch.equal(predicted, _logits().argmax(-1))


def test_rows_count_once_and_only_with_targets() -> None:
    from lightning_megatron.steps.gpt import LastWordTrainStep, TokenOutput

    step = LastWordTrainStep()
    metrics = step.metrics()
    mask = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0], [0.5, 0, 0]])
    right = torch.tensor([[0, 1, 1], [1, 1, 0], [0, 0, 1], [1, 1, 1], [1, 0, 0]]).bool()
    for rows in (slice(0, 2), slice(2, 5)):
        output = TokenOutput(losses=torch.ones(5, 3)[rows], is_predicted=right[rows])
        step.update_metrics(metrics, {"loss_mask": mask[rows]}, output)
    # All of the second row's targets but one are right; the fourth row has none.
    assert metrics["last_word_accuracy"].compute().item() == 3 / 4
    assert metrics["perplexity"].compute().item() == pytest.approx(torch.e)
