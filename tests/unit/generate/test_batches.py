"""Which tensors of a batch are taken for prompts, and which batches have none?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.batches import given_in
from tests.unit.generate.test_prompts import MODEL

T5 = replace(MODEL, family="t5", architecture="t5", num_decoder_layers=1, position_embedding_type="relative")
IDS, MASK, ANSWER = torch.tensor([[5, 6], [7, 2]]), torch.tensor([[1, 1], [1, 0]]), torch.tensor([[3], [4]])


def test_prompts_go_by_hugging_faces_names_and_a_t5s_by_megatrons_too() -> None:
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS, "position_ids": IDS}
    assert _as_lists(given_in(batch, MODEL)) == (IDS.tolist(), MASK.tolist(), None, None)
    megatrons = {"text_enc": IDS, "enc_mask": torch.stack((MASK, MASK), dim=1) > 0, "text_dec": ANSWER}
    assert _as_lists(given_in(megatrons, T5)) == (IDS.tolist(), MASK.tolist(), ANSWER.tolist(), None)


def test_an_answer_is_no_part_of_the_question() -> None:
    batch = {"input_ids": IDS, "decoder_input_ids": ANSWER, "decoder_attention_mask": ANSWER > 3}
    assert _as_lists(given_in(batch, T5)) == (IDS.tolist(), None, ANSWER.tolist(), [[False], [True]])
    assert _as_lists(given_in({**batch, "labels": ANSWER}, T5)) == (IDS.tolist(), None, None, None)


def test_rows_that_fill_a_batch_up_are_left_out() -> None:
    given = given_in({"input_ids": IDS, "attention_mask": MASK, "sample_mask": torch.tensor([0, 1])}, MODEL)
    assert _as_lists(given) == (IDS[1:].tolist(), MASK[1:].tolist(), None, None)


def test_batches_without_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch keys labels, text have no 'input_ids', which predict continues"):
        given_in({"text": IDS, "labels": IDS}, MODEL)
    with pytest.raises(ConfigError, match=r"batch keys text have no 'input_ids' \(or 'text_enc'\), which"):
        given_in({"text": IDS}, T5)


def _as_lists(given: object) -> tuple[object, ...]:
    return tuple(None if x is None else x.tolist() for x in vars(given).values())
