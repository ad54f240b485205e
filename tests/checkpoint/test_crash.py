"""What is on the disk after a rank was killed while it saved? The previous checkpoint, and a half that is refused."""

from __future__ import annotations

import os
import re
import resource
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


def _before_anything() -> None:
    from lightning_megatron.checkpoint import save

    save._on_rank_0 = _die  # type: ignore[assignment]


def _while_writing_weights() -> None:
    from lightning_megatron.checkpoint.save import FileWriter

    FileWriter._write_shards = _die  # type: ignore[method-assign]


def _after_the_own_files() -> None:
    from lightning_megatron.checkpoint.save import FileWriter

    original = FileWriter.wait

    def wait(self: FileWriter) -> Any:
        original(self)
        _die()

    FileWriter.wait = wait  # type: ignore[method-assign]


def _before_the_last_name() -> None:
    from lightning_megatron.checkpoint.save import Save

    Save._complete = _die  # type: ignore[method-assign]  # only rank 0 comes here


def _around_the_exchange(*, before: bool) -> Callable[[], None]:
    def install() -> None:
        from lightning_megatron import files

        original = files._exchange

        def exchange(a: Path, b: Path) -> bool:
            if not before:
                original(a, b)
            _die()
            return True

        files._exchange = exchange

    return install


def _without_exchange(moment: Callable[[], None]) -> Callable[[], None]:
    def install() -> None:
        from lightning_megatron import files

        files._exchange = lambda a, b: False
        moment()

    return install


def _before_rename_to(ending: str) -> Callable[[], None]:
    def install() -> None:
        original = Path.rename

        def rename(self: Path, target: Path) -> Path:
            if str(target).endswith(ending):
                _die()
            return original(self, target)

        Path.rename = rename  # type: ignore[method-assign]

    return install


def _while_deleting_the_old_one() -> None:
    import shutil

    def rmtree(path: Path, *args: Any, **kwargs: Any) -> None:
        assert path.name.endswith(".removed")
        _die()

    shutil.rmtree = rmtree  # type: ignore[assignment]


MOMENTS: dict[str, Callable[[], None]] = {
    "before anything": _before_anything,
    "while writing weights": _while_writing_weights,
    "after its own files": _after_the_own_files,
    "before the last name": _before_the_last_name,
    "before the exchange": _around_the_exchange(before=True),
    "after the exchange": _around_the_exchange(before=False),
    "while deleting the old one": _while_deleting_the_old_one,
    "before the old one is aside": _without_exchange(_before_rename_to(".replaced")),
    "between the two renames": _without_exchange(_before_rename_to("last.ckpt")),
    "while deleting what is aside": _without_exchange(_while_deleting_the_old_one),
}


def _save_twice(run: Run, path: Path, victim: int, moment: str) -> None:
    """Save after step 1, and die while saving to the same name after step 2."""
    import lightning.pytorch as pl

    class SaveEachStep(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2 and trainer.global_rank == victim:
                MOMENTS[moment]()
            trainer.save_checkpoint(path)

    fit(run, SaveEachStep())


def _first_step_of(run: Run, path: Path) -> int | str:
    """The step that a run resumed from ``path`` begins with, or why it does not."""
    from lightning_megatron.errors import CheckpointError

    try:
        _, trace = fit(run.but(ckpt_path=str(path)))
    except CheckpointError as error:
        return str(error)
    return min(trace.steps)


def _go_on(run: Run, path: Path, half: Path | None) -> tuple[int | str, int, list[str], int | str]:
    """Try the half; resume from what is left, save to the same name and resume from that."""
    refusal = _first_step_of(run, half) if half is not None else ""
    trainer, trace = fit(run.but(ckpt_path=str(path)))
    trainer.save_checkpoint(path)
    names = sorted(each.name for each in path.parent.iterdir())
    return refusal, min(trace.steps), names, _first_step_of(run.but(trainer={"max_steps": 4}), path)


OLD, NEW = 2, 3
"""The step with which a run goes on from the checkpoint of step 1, and of step 2."""


@pytest.mark.parametrize(
    ("victim", "moment", "left", "found"),
    [
        (0, "while writing weights", [".partial"], OLD),
        (1, "after its own files", [], OLD),  # rank 0 lives and clears up
        pytest.param(0, "before the last name", [".partial"], OLD, marks=pytest.mark.exhaustive),
        pytest.param(0, "before the exchange", [".partial"], OLD, marks=pytest.mark.exhaustive),
        (0, "after the exchange", [".partial"], NEW),
        pytest.param(0, "while deleting the old one", [".removed"], NEW, marks=pytest.mark.exhaustive),
        pytest.param(0, "before the old one is aside", [".partial"], OLD, marks=pytest.mark.exhaustive),
        (0, "between the two renames", [".partial", ".replaced"], OLD),
        pytest.param(0, "while deleting what is aside", [".removed"], NEW, marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_that_is_killed_while_it_saves_leaves_the_previous_checkpoint_whole(
    tmp_path: Path, victim: int, moment: str, left: list[str], found: int
) -> None:
    path = tmp_path / "last.ckpt"
    with pytest.raises(RankError) as caught:
        run_ranks(_save_twice, 2, RUN.but(trainer={"max_steps": 2}), path, victim, moment)
    assert f"rank {victim} (pid" in str(caught.value)
    assert "died without a result" in str(caught.value)
    names = {each.name for each in tmp_path.iterdir()}
    assert names - {"last.ckpt"} == {f"last.ckpt{suffix}" for suffix in left}
    assert ("last.ckpt" in names) == (moment != "between the two renames")

    # A folder that has its meta.pt is whole, whatever it is called.
    halves = [each for each in tmp_path.iterdir() if each.suffix != ".ckpt" and not (each / "meta.pt").exists()]
    for refusal, first_step, names_after, next_step in run_ranks(_go_on, 2, RUN, path, halves[0] if halves else None):
        if halves:
            # Which of both depends on whether the table of contents was there already.
            assert re.search("has no meta.pt: it was never finished|that another program wrote", str(refusal))
            assert str(halves[0]) in str(refusal)
        assert first_step == found
        assert names_after == ["last.ckpt"]
        assert next_step == 4


def _save_interrupted_twice(run: Run, path: Path) -> None:
    """Over what a crash between the renames left: the old one aside, the new one not yet named."""
    trainer, _ = fit(run.but(trainer={"max_steps": 1}))
    trainer.save_checkpoint(path)
    path.rename(path.with_name(path.name + ".replaced"))
    trainer, _ = fit(run.but(trainer={"max_steps": 2}, ckpt_path=str(path)))
    MOMENTS["between the two renames"]()
    trainer.save_checkpoint(path)


def test_the_only_whole_checkpoint_survives_a_second_crash(tmp_path: Path) -> None:
    run = Run(trainer={"max_steps": 3})
    path = tmp_path / "last.ckpt"
    with pytest.raises(RankError, match="died without a result"):
        run_ranks(_save_interrupted_twice, 1, run, path)

    assert not path.exists()
    assert run_ranks(_first_step_of, 1, run, path) == [OLD]


def _save_onto_a_full_disk(run: Run, path: Path, victim: int, limit: int) -> str:
    from lightning_megatron.errors import CheckpointError

    trainer, _ = fit(run.but(trainer={"max_steps": 1}))
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    if trainer.global_rank == victim:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        trainer.save_checkpoint(path)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return ""


@pytest.mark.parametrize(
    ("victim", "limit"),
    [
        pytest.param(0, 1_000, id="rank 0, first file", marks=pytest.mark.exhaustive),
        pytest.param(1, 50_000, id="rank 1, weights"),
    ],
)
def test_a_full_disk_on_one_rank_ends_the_save_on_all_and_leaves_the_old_checkpoint(
    tmp_path: Path, victim: int, limit: int
) -> None:
    """A limit on the size of files stands in for a disk without room."""
    path = tmp_path / "last.ckpt"

    for message in run_ranks(_save_onto_a_full_disk, 2, RUN, path, victim, limit, timeout=60):
        assert message.startswith(f"checkpoint {path} is not written")

    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]
    assert run_ranks(_first_step_of, 2, RUN, path) == [OLD, OLD]
