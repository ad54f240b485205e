"""Resuming with another kind of data, or beyond the last step, is told in words."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning_megatron
from tests.checkpoint.runs import Run, fit, rows_dataset, train_and_save
from tests.ranks import run_ranks


class Mine(lightning_megatron.DatasetDataModule):
    """Of the user's own."""


LOADER = Run(trainer={"max_steps": 2})
MODULE = LOADER.but(indexed={"train": rows_dataset()}, data_module="DatasetDataModule")


def _said(run: Run) -> str:
    """The step that a resumed run comes to, and what it says on the way."""
    from lightning_utilities.core import rank_zero

    lightning_megatron.Mine = Mine  # type: ignore[attr-defined]
    lines: list[str] = []
    handler: Any = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    rank_zero.log.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            lines.append(f"step {fit(run)[0].global_step}")
        except lightning_megatron.CheckpointError as error:
            lines.append(str(error))
    return " ".join([*lines, *(str(warning.message) for warning in caught)])


def test_another_kind_of_data_and_a_run_that_is_over_are_told(tmp_path: Path) -> None:
    paths = {"loader": tmp_path / "loader.ckpt", "module": tmp_path / "module.ckpt"}
    for run, path in zip((LOADER, MODULE), paths.values(), strict=True):
        run_ranks(train_and_save, 1, run, path)
    anew, kind = "the training data begins anew", "expected Mine, got DatasetDataModule; resume with the same kind"
    for saved, run, steps, says in (
        ("loader", LOADER, 3, ""),
        ("loader", MODULE, 3, anew),
        ("module", LOADER, 3, anew),
        ("module", MODULE.but(data_module="Mine"), 3, kind),
        ("module", MODULE, 3, ""),
        ("module", MODULE, 1, "is of step 2, and max_steps=1: nothing is left to do"),
    ):
        resumed = run.but(trainer={"max_steps": steps}, ckpt_path=str(paths[saved]))
        (said,) = run_ranks(_said, 1, resumed)
        assert says in said
        assert (anew in said) == (says == anew)
        assert ("step 3" in said) == (steps == 3 and says != kind)
