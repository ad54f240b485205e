"""Adapters of every family equal those of ``peft``: logits, loss, gradients and what is saved."""

from __future__ import annotations

from typing import Any

import pytest

from tests.families.parity import FOUR_RANKS, check_family
from tests.families.parity import padded_sentences as sentences
from tests.families.t5_models import t5_1_1
from tests.families.test_gpts import FAMILIES, gpt_model
from tests.families.test_megatron_bert import _masked, bert_model
from tests.families.test_t5 import _pairs

MODELS: dict[str, Any] = {
    **{name: (lambda name=name: (gpt_model(name, {}), sentences())) for name in FAMILIES},
    "t5": lambda: (t5_1_1(), _pairs()),
    "megatron-bert": lambda: (bert_model("MaskedLM"), _masked()),
}
IN_EVERY_RUN = ("phi3", "t5")
"""Linears of phi3 are fused in the files, too, otherwise than those of tests/parity/test_lora.py."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.exhaustive) for name in MODELS]
)
def test_adapters_equal_those_of_peft(family: str) -> None:
    model, rows = MODELS[family]()
    check_family(model, FOUR_RANKS, rows, adapters=True)
