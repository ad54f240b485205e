"""No small file takes much memory or time, whatever sizes it claims: one line, 300 MB and 5 s at most.

All commands run one after another in one process, whose peak memory is reset before each.
"""

import re
import resource
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.command import run_here
from tests.hostile.bombs import BOMBS, HARMLESS, make_intact_files
from tests.ranks import run_ranks

_MAX_MEGABYTES = 300
_MAX_SECONDS = 5.0
_MAX_ADDRESS_SPACE = 16 << 30
"""A bomb that goes off fails its own test, not the machine."""


@dataclass(frozen=True, kw_only=True)
class _Result:
    code: int
    printed: str
    megabytes: float
    seconds: float


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, _Result]:
    folder = tmp_path_factory.mktemp("bombs")
    (folder / "intact").mkdir()
    run_ranks(make_intact_files, 1, folder / "intact")
    found: dict[str, _Result] = run_ranks(_set_off_all, 1, folder)[0]
    return found


def _set_off_all(folder: Path) -> dict[str, _Result]:
    return {name: _set_off(folder, name) for name in BOMBS}


def _set_off(folder: Path, name: str) -> _Result:
    files = folder / name
    shutil.copytree(folder / "intact", files)
    command = BOMBS[name](files)
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_ADDRESS_SPACE, resource.RLIM_INFINITY))
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the present size
    before = _megabytes("VmRSS")
    begin = time.process_time()
    ((code, out, err),) = run_here(str(files), [command.split()])
    seconds = time.process_time() - begin
    shutil.rmtree(files)
    return _Result(
        code=code, printed=out + err, megabytes=_megabytes("VmHWM") - before, seconds=seconds
    )


def _megabytes(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.parametrize("name", BOMBS)
def test_small_file_is_refused_at_a_small_cost(results: dict[str, _Result], name: str) -> None:
    result = results[name]
    assert result.code == (0 if name in HARMLESS else 2), result.printed
    assert name in HARMLESS or result.printed.count("error: ") == 1, result.printed
    assert result.megabytes < _MAX_MEGABYTES
    assert result.seconds < _MAX_SECONDS
