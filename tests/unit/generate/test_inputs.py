"""Rows of calls and batches: what is read of them, how they are laid out, and which are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.inputs import Inputs, check_prompts, inputs_of_batch, with_first_token
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.models.config import ModelConfig

MODEL = ModelConfig(
    family="gpt2",
    num_layers=1,
    hidden_size=8,
    ffn_hidden_size=8,
    num_attention_heads=2,
    num_query_groups=2,
    kv_channels=4,
    vocab_size=50,
    max_position_embeddings=16,
)
T5 = replace(MODEL, family="t5", architecture="t5", num_decoder_layers=1, position_embedding_type="relative")
IDS, MASK, ANSWER = torch.tensor([[5, 6], [7, 2]]), torch.tensor([[1, 1], [1, 0]]), torch.tensor([[3], [4]])
MEGATRONS = {"text_enc": IDS, "enc_mask": torch.stack((MASK, MASK), dim=1) > 0, "text_dec": ANSWER}
ENCODER_DECODER = {"input_ids": IDS, "decoder_input_ids": ANSWER, "decoder_attention_mask": ANSWER > 3}


@pytest.mark.parametrize(
    ("model", "batch", "expected"),
    [
        (
            MODEL,
            {"input_ids": IDS, "attention_mask": MASK, "position_ids": IDS},
            (IDS, MASK, None, None),
        ),
        (T5, MEGATRONS, (IDS, MASK, ANSWER, None)),
        (T5, ENCODER_DECODER, (IDS, None, ANSWER, torch.tensor([[0], [1]]))),
        # An answer is no part of the question.
        (T5, {**ENCODER_DECODER, "labels": ANSWER}, (IDS, None, None, None)),
        # Rows that fill a batch up are left out.
        (MODEL, {"input_ids": IDS, "sample_mask": torch.tensor([0, 1])}, (IDS[1:], None, None, None)),
    ],
)
def test_prompts_go_by_hugging_faces_names_and_a_t5s_by_megatrons_too(model: Any, batch: Any, expected: Any) -> None:
    given = inputs_of_batch(batch, model, to_continue=True)
    names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    for name, tensor in zip(names, expected, strict=True):
        actual = getattr(given, name)
        assert actual is tensor is None or torch.equal(actual, tensor), name
    assert given.position_ids is None


def test_batches_without_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch keys labels, text have no 'input_ids', which predict continues"):
        inputs_of_batch({"text": IDS, "labels": IDS}, MODEL, to_continue=True)
    with pytest.raises(ConfigError, match=r"batch keys text have no 'input_ids' \(or 'text_enc'\), which"):
        inputs_of_batch({"text": IDS}, T5, to_continue=True)


def _ids(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("input_ids", "mask", "options", "says"),
    [
        ([[1]], None, {}, r"input_ids: expected a tensor of integers, \[prompts, tokens\], got a list"),
        (torch.ones(0, 2).long(), None, {}, r"got torch.int64 \[0, 2\]"),
        (_ids([1, 2]), [[1, 1]], {}, r"attention_mask: expected the shape \[1, 2\] of input_ids, got a list"),
        (_ids([1, 2]), _ids([1, 2]), {}, "expected 1 for tokens and 0 for padding"),
        (_ids([1], [2]), _ids([0], [1]), {}, r"prompts \[0\] are empty"),
        (_ids([1, 50]), None, {}, r"expected tokens of the vocabulary, 0 to 49, got 50"),
        (_ids([1] * 8), None, {"max_new_tokens": 10}, "a prompt of 8 tokens and max_new_tokens=10 .* at most 9"),
        (_ids([1] * 8), None, {"max_length": 18}, "a prompt of 8 tokens and max_length=18 .* max_length of at most 17"),
        (_ids([1] * 20), None, {}, "cut the prompts to 16 tokens"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(input_ids: Any, mask: Any, options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_prompts(Inputs(input_ids=input_ids, attention_mask=mask), MODEL, GenerationOptions(**options))


def test_a_first_token_is_put_before_the_rows_that_have_none() -> None:
    tokens = _ids([5, 6, 7], [9, 9, 5], [9, 1, 5], [1, 2, 9], [6, 9, 9])
    mask = (tokens != 9).long()
    longer, its_mask = with_first_token(tokens, mask, 1)
    assert its_mask is not None
    assert longer.shape == its_mask.shape == (5, 4)
    real = [row[m == 1].tolist() for row, m in zip(longer, its_mask, strict=True)]
    assert real == [[1, 5, 6, 7], [1, 5], [1, 5], [1, 2], [1, 6]]
    without_mask, mask_of_ones = with_first_token(tokens[:1], None, 1)
    assert without_mask.tolist() == [[1, 5, 6, 7]]
    assert mask_of_ones is not None
    assert mask_of_ones.tolist() == [[1, 1, 1, 1]]
    assert with_first_token(tokens[2:4], mask[2:4], 1)[0].tolist() == tokens[2:4].tolist()
