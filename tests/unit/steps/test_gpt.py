"""GPT train step: tokens, targets, segments and positions equal those of Megatron and Hugging Face; refused batches."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from torch import Tensor

from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.generate.layout import inputs_for_logits
from lightning_megatron.steps.base import Batch
from lightning_megatron.steps.classification import ClassificationTrainStep
from lightning_megatron.steps.gpt import GPTTrainStep
from tests.unit.models.test_t5_layout import MODEL as TINY

VOCAB = 11
EOD = 3
LENGTH = 24

MODEL = replace(
    TINY, family="gpt2", architecture="gpt", vocab_size=VOCAB, max_position_embeddings=LENGTH
)


def _step(**options: Any) -> GPTTrainStep:
    step = GPTTrainStep(**options)
    step.bind(MODEL)
    return step


def _texts(rows: int = 6) -> Tensor:
    """Tokens [rows, LENGTH + 1]: one row without end-of-document tokens, one with some at both ends and in a pair."""
    text = torch.randint(
        0,
        VOCAB,
        (rows, LENGTH + 1),
        generator=torch.Generator().manual_seed(4),
    )
    text[0] = text[0].masked_fill(text[0] == EOD, EOD + 1)
    text[1, 0] = text[1, 5] = text[1, 6] = text[1, LENGTH - 1] = text[1, LENGTH] = EOD
    return text


def _visible(prepared: Batch) -> Tensor:
    """Visibility of keys to queries in a causal model: bool [b, s, s]."""
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if "attention_mask" not in prepared:
        return causal.expand(
            prepared["tokens"].shape[0],
            -1,
            -1,
        )
    segments = prepared["attention_mask"]
    return (segments[:, :, None] == segments[:, None, :]) & causal


SWITCHES = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


@pytest.mark.parametrize(
    "switches",
    [tuple(bool(n & bit) for bit in (1, 2, 4)) for n in range(8)],
)
@pytest.mark.parametrize("is_text", [True, False])
def test_end_of_document_switches_equal_megatrons(
    switches: tuple[bool, ...], is_text: bool
) -> None:
    text = _texts()
    step = _step(
        eod_token=EOD if any(switches) else None,
        **dict(zip(SWITCHES, switches, strict=True)),
    )
    prepared = step.prepare_batch({"text": text} if is_text else {"input_ids": text[:, :-1]})
    positions = prepared.get("position_ids", torch.arange(LENGTH).expand_as(prepared["tokens"]))
    for row, tokens in enumerate(text[:, :-1]):
        hidden, loss_mask, position_ids = _get_ltor_masks_and_position_ids(
            tokens, EOD, *switches, True
        )
        assert torch.equal(_visible(prepared)[row], ~hidden[0])
        assert torch.equal(positions[row], position_ids)
        # The target of the last token of a Hugging Face row is not in the row.
        has_target = slice(None) if is_text else slice(None, -1)
        assert torch.equal(prepared["loss_mask"][row, has_target], loss_mask[has_target])
    assert torch.equal(prepared["targets"][:, :-1], text[:, 1:-1])
    assert prepared.keys() - {"tokens", "targets", "loss_mask"} == {
        name
        for name, switch in zip(("position_ids", "attention_mask"), switches, strict=False)
        if switch
    }


def test_documents_and_padding_are_masked_from_each_other() -> None:
    text = _texts()
    mask = torch.ones(6, LENGTH, dtype=torch.int64)
    mask[:, LENGTH - 5 :] = 0
    mask[2, :4] = 0
    mask[3, 6:10] = 2
    mask[4, 4:9] = 0
    prepared = _step(eod_token=EOD, reset_attention_mask=True).prepare_batch(
        {"input_ids": text[:, :-1], "attention_mask": mask}
    )
    assert torch.equal(prepared["attention_mask"] == 0, mask == 0)
    documents = _step(eod_token=EOD, reset_attention_mask=True).prepare_batch(
        {"input_ids": text[:, :-1]}
    )
    both = _visible(documents) & (mask[:, :, None] == mask[:, None, :])
    is_token = mask[0] != 0
    assert torch.equal(_visible(prepared)[:, is_token], both[:, is_token])


def test_end_token_is_a_target_but_not_as_padding() -> None:
    tokens = torch.tensor(
        [
            [5, 6, EOD, EOD, EOD],
            [EOD, EOD, 5, 6, EOD],
        ]
    )
    mask = torch.tensor(
        [
            [1, 1, 1, 0, 0],
            [0, 0, 1, 1, 1],
        ]
    )
    prepared = _step().prepare_batch({"input_ids": tokens, "attention_mask": mask})
    assert prepared["loss_mask"].tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0]]
    assert prepared["targets"][prepared["loss_mask"] == 1].tolist() == [6, EOD, 6, EOD]


def test_labels_take_precedence_over_the_attention_mask() -> None:
    tokens = torch.tensor([[5, 6, 7, 8]])
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.tensor([[0, 0, 1, 1]]),
    }
    prepared = _step().prepare_batch(
        {
            **batch,
            "labels": torch.tensor([[5, 6, -100, 8]]),
        }
    )
    assert prepared["loss_mask"].tolist() == [[1, 0, 1, 0]]
    assert prepared["targets"][0, [0, 2]].tolist() == [6, 8]


def test_unsuitable_options_and_models_are_refused() -> None:
    with pytest.raises(ConfigError, match="reset_position_ids=True: expected eod_token"):
        GPTTrainStep(reset_position_ids=True)
    with pytest.raises(
        ConfigError, match="GPTTrainStep trains GPTs, and t5 is a T5; use train_step='t5'"
    ):
        GPTTrainStep().bind(TINY)
    with pytest.raises(ConfigError, match=f"eod_token=50256 must be in 0..{VOCAB - 1}"):
        _step(eod_token=50256, eod_mask_loss=True)
    with pytest.raises(ConfigError, match="eod_token=5: expected reset_position_ids, .* got none"):
        _step(eod_token=5)


IDS = torch.randint(
    0,
    VOCAB,
    (2, LENGTH),
    generator=torch.Generator().manual_seed(5),
)


ONES = torch.ones(2, LENGTH, dtype=torch.int64)

REFUSED: dict[str, tuple[Mapping[str, Tensor], str]] = {
    "two kinds": ({"text": IDS, "labels": IDS}, "'text' and 'labels' both"),
    "float tokens": ({"input_ids": IDS.float()}, "input_ids is torch.float32"),
    "too long": (
        {"input_ids": torch.cat([IDS, IDS], 1)},
        f"at most max_position_embeddings.* got {2 * LENGTH};",
    ),
    "fraction": ({"input_ids": IDS, "attention_mask": ONES / 2}, "expected integers, got frac"),
    "loss mask": (
        {"text": IDS, "loss_mask": ONES},
        rf"loss_mask has the shape .* must have \[2, {LENGTH - 1}\]",
    ),
    "negative weight": (
        {"input_ids": IDS, "loss_mask": ONES - 2 * torch.eye(2, LENGTH, dtype=torch.int64)},
        r"loss_mask\[0, 0\] is -1 and must be a weight, finite and at least 0",
    ),
    "infinite weight": (
        {"input_ids": IDS, "sample_mask": torch.tensor([1.0, torch.inf])},
        r"sample_mask\[1\] is inf and must be a weight, finite",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_batch_is_refused(case: str) -> None:
    batch, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        _step().check_batch(dict(batch))


def _flattened() -> dict[str, Tensor]:
    """A row of three texts, as transformers packs them."""
    from transformers import DataCollatorWithFlattening

    texts = ([5, 6, 7], [8], [9, 4])
    collate = DataCollatorWithFlattening(return_tensors="pt")
    return dict(collate([{"input_ids": text} for text in texts]))


def _of_training(batch: Batch, model: Any) -> Batch:
    step = GPTTrainStep()
    step.bind(model)
    step.check_batch(batch)
    return step.prepare_batch(batch)


def _of_labels(batch: Batch, model: Any) -> Batch:
    step = ClassificationTrainStep()
    step.bind(replace(model, task="token_classification", num_labels=VOCAB))
    step.check_batch(batch)
    return step.prepare_batch(batch)


def _of_logits(batch: Batch, model: Any) -> Batch:
    del batch["labels"]
    inputs = inputs_for_logits(batch, model)
    assert inputs.positions is not None
    prepared = {"position_ids": inputs.positions}
    if inputs.mask is not None:
        prepared["attention_mask"] = inputs.mask
    return prepared


@pytest.mark.parametrize("read", [_of_training, _of_labels, _of_logits])
def test_positions_that_restart_separate_texts_unless_a_mask_says_otherwise(read: Any) -> None:
    prepared = read(_flattened(), MODEL)
    assert prepared["attention_mask"].tolist() == [[1, 1, 1, 2, 3, 3]]
    assert prepared["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    ones = torch.ones(1, 6, dtype=torch.int64)
    one_text = read({**_flattened(), "attention_mask": ones}, MODEL)
    assert one_text["attention_mask"].tolist() == ones.tolist()
    # transformers' OPT does not look for texts.
    assert "attention_mask" not in read(_flattened(), replace(MODEL, position_offset=2))


def test_positions_and_masks_without_effect_are_dropped() -> None:
    batch = {"input_ids": torch.arange(6)[None], "position_ids": torch.arange(6)[None]}
    ones = torch.ones(1, 6, dtype=torch.int64)
    for mask in ({}, {"attention_mask": ones}):
        prepared = _of_training({**batch, **mask}, MODEL)
        assert not prepared.keys() & {"attention_mask", "position_ids"}
    # With padding OPT's own positions would be others.
    padded = torch.tensor([[0, 1, 1, 1, 1, 1]])
    assert "position_ids" in _of_training({**batch, "attention_mask": padded}, MODEL)
