"""What all ranks need is imported once, and no two runs share ports.

That a rank which fails or dies is noticed: tests/checkpoint, tests/convert.
"""

import importlib.util

from tests.ranks import PRELOADED, ports


def test_what_is_imported_once_for_all_ranks_exists() -> None:
    """A module that is missing is passed over, and each rank would import in vain what the warm process could."""
    assert [name for name in PRELOADED if importlib.util.find_spec(name) is None] == []


def test_processes_have_ports_of_their_own() -> None:
    ours, theirs = ports(), ports.__wrapped__()
    assert set(ours[0]).isdisjoint(theirs[0])
