"""Adapters of every family equal those of ``peft``: logits, loss, gradients and what is saved."""

from __future__ import annotations

import pytest

from tests.families.parity import FOUR_RANKS, check_adapters
from tests.families.parity import padded_sentences as sentences
from tests.families.t5_models import t5_1_1
from tests.families.test_gpts import FAMILIES, gpt_model
from tests.families.test_megatron_bert import _masked, bert_model
from tests.families.test_t5 import _pairs

IN_EVERY_RUN = ("phi3",)
"""Whose linears are fused in the files, too, otherwise than those of tests/parity/test_lora.py."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.exhaustive) for name in FAMILIES]
)
def test_adapters_of_a_gpt_equal_those_of_peft(family: str) -> None:
    check_adapters(gpt_model(family, {}), FOUR_RANKS, sentences())


def test_adapters_of_a_t5_equal_those_of_peft() -> None:
    check_adapters(t5_1_1(), FOUR_RANKS, _pairs())


@pytest.mark.exhaustive
def test_adapters_of_a_bert_equal_those_of_peft() -> None:
    check_adapters(bert_model("MaskedLM"), FOUR_RANKS, _masked())
