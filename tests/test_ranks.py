"""The rank pool returns results, notices every kind of failure, and starts ranks cheaply."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from pathlib import Path

import pytest

from tests.ranks import RankError, run_ranks


def _environment_and_tensor() -> tuple[dict[str, str], str, object]:
    import torch
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    assert TorchElasticEnvironment.detect()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "FROM_THE_TEST")
    return {name: os.environ[name] for name in names}, os.getcwd(), torch.arange(3) + int(os.environ["RANK"])


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


def test_each_rank_has_the_environment_of_torchrun_and_of_the_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FROM_THE_TEST", "seen")
    monkeypatch.chdir(tmp_path)
    results = run_ranks(_environment_and_tensor, 2)
    for rank, (environment, cwd, tensor) in enumerate(results):
        assert environment == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "FROM_THE_TEST": "seen",
        }
        assert Path(cwd) == tmp_path
        assert tensor.tolist() == [rank, rank + 1, rank + 2]
    assert "RANK" not in os.environ


def test_a_failing_rank_ends_the_others_and_shows_its_traceback_and_output() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="the reason") as caught:
        run_ranks(_fail_on_rank_one, 2)
    assert caught.value.rank == 1
    assert caught.value.error_type == "KeyError"
    assert "about to fail" in str(caught.value)
    assert "_fail_on_rank_one" in str(caught.value)
    assert time.monotonic() - started < 60


def test_a_killed_rank_is_noticed_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 .* died without a result") as caught:
        run_ranks(_die_on_rank_one, 2)
    assert caught.value.rank == 1
    assert "killed while still running: ranks 0" in str(caught.value)
    assert time.monotonic() - started < 60


def test_a_hanging_rank_is_killed_and_its_stack_is_shown() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="did not end within 1 s on ranks 0, 1") as caught:
        run_ranks(_sleep_forever_here, 2, timeout=1)
    assert "_sleep_forever_here" in str(caught.value).split("their stacks:")[1]
    assert time.monotonic() - started < 60


def test_what_is_imported_once_for_all_ranks_exists() -> None:
    """A module that is missing is passed over, and each rank would import in vain what the warm process could."""
    from tests.rank_zygote import _PRELOADED

    assert [name for name in _PRELOADED if importlib.util.find_spec(name) is None] == []
