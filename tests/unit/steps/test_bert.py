"""BERT train step: targets, losses, refused batches and metrics, computed by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.steps.base import LossTerm
from lightning_megatron.steps.bert import BertTrainStep
from tests.unit.models.test_t5_layout import MODEL as TINY

MODEL = replace(
    TINY,
    family="megatron-bert",
    architecture="bert",
    task="pretraining",
    vocab_size=7,
    num_tokentypes=2,
)
MODEL = replace(MODEL, max_position_embeddings=4)
IDS = torch.tensor([[1, 2, 3], [4, 5, 0]])


def _step(
    task: str,
    *,
    binary_head: bool = True,
    **fields: Any,
) -> BertTrainStep:
    step = BertTrainStep(binary_head)
    step.bind(replace(MODEL, task=task, **fields))
    return step


# ---- losses ---------------------------------------------------------------------------------------------------------

LABELS = torch.tensor(
    [
        [-100, 2, -100],
        [6, -100, 0],
    ]
)
TOKEN_LOSSES = torch.tensor([[9.0, 1.0, 9.0], [2.0, 9.0, 4.0]])
ORDER_LOGITS = torch.tensor([[0.0, 1.0], [2.0, 0.0]])


def test_megatron_and_hugging_face_batches_are_equivalent() -> None:
    hugging_face = {
        "input_ids": IDS,
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "token_type_ids": torch.tensor([[0, 0, 1], [0, 1, 0]]),
        "labels": torch.tensor(
            [
                [-100, 2, -100],
                [6, -100, -100],
            ]
        ),
        "next_sentence_label": torch.tensor([1, 0]),
    }
    megatron = {
        "text": IDS,
        "padding_mask": hugging_face["attention_mask"],
        "types": hugging_face["token_type_ids"],
        "labels": torch.tensor(
            [
                [-1, 2, -1],
                [6, 5, -1],
            ]
        ),
        "loss_mask": torch.tensor([[0, 1, 0], [1, 0, 0]]),
        "is_random": hugging_face["next_sentence_label"],
        "truncated": torch.tensor([0, 1]),
    }
    prepared = _step("pretraining").prepare_batch(megatron)
    expected = _step("pretraining").prepare_batch(hugging_face)
    assert prepared.keys() == expected.keys()
    is_target = expected["loss_mask"] > 0
    assert torch.equal(prepared.pop("targets")[is_target], expected.pop("targets")[is_target])
    assert all(torch.equal(prepared[name], expected[name]) for name in expected)


def test_loss_mask_and_sample_mask_weight_tokens_and_rows() -> None:
    batch = {
        "input_ids": IDS,
        "labels": LABELS,
        "loss_mask": torch.tensor([[1.0, 0.5, 1.0], [1.0, 1.0, 0.0]]),
        "sample_mask": torch.tensor([1.0, 0.25]),
    }
    step = _step("masked_lm")
    step.check_batch(batch)
    prepared = step.prepare_batch(batch)
    terms = step.loss_func(prepared, (TOKEN_LOSSES, None))
    expected = (torch.tensor(0.5 * 1.0 + 0.25 * 2.0), torch.tensor(0.75))
    assert terms == {"lm_loss": LossTerm(*expected)}
    assert step.counts(prepared) == {"lm_loss": expected[1]}


# ---- refusals -------------------------------------------------------------------------------------------------------

LM = {"input_ids": IDS, "labels": LABELS}
PRETRAINING = {**LM, "next_sentence_label": torch.tensor([0, 1])}
CLASSES: dict[str, Any] = {"num_labels": 3, "problem_type": "single_label_classification"}
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Tensor], str]] = {
    "no_order": ("pretraining", {}, LM, r"no 'next_sentence_label'.*binary_head=False"),
    "token": ("masked_lm", {}, {**LM, "input_ids": IDS + 2}, r"input_ids\[1, 1\] is 7 .* 0..6 \(vocab_size=7\)"),
    "left_padding": ("pretraining", {}, {**PRETRAINING, "attention_mask": 1 - IDS // 4}, r"\[1, 0\] is 0.*right"),
    "lm_label": ("masked_lm", {}, {**LM, "labels": LABELS + 1}, r"labels\[0, 0\] is -99 .* -100 for no target"),
    "class": ("sequence_classification", CLASSES, {"input_ids": IDS, "labels": torch.tensor([0, 3])},
              r"labels\[1\] is 3 and must be in 0..2 \(num_labels=3\)"),
    "no_value": ("sequence_classification", {"num_labels": 1},
                 {"input_ids": IDS, "labels": torch.tensor([0, math.nan])}, r"labels\[1\] is nan and must be finite"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_batch_is_refused(case: str) -> None:
    task, fields, batch, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        _step(task, **fields).check_batch(batch)


@pytest.mark.parametrize(("fields", "message"), [
    ({"architecture": "gpt"}, "BertTrainStep trains BERTs, and .* use train_step='gpt'"),
    ({"task": "masked_lm", "binary_head": False}, "binary_head=False: expected task='pretraining', .* got 'masked_lm'"),
    ({"task": "question_answering", "num_labels": 3}, "num_labels=3: expected 2 .* use num_labels=2"),
    ({"task": "sequence_classification", "problem_type": "multi"}, "problem_type='multi' is unknown; choose from"),
    ({"task": "token_classification", "num_labels": 1}, "num_labels=1: expected at least 2 for task='token_cl"),
])  # fmt: skip
def test_unsuitable_model_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _step(**{"task": MODEL.task, **fields})


# ---- metrics --------------------------------------------------------------------------------------------------------


def _compute_metrics(
    step: BertTrainStep, batch: dict[str, Tensor], output: Any
) -> dict[str, float]:
    prepared = step.prepare_batch(batch)
    metrics = step.metrics()
    step.update_metrics(metrics, prepared, output)
    # Padding rows, which repeat the last row, must not count.
    last = {name: tensor[-1:] for name, tensor in prepared.items()}
    padding = {name: tensor[1:] for name, tensor in step.pad_rows(last, 4).items()}
    step.update_metrics(metrics, padding, _repeat_last_row(output, 3))
    return {name: float(metric.compute()) for name, metric in metrics.items()}


def _repeat_last_row(output: Any, number: int) -> Any:
    if isinstance(output, tuple):
        return tuple(_repeat_last_row(part, number) for part in output)
    return output[-1:].expand(number, *output.shape[1:])


def _one_hot(
    classes: list[int] | list[list[int]],
    width: int,
) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(classes), width).float()


MEASURED: dict[str, tuple[str, dict[str, Any], dict[str, Tensor], Any, dict[str, float]]] = {
    "masked tokens and sentence order": (
        "pretraining", {}, PRETRAINING, (TOKEN_LOSSES, ORDER_LOGITS),
        {"perplexity": math.exp(7 / 3), "sop_accuracy": 0.0},
    ),
    "classes, the last one ignored": (
        "sequence_classification", {"num_labels": 3},
        {"input_ids": IDS.repeat(3, 1), "labels": torch.tensor([0, 1, 2, 2, 1, -100])}, _one_hot([0, 2, 2, 1, 1, 0], 3),
        {"accuracy": 3 / 5, "f1": (1 + 1 / 2 + 1 / 2) / 3},
    ),
    "classes of tokens": (
        "token_classification", {},
        {"input_ids": IDS, "labels": torch.tensor([[-100, 1, 0], [0, -100, 1]])}, _one_hot([[1, 1, 1], [0, 0, 1]], 2),
        {"accuracy": 3 / 4, "f1": (2 / 3 + 4 / 5) / 2},
    ),
    # All in 0..1, where torchmetrics would treat logits as probabilities.
    "multi-label by the sign of the logits": (
        "sequence_classification", {},
        {"input_ids": IDS, "labels": torch.tensor([[1.0, 0.0], [0.0, 1.0]])}, torch.tensor([[0.1, -0.1], [0.2, 0.3]]),
        {"accuracy": 3 / 4, "f1": (2 / 3 + 1) / 2},
    ),
    "regression by squared error": (
        "sequence_classification", {"num_labels": 1},
        {"input_ids": IDS, "labels": torch.tensor([0.5, -1.0])}, torch.tensor([[1.0], [1.0]]),
        {"mse": 4.25 / 2},
    ),
    "answers with both ends correct": (
        "question_answering", {},
        {"input_ids": IDS, "start_positions": torch.tensor([0, 0]), "end_positions": torch.tensor([2, 2])},
        _one_hot([[0, 2], [1, 2]], 3).transpose(1, 2),
        {"exact_match": 1 / 2},
    ),
}  # fmt: skip
"""Task, model fields, batch, model output, and expected metrics."""


@pytest.mark.parametrize("case", MEASURED)
def test_metrics_equal_values_computed_by_hand(case: str) -> None:
    task, fields, batch, output, expected = MEASURED[case]
    assert _compute_metrics(_step(task, **fields), batch, output) == {
        n: pytest.approx(x) for n, x in expected.items()
    }
