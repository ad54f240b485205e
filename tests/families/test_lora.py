"""Adapters of every family equal those of ``peft``: logits, loss, gradients and what is saved."""

from __future__ import annotations

import pytest

from tests.families.cards import models
from tests.families.parity import FOUR_RANKS, check_family

IN_EVERY_RUN = ("phi3", "t5")
"""Linears of phi3 are fused in the files, too, otherwise than those of tests/parity/test_lora.py."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.exhaustive) for name in models()]
)
def test_adapters_equal_those_of_peft(family: str) -> None:
    model, rows = models()[family]()
    check_family(model, FOUR_RANKS, rows, adapters=True)
