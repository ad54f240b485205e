"""A run whose rank was killed while it saved goes on from the checkpoint before; its next save clears up.

``test_kill.py`` kills at many more moments, without a Trainer.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import Run, fit
from tests.ranks import RankError, run_ranks

RUN = Run(strategy={"tp": 2}, trainer={"max_steps": 3})


def _die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _while_writing_weights() -> None:
    from lightning_megatron.checkpoint.save import FileWriter

    FileWriter._write_shards = _die  # type: ignore[method-assign]


def _after_the_exchange() -> None:
    from lightning_megatron import files

    files._delete = _die  # type: ignore[assignment]


def _between_the_two_renames() -> None:
    from lightning_megatron import files

    rename = Path.rename

    def die_before_the_second(self: Path, target: Path) -> Path:
        return _die() if target.name == "last.ckpt" else rename(self, target)  # type: ignore[return-value]

    files._exchange = lambda a, b: False
    Path.rename = die_before_the_second  # type: ignore[method-assign]


def _train(run: Run, path: Path, victim: int = -1, moment: Callable[[], None] | None = None) -> int:
    """Save after each step, and die while saving to the same name after step 2; returns the first step."""
    import lightning.pytorch as pl

    class SaveEachStep(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if moment is not None and trainer.global_step == 2 and trainer.global_rank == victim:
                moment()
            trainer.save_checkpoint(path)

    return min(fit(run, SaveEachStep())[1].steps)


@pytest.mark.parametrize(
    ("victim", "moment", "left", "first_step"),
    [
        (1, _while_writing_weights, [], 2),  # rank 0 lives and clears up
        pytest.param(0, _while_writing_weights, [".partial"], 2, marks=pytest.mark.exhaustive),
        (0, _after_the_exchange, [".partial"], 3),
        (0, _between_the_two_renames, [".partial", ".replaced"], 2),
    ],
)
def test_a_run_goes_on_after_a_rank_was_killed_while_it_saved(
    tmp_path: Path, victim: int, moment: Callable[[], None], left: list[str], first_step: int
) -> None:
    path = tmp_path / "last.ckpt"
    with pytest.raises(RankError, match=rf"rank {victim} \(pid \d+\) died without a result"):
        run_ranks(_train, 2, RUN.but(trainer={"max_steps": 2}), path, victim, moment)
    names = {each.name for each in tmp_path.iterdir()}
    assert names - {"last.ckpt"} == {f"last.ckpt{suffix}" for suffix in left}
    assert ("last.ckpt" in names) == (moment is not _between_the_two_renames)

    assert run_ranks(_train, 2, RUN.but(ckpt_path=str(path)), path) == [first_step] * 2
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


def _save_interrupted_twice(run: Run, path: Path) -> None:
    """Over what a crash between the renames left: the old one aside, the new one not yet named."""
    _train(run.but(trainer={"max_steps": 1}), path)
    path.rename(path.with_name(path.name + ".replaced"))
    _train(run.but(ckpt_path=str(path)), path, 0, _between_the_two_renames)


def test_the_only_whole_checkpoint_survives_a_second_crash(tmp_path: Path) -> None:
    run = Run(trainer={"max_steps": 3})
    path = tmp_path / "last.ckpt"
    with pytest.raises(RankError, match="died without a result"):
        run_ranks(_save_interrupted_twice, 1, run, path)

    assert not path.exists()
    assert run_ranks(_train, 1, run.but(ckpt_path=str(path)), path) == [2]
