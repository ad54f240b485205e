"""Train steps of GPTs' labels and of rewards: targets, losses, metrics and refused batches, computed by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_megatron.convert.registry import model_config
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.steps import train_step_named
from lightning_megatron.steps.classification import ClassificationTrainStep
from lightning_megatron.steps.gpt import GPTTrainStep, LastWordTrainStep
from lightning_megatron.steps.reward import RewardTrainStep
from tests.unit.models.test_t5_layout import MODEL as TINY

MODEL = replace(TINY, family="llama", architecture="gpt", vocab_size=7)
MODEL = replace(MODEL, max_position_embeddings=4)
IDS = torch.tensor([[1, 2, 3], [4, 5, 0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
NO_TOKENS = torch.tensor([[1, 1, 1], [0, 0, 0]])


def _step(task: str, **fields: Any) -> ClassificationTrainStep:
    step = ClassificationTrainStep()
    step.bind(replace(MODEL, task=task, **fields))
    return step


def _reward_step() -> RewardTrainStep:
    step = RewardTrainStep()
    step.bind(replace(MODEL, task="sequence_classification", num_labels=1))
    return step


# ---- which step -----------------------------------------------------------------------------------------------------


def test_name_and_task_choose_the_step() -> None:
    assert type(train_step_named("gpt", "causal_lm")) is GPTTrainStep
    assert type(train_step_named("gpt", "token_classification")) is ClassificationTrainStep
    assert type(train_step_named("reward", "sequence_classification")) is RewardTrainStep


@pytest.mark.parametrize(
    ("step", "fields", "message"),
    [
        (
            LastWordTrainStep(),
            {"task": "sequence_classification"},
            "LastWordTrainStep trains language models, and this llama has a head for task='sequence_cl",
        ),
        (
            ClassificationTrainStep(),
            {},
            "ClassificationTrainStep trains heads for .* and this llama has task='causal_lm'; give",
        ),
        (
            ClassificationTrainStep(),
            {"architecture": "bert"},
            "trains GPTs, and llama is a BERT; use train_step='bert'",
        ),
        (
            ClassificationTrainStep(),
            {"task": "token_classification", "num_labels": 1},
            "num_labels=1: expected at least 2 for task='token_cl",
        ),
        (
            RewardTrainStep(),
            {"task": "sequence_classification"},
            "train_step='reward': expected task='sequence_classification' and num_labels=1, .* num_labels=2",
        ),
        (RewardTrainStep(), {}, "got task='causal_lm'"),
    ],
)
def test_unsuitable_model_is_refused(
    step: Any,
    fields: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        step.bind(replace(MODEL, **fields))
    assert "\n" not in str(error.value)


# ---- labels ---------------------------------------------------------------------------------------------------------

ROWS = {"input_ids": IDS, "attention_mask": MASK}
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor], str]] = {
    "no labels": ("sequence_classification", {}, ROWS, "have no 'labels', which ClassificationTrainStep for task"),
    "class": ("sequence_classification", {}, {**ROWS, "labels": torch.tensor([0, 2])},
              r"labels\[1\] is 2 and must be in 0..1 \(num_labels=2\)"),
    "shape": ("sequence_classification", {"problem_type": "regression"}, {**ROWS, "labels": torch.zeros(2)},
              r"labels has the shape \[2\] and must have \[2, 2\] \(num_labels=2, problem_type='regression'\)"),
    "class of a token": ("token_classification", {}, {**ROWS, "labels": torch.full((2, 3), 5)}, r"labels\[0, 0\] is 5"),
    "no token": ("sequence_classification", {}, {
        "input_ids": IDS, "attention_mask": NO_TOKENS, "labels": torch.tensor([0, 1]),
    }, r"attention_mask\[1\] is 0 everywhere, and the head reads the last token"),
    "weights of rows": ("sequence_classification", {}, {
        **ROWS, "labels": torch.tensor([0, 1]), "loss_mask": torch.ones(2, 3),
    }, "batch key 'loss_mask' is not understood"),
    "types": ("sequence_classification", {}, {**ROWS, "labels": torch.tensor([0, 1]), "token_type_ids": IDS},
              "'token_type_ids' is not understood"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_batch_is_refused(case: str) -> None:
    task, fields, batch, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        _step(task, **fields).check_batch(dict(batch))


def test_rows_that_do_not_count_may_be_empty() -> None:
    batch = {
        "input_ids": IDS,
        "attention_mask": NO_TOKENS,
        "labels": torch.tensor([0, 1]),
        "sample_mask": torch.tensor([1.0, 0.0]),
    }
    _step("sequence_classification").check_batch(batch)
    whole = {**ROWS, "attention_mask": torch.ones_like(IDS), "labels": torch.tensor([0, 1])}
    _step("sequence_classification").check_batch(whole)
    assert "attention_mask" not in whole


def test_weights_of_rows_and_tokens_count_in_the_loss() -> None:
    step = _step("token_classification")
    batch = {
        "input_ids": IDS,
        "labels": torch.tensor([[0, -100, 1], [1, 0, -100]]),
        "loss_mask": torch.tensor([[1.0, 1.0, 0.5], [1.0, 0.0, 1.0]]),
        "sample_mask": torch.tensor([1.0, 0.25]),
    }
    step.check_batch(batch)
    prepared = step.prepare_batch(batch)
    terms = step.loss_func(prepared, torch.zeros(2, 3, 2))
    weights = 1.0 + 0.5 + 0.25
    assert terms["label_loss"].targets.item() == weights
    assert terms["label_loss"].sum.item() == pytest.approx(weights * math.log(2))
    metrics = step.metrics()
    step.update_metrics(metrics, prepared, torch.tensor([[[1.0, 0.0]] * 3] * 2))
    assert float(metrics["accuracy"].compute()) == pytest.approx(1 / 3)


# ---- rewards --------------------------------------------------------------------------------------------------------


def _pairs(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"chosen_input_ids": IDS, "rejected_input_ids": IDS[:, :2], **changes}


def test_pairs_are_padded_to_one_length() -> None:
    step = _reward_step()
    prepared = step.prepare_batch(_pairs(chosen_attention_mask=MASK))
    assert prepared["tokens"].tolist() == [[[1, 2, 3], [1, 2, 0]], [[4, 5, 0], [4, 5, 0]]]
    assert prepared["attention_mask"].tolist() == [[[1, 1, 1], [1, 1, 0]], [[1, 1, 0], [1, 1, 0]]]
    assert step.seq_length(prepared) == 3
    assert "attention_mask" not in step.prepare_batch(_pairs(rejected_input_ids=IDS))


def test_loss_and_metrics_of_pairs_equal_hand_calculation() -> None:
    step = _reward_step()
    prepared = step.prepare_batch(_pairs(sample_mask=torch.tensor([1.0, 0.5])))
    rewards = torch.tensor([[2.0], [0.5], [-1.0], [1.0]])
    loss = step.loss_func(prepared, rewards)["reward_loss"]
    of_pairs = [math.log(1 + math.exp(-1.5)), math.log(1 + math.exp(2.0))]
    assert loss.sum.item() == pytest.approx(of_pairs[0] + 0.5 * of_pairs[1])
    assert loss.targets.item() == 1.5
    metrics = step.metrics()
    step.update_metrics(metrics, prepared, rewards)
    padded = step.pad_rows(prepared, 5)
    padding = {name: tensor[2:] for name, tensor in padded.items()}
    step.update_metrics(metrics, padding, torch.full((6, 1), 9.0))
    assert float(metrics["accuracy"].compute()) == pytest.approx(1 / 1.5)
    assert float(metrics["margin"].compute()) == pytest.approx((1.5 - 0.5 * 2.0) / 1.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rejected_input_ids": IDS + 3}, r"rejected_input_ids\[1, 0\] is 7 and must be in 0..6"),
        ({"rejected_input_ids": IDS[:1]}, r"rejected_input_ids has the shape \[1, 3\] .* \[2, 3\]"),
        (
            {"chosen_attention_mask": 2 * MASK},
            r"chosen_attention_mask\[0, 0\] is 2 .* 0 for padding or 1",
        ),
        ({"chosen_attention_mask": NO_TOKENS}, r"chosen_attention_mask\[1\] is 0 everywhere"),
        ({"labels": IDS}, "'labels' is not understood by RewardTrainStep"),
    ],
)
def test_invalid_pairs_are_refused(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(DataError, match=message):
        _reward_step().check_batch(_pairs(**changes))


def test_pairs_without_the_rejected_sequence_are_refused() -> None:
    with pytest.raises(DataError, match="have no 'rejected_input_ids', which RewardTrainStep"):
        _reward_step().check_batch({"chosen_input_ids": IDS})


# ---- configs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "dropout"),
    [
        ({"model_type": "llama"}, 0.1),
        ({"model_type": "llama", "classifier_dropout": 0.3}, 0.3),
        ({"model_type": "falcon", "hidden_dropout": 0.2}, 0.2),
        ({"model_type": "gpt_neox", "classifier_dropout": 0.0}, 0.0),
    ],
)
def test_dropout_of_heads_is_that_of_transformers(fields: dict[str, Any], dropout: float) -> None:
    assert model_config(fields, "token_classification").classifier_dropout == dropout
    assert model_config(fields, "sequence_classification").classifier_dropout == 0.0
