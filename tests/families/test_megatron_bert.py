"""Megatron-BERT: norms before each block, token types, and the heads of five tasks."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.families.parity import LAYOUTS, VOCAB_SIZE, Rows, check_family, tiny_model
from tests.parity.training import Layout

LENGTHS = (16, 9, 5, 12)
PAD = 3
TOKEN_TYPES = 3
NUM_LABELS = 5
FOUR_RANKS = Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2)
ONE_AND_FOUR_RANKS = (Layout(), FOUR_RANKS)


@functools.cache
def _model(head: str, num_labels: int = 2, problem_type: str | None = None) -> Any:
    import transformers

    config = transformers.MegatronBertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=24,
        type_vocab_size=TOKEN_TYPES,
        pad_token_id=PAD,
        layer_norm_eps=1e-3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=num_labels,
        problem_type=problem_type,
    )
    return tiny_model(getattr(transformers, f"MegatronBertFor{head}"), config)


def _sentences(**labels: torch.Tensor) -> Rows:
    """Padded rows with token types and, at real positions, padding's own token too."""
    generator = torch.Generator().manual_seed(5)
    shape = (len(LENGTHS), max(LENGTHS))
    mask = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).long()
    tokens = torch.randint(0, VOCAB_SIZE, shape, generator=generator).masked_fill(mask == 0, PAD)
    tokens[:, 2] = PAD
    types = torch.randint(0, TOKEN_TYPES, shape, generator=generator)
    batch = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": types, **labels}
    return [{name: tensor[row] for name, tensor in batch.items()} for row in range(shape[0])]


def _labels_of_tokens(limit: int) -> torch.Tensor:
    """About half of the real tokens have a label; each row has another number of them, the second none."""
    generator = torch.Generator().manual_seed(6)
    labels = torch.randint(0, limit, (len(LENGTHS), max(LENGTHS)), generator=generator)
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    labelled = real & (torch.rand(labels.shape, generator=generator) < 0.5)
    labelled[1] = False
    return labels.masked_fill(~labelled, -100)


def _pretraining_rows() -> Rows:
    return _sentences(labels=_labels_of_tokens(VOCAB_SIZE), next_sentence_label=torch.tensor([1, 0, -100, 1]))


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(tp=2, sequence_parallel=True)], ids=str)
def test_pretraining_equals_hugging_face_in_every_layout(layout: Layout) -> None:
    check_family(_model("PreTraining"), layout, _pretraining_rows())


@pytest.mark.parametrize("layout", ONE_AND_FOUR_RANKS, ids=str)
def test_masked_lm_equals_hugging_face(layout: Layout) -> None:
    check_family(_model("MaskedLM"), layout, _sentences(labels=_labels_of_tokens(VOCAB_SIZE)))


ROW_LABELS = {
    "one_value": (1, None, torch.tensor([0.5, -1.25, 2.0, 0.0])),
    "values": (3, "regression", torch.linspace(-1, 1, 12).view(4, 3)),
    "classes": (NUM_LABELS, None, torch.tensor([4, 0, -100, 2])),
    "several_labels": (3, None, (torch.arange(12).view(4, 3) % 2).float()),
}


@pytest.mark.parametrize("layout", ONE_AND_FOUR_RANKS, ids=str)
@pytest.mark.parametrize("kind", ROW_LABELS)
def test_sequence_classification_equals_hugging_face(kind: str, layout: Layout) -> None:
    num_labels, problem_type, labels = ROW_LABELS[kind]
    check_family(_model("SequenceClassification", num_labels, problem_type), layout, _sentences(labels=labels))


@pytest.mark.parametrize("layout", ONE_AND_FOUR_RANKS, ids=str)
def test_token_classification_equals_hugging_face(layout: Layout) -> None:
    rows = _sentences(labels=_labels_of_tokens(NUM_LABELS))
    check_family(_model("TokenClassification", NUM_LABELS), layout, rows)


@pytest.mark.parametrize("layout", ONE_AND_FOUR_RANKS, ids=str)
def test_question_answering_equals_hugging_face_with_answers_outside_the_row(layout: Layout) -> None:
    starts, ends = torch.tensor([0, 3, 16, 15]), torch.tensor([4, 8, 99, 15])
    check_family(_model("QuestionAnswering"), layout, _sentences(start_positions=starts, end_positions=ends))
