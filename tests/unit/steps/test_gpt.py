"""A GPT batch becomes the tokens, targets, segments and positions that Megatron and Hugging Face make of it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.steps.base import Batch
from lightning_megatron.steps.gpt import GPTTrainStep
from tests.unit.models.test_t5_layout import MODEL as TINY

VOCAB, EOD, LENGTH = 11, 3, 24

MODEL = replace(TINY, family="gpt2", architecture="gpt", vocab_size=VOCAB, max_position_embeddings=LENGTH)


def _step(**options: Any) -> GPTTrainStep:
    step = GPTTrainStep(**options)
    step.bind(MODEL)
    return step


def _texts(rows: int = 6) -> torch.Tensor:
    """[rows, LENGTH + 1], with ends of documents at either end, in pairs, and nowhere."""
    text = torch.randint(0, VOCAB, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(4))
    text[0] = text[0].masked_fill(text[0] == EOD, EOD + 1)
    text[1, 0] = text[1, 5] = text[1, 6] = text[1, LENGTH - 1] = text[1, LENGTH] = EOD
    return text


def _seen(prepared: Batch) -> torch.Tensor:
    """Who sees whom in a causal model: bool [b, s, s]."""
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if "attention_mask" not in prepared:
        return causal.expand(prepared["tokens"].shape[0], -1, -1)
    segments = prepared["attention_mask"]
    return (segments[:, :, None] == segments[:, None, :]) & causal


SWITCHES = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


@pytest.mark.parametrize("switches", [tuple(bool(n & bit) for bit in (1, 2, 4)) for n in range(8)])
@pytest.mark.parametrize("is_text", [True, False])
def test_ends_of_documents_mean_what_they_mean_in_megatron(switches: tuple[bool, ...], is_text: bool) -> None:
    text = _texts()
    step = _step(eod_token=EOD, **dict(zip(SWITCHES, switches, strict=True)))
    prepared = step.prepare_batch({"text": text} if is_text else {"input_ids": text[:, :-1]})
    positions = prepared.get("position_ids", torch.arange(LENGTH).expand_as(prepared["tokens"]))
    for row, tokens in enumerate(text[:, :-1]):
        hidden, loss_mask, position_ids = _get_ltor_masks_and_position_ids(tokens, EOD, *switches, True)
        assert torch.equal(_seen(prepared)[row], ~hidden[0])
        assert torch.equal(positions[row], position_ids)
        # What the last token of Hugging Face's rows predicts is not in the row.
        predicts = slice(None) if is_text else slice(None, -1)
        assert torch.equal(prepared["loss_mask"][row, predicts], loss_mask[predicts])
    assert torch.equal(prepared["targets"][:, :-1], text[:, 1:-1])
    assert prepared.keys() - {"tokens", "targets", "loss_mask"} == {
        name for name, switch in zip(("position_ids", "attention_mask"), switches, strict=False) if switch
    }


def test_documents_and_padding_are_hidden_from_each_other() -> None:
    text = _texts()
    mask = torch.ones(6, LENGTH, dtype=torch.int64)
    mask[:, LENGTH - 5 :] = 0
    mask[2, :4], mask[3, 6:10], mask[4, 4:9] = 0, 2, 0
    prepared = _step(eod_token=EOD, reset_attention_mask=True).prepare_batch(
        {"input_ids": text[:, :-1], "attention_mask": mask}
    )
    assert torch.equal(prepared["attention_mask"] == 0, mask == 0)
    apart = _step(eod_token=EOD, reset_attention_mask=True).prepare_batch({"input_ids": text[:, :-1]})
    both = _seen(apart) & (mask[:, :, None] == mask[:, None, :])
    is_token = mask[0] != 0
    assert torch.equal(_seen(prepared)[:, is_token], both[:, is_token])


def test_padding_that_is_the_end_of_text_is_no_target_but_the_end_is() -> None:
    tokens = torch.tensor([[5, 6, EOD, EOD, EOD], [EOD, EOD, 5, 6, EOD]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]])
    prepared = _step().prepare_batch({"input_ids": tokens, "attention_mask": mask})
    assert prepared["loss_mask"].tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0]]
    assert prepared["targets"][prepared["loss_mask"] == 1].tolist() == [6, EOD, 6, EOD]


def test_given_labels_count_exactly_whatever_the_mask_says() -> None:
    tokens = torch.tensor([[5, 6, 7, 8]])
    batch = {"input_ids": tokens, "attention_mask": torch.tensor([[0, 0, 1, 1]])}
    prepared = _step().prepare_batch({**batch, "labels": torch.tensor([[5, 6, -100, 8]])})
    assert prepared["loss_mask"].tolist() == [[1, 0, 1, 0]]
    assert prepared["targets"][0, [0, 2]].tolist() == [6, 8]


def test_options_and_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="reset_position_ids=True: expected eod_token"):
        GPTTrainStep(reset_position_ids=True)
    with pytest.raises(ConfigError, match="GPTTrainStep trains GPTs, and t5 is a T5; use train_step='t5'"):
        GPTTrainStep().bind(TINY)
    with pytest.raises(ConfigError, match=f"eod_token=50256 must be in 0..{VOCAB - 1}"):
        _step(eod_token=50256)


IDS = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def _with(value: Any, place: tuple[int, int] = (1, 7), base: torch.Tensor = IDS) -> torch.Tensor:
    changed = base.clone()
    changed[place] = value
    return changed


ONES = torch.ones(2, LENGTH, dtype=torch.int64)

WRONG: dict[str, tuple[Mapping[str, torch.Tensor], str]] = {
    "unknown key": ({"input_ids": IDS, "token_types": IDS}, "'token_types' is not understood.*attention_mask"),
    "two kinds": ({"text": IDS, "labels": IDS}, "'text' and 'labels' both"),
    "token": ({"input_ids": _with(VOCAB)}, rf"input_ids\[1, 7\] is {VOCAB} and must be in 0..{VOCAB - 1}"),
    "float tokens": ({"input_ids": IDS.float()}, "input_ids is torch.float32"),
    "too long": ({"input_ids": torch.cat([IDS, IDS], 1)}, f"at most max_position_embeddings.* got {2 * LENGTH};"),
    "label": ({"input_ids": IDS, "labels": _with(VOCAB)}, rf"labels\[1, 7\] is {VOCAB}.*-100 for no target"),
    "fraction": ({"input_ids": IDS, "attention_mask": _with(0.5, base=ONES.float())}, "expected integers, got frac"),
    "loss mask": ({"text": IDS, "loss_mask": ONES}, rf"loss_mask has the shape .* must have \[2, {LENGTH - 1}\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_numbers_are_refused_by_name(case: str) -> None:
    batch, message = WRONG[case]
    with pytest.raises(DataError, match=message):
        _step().check_batch(dict(batch))
