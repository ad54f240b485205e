"""What happens to ranks in the middle of a run, and a run that writes down, bit by bit, what it computed."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.checkpoint.runs import Run, fit
from tests.ranks import _is_alive, _pool

PHASES = {
    "training": "on_train_batch_start",
    "saving": "on_save_checkpoint",
    "validating": "on_validation_batch_start",
    "generating": "on_validation_start",
}
"""By what the run is doing: the hook in which a fault becomes due; in the last the run generates text."""

SLOW_FSYNC = "CAMPAIGN_SLOW_FSYNC"
"""Environment variable of a run: seconds by which each ``fsync`` takes longer."""

LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {}}
WORLD_SIZE = 2

_TRAINER = {"max_steps": 10, "val_check_interval": 2, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}


def run_of(layout: str, **strategy: Any) -> Run:
    """Ten steps that save, validate and generate every other step."""
    return Run(strategy={**LAYOUTS[layout], **strategy}, trainer=_TRAINER, validate=True)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A signal to some ranks, or a hook of theirs that does not return."""

    phase: str
    """Of ``PHASES``."""
    ranks: tuple[int, ...]
    step: int
    """It comes in the first such phase from this step on."""
    delay: float = 0.0
    """Seconds from the beginning of the phase, if it is a signal."""
    signum: int | None = signal.SIGKILL
    times: int = 1
    hang: Callable[[], None] | None = None
    """In place of a signal; a function at the top level of a module."""


def sleep() -> None:
    time.sleep(3600)


def _come(fault: Fault, folder: Path) -> None:
    if fault.hang is None:
        time.sleep(fault.delay)
    with (folder / "faults.txt").open("a") as file:
        file.write(f"{time.time()}\n")
    if fault.hang is not None:
        fault.hang()
        return
    for _ in range(fault.times if fault.signum else 0):
        os.kill(os.getpid(), fault.signum or 0)
        time.sleep(0.01)


def _faulty_callback(fault: Fault, folder: Path) -> Any:
    import lightning.pytorch as pl

    class Faulty(pl.Callback):
        def __init__(self) -> None:
            self._is_due = True

        def _enter(self, hook: str, trainer: Any) -> None:
            is_hit = hook == PHASES[fault.phase] and trainer.global_rank in fault.ranks
            if not is_hit or not self._is_due or trainer.global_step < fault.step:
                return
            self._is_due = False
            if fault.hang is not None:
                _come(fault, folder)
            else:
                threading.Thread(target=_come, args=(fault, folder), daemon=True).start()

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            self._enter("on_train_batch_start", trainer)

        def on_save_checkpoint(self, trainer: Any, *args: Any) -> None:
            self._enter("on_save_checkpoint", trainer)

        def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
            self._enter("on_validation_batch_start", trainer)

        def on_validation_start(self, trainer: Any, *args: Any) -> None:
            self._enter("on_validation_start", trainer)

    return Faulty()


def _recorder(folder: Path) -> Any:
    import lightning.pytorch as pl
    import torch

    class Recorder(pl.Callback):
        """Writes every loss down, and has the model generate before each validation."""

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            with (folder / f"losses_{trainer.global_rank}.txt").open("a") as file:
                file.write(f"{trainer.global_step} {float(outputs['loss']).hex()}\n")

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            module.generate(torch.arange(4)[None], max_new_tokens=4)

    return Recorder()


def train_on(run: Run, folder: Path, fault: Fault | None) -> None:
    """Go on with the run in ``folder`` to its end; the process ends with the code of a script that does so."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    rank, code = os.environ["RANK"], 0
    if delay := os.environ.get(SLOW_FSYNC):
        fsync = os.fsync
        os.fsync = lambda descriptor: (time.sleep(float(delay)), fsync(descriptor))[1]  # type: ignore[assignment]
    keeper = ModelCheckpoint(folder / "kept", every_n_train_steps=2, save_last=True)
    faulty = [_faulty_callback(fault, folder)] if fault else []
    try:
        fit(run.but(trainer={"default_root_dir": str(folder)}, ckpt_path="last"), *faulty, _recorder(folder), keeper)
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    (folder / f"code_{rank}.txt").write_text(str(code))
    os._exit(code)


def losses(folder: Path) -> dict[str, set[str]]:
    """By rank and step: every loss computed for it; just one if resumed runs are exact."""
    found: dict[str, set[str]] = {}
    for file in folder.glob("losses_*.txt"):
        for line in file.read_text().splitlines():
            step, _, loss = line.partition(" ")
            found.setdefault(f"{file.stem} {step}", set()).add(loss)
    return found


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the ranks of a run ended."""

    codes: dict[int, int]
    """By rank, of those that ended in Python."""
    left: list[int]
    """Ranks that were still there when time was up."""
    noticed: float | None
    """Seconds from the first fault to the end of the last rank."""
    printed: str


def _first_fault(folder: Path) -> float | None:
    file = folder / "faults.txt"
    times = file.read_text().split() if file.exists() else []
    return float(times[0]) if times else None


def run_to_end(run: Run, folder: Path, fault: Fault | None, patience: float, ignore: tuple[int, ...] = ()) -> Ended:
    """Start the run, wait until all ranks but those to ``ignore`` have ended, and kill what is left.

    Args:
        run: What to train.
        folder: Where it is kept.
        fault: What happens to it.
        patience: Seconds from the fault (from the start, if none comes) until it counts as hung.
        ignore: Ranks that cannot end.
    """
    for old in [*folder.glob("code_*.txt"), *folder.glob("faults.txt")]:
        old.unlink()
    _pool._start_if_needed()
    job = _pool._submit(train_on, WORLD_SIZE, (run, folder, fault))
    begin = time.time()
    try:
        while left := [rank for rank, pid in enumerate(job._pids) if rank not in ignore and _is_alive(pid)]:
            if time.time() > (_first_fault(folder) or begin + 60) + patience:
                break
            time.sleep(0.02)
        fault_time = _first_fault(folder)
        noticed = None if fault_time is None else time.time() - fault_time
    finally:
        job.kill()
    codes = {int(path.stem[5:]): int(path.read_text()) for path in folder.glob("code_*.txt")}
    return Ended(codes=codes, left=left, noticed=noticed, printed=job._logs())
