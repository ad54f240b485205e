"""``ckpt_path`` always resolves to a complete checkpoint, whatever files a killed run left.

The directories are made by hand and no process is started, because ``ckpt_path`` is resolved before that.
"""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.errors import CheckpointError, ConfigError
from tests.checkpoint.runs import Run, checkpoints_at, fit
from tests.marks import exhaustive
from tests.ranks import RankError, run_ranks

Files = dict[str, Any]
"""Files of a killed run. By checkpoint name: its step (and more of ``meta.pt``), None if unfinished, or the target of a
link. Names without ``.ckpt`` are files of other programs."""


def _complete(path: Path, step: int, **more: Any) -> None:
    path.mkdir(parents=True)
    for name in (".metadata", "metadata.json", "common.pt", "checksums.json"):
        (path / name).touch()
    meta = path / "meta.pt"
    torch.save({"lightning": {"global_step": step}, **more}, meta)
    # A copied checkpoint has a later file time than its original.
    changed = 100 - step if "time" in more else step
    os.utime(meta, (changed, changed))


def _make(folder: Path, files: Files) -> None:
    for name, content in files.items():
        if isinstance(content, str):
            (folder / name).symlink_to(content)
        elif ".ckpt" not in name:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()
        elif content is None:
            (folder / name).mkdir(parents=True)
            (folder / name / "common.pt").touch()
        elif isinstance(content, tuple):
            step, more = content
            _complete(folder / name, step, **more)
        else:
            _complete(folder / name, content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def _find(
    folder: Path, ckpt_path: str | Path | None, load_weights_only: bool = False
) -> str | Path | None:
    import lightning.pytorch as pl
    from lightning.pytorch.trainer.states import TrainerFn

    from lightning_megatron.run.start import find_checkpoint

    options: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
    }
    options |= {"callbacks": [pl.callbacks.ModelCheckpoint(folder)]}
    trainer = pl.Trainer(default_root_dir=folder.parent, **options)
    trainer.state.fn = TrainerFn.FITTING
    trainer.strategy.load_weights_only = load_weights_only  # type: ignore[attr-defined]
    return find_checkpoint(trainer, ckpt_path)


LIKE_6: Files = {"step=4.ckpt": 4, "last.ckpt": "step=6.ckpt"}
WEIGHTS = (4, {"has_optimizer": False, "time": 5.0})
NEWER_WEIGHTS: Files = {"step=4.ckpt": 4, "last.ckpt": WEIGHTS}
"""Files of two callbacks, one of which saves only weights."""


def _at(
    step: int,
    start: int,
    save: int,
    time: float,
    line: str = "a",
) -> Any:
    """A checkpoint of ``step`` with counters, saved when the clock showed ``time``."""
    position = {"line": line, "start": start, "save": save}
    return step, {"position": position, "time": time}


HOUR = 3600.0
AHEAD: Files = {
    "step=6.ckpt": _at(6, 1, 2, HOUR),
    "step=12.ckpt": _at(12, 2, 2, 60.0),
    "b.ckpt": _at(9, 2, 1, 50.0),
}
"""The first start was on a host whose clock is an hour ahead."""
WENT_BACK: Files = {
    "step=12.ckpt": _at(12, 1, 4, HOUR),
    "step=7.ckpt": _at(7, 2, 1, 70.0),
    "c.ckpt": _at(6, 1, 2, 60.0),
}
"""The second start was told to resume from step 6."""
OLD = (20, {"time": 100.0})
EARLIER: Files = {
    "last.ckpt": (4, {"time": 4.0}),
    "step=6.ckpt": (6, {"time": 6.0}),
    "step=8.ckpt": (8, {"time": 0.0}),
}
FOUND: dict[str, tuple[Files, str, str | None] | tuple[Files, str, str | None, bool]] = {
    "complete": (
        {"step=2.ckpt": 2, "step=4.ckpt": 4, "last.ckpt": "step=4.ckpt"},
        "last",
        "last.ckpt",
    ),
    "between removal and link": ({"step=2.ckpt": 2, "step=4.ckpt": 4}, "last", "step=4.ckpt"),
    "link to a save that was killed": (
        {**LIKE_6, "step=6.ckpt.partial": None},
        "last",
        "step=4.ckpt",
    ),
    "link to an unfinished folder": ({**LIKE_6, "step=6.ckpt": None}, "last", "step=4.ckpt"),
    "between two renames": (
        {"step=2.ckpt": 2, "last.ckpt.replaced": 4, "a.ckpt.partial": None},
        "last",
        "last.ckpt",
    ),
    "killed removal": ({"step=4.ckpt": 4, "last.ckpt": None}, "last", "step=4.ckpt"),
    "last is older": ({"last.ckpt": 4, "step=6.ckpt": 6}, "last", "step=6.ckpt"),
    "earlier run with more steps": (EARLIER, "last", "step=6.ckpt"),
    "clock ahead": (AHEAD, "last", "step=12.ckpt"),
    "clock ahead, and a link": ({**AHEAD, "last.ckpt": "step=6.ckpt"}, "last", "step=12.ckpt"),
    "went back on purpose": (WENT_BACK, "last", "step=7.ckpt"),
    "rolled back in one start": (
        {
            "a.ckpt": _at(
                8,
                1,
                4,
                HOUR,
            ),
            "b.ckpt": _at(8, 1, 5, 0.0),
        },
        "last",
        "b.ckpt",
    ),
    "another line, later by the clock": (
        {
            **WENT_BACK,
            "other.ckpt": _at(
                3,
                1,
                1,
                80.0,
                line="b",
            ),
        },
        "last",
        "other.ckpt",
    ),
    "another line, earlier by the clock": (
        {
            **WENT_BACK,
            "other.ckpt": _at(
                99,
                9,
                9,
                60.0,
                line="b",
            ),
        },
        "last",
        "step=7.ckpt",
    ),
    "no counters, later by the clock": ({**WENT_BACK, "old.ckpt": OLD}, "last", "old.ckpt"),
    "no counters, earlier by the clock": (
        {**WENT_BACK, "old.ckpt": (20, {"time": 1.0})},
        "last",
        "step=7.ckpt",
    ),
    "damaged counters": (
        {
            "a.ckpt": _at(8, 1, "x", 9.0),  # type: ignore[arg-type]
            "b.ckpt": (8, {"position": 3, "time": 8.0}),
        },
        "last",
        "a.ckpt",
    ),
    "directory: most steps, twice": (
        {
            "a.ckpt": _at(
                8,
                1,
                4,
                HOUR,
            ),
            "b.ckpt": _at(8, 2, 1, 0.0),
        },
        ".",
        "b.ckpt",
    ),
    "directory: most steps": (
        {"step=10.ckpt": 10, "step=9.ckpt": 9, "step=11.ckpt": None},
        ".",
        "step=10.ckpt",
    ),
    "newer weights only": (NEWER_WEIGHTS, "last", "step=4.ckpt"),
    "directory: newer weights only": (NEWER_WEIGHTS, ".", "step=4.ckpt"),
    "weights suffice": (NEWER_WEIGHTS, "last", "last.ckpt", True),
    "directory: weights suffice": (NEWER_WEIGHTS, ".", "last.ckpt", True),
    # Refused when it is loaded.
    "only weights": ({"step=4.ckpt": None, "last.ckpt": WEIGHTS}, ".", "last.ckpt"),
    "nothing": ({}, "last", None),
    "killed first save": ({"step=2.ckpt.partial": None, "last.ckpt": "step=2.ckpt"}, "last", None),
}
"""Files, ``ckpt_path``, the expected checkpoint and optionally ``load_weights_only``."""


@pytest.mark.parametrize("name", FOUND)
def test_ckpt_path_resolves_to_a_complete_checkpoint(folder: Path, name: str) -> None:
    files, ckpt_path, found, *weights_only = FOUND[name]
    _make(folder, files)
    before = sorted(folder.rglob("*"))
    expected = "last"  # left to Lightning, which warns
    if found is not None:
        expected = str(folder / found)
    path = "last" if ckpt_path == "last" else folder / ckpt_path
    assert _find(folder, path, *weights_only) == expected
    assert sorted(folder.rglob("*")) == before


def test_load_from_finds_a_checkpoint_set_aside_by_a_crash(folder: Path) -> None:
    from lightning_megatron import LoadFrom

    _make(folder, {"last.ckpt.replaced": 4, "last.ckpt.partial": None})
    assert LoadFrom(path=str(folder / "last.ckpt")).resolve() == folder / "last.ckpt.replaced"


@pytest.mark.parametrize(
    ("name", "ckpt_path", "message"),
    [
        ("step=2.ckpt", "last", "finds no complete checkpoint, but .*step=2.ckpt"),
        ("step=2.ckpt", "step=2.ckpt", "step=2.ckpt lacks its file meta.pt: it was never finished"),
        ("step=2.ckpt", "nowhere.ckpt", "nowhere.ckpt does not exist"),
        ("step=2.ckpt", ".", "none of the checkpoints in .* is complete: step=2.ckpt"),
        (
            "config.json",
            ".",
            "is a model of Hugging Face, which .* loads; convert it with `lightning-megatron convert`",
        ),
        (
            "latest_checkpointed_iteration.txt",
            ".",
            "is a checkpoint of Megatron-LM; convert it with",
        ),
        ("weights/metadata.json", ".", "is a checkpoint of NeMo 2; convert it with"),
    ],
)
def test_incomplete_and_foreign_checkpoints_are_refused(
    folder: Path, name: str, ckpt_path: str, message: str
) -> None:
    _make(folder, {name: None})
    with pytest.raises(CheckpointError, match=message):
        _find(folder, ckpt_path if ckpt_path == "last" else folder / ckpt_path)


def test_unknown_protocols_are_refused_before_any_process_starts(tmp_path: Path) -> None:
    """As ``ckpt_path`` and as directory of a stock callback."""
    import lightning.pytorch as pl

    from lightning_megatron import MegatronStrategy

    message = "nowhere://bucket.* cannot be opened .*; pip install 'lightning-megatron.remote.' and the package of that"
    with pytest.raises(ConfigError, match=message):
        _find(tmp_path, "nowhere://bucket/a.ckpt")
    saver = pl.callbacks.ModelCheckpoint("memory://bucket")
    saver.dirpath = "nowhere://bucket"
    strategy = MegatronStrategy()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        logger=False,
        callbacks=[saver],
        strategy=strategy,
    )
    with pytest.raises(ConfigError, match=message):
        strategy.checkpointing.resolve_ckpt_path(trainer, None)


@pytest.fixture
def requeued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")


@pytest.mark.usefixtures("requeued")
@pytest.mark.parametrize(
    ("steps", "last", "ckpt_path", "found"),
    [
        ([3, 5], 2, None, "hpc_ckpt_2.ckpt"),
        ([3, 5], 4, "last", "hpc_ckpt_2.ckpt"),
        ([3, 5], 6, "last", "checkpoints/last.ckpt"),
        ([3], 9, "checkpoints/last.ckpt", "hpc_ckpt_1.ckpt"),
    ],
)
def test_requeued_job_resumes_from_its_newest_checkpoint(
    folder: Path,
    tmp_path: Path,
    steps: list[int],
    last: int,
    ckpt_path: str | None,
    found: str,
) -> None:
    files: Files = {"hpc_ckpt_7.ckpt.partial": None, "checkpoints/last.ckpt": last}
    for version, step in enumerate(steps, start=1):
        files[f"hpc_ckpt_{version}.ckpt"] = step
    _make(tmp_path, files)
    if ckpt_path and "/" in ckpt_path:
        ckpt_path = str(tmp_path / ckpt_path)
    assert _find(folder, ckpt_path) == str(tmp_path / found)


@pytest.mark.usefixtures("requeued")
def test_requeued_job_that_went_back_goes_on_from_there(folder: Path, tmp_path: Path) -> None:
    _make(folder, WENT_BACK)
    _make(
        tmp_path,
        {
            "hpc_ckpt_1.ckpt": _at(14, 1, 5, HOUR),
            "hpc_ckpt_2.ckpt": _at(8, 2, 2, 80.0),
        },
    )
    assert _find(folder, "last") == str(tmp_path / "hpc_ckpt_2.ckpt")
    assert _find(folder, None) == str(tmp_path / "hpc_ckpt_2.ckpt")


@pytest.mark.usefixtures("requeued")
def test_requeued_job_without_a_complete_checkpoint_is_refused(tmp_path: Path) -> None:
    _make(tmp_path, {"hpc_ckpt_1.ckpt.partial": None})
    with pytest.raises(
        CheckpointError,
        match="no complete checkpoint of a requeued job, but hpc_ckpt_1.ckpt.partial",
    ):
        _find(tmp_path / "checkpoints", None)


def _resume_without_shared_disk(folder: Path) -> None:
    """Resume where only rank 0 sees the checkpoint, as on two nodes without a shared disk."""
    if os.environ["RANK"] != "0":
        folder = folder / "empty"
    trainer = {"default_root_dir": str(folder), "max_steps": 1}
    fit(
        Run(
            strategy={"tp": 2},
            trainer=trainer,
            ckpt_path="last",
        )
    )


def test_ranks_that_find_different_checkpoints_raise_instead_of_deadlock(tmp_path: Path) -> None:
    _complete(tmp_path / "last.ckpt", 3)
    with pytest.raises(
        RankError,
        match="would begin with no checkpoint and rank 0 with .*last.ckpt; keep checkpoints",
    ):
        run_ranks(_resume_without_shared_disk, 2, tmp_path, timeout=60)


def test_skipped_unreadable_checkpoint_is_warned_about(tmp_path: Path) -> None:
    _make(tmp_path, {"step=2.ckpt": 2, "step=4.ckpt": 4})
    (tmp_path / "step=4.ckpt" / "meta.pt").write_bytes(b"damaged")
    with pytest.warns(
        UserWarning, match=r"step=4.ckpt/meta.pt is damaged.* Skipped, although complete"
    ):
        assert _find(tmp_path, tmp_path) == str(tmp_path / "step=2.ckpt")
    shutil.rmtree(tmp_path / "step=2.ckpt")
    refused = pytest.raises(CheckpointError, match="finds no complete checkpoint, but .*step=4")
    with pytest.warns(UserWarning, match="Skipped, although complete"), refused:
        _find(tmp_path, "last")  # a resume never starts from scratch instead


def test_last_is_found_in_version_directories_of_a_logger(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    from lightning_megatron.run.start import find_last

    options: dict[str, Any] = {
        "accelerator": "cpu",
        "default_root_dir": tmp_path,
        "enable_progress_bar": False,
    }
    for version, step in (
        (0, 7),
        (1, 3),
        (10, 5),
    ):
        folder = tmp_path / "runs" / f"version_{version}" / "checkpoints"
        _complete(folder / f"step={step}.ckpt", step, time=float(version))
    for name, found in (("runs", 5), ("others", None)):
        trainer = pl.Trainer(logger=CSVLogger(tmp_path, name), **options)
        last = find_last(trainer)
        assert (last.step if last else None) == found
    options |= {"callbacks": [pl.callbacks.ModelCheckpoint(tmp_path / "elsewhere")]}
    trainer = pl.Trainer(logger=CSVLogger(tmp_path, "runs"), **options)
    assert find_last(trainer) is None


def _train_with_clocks(folder: str) -> list[tuple[str, int, int, int]]:
    """Runs on hosts with wrong clocks: from which checkpoint each starts, and line, start and save of its last one."""
    from lightning_megatron.checkpoint import save
    from lightning_megatron.run.start import find_last

    starts = []
    lines: list[str] = []

    def run(max_steps: int, ckpt_path: str | None, clock: float) -> None:
        class Clock:
            monotonic = staticmethod(time.monotonic)

            @staticmethod
            def time() -> float:
                return time.time() + clock

        save.time = Clock  # type: ignore[assignment, attr-defined]
        if ckpt_path not in (None, "last"):
            ckpt_path = f"{folder}/{ckpt_path}"
        run = Run(
            # Nothing is written there.
            trainer={"max_steps": max_steps, "default_root_dir": "/nonexistent"},
            ckpt_path=ckpt_path,
            model={"n_layer": 2},
            strategy={"num_microbatches": 1},
        )
        trainer, _ = fit(run, checkpoints_at(folder, every_n_train_steps=2))
        trainer.strategy.barrier()
        last = find_last(trainer)
        assert last is not None
        assert last.step == max_steps
        position = last.position
        assert position is not None
        if position.line not in lines:
            lines.append(position.line)
        started = trainer.ckpt_path if ckpt_path else None
        starts.append(
            (
                str(started).rpartition("/")[2],
                lines.index(position.line),
                position.start,
                position.save,
            )
        )

    run(4, None, 2 * HOUR)  # step 2 and 4 by a clock that is two hours ahead
    run(8, "last", 0.0)  # from 4: step 6 and 8
    run(10, "last", -HOUR)  # from 8
    run(6, "step=2.ckpt", -2 * HOUR)  # back on purpose: step 4 (its name is taken: 4-v1) and 6
    run(12, "last", 0.0)  # goes on from there
    run(2, None, 3 * HOUR)  # another run, by the clock the latest
    run(4, "last", 0.0)
    return starts


@pytest.mark.parametrize("protocol", ["", exhaustive("memory")])
def test_restarts_go_on_from_what_was_written_last_whatever_the_clocks(
    tmp_path: Path, protocol: str
) -> None:
    folder = f"memory:/{tmp_path}" if protocol else str(tmp_path)
    first, *others = run_ranks(_train_with_clocks, 1 if protocol else 2, folder)
    assert all(other == first for other in others)
    assert first == [
        ("None", 0, 1, 2),
        ("step=4.ckpt", 0, 2, 2),
        ("step=8.ckpt", 0, 3, 1),
        ("step=2.ckpt", 0, 4, 2),
        ("step=6-v1.ckpt", 0, 5, 3),
        ("None", 1, 1, 1),
        ("step=2-v1.ckpt", 1, 2, 1),
    ]
