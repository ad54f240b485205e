"""Does a run that a scheduler stops go on where it was? SIGTERM, and SLURM's requeue signal."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import Run, Trace, checkpoints_at, differences, fit
from tests.ranks import run_ranks

SIX_STEPS = Run(strategy={"tp": 2}, trainer={"max_steps": 6})


def _signals_itself(signum: int, ranks: tuple[int, ...], step: int, times: int = 1) -> Any:
    import lightning.pytorch as pl

    class SignalsItself(pl.Callback):
        """Sends this process a signal at the end of a step."""

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == step and trainer.global_rank in ranks:
                for _ in range(times):
                    os.kill(os.getpid(), signum)

        def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
            if step == -1 and trainer.global_step == 4 and trainer.global_rank in ranks:
                os.kill(os.getpid(), signum)

    return SignalsItself()


def _stopped(run: Run, folder: Path, keep: dict[str, Any], sent: dict[str, Any]) -> tuple[Any, list[str]]:
    """The exit code of a run that gets SIGTERM, and what it leaves."""
    code = None
    try:
        fit(run, checkpoints_at(folder, **keep), _signals_itself(signal.SIGTERM, **sent))
    except SystemExit as ended:
        code = ended.code
    return code, sorted(path.name for path in folder.iterdir())


def _whole(run: Run, folder: Path | None = None, keep: dict[str, Any] | None = None) -> Trace:
    return fit(run, *([] if folder is None else [checkpoints_at(folder, **(keep or {}))]))[1]


def _goes_on_exactly(expected: list[Trace], found: list[Trace], first: int) -> None:
    for whole, rest in zip(expected, found, strict=True):
        assert min(rest.steps) == first
        assert all(rest.steps[step] == whole.steps[step] for step in rest.steps)
        assert max(rest.steps) == max(whole.steps)
        assert differences(whole.state, rest.state) == []


NEVER = {"every_n_train_steps": 100}


@pytest.mark.parametrize(
    ("sent", "keep", "left"),
    [
        pytest.param({"ranks": (0,)}, {"save_last": True, **NEVER}, ["last.ckpt"], id="rank 0"),
        pytest.param({"ranks": (1,)}, NEVER, ["last.ckpt"], id="rank 1, without save_last"),
        pytest.param(
            {"ranks": (0, 1), "times": 2},
            {"save_last": "link", "save_top_k": 1, "every_n_train_steps": 2},
            ["last.ckpt", "preempted.ckpt", "step=2.ckpt"],
            id="both, twice, link",
        ),
    ],
)
def test_sigterm_saves_at_the_next_step_and_the_run_goes_on_exactly(
    tmp_path: Path, sent: dict[str, Any], keep: dict[str, Any], left: list[str]
) -> None:
    expected = run_ranks(_whole, 2, SIX_STEPS)

    stopped = run_ranks(_stopped, 2, SIX_STEPS, tmp_path, keep, {"step": 1, **sent})

    assert stopped == [(143, left)] * 2
    rest = run_ranks(_whole, 2, SIX_STEPS.but(ckpt_path="last"), tmp_path, keep)
    # Noted in step 1, agreed on in step 2, and step 3 is the last.
    _goes_on_exactly(expected, rest, first=4)
