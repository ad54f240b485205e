"""T5 train step: inputs, targets and masks of Megatron's batches, computed by hand; refused batches."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.errors import DataError
from lightning_megatron.steps.t5 import T5TrainStep
from tests.unit.models.test_t5_layout import MODEL

START = 5
PAD = 3
IDS = torch.tensor(
    [
        [1, 2, 9, 0],
        [4, 6, 7, 8],
    ]
)
LABELS = torch.tensor(
    [
        [11, -100, 12],
        [13, 14, -100],
    ]
)
BATCH = {"input_ids": IDS, "labels": LABELS}


def _step() -> T5TrainStep:
    step = T5TrainStep()
    step.bind(replace(MODEL, decoder_start_token_id=START, pad_token_id=PAD))
    return step


# ---- Megatron's samples ---------------------------------------------------------------------------------------------

ENCODER_MASK = torch.tensor(
    [
        [1, 1, 0, 0],
        [1, 1, 1, 1],
    ]
)
DECODER_MASK = torch.tensor([[1, 0, 0], [1, 1, 1]])


def _megatron_batch(**changes: Any) -> dict[str, Tensor]:
    return {
        "text_enc": IDS,
        "text_dec": torch.tensor([[1, 11, 2], [1, 13, 14]]),
        "labels": torch.tensor(
            [
                [11, -1, -1],
                [13, 14, 12],
            ]
        ),
        "loss_mask": torch.tensor([[1, 1, 1], [1, 0, 1]]),
        "enc_mask": ENCODER_MASK,
        "dec_mask": DECODER_MASK,
        **changes,
    }


def _outer(queries: Tensor, keys: Tensor) -> Tensor:
    return queries[:, :, None] * keys[:, None, :]


@pytest.mark.parametrize("as_float", [False, True])
def test_megatron_masks_may_be_per_key_or_per_pair(as_float: bool) -> None:
    square = {
        "enc_mask": _outer(ENCODER_MASK, ENCODER_MASK),
        "dec_mask": _outer(DECODER_MASK, DECODER_MASK).tril(),
        "enc_dec_mask": _outer(DECODER_MASK, ENCODER_MASK),
    }
    if as_float:
        square = {name: mask.float() for name, mask in square.items()}
    step = _step()
    # Megatron's dataset also returns `truncated`: megatron-core 0.16.1, datasets/t5_dataset.py:__getitem__
    per_key = _megatron_batch(truncated=torch.tensor([0, 1]))
    for batch in (per_key, _megatron_batch(**square), _megatron_batch(enc_dec_mask=ENCODER_MASK)):
        step.check_batch(batch)
        prepared = step.prepare_batch(batch)
        assert prepared["encoder_mask"].equal(ENCODER_MASK)
        assert prepared["decoder_mask"].equal(DECODER_MASK)
        assert prepared["loss_mask"].tolist() == [[1, 0, 0], [1, 0, 1]]
        assert prepared["decoder_ids"].tolist() == [[1, 11, 2], [1, 13, 14]]


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"input_ids": IDS + 90},
            r"input_ids\[0, 2\] is 99 and must be in 0..96 \(vocab_size=97\)",
        ),
        ({"decoder_input_ids": LABELS}, r"decoder_input_ids\[0, 1\] is -100"),
        ({"input_ids": IDS[:, :0]}, r"\[rows, tokens >= 1\], got shape \[2, 0\]"),
        (
            {"attention_mask": -1e4 * (IDS == 0)},
            r"attention_mask\[0, 3\] is -10000.0 and must be 1 \(visible\) or 0",
        ),
        ({"decoder_attention_mask": torch.ones(2, 4)}, r"must have \[2, 3\] or \[2, 3, 3\]"),
        (
            {"enc_dec_mask": 1 - IDS // 9},
            "enc_dec_mask: expected the visible encoder tokens of enc_mask",
        ),
        ({"text_enc": IDS}, "batch keys 'input_ids' and 'text_enc' mean the same"),
    ],
)
def test_invalid_batch_is_refused(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(DataError, match=message):
        _step().check_batch({**BATCH, **changes})
