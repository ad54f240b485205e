"""docs/families.md is that of the families as they are now."""

from __future__ import annotations

import pytest

from lightning_megatron.convert.registry import known_families
from tests.families.cards import ELSEWHERE, LAYOUTS, PAGE, description, models, page

_COMMAND = "python -m tests.families.cards"
_LARGEST = (2e-5,) * len(LAYOUTS) + (2e-6, 2e-5)
"""As tests/families/parity.py allows."""


def _lines() -> list[str]:
    return [line for line in PAGE.read_text().splitlines() if "bit-equal" in line]


def _cells() -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in _lines()]
    return {row[0]: row[1:] for row in cells}


def test_the_page_is_that_of_the_registry_with_a_row_of_every_family() -> None:
    assert PAGE.read_text() == page(_lines()), _COMMAND
    assert set(_cells()) == set(models()) == set(known_families()) - ELSEWHERE, _COMMAND


@pytest.mark.parametrize("family", models())
def test_a_row_is_that_of_the_familys_table_and_its_figures_are_small(family: str) -> None:
    row = _cells()[family]
    assert " | ".join(row[:3]) == description(models()[family]()[0]), _COMMAND
    assert all(float(error) <= largest for error, largest in zip(row[3:8], _LARGEST, strict=True))
