"""A rank that fails, dies or hangs is noticed and shown; what all ranks need is imported once."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.ranks import PRELOADED, RankError, run_ranks


def _fail_on_rank_one() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        print("about to fail")
        raise KeyError("the reason")
    dist.barrier()


def _die_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _sleep_forever_here() -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("fn", "timeout", "rank", "says"),
    [
        (_fail_on_rank_one, 100, 1, ("_fail_on_rank_one failed on rank 1", "the reason", "about to fail")),
        (_die_on_rank_one, 100, 1, ("rank 1 ", "died without a result", "killed while still running: ranks 0")),
        (
            _sleep_forever_here,
            1,
            None,
            ("did not end within 1 s on ranks 0, 1", "their stacks:", "_sleep_forever_here"),
        ),
    ],
)
def test_a_rank_that_fails_dies_or_hangs_ends_the_others_and_is_shown(
    fn: Callable[[], None], timeout: float, rank: int | None, says: tuple[str, ...]
) -> None:
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(fn, 2, timeout=timeout)
    assert (caught.value.rank, caught.value.error_type) == (rank, "KeyError" if fn is _fail_on_rank_one else None)
    assert all(each in str(caught.value) for each in says)
    assert time.monotonic() - started < 60


def test_what_is_imported_once_for_all_ranks_exists() -> None:
    """A module that is missing is passed over, and each rank would import in vain what the warm process could."""
    assert [name for name in PRELOADED if importlib.util.find_spec(name) is None] == []
