"""Dropout masks differ where ranks hold different numbers, and are equal where they hold the same ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.parity.comparison import assert_same_run
from tests.parity.dropout_masks import DROPOUT, PROBABILITY, Masks, dropout_masks, independent
from tests.parity.training import SEQ_LENGTH, Case, Layout, outcome
from tests.ranks import run_ranks

CASE = Case(model_fields=DROPOUT)
NUM_LAYERS = 4
FOUR_RANKS = Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2)


def _masks(layout: Layout) -> list[Masks]:
    return run_ranks(dropout_masks, layout.world_size, replace(CASE, layout=layout))


def _visible(mask: torch.Tensor) -> torch.Tensor:
    """The part of an attention mask that causality leaves."""
    return mask[..., torch.ones(SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool).tril()]


def test_tensor_parallel_ranks_drop_the_same_activations_and_different_attention_weights() -> None:
    first, second = _masks(Layout(tp=2))
    assert len(first.activations) == len(second.activations) == 1 + 2 * NUM_LAYERS
    assert all(torch.equal(a, b) for a, b in zip(first.activations, second.activations, strict=True))
    assert len(first.attention) == len(second.attention) == NUM_LAYERS
    assert all(independent(_visible(a), _visible(b)) for a, b in zip(first.attention, second.attention, strict=True))


def test_under_sequence_parallelism_each_rank_drops_its_own_part_of_the_activations() -> None:
    first, second = _masks(Layout(tp=2, sequence_parallel=True))
    assert all(mask.shape[0] == SEQ_LENGTH // 2 for mask in first.activations)
    assert all(independent(a, b) for a, b in zip(first.activations, second.activations, strict=True))
    assert all(independent(_visible(a), _visible(b)) for a, b in zip(first.attention, second.attention, strict=True))


@pytest.mark.parametrize("how", ["a2a", pytest.param("all_gather", marks=pytest.mark.exhaustive)])
def test_context_parallel_ranks_drop_different_activations_and_attention_weights(how: Any) -> None:
    first, second = _masks(Layout(cp=2, cp_comm_type=how))
    assert all(mask.shape[0] == SEQ_LENGTH // 2 for mask in first.activations)
    assert all(independent(a, b) for a, b in zip(first.activations, second.activations, strict=True))
    heads = {"a2a": (2, SEQ_LENGTH, SEQ_LENGTH), "all_gather": (4, SEQ_LENGTH // 4, SEQ_LENGTH // 4)}[how]
    assert first.attention[0].shape[1:] == heads
    if how == "a2a":
        pairs = zip(first.attention, second.attention, strict=True)
        assert all(independent(_visible(a), _visible(b)) for a, b in pairs)


def test_stages_and_microbatches_and_layers_drop_different_activations() -> None:
    first, second = _masks(Layout(pp=2, num_microbatches=2))
    per_microbatch = len(first.activations) // 2
    embedding, *blocks = first.activations[:per_microbatch]
    assert per_microbatch == 1 + NUM_LAYERS
    assert independent(blocks[0], blocks[1])
    assert independent(embedding, first.activations[per_microbatch])
    assert all(independent(a, b) for a, b in zip(blocks, second.activations, strict=False))


def test_the_configured_share_is_dropped() -> None:
    (masks,) = _masks(Layout())
    for mask in [*masks.activations, *(_visible(m) for m in masks.attention)]:
        assert mask.float().mean().item() == pytest.approx(PROBABILITY, abs=0.03)


def test_nothing_is_dropped_in_validation() -> None:
    (masks,) = run_ranks(_validation_masks, 1)
    assert masks.activations == masks.attention == []


def _validation_masks() -> Masks:
    return dropout_masks(CASE, validate=True)


def _recomputing(layout: Layout, mode: str) -> Layout:
    if mode == "selective":
        return replace(layout, recompute="selective")
    return replace(layout, recompute="full", recompute_method=mode)


@pytest.mark.parametrize("mode", ["selective", "uniform", pytest.param("block", marks=pytest.mark.exhaustive)])
def test_recomputed_activations_are_dropped_where_they_were(mode: str) -> None:
    # ``outcome`` also checks that ranks with the same weights keep the same weights.
    case = replace(CASE, layout=FOUR_RANKS, steps=2)
    assert_same_run(outcome(replace(case, layout=_recomputing(FOUR_RANKS, mode))), outcome(case))


@pytest.mark.gpu(2)
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, sequence_parallel=True)], ids=str)
def test_recomputed_activations_are_dropped_where_they_were_on_gpus(layout: Layout) -> None:
    # Only the first layer is recomputed beside all four. Without recomputation other kernels drop, by other numbers.
    case = replace(CASE, layout=layout, steps=3, accelerator="gpu")
    # In fp32: one other mask would change the loss by far more than rounding does.
    assert_same_run(*(outcome(replace(case, layout=_recomputing(layout, mode))) for mode in ("uniform", "block")))
