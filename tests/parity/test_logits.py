"""Rows that pad the vocabulary never win, get no gradient and change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.parity.logits import answer, whole_logits
from tests.parity.sharding import whole
from tests.parity.training import VOCAB_SIZE, Case, Layout, Sentences, outcome, train
from tests.ranks import run_ranks

LENGTHS = (16, 9, 1, 12)
FOUR_RANKS = Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2)

# The logits are about 1 in size and come out of four layers in another order of additions.
ATOL = 5e-6


@pytest.mark.parametrize("layout", [Layout(tp=4), FOUR_RANKS], ids=str)
def test_padding_of_the_vocabulary_never_wins(layout: Layout) -> None:
    # With tp=4 the last rank has nothing but padding.
    case = Case(layout=layout, make_vocab_size_divisible_by=32)
    logits = whole_logits(run_ranks(answer, layout.world_size, case, list(Sentences(4))))
    assert logits.shape[-1] == (128 if layout.tp > 1 else 96)
    assert (logits[..., VOCAB_SIZE:] == -torch.inf).all()
    assert logits[..., :VOCAB_SIZE].isfinite().all()


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_padding_of_the_vocabulary_gets_no_gradient_and_stays_zero(model: str) -> None:
    layout = Layout(tp=2, sequence_parallel=True)
    case = Case(model=model, layout=layout, steps=2, make_vocab_size_divisible_by=32)
    ranks = run_ranks(train, layout.world_size, case)
    for tensors in (whole([r.gradients for r in ranks]), whole([r.weights for r in ranks])):
        vocabulary = [t for name, t in tensors.items() if "word_embeddings" in name or "output_layer" in name]
        assert all(t.shape[0] > VOCAB_SIZE and (t[VOCAB_SIZE:] == 0).all() for t in vocabulary)
        assert all((t[:VOCAB_SIZE] != 0).any() for t in vocabulary)


def test_a_rank_with_nothing_but_padding_rows_changes_nothing() -> None:
    case = Case(layout=Layout(tp=4), make_vocab_size_divisible_by=32, steps=3)
    reference = replace(case.on_one_process, make_vocab_size_divisible_by=1)
    torch.testing.assert_close(outcome(case).losses, outcome(reference).losses, rtol=1.5e-6, atol=0)
