"""``ckpt_path`` always means a complete checkpoint, whatever a killed run has left behind.

The folders are made by hand, and no process is started: what ``ckpt_path`` means is known before.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.errors import CheckpointError, ConfigError
from tests.checkpoint.runs import Run, fit
from tests.ranks import RankError, run_ranks

Left = dict[str, Any]
"""Of a killed run: the steps of complete checkpoints (with what ``meta.pt`` says besides), None of unfinished ones, and
where links lead; files of other programs have no such ending."""


def _complete(path: Path, step: int, **more: Any) -> None:
    path.mkdir(parents=True)
    for name in (".metadata", "metadata.json", "common.pt", "checksums.json"):
        (path / name).touch()
    torch.save({"lightning": {"global_step": step}, **more}, path / "meta.pt")
    changed = 100 - step if "time" in more else step  # a copy has another time than what was copied
    os.utime(path / "meta.pt", (changed, changed))


def _leave(folder: Path, left: Left) -> None:
    for name, what in left.items():
        if isinstance(what, str):
            (folder / name).symlink_to(what)
        elif ".ckpt" not in name:
            (folder / name).touch()
        elif what is None:
            (folder / name).mkdir(parents=True)
            (folder / name / "common.pt").touch()
        else:
            step, more = what if isinstance(what, tuple) else (what, {})
            _complete(folder / name, step, **more)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def _find(folder: Path, ckpt_path: str | Path | None, load_weights_only: bool = False) -> str | Path | None:
    import lightning.pytorch as pl
    from lightning.pytorch.trainer.states import TrainerFn

    from lightning_megatron.checkpointing import find_checkpoint

    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    keeper = pl.callbacks.ModelCheckpoint(folder)
    trainer = pl.Trainer(default_root_dir=folder.parent, callbacks=[keeper], **options)
    trainer.state.fn = TrainerFn.FITTING
    trainer.strategy.load_weights_only = load_weights_only  # type: ignore[attr-defined]
    return find_checkpoint(trainer, ckpt_path)


LIKE_6: Left = {"step=4.ckpt": 4, "last.ckpt": "step=6.ckpt"}
WEIGHTS = (4, {"has_optimizer": False, "time": 5.0})
NEWER_WEIGHTS: Left = {"step=4.ckpt": 4, "last.ckpt": WEIGHTS}
"""As two callbacks leave them, one of which saves only weights."""
EARLIER: Left = {"last.ckpt": (4, {"time": 4.0}), "step=6.ckpt": (6, {"time": 6.0}), "step=8.ckpt": (8, {"time": 0.0})}
FOUND: dict[str, tuple[Left, str, str | None] | tuple[Left, str, str | None, bool]] = {
    "whole": ({"step=2.ckpt": 2, "step=4.ckpt": 4, "last.ckpt": "step=4.ckpt"}, "last", "last.ckpt"),
    "between removal and link": ({"step=2.ckpt": 2, "step=4.ckpt": 4}, "last", "step=4.ckpt"),
    "link to a save that was killed": ({**LIKE_6, "step=6.ckpt.partial": None}, "last", "step=4.ckpt"),
    "link to an unfinished folder": ({**LIKE_6, "step=6.ckpt": None}, "last", "step=4.ckpt"),
    "between two renames": ({"step=2.ckpt": 2, "last.ckpt.replaced": 4, "a.ckpt.partial": None}, "last", "last.ckpt"),
    "a removal was killed": ({"step=4.ckpt": 4, "last.ckpt": None}, "last", "step=4.ckpt"),
    "before the last one was renewed": ({"last.ckpt": 4, "step=6.ckpt": 6}, "last", "step=6.ckpt"),
    "more steps, of an earlier run": (EARLIER, "last", "step=6.ckpt"),
    "a folder means most steps": ({"step=10.ckpt": 10, "step=9.ckpt": 9, "step=11.ckpt": None}, ".", "step=10.ckpt"),
    "a newer one has only weights": (NEWER_WEIGHTS, "last", "step=4.ckpt"),
    "a newer one of a folder has only weights": (NEWER_WEIGHTS, ".", "step=4.ckpt"),
    "weights will do": (NEWER_WEIGHTS, "last", "last.ckpt", True),
    "weights of a folder will do": (NEWER_WEIGHTS, ".", "last.ckpt", True),
    "there are only weights": ({"step=4.ckpt": None, "last.ckpt": WEIGHTS}, ".", "last.ckpt"),  # loading it tells
    "nothing": ({}, "last", None),
    "the first save was killed": ({"step=2.ckpt.partial": None, "last.ckpt": "step=2.ckpt"}, "last", None),
}
"""What is left, what is asked for, and what is found; and whether weights are all that is wanted."""


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found_is_a_complete_checkpoint(folder: Path, name: str) -> None:
    left, ckpt_path, found, *wanted = FOUND[name]
    _leave(folder, left)
    before = sorted(folder.rglob("*"))
    expected = "last" if found is None else str(folder / found)  # for Lightning, which warns
    assert _find(folder, "last" if ckpt_path == "last" else folder / ckpt_path, *wanted) == expected
    assert sorted(folder.rglob("*")) == before


def test_weights_for_a_new_run_are_read_where_a_crash_between_two_renames_left_them(folder: Path) -> None:
    from lightning_megatron import LoadFrom

    _leave(folder, {"last.ckpt.replaced": 4, "last.ckpt.partial": None})
    assert LoadFrom(path=str(folder / "last.ckpt")).resolve() == folder / "last.ckpt.replaced"


@pytest.mark.parametrize(
    ("left", "ckpt_path", "message"),
    [
        ("step=2.ckpt", "last", "finds no complete checkpoint, but .*step=2.ckpt"),
        ("step=2.ckpt", "step=2.ckpt", "step=2.ckpt lacks its file meta.pt: it was never finished"),
        ("step=2.ckpt", "nowhere.ckpt", "nowhere.ckpt does not exist"),
        ("step=2.ckpt", ".", "none of the checkpoints in .* is complete: step=2.ckpt"),
        ("config.json", ".", "is a model of Hugging Face; convert it with `lightning-megatron convert`"),
        ("latest_checkpointed_iteration.txt", ".", "is a checkpoint of Megatron-LM; convert it with"),
    ],
)
def test_what_is_not_complete_is_an_error(folder: Path, left: str, ckpt_path: str, message: str) -> None:
    _leave(folder, {left: None})
    with pytest.raises(CheckpointError, match=message):
        _find(folder, ckpt_path if ckpt_path == "last" else folder / ckpt_path)


def test_an_address_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    """Neither to begin with nor, in stock callbacks, to save to; this is known before any process starts."""
    import lightning.pytorch as pl

    from lightning_megatron import MegatronStrategy

    message = "nowhere://bucket.* cannot be opened .*; pip install 'lightning-megatron.remote.' and the package of that"
    with pytest.raises(ConfigError, match=message):
        _find(tmp_path, "nowhere://bucket/a.ckpt")
    keeper = pl.callbacks.ModelCheckpoint("memory://bucket")
    keeper.dirpath = "nowhere://bucket"
    strategy = MegatronStrategy()
    trainer = pl.Trainer(accelerator="cpu", devices=2, logger=False, callbacks=[keeper], strategy=strategy)
    with pytest.raises(ConfigError, match=message):
        strategy.checkpointing.resolve_ckpt_path(trainer, None)


@pytest.fixture
def requeued(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train", "SLURM_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)


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
def test_a_requeued_job_goes_on_from_its_newest_checkpoint(
    folder: Path, tmp_path: Path, steps: list[int], last: int, ckpt_path: str | None, found: str
) -> None:
    requeued = {f"hpc_ckpt_{version}.ckpt": step for version, step in enumerate(steps, start=1)}
    _leave(tmp_path, {**requeued, "hpc_ckpt_7.ckpt.partial": None, "checkpoints/last.ckpt": last})
    given = str(tmp_path / ckpt_path) if ckpt_path and "/" in ckpt_path else ckpt_path
    assert _find(folder, given) == str(tmp_path / found)


@pytest.mark.usefixtures("requeued")
def test_a_requeued_job_without_a_complete_checkpoint_does_not_begin_anew(tmp_path: Path) -> None:
    _leave(tmp_path, {"hpc_ckpt_1.ckpt.partial": None})
    with pytest.raises(CheckpointError, match="no complete checkpoint of a requeued job, but hpc_ckpt_1.ckpt.partial"):
        _find(tmp_path / "checkpoints", None)


def _resume_from_a_folder_of_its_own(folder: Path) -> None:
    """As on two machines that share no disk: rank 1 does not see the checkpoint."""
    there = os.environ["RANK"] == "0"
    trainer = {"default_root_dir": str(folder if there else folder / "empty"), "max_steps": 1}
    fit(Run(strategy={"tp": 2}, trainer=trainer, ckpt_path="last"))


def test_ranks_that_find_different_checkpoints_do_not_wait_for_each_other(tmp_path: Path) -> None:
    _complete(tmp_path / "last.ckpt", 3)
    with pytest.raises(RankError, match="would begin with no checkpoint and rank 0 with .*last.ckpt; keep checkpoints"):
        run_ranks(_resume_from_a_folder_of_its_own, 2, tmp_path, timeout=60)


def test_a_checkpoint_that_cannot_be_read_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    _leave(tmp_path, {"step=2.ckpt": 2, "step=4.ckpt": 4})
    (tmp_path / "step=4.ckpt" / "meta.pt").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match=r"step=4.ckpt/meta.pt is damaged.* passed over"):
        assert _find(tmp_path, tmp_path) == str(tmp_path / "step=2.ckpt")
    shutil.rmtree(tmp_path / "step=2.ckpt")
    refused = pytest.raises(CheckpointError, match="finds no complete checkpoint, but .*step=4")
    with pytest.warns(UserWarning, match="passed over"), refused:
        _find(tmp_path, "last")  # a run that shall go on does not begin anew


def test_last_is_found_in_the_numbered_folders_of_a_logger(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    from lightning_megatron.checkpointing import find_last

    options: dict[str, Any] = {"accelerator": "cpu", "default_root_dir": tmp_path, "enable_progress_bar": False}
    for version, step in ((0, 7), (1, 3), (10, 5)):
        folder = tmp_path / "runs" / f"version_{version}" / "checkpoints"
        _complete(folder / f"step={step}.ckpt", step, time=float(version))
    for name, found in (("runs", 5), ("others", None)):
        trainer = pl.Trainer(logger=CSVLogger(tmp_path, name), **options)
        last = find_last(trainer)
        assert (last.step if last else None) == found
    elsewhere = pl.callbacks.ModelCheckpoint(tmp_path / "elsewhere")
    assert find_last(pl.Trainer(logger=CSVLogger(tmp_path, "runs"), callbacks=[elsewhere], **options)) is None
