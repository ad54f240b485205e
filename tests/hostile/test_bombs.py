"""No small file takes much memory or time, whatever sizes it claims: one line, 300 MB and 5 s at most.

All commands run one after another in one process, whose peak memory is reset before each.
"""

import shutil
from pathlib import Path

import pytest

from tests.hostile.bombs import BOMBS, HARMLESS, make_intact_files
from tests.hostile.measure import MAX_MEGABYTES, MAX_SECONDS, Measured, measure
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measured]:
    folder = tmp_path_factory.mktemp("bombs")
    (folder / "intact").mkdir()
    run_ranks(make_intact_files, 1, folder / "intact")
    found: dict[str, Measured] = run_ranks(_set_off_all, 1, folder)[0]
    return found


def _set_off_all(folder: Path) -> dict[str, Measured]:
    return {name: _set_off(folder, name) for name in BOMBS}


def _set_off(folder: Path, name: str) -> Measured:
    files = folder / name
    shutil.copytree(folder / "intact", files)
    measured = measure(files, BOMBS[name](files))
    shutil.rmtree(files)
    return measured


@pytest.mark.parametrize("name", BOMBS)
def test_small_file_is_refused_at_a_small_cost(results: dict[str, Measured], name: str) -> None:
    result = results[name]
    assert result.code == (0 if name in HARMLESS else 2), result.printed
    assert name in HARMLESS or result.printed.count("error: ") == 1, result.printed
    assert result.megabytes < MAX_MEGABYTES
    assert result.seconds < MAX_SECONDS
