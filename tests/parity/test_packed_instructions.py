"""Instructions that share a row are learned as by Hugging Face's model, which reads one at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_megatron.data.instructions import Instructions, InstructionSamples
from tests.parity.comparison import assert_same_gradients
from tests.parity.hugging_face import hugging_face_model, outcome_in_hugging_face_names, train_in_hugging_face_names
from tests.parity.sharding import Tensors
from tests.parity.training import SEQ_LENGTH, VOCAB_SIZE, Case, Layout, RankOutcome
from tests.ranks import run_ranks

LENGTHS = (5, 16, 3, 8, 2, 7, 4, 9, 6)
ROWS = 4


def _instructions() -> Instructions:
    """Every second token on average is an answer's; never the first."""
    generator = np.random.default_rng(5)
    starts = np.cumsum([0, *LENGTHS])
    is_answer = generator.random(starts[-1]) < 0.5
    is_answer[starts[1:] - 1], is_answer[starts[:-1]] = True, False
    tokens = generator.integers(0, VOCAB_SIZE, starts[-1]).astype(np.int32)
    return Instructions(tokens=tokens, is_answer=is_answer, starts=starts, padding_token=np.array(0))


def _train_packed(case: Case) -> RankOutcome:
    samples = InstructionSamples(_instructions(), SEQ_LENGTH, pack_by=1234)
    assert len(samples) == ROWS, "several samples a row, and some padding"
    rows = samples.rows(range(ROWS))
    items = [{name: tensor[row] for name, tensor in rows.items()} for row in range(ROWS)]
    loader: DataLoader[dict[str, torch.Tensor]] = DataLoader(items, batch_size=ROWS)  # type: ignore[arg-type]
    return train_in_hugging_face_names(case, loader)


def _learn_one_at_a_time(case: Case, weights: Tensors) -> tuple[float, Tensors]:
    """Mean loss over all answers, and its gradients."""
    model, instructions = hugging_face_model(case, weights), _instructions()
    losses = []
    for index in range(len(instructions)):
        tokens, is_answer = (torch.from_numpy(part) for part in instructions.sample(index))
        logits = model(input_ids=tokens[None].long()).logits[0, :-1]
        losses.append(F.cross_entropy(logits, tokens[1:].long(), reduction="none")[is_answer[1:]])
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_packed_instructions_are_learned_as_one_at_a_time() -> None:
    layout = Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2)
    case = Case(model="llama", layout=layout, steps=1)
    ours = outcome_in_hugging_face_names(case, _train_packed)
    ((loss, gradients),) = run_ranks(_learn_one_at_a_time, 1, case, ours.initial_weights)
    # Sums of a few dozen losses in another order.
    assert ours.losses == pytest.approx([loss], rel=1.5e-6)
    assert_same_gradients(ours.gradients, gradients)
