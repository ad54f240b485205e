"""Lightning's ``ModelCheckpoint`` keeps, links, finds and deletes checkpoints, which are directories."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import (
    GLOBAL_BATCH,
    Run,
    callback,
    checkpoints_at,
    fit,
    names_in,
    rows_dataset,
)
from tests.ranks import run_ranks
from tests.recording import recorded_warnings


def _monitor_loss(folder: Path, save_last: bool | str) -> Any:
    return checkpoints_at(
        folder,
        monitor="val_loss",
        mode="max",  # the loss falls: the first checkpoint is best, later ones compete for second place
        save_top_k=2,
        save_last=save_last,
        filename="{step}-{val_loss:.3f}",
        every_n_train_steps=None,
    )


def _train_unvalidated(folder: Path) -> tuple[list[str], list[str]]:
    with recorded_warnings("ModelCheckpoint") as warned:
        fit(Run(trainer={"max_steps": 2}), _monitor_loss(folder, True))
    return warned, [path.name for path in folder.glob("*.ckpt")]


def test_monitor_without_validation_is_warned_about(tmp_path: Path) -> None:
    ((warned, kept),) = run_ranks(_train_unvalidated, 1, tmp_path)
    assert any(
        "ModelCheckpoint(monitor='val_loss'): expected validation, got a run without" in text
        for text in warned
    )
    assert kept == ["last.ckpt"]


def _name_by_gradient_norm(folder: Path) -> tuple[list[str], list[str]]:
    """Names of checkpoints, and those that the steps' own gradient norms give."""
    saver = checkpoints_at(folder, filename="{step}-{grad_norm:.4f}", every_n_train_steps=1)
    _, trace = fit(Run(trainer={"max_steps": 3}), saver)
    expected = [
        f"step={step}-grad_norm={row['grad_norm']:.4f}.ckpt" for step, row in trace.steps.items()
    ]
    return names_in(folder), sorted(expected)


def test_what_names_a_checkpoint_is_of_its_own_step(tmp_path: Path) -> None:
    ((names, expected),) = run_ranks(_name_by_gradient_norm, 1, tmp_path)
    assert names == expected
    assert len(set(names)) == 3


def _train_with_two_callbacks(folder: Path, is_async: bool) -> list[str]:
    newest = checkpoints_at(folder, save_top_k=1)
    every_second = checkpoints_at(folder, every_n_train_steps=2)
    run = Run(strategy={"async_save": is_async}, trainer={"max_steps": 4})
    fit(run, newest, every_second)
    return names_in(folder)


@pytest.mark.parametrize("is_async", [False, True])
def test_callbacks_with_the_same_names_keep_each_others_checkpoints(
    tmp_path: Path, is_async: bool
) -> None:
    (names,) = run_ranks(_train_with_two_callbacks, 1, tmp_path, is_async)
    assert names == ["step=2-v1.ckpt", "step=4-v1.ckpt", "step=4.ckpt"]


def _train_then_evaluate_best_and_last(
    run: Run, folder: Path, save_last: bool | str
) -> dict[str, Any]:
    from torch.utils.data import DataLoader

    losses: dict[int, float] = {}

    def record(trainer: Any, _: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            losses[trainer.global_step] = float(trainer.callback_metrics["val_loss"])

    saver = _monitor_loss(folder, save_last)
    trainer, _ = fit(run, callback(on_validation_end=record), saver)
    trainer.strategy.barrier()  # rank 0 removes old checkpoints
    listing = {
        path.name: os.readlink(path) if path.is_symlink() else path.is_dir()
        for path in folder.glob("*.ckpt")
    }
    trainer.strategy.barrier()
    batch_size = GLOBAL_BATCH // trainer.strategy.data_parallel_size
    loader = DataLoader(rows_dataset(12), batch_size=batch_size)
    evaluated = {}
    for name in ("best", "last"):
        (validated,) = trainer.validate(
            dataloaders=loader,
            ckpt_path=name,
            verbose=False,
        )
        (tested,) = trainer.test(
            dataloaders=loader,
            ckpt_path=name,
            verbose=False,
        )
        evaluated[name] = (validated["val_loss"], tested["test_loss"])
    return {
        "losses": losses,
        "best": Path(saver.best_model_path).name,
        "best_score": float(saver.best_model_score),
        "listing": listing,
        "evaluated": evaluated,
    }


@pytest.mark.parametrize(
    ("strategy", "save_last"),
    [({"pp": 2}, True), ({"async_save": True}, "link")],
    ids=["pp2", "async, link"],
)
def test_top_k_best_and_last_checkpoints_are_kept_and_found(
    tmp_path: Path, strategy: dict[str, Any], save_last: bool | str
) -> None:
    trainer = {"max_steps": 6, "val_check_interval": 2, "check_val_every_n_epoch": None}
    run = Run(strategy=strategy, validate=True, trainer=trainer)

    result, other = run_ranks(_train_then_evaluate_best_and_last, 2, run, tmp_path, save_last)

    assert result == other
    losses = result["losses"]
    assert losses[2] > losses[4] > losses[6]
    names = {step: f"step={step}-val_loss={loss:.3f}.ckpt" for step, loss in losses.items()}
    # The third is not kept because it is worse than both, and Lightning updates the last one only when it keeps one.
    last: Any = True if save_last is True else names[4]
    assert result["listing"] == {names[2]: True, names[4]: True, "last.ckpt": last}
    assert (result["best"], result["best_score"]) == (names[2], losses[2])
    assert result["evaluated"] == {"best": (losses[2], losses[2]), "last": (losses[4], losses[4])}
