"""What all ranks need is imported once. That a rank which fails or dies is noticed: tests/checkpoint, tests/convert."""

import importlib.util

from tests.ranks import PRELOADED


def test_what_is_imported_once_for_all_ranks_exists() -> None:
    """A module that is missing is passed over, and each rank would import in vain what the warm process could."""
    assert [name for name in PRELOADED if importlib.util.find_spec(name) is None] == []
