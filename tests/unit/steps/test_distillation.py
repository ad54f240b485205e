"""Train step of distillation: divergences by hand, prepared and refused batches, refused options."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.steps.distillation import DistillationTrainStep
from tests.unit.steps.test_classification import MODEL

IDS = torch.tensor([[1, 2, 3], [4, 5, 0]])
TOP_IDS = torch.tensor([[[1, 2], [3, 4], [0, -1]]]).expand(2, 3, 2).clone()
TOP_LOGITS = torch.tensor([[[1.0, 0.5], [2.0, 2.0], [0.0, torch.inf]]]).expand(2, 3, 2).clone()
BATCH = {"input_ids": IDS, "teacher_ids": TOP_IDS, "teacher_logits": TOP_LOGITS}


def _step(**options: Any) -> DistillationTrainStep:
    step = DistillationTrainStep(**options)
    step.bind(MODEL)
    return step


def test_terms_are_weighted_in_the_loss_alone() -> None:
    step = _step(temperature=2.0, alpha=0.25)
    output = torch.tensor([[[1.0, 0.5], [3.0, 0.1], [9.0, 9.0]]])
    terms = step.loss_func({"loss_mask": torch.tensor([[1.0, 0.5, 0.0]])}, output)
    assert terms["lm_loss"].sum.item() == pytest.approx(2.5)
    assert terms["kl_loss"].sum.item() == pytest.approx(0.55)
    assert terms["distillation_loss"].sum.item() == pytest.approx(0.75 * 2.5 + 0.25 * 4 * 0.55)
    assert {term.targets.item() for term in terms.values()} == {1.5}


def test_top_logits_are_prepared_with_the_inputs() -> None:
    step = _step()
    batch = {**BATCH, "attention_mask": torch.ones_like(IDS)}
    step.check_batch(batch)
    assert "attention_mask" not in batch
    prepared = step.prepare_batch(batch)
    assert prepared.keys() == {"tokens", "targets", "loss_mask", "teacher_ids", "teacher_logits"}
    assert prepared["teacher_ids"].tolist() == TOP_IDS.tolist()
    assert step.frozen_pass(prepared) is None
    text = {"text": torch.tensor([[1, 2, 3, 4], [1, 2, -1, -1]])}
    step.check_batch({**_without("input_ids"), **text})


def _without(*names: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (BATCH | changes).items() if name not in names}


@pytest.mark.parametrize(
    ("options", "batch", "message"),
    [
        ({}, _without("teacher_ids"), "expected teacher_ids and teacher_logits, since teacher=None"),
        ({"teacher": "x"}, BATCH, "teacher_ids, teacher_logits and teacher=x both say what to learn"),
        ({}, _without(teacher_ids=TOP_IDS[:, :2]), r"expected the shape \[2, 3, k\], one row of tok"),
        ({}, _without(teacher_logits=TOP_LOGITS[..., :1]), r"teacher_logits has the shape \[2, 3, 1\]"),
        ({}, _without(teacher_ids=TOP_IDS + 3), r"teacher_ids\[0, 1, 1\] is 7 and must be below vocab"),
        ({}, _without(teacher_ids=TOP_IDS.clamp(max=-1)), r"teacher_ids\[0, 0\]: expected at least on"),
        ({}, _without(teacher_logits=TOP_LOGITS * torch.nan), r"teacher_logits\[0, 0, 0\] is nan and"),
        ({}, _without(input_ids=IDS + 5), r"input_ids\[0, 1\] is 7 and must be in 0..6"),
        ({}, _without(chosen=IDS), "batch key 'chosen' is not understood by"),
    ],
)  # fmt: skip
def test_wrong_batches_are_refused(
    options: dict[str, Any], batch: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        _step(**options).check_batch(dict(batch))


def test_rows_longer_than_the_positions_of_the_teacher_are_refused() -> None:
    step = _step(teacher="x")
    step.bind_teacher(
        replace(MODEL, position_embedding_type="learned_absolute", max_position_embeddings=2)
    )
    with pytest.raises(
        DataError, match="of the teacher: expected at most max_position_embeddings=2"
    ):
        step.check_batch({"input_ids": IDS})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature=0: expected a positive number"),
        ({"alpha": 1.5}, "alpha=1.5 must be at most 1"),
        ({"alpha": -0.5}, "alpha=-0.5 must be at least 0"),
        ({"eod_mask_loss": True}, "eod_mask_loss=True: expected eod_token, got None"),
        ({"tau": 1}, "DistillationTrainStep has no option 'tau'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistillationTrainStep(**options)
