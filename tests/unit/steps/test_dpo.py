"""Train step of preferences: losses by hand, prepared pairs, refused batches and options."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_megatron import LoRA, MegatronModule
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.models.config import Adapters
from lightning_megatron.steps import train_step_named
from lightning_megatron.steps.dpo import DPOTrainStep
from tests.unit.steps.test_classification import MODEL

IDS = torch.tensor([[1, 2, 3], [4, 5, 0]])
LABELS = torch.tensor([[-100, 2, 3], [-100, 5, -100]])
REFERENCES = {
    "reference_chosen_logps": torch.tensor([-3.0, -1.0]),
    "reference_rejected_logps": torch.tensor([-2.0, -2.5]),
}
BATCH = {
    "chosen_input_ids": IDS,
    "chosen_labels": LABELS,
    "rejected_input_ids": IDS[:, :2],
    "rejected_labels": LABELS[:, :2],
    **REFERENCES,
}
ADAPTED = replace(
    MODEL,
    lora=Adapters(
        rank=2,
        alpha=4.0,
        linears=(),
    ),
)


def _step(*, lora: bool = False, **options: Any) -> DPOTrainStep:
    step = DPOTrainStep(**options)
    step.bind(ADAPTED if lora else MODEL)
    return step


def _without(*names: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (BATCH | changes).items() if name not in names}


def test_labels_are_shifted_and_shorter_answers_padded() -> None:
    step = _step()
    batch = dict(BATCH)
    step.check_batch(batch)
    prepared = step.prepare_batch(batch)
    assert prepared["tokens"].tolist() == [[[1, 2, 3], [1, 2, 0]], [[4, 5, 0], [4, 5, 0]]]
    assert prepared["targets"].tolist() == [[[2, 3, 0], [2, 0, 0]], [[5, 0, 0], [5, 0, 0]]]
    assert prepared["target_mask"].tolist() == [[[1, 1, 0], [1, 0, 0]], [[1, 0, 0], [1, 0, 0]]]
    assert prepared["attention_mask"].tolist() == [[[1, 1, 1], [1, 1, 0]], [[1, 1, 1], [1, 1, 0]]]
    assert prepared["reference_logps"].tolist() == [[-3.0, -2.0], [-1.0, -2.5]]
    assert prepared["loss_mask"].tolist() == [1.0, 1.0]
    assert step.frozen_pass(prepared) is None
    padded = step.pad_rows(prepared, 4)
    assert padded["loss_mask"].tolist() == [1.0, 1.0, 0.0, 0.0]


# Log-probabilities of the answers of two pairs, with their references, give the margins 2 and -1.5.
_LOSSES = torch.tensor([[1.5, 0.5, 9.0], [3.0, 9.0, 9.0], [2.5, 9.0, 9.0], [2.5, 9.0, 9.0]])
_MARGINS = (-2.0 + 3.0 - (-3.0 + 2.0), -2.5 + 1.0 - (-2.5 + 2.5))
_AVERAGED = (0.5 * (-2.0 + 3.0) - (-3.0 + 2.0), -2.5 + 1.0 - (-2.5 + 2.5))


def _softplus(value: float) -> float:
    return math.log(1 + math.exp(value))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"beta": 0.5}, [_softplus(-0.5 * margin) for margin in _MARGINS]),
        (
            {"beta": 0.5, "label_smoothing": 0.2},
            [0.8 * _softplus(-0.5 * m) + 0.2 * _softplus(0.5 * m) for m in _MARGINS],
        ),
        ({"loss": "hinge", "beta": 0.6}, [max(0.0, 1 - 0.6 * margin) for margin in _MARGINS]),
        (
            {"loss": "ipo", "beta": 0.25, "average_log_probs": True},
            [(margin - 2.0) ** 2 for margin in _AVERAGED],
        ),
    ],
    ids=["sigmoid", "smoothed", "hinge", "ipo"],
)
def test_losses_and_rewards_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    step = _step(**options)
    prepared = step.prepare_batch({**BATCH, "sample_mask": torch.tensor([1.0, 0.5])})
    terms = step.loss_func(prepared, _LOSSES)
    assert terms.keys() == {*step.loss_terms, *step.logged_terms}
    assert terms["dpo_loss"].sum.item() == pytest.approx(expected[0] + 0.5 * expected[1])
    beta = options["beta"]
    if not options.get("average_log_probs"):
        assert terms["rewards_chosen"].sum.item() == pytest.approx(beta * (1.0 + 0.5 * -1.5))
        assert terms["rewards_rejected"].sum.item() == pytest.approx(beta * -1.0)
        assert terms["margin"].sum.item() == pytest.approx(beta * (2.0 - 0.75))
    assert terms["accuracy"].sum.item() == 1.0
    assert {term.targets.item() for term in terms.values()} == {1.5}


def test_adapters_provide_the_reference_of_batches_without_one() -> None:
    step = _step(lora=True)
    batch = _without(*REFERENCES)
    step.check_batch(batch)
    prepared = step.prepare_batch(batch)
    assert step.frozen_pass(prepared) is not None
    assert step.frozen_pass(step.prepare_batch(dict(BATCH))) is None


def test_a_step_of_two_modules_needs_references_in_that_without_adapters() -> None:
    step = DPOTrainStep()
    config = {"model_type": "gpt2", "vocab_size": 17, "n_embd": 8, "n_head": 1, "n_layer": 1}
    module = MegatronModule(config, train_step=step)
    again = MegatronModule(config, train_step=step)
    adapted = MegatronModule(config, train_step=step, lora=LoRA(rank=1))
    assert module.train_step is again.train_step is step
    modules = (module, again, adapted)
    assert [each.train_step.needs_references for each in modules] == [True, True, False]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (_without(*REFERENCES), "without lora the trained model has no reference in it; use Prefere"),
        (_without("reference_chosen_logps"), "got reference_rejected_logps alone; give both"),
        (_without("chosen_labels"), "have no 'chosen_labels', which DPOTrainStep needs"),
        (_without(position_ids=IDS), "batch key 'position_ids' is not understood by DPOTrainStep"),
        (_without(rejected_input_ids=IDS[:1]), r"rejected_input_ids has the shape \[1, 3\]"),
        (_without(rejected_labels=LABELS), r"rejected_labels has the shape \[2, 3\] and must have \[2, 2"),
        (_without(chosen_labels=LABELS + 5), r"chosen_labels\[0, 0\] is -95 and must be in 0..6"),
        (_without(chosen_input_ids=IDS + 5), r"chosen_input_ids\[0, 1\] is 7 and must be in 0..6"),
        (_without(chosen_attention_mask=IDS), r"chosen_attention_mask\[0, 1\] is 2 and must be 0 for"),
        (
            _without(rejected_labels=torch.tensor([[-100, 2], [4, -100]])),
            r"rejected_labels\[1\]: expected the tokens of an answer after the first position, got -100",
        ),
        (
            _without(reference_chosen_logps=torch.tensor([math.nan, 1.0])),
            r"reference_chosen_logps\[0\] is nan and must be finite",
        ),
        (_without(reference_chosen_logps=torch.zeros(3)), r"reference_chosen_logps has the shape \[3\]"),
    ],
)  # fmt: skip
def test_wrong_batches_are_refused(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        _step().check_batch(batch)


def test_a_pair_that_does_not_count_needs_no_answer() -> None:
    labels = torch.tensor([[-100, 2], [-100, -100]])
    mask = torch.tensor([1.0, 0.0])
    _step().check_batch(_without(rejected_labels=labels, sample_mask=mask))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta=0.0: expected a positive number"),
        ({"beta": -1.0}, "beta=-1.0 must be at least 0"),
        ({"loss": "kto"}, "loss='kto' is unknown; choose from sigmoid, ipo"),
        ({"label_smoothing": 0.5}, "label_smoothing=0.5: expected less than 0.5"),
        ({"label_smoothing": 0.1, "loss": "ipo"}, "expected loss='sigmoid', got 'ipo'; leave one"),
        ({"gamma": 1.0}, "DPOTrainStep has no option 'gamma'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DPOTrainStep(**options)


def test_only_language_models_are_trained() -> None:
    step = train_step_named("dpo", "causal_lm")
    assert type(step) is DPOTrainStep
    classifier = replace(MODEL, task="sequence_classification")
    bert = replace(MODEL, architecture="bert")
    for model in (classifier, bert):
        with pytest.raises(ConfigError, match="DPOTrainStep: expected a GPT that is a language mo"):
            step.bind(model)
