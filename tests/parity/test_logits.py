"""Does the model answer as Hugging Face's does, with padding at either end of the rows and of the vocabulary?"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from tests.parity.hugging_face import in_hugging_face_names
from tests.parity.logits import Answer, Rows, answer, hugging_face_answer, whole_logits
from tests.parity.sharding import whole, without_vocabulary_padding
from tests.parity.training import VOCAB_SIZE, Case, Layout, Sentences, outcome, train
from tests.ranks import run_ranks

LENGTHS = (16, 9, 1, 12)
FOUR_RANKS = Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2)

# The logits are about 1 in size and come out of four layers in another order of additions.
ATOL = 5e-6


@functools.cache
def padded_rows(side: str) -> Rows:
    """Sentences of different lengths; labels are the tokens, and -100 on padding and on a token that follows padding.

    What a padding position predicts means nothing: two implementations of Hugging Face's attention differ there.
    """
    rows = []
    for sentence, length in zip(Sentences(len(LENGTHS)), LENGTHS, strict=False):
        mask = torch.zeros_like(sentence["input_ids"])
        mask[slice(None, length) if side == "right" else slice(-length, None)] = 1
        is_target = (mask == 1) & (mask.roll(1) == 1)
        rows.append({**sentence, "labels": sentence["labels"].masked_fill(~is_target, -100), "attention_mask": mask})
    return rows


def _against_hugging_face(case: Case, rows: Rows) -> None:
    answers: list[Answer] = run_ranks(answer, case.layout.world_size, case, rows)
    weights = without_vocabulary_padding(whole([a.weights for a in answers]), VOCAB_SIZE)
    ((logits, loss),) = run_ranks(hugging_face_answer, 1, case, in_hugging_face_names(weights, case), rows)
    real = torch.stack([row["attention_mask"] for row in rows]).bool()
    torch.testing.assert_close(whole_logits(answers)[..., :VOCAB_SIZE][real], logits[real], rtol=0, atol=ATOL)
    assert [a.loss for a in answers] == pytest.approx([loss] * len(answers), rel=1e-6)


@pytest.mark.parametrize("layout", [Layout(), FOUR_RANKS], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_padded_sentences_get_the_logits_and_the_loss_of_hugging_face(model: str, side: str, layout: Layout) -> None:
    _against_hugging_face(Case(model=model, layout=layout), padded_rows(side))


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_given_positions_are_used_as_hugging_face_uses_them(model: str) -> None:
    # Not a shift of 0, 1, 2, ..., which rotary embeddings could not see.
    positions = torch.tensor([0, 0, 3, 4, 4, 1, 2, 9, 8, 7, 15, 15, 14, 2, 1, 0])
    mask = torch.ones_like(positions)
    rows = [{**row, "position_ids": positions.roll(i), "attention_mask": mask} for i, row in enumerate(Sentences(4))]
    _against_hugging_face(Case(model=model, layout=FOUR_RANKS), rows)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4), FOUR_RANKS], ids=str)
def test_padding_of_the_vocabulary_never_wins(layout: Layout) -> None:
    # With tp=4 the last rank has nothing but padding.
    case = Case(layout=layout, make_vocab_size_divisible_by=32)
    logits = whole_logits(run_ranks(answer, layout.world_size, case, list(Sentences(4))))
    assert logits.shape[-1] == (128 if layout.tp > 1 else 96)
    assert (logits[..., VOCAB_SIZE:] == -torch.inf).all()
    assert logits[..., :VOCAB_SIZE].isfinite().all()


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4, sequence_parallel=True)], ids=str)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_padding_of_the_vocabulary_gets_no_gradient_and_stays_zero(model: str, layout: Layout) -> None:
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
