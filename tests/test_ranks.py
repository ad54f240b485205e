"""Preloaded modules exist, and no two runs share ports.

tests/checkpoint and tests/convert show that failed and killed ranks are detected.
"""

import importlib.util

from tests.ranks import PRELOADED, ports


def test_preloaded_modules_exist() -> None:
    """Missing ones are skipped silently, which would make every rank slow."""
    assert [name for name in PRELOADED if importlib.util.find_spec(name) is None] == []


def test_processes_reserve_different_ports() -> None:
    ours = ports()
    theirs = ports.__wrapped__()
    assert set(ours[0]).isdisjoint(theirs[0])
