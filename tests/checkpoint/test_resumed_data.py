"""Resuming with another kind of data, or beyond the last step, is told in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.parity.training import Case, Sentences, loader_of, module_of, trainer_of
from tests.ranks import run_ranks


def _said(folder: Path) -> dict[str, str]:
    """What resumed runs say, by what was saved and what the run has."""
    import logging
    import warnings

    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning_utilities.core import rank_zero

    from lightning_megatron import DatasetDataModule
    from lightning_megatron.errors import CheckpointError

    class Mine(DatasetDataModule):
        pass

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    rank_zero.log.addHandler(handler)
    case = Case(steps=2)
    rows = Sentences(60)

    def data(kind: str) -> dict[str, Any]:
        if kind == "loader":
            return {"train_dataloaders": loader_of(Case(steps=5))}
        return {"datamodule": {"module": DatasetDataModule, "mine": Mine}[kind](train=rows, micro_batch_size=12)}

    for kind in ("loader", "module"):
        saving = ModelCheckpoint(folder, kind, every_n_train_steps=2)
        trainer_of(case, callbacks=[saving], enable_checkpointing=True).fit(module_of(case), **data(kind))
    said = {}
    for saved, given, steps in (
        ("loader", "loader", 3),
        ("loader", "module", 3),
        ("module", "loader", 3),
        ("module", "mine", 3),
        ("module", "module", 3),
        ("module", "module", 1),
    ):
        lines.clear()
        trainer = trainer_of(case, max_steps=steps)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                trainer.fit(module_of(case), **data(given), ckpt_path=folder / f"{saved}.ckpt")
            except CheckpointError as error:
                lines.append(str(error))
        lines += [str(warning.message) for warning in caught]
        told = [line for line in lines if "anew" in line or "same kind" in line or "nothing is left" in line]
        said[f"{saved} {given} {steps}"] = " ".join([f"step {trainer.global_step}", *told])
    return said


def test_another_kind_of_data_and_a_run_that_is_over_are_told(tmp_path: Path) -> None:
    (said,) = run_ranks(_said, 1, tmp_path)
    assert said["loader loader 3"] == said["module module 3"] == "step 3"
    for kinds in ("loader module 3", "module loader 3"):
        assert said[kinds].startswith("step 3")
        assert "the training data begins anew" in said[kinds]
    assert "expected Mine, got DatasetDataModule; resume with the same kind" in said["module mine 3"].replace(
        "_said.<locals>.", ""
    )
    assert "is of step 2, and max_steps=1: nothing is left to do" in said["module module 1"]
