"""Training on packed rows (documents, instructions) equals Hugging Face's model on one text at a time."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron.data.instruction_rows import InstructionSamples
from lightning_megatron.data.instructions import Instructions
from tests.marks import exhaustive
from tests.models import VOCAB_SIZE
from tests.parity.comparison import assert_same_gradients
from tests.parity.hugging_face import hugging_face_model, tensors_of
from tests.parity.sharding import Tensors
from tests.parity.training import (
    CP2,
    FOUR_RANKS,
    INTERLEAVED,
    SEQ_LENGTH,
    Case,
    Layout,
    Outcome,
    Sentences,
    module_of,
    train_module,
)
from tests.ranks import run_ranks

Texts = list[tuple[Tensor, Tensor]]
"""Tokens, and which of them are targets."""
Rows = list[dict[str, Tensor]]

EOD = 3
SWITCHES = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
ENDS = (
    (4, 9),
    (15,),
    (0, 1, 7, 15),
    (),
)
LENGTHS = (
    5,
    16,
    3,
    8,
    2,
    7,
    4,
    9,
    6,
)


def _documents() -> tuple[Rows, Texts, dict[str, Any]]:
    """Packed rows, the texts in them, and options of ``GPTTrainStep``."""
    rows = []
    texts = []
    for row, ends in zip(Sentences(len(ENDS)).tokens, ENDS, strict=True):
        tokens = row.masked_fill(row == EOD, EOD + 1)
        tokens[list(ends)] = EOD
        rows.append({"input_ids": tokens})
        texts += [
            (text, text >= 0)
            for text in torch.tensor_split(tokens, [end + 1 for end in ends])
            if len(text)
        ]
    return rows, texts, {"eod_token": EOD, **dict.fromkeys(SWITCHES, True)}


def _instructions() -> tuple[Rows, Texts, dict[str, Any]]:
    """Packed rows and their texts: half of the tokens on average belong to answers, never a text's first."""
    generator = np.random.default_rng(5)
    starts = np.cumsum([0, *LENGTHS])
    is_answer = generator.random(starts[-1]) < 0.5
    is_answer[starts[1:] - 1] = True
    is_answer[starts[:-1]] = False
    tokens = generator.integers(0, VOCAB_SIZE, starts[-1]).astype(np.int32)
    instructions = Instructions(
        tokens=tokens, is_answer=is_answer, starts=starts, padding_token=np.array(0)
    )
    samples = InstructionSamples(instructions, SEQ_LENGTH, packing_seed=1234)
    assert len(samples) == 4, "expected several samples per row, and some padding"
    packed = samples.rows(range(4))
    texts = [
        tuple(map(torch.from_numpy, instructions.sample(index)))
        for index in range(len(instructions))
    ]
    return [{name: tensor[row] for name, tensor in packed.items()} for row in range(4)], texts, {}  # type: ignore[return-value]


def _flattened() -> tuple[Rows, Texts, dict[str, Any]]:
    """Packed rows as ``DataCollatorWithFlattening`` makes them: positions alone tell where a text begins."""
    rows, texts, options = _instructions()
    for row in rows:
        del row["attention_mask"]
    return rows, texts, options


_ROWS = {"documents": _documents, "instructions": _instructions, "flattened": _flattened}


def _train_packed(
    case: Case,
    rows: Rows,
    options: dict[str, Any],
) -> Outcome:
    from lightning_megatron import GPTTrainStep

    step = GPTTrainStep(**options)
    loader: DataLoader[Any] = DataLoader(rows, batch_size=len(rows))  # type: ignore[arg-type]
    return train_module(module_of(case, train_step=step), case, loader, collect=tensors_of)


def _train_one_text_at_a_time(
    case: Case,
    weights: Tensors,
    texts: Texts,
) -> tuple[float, Tensors]:
    """Mean loss over all targets, and its gradients."""
    model = hugging_face_model(case, weights)
    losses = []
    for tokens, is_target in texts:
        logits = model(input_ids=tokens[None].long()).logits[0, :-1]
        losses.append(F.cross_entropy(logits, tokens[1:].long(), reduction="none")[is_target[1:]])
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("kind", "model", "layout"),
    [
        ("documents", "gpt2", FOUR_RANKS),
        ("documents", "llama", INTERLEAVED),
        exhaustive("documents", "gpt2", CP2),
        ("documents", "llama", Layout(cp=4)),
        ("instructions", "llama", FOUR_RANKS),
        ("flattened", "gpt2", Layout()),
    ],
    ids=str,
)
def test_packed_rows_equal_separate_texts(kind: str, model: str, layout: Layout) -> None:
    rows, texts, options = _ROWS[kind]()
    case = Case(model=model, layout=layout, steps=1)
    ours = run_ranks(_train_packed, layout.world_size, case, rows, options)[0]
    ((loss, gradients),) = run_ranks(
        _train_one_text_at_a_time, 1, case, ours.initial_weights, texts
    )
    # Sums of a few dozen losses in a different order.
    assert ours.losses == pytest.approx([loss], rel=1.5e-6)
    assert_same_gradients(ours.gradients, gradients)
