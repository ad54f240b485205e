"""Ranks that are killed, get many signals or hang, and disks that fail, while a run trains, saves and generates.

The ranks must end by themselves, without a scheduler that kills them, and name the cause; a run whose disk fails may
also continue without the failed saves. Then the run resumes from its checkpoints, and every loss that it ever computed
must be bitwise equal to that of a run without faults.
"""

import contextlib
import functools
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaigns import Attempt, Outcome
from tests.checkpoint.runs import Run, callback, checkpoints_at, fit
from tests.ranks import Job

_PHASES = {
    "training": "on_train_batch_start",
    "saving": "on_save_checkpoint",
    "validating": "on_validation_batch_start",
    "generating": "on_validation_start",
}
"""Hook in which a fault is triggered, by phase; in the last hook the run generates text."""
_ANY = tuple(_PHASES)
_LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {},
}
_RANKS = (0, 1)
_LIMITS = {"setup": 9, "step": 6, "checkpoint": 6}
"""Heartbeat limits in seconds."""
_SLOW_FSYNC = "CAMPAIGN_SLOW_FSYNC"
"""Environment variable of a run: seconds added to each ``fsync``."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Fault on some ranks, in the first occurrence of ``phase`` from ``step`` on."""

    phase: str
    ranks: tuple[int, ...]
    step: int
    act: Callable[[], None]
    """A function at the top level of a module."""
    is_async: bool = False
    """Whether the run continues during the fault."""


# ---- a run ----------------------------------------------------------------------------------------------------------


def _run_of(layout: str, **strategy: Any) -> Run:
    """Run of ten steps that saves, validates and generates every other step."""
    trainer = {
        "max_steps": 10,
        "val_check_interval": 2,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
    }
    return Run(
        strategy={**_LAYOUTS[layout], **strategy},
        trainer=trainer,
        validate=True,
    )


def _callbacks(fault: Fault | None, folder: Path) -> list[Any]:
    import torch

    pending = [] if fault is None else [fault]

    def trigger(fault: Fault) -> None:
        with (folder / "faults.txt").open("a") as file:
            file.write(f"{time.time()}\n")
        fault.act()

    def enter(trainer: Any, *_: Any) -> None:
        if (
            pending
            and trainer.global_rank in pending[0].ranks
            and trainer.global_step >= pending[0].step
        ):
            now = pending.pop()
            threading.Thread(
                target=trigger, args=(now,), daemon=True
            ).start() if now.is_async else trigger(now)

    def record(
        trainer: Any,
        module: Any,
        outputs: Any,
        *_: Any,
    ) -> None:
        with (folder / f"losses_{trainer.global_rank}.txt").open("a") as file:
            file.write(f"{trainer.global_step} {float(outputs['loss']).hex()}\n")

    def generate(trainer: Any, module: Any) -> None:
        module.generate(torch.arange(4)[None], max_new_tokens=4)

    faulty = [callback(**{_PHASES[fault.phase]: enter}) for fault in pending]
    saver = checkpoints_at(folder / "kept", every_n_train_steps=2, save_top_k=1, save_last=True)
    return [*faulty, callback(on_train_batch_end=record, on_validation_start=generate), saver]


def _train(run: Run, folder: Path, fault: Fault | None) -> None:
    """Resume the run in ``folder`` and finish it; exit with the code of a script that does so."""
    code = 0
    if delay := os.environ.get(_SLOW_FSYNC):
        fsync = os.fsync

        def slow_fsync(descriptor: Any) -> None:
            time.sleep(float(delay))
            fsync(descriptor)

        os.fsync = slow_fsync  # type: ignore[assignment]
    try:
        fit(
            run.but(trainer={"default_root_dir": str(folder)}, ckpt_path="last"),
            *_callbacks(fault, folder),
        )
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """How the ranks of a run ended."""

    codes: dict[int, int]
    """Exit code by rank, for ranks that were not killed."""
    left: list[int]
    """Ranks that had not ended in time."""
    seconds: float
    """Seconds from the first fault (from the start, if there was none) to the end of the last rank."""
    printed: str


def _run_to_end(
    run: Run,
    folder: Path,
    fault: Fault | None = None,
    patience: float = 60,
    stopped: tuple[int, ...] = (),
) -> _Ended:
    """Start the run, wait until all ranks except ``stopped`` have ended, and kill the rest.

    Args:
        run: The run.
        folder: Directory of its files.
        fault: Fault to cause.
        patience: Seconds from the fault (without one, from 60 s after the start) until the run counts as hung.
        stopped: Ranks that cannot end.
    """
    faults = folder / "faults.txt"
    faults.unlink(missing_ok=True)
    job = Job(_train, len(_RANKS), run, folder, fault)
    begin = time.time()
    try:
        while True:
            left = [
                rank for rank in _RANKS if rank not in stopped and job.processes[rank].is_alive()
            ]
            times = faults.read_text().split() if faults.exists() else []
            if not left or time.time() > (float(times[0]) if times else begin + 60) + patience:
                break
            time.sleep(0.02)
        seconds = time.time() - (float(times[0]) if times else begin)
        printed = job.logs()
        codes = {
            rank: code
            for rank in _RANKS
            if (code := job.processes[rank].exitcode) is not None and code >= 0
        }
    finally:
        job.close()
    return _Ended(codes=codes, left=left, seconds=seconds, printed=printed)


def _losses(folder: Path) -> dict[str, set[str]]:
    """All losses computed for each rank and step; exactly one if resumes are exact."""
    losses: dict[str, set[str]] = {}
    for file in folder.glob("losses_*.txt"):
        for line in file.read_text().splitlines():
            step, _, loss = line.partition(" ")
            losses.setdefault(f"{file.stem} {step}", set()).add(loss)
    return losses


@functools.cache
def _expected(layout: str) -> dict[str, set[str]]:
    """Losses of a run without faults."""
    with tempfile.TemporaryDirectory() as folder:
        ended = _run_to_end(_run_of(layout), Path(folder))
        if set(ended.codes.values()) != {0}:
            raise SystemExit(f"a run without faults fails: {ended.printed}")
        return _losses(Path(folder))


def _outcome(
    layout: str,
    folder: Path,
    fault: object,
    ended: _Ended,
    wrong: str = "",
) -> Outcome:
    """Judge how a run ended, and whether it resumes exactly and finishes."""
    steps = 0
    if ended.left:
        wrong = f"ranks {ended.left} have not ended"
    elif not wrong:
        resumed = _run_to_end(_run_of(layout), folder)
        expected = _expected(layout)
        losses = _losses(folder)
        steps = len(expected)
        if resumed.codes != dict.fromkeys(_RANKS, 0):
            wrong = f"the run does not resume: codes {resumed.codes}, left {resumed.left}\n{resumed.printed}"
        elif differing := sorted(step for step in expected if losses.get(step) != expected[step]):
            wrong = f"other losses than without the fault: {', '.join(differing)}"
    text = wrong and f"{layout}, {fault}: {wrong}\n{ended.printed}"
    return Outcome(
        wrong=text,
        hung=bool(ended.left),
        noticed=ended.seconds,
        steps=steps,
    )


# ---- killed ranks ------------------------------------------------------------------------------------------


def _signal(signum: int, times: int, delay: float) -> None:
    time.sleep(delay)
    for _ in range(times):
        os.kill(os.getpid(), signum)
        time.sleep(0.01)


def _kill(
    signum: int,
    max_times: int,
    rng: random.Random,
    folder: Path,
) -> Outcome:
    layout = rng.choice(list(_LAYOUTS))
    fault = Fault(
        phase=rng.choice(_ANY),
        ranks=rng.choice(((0,), (1,), _RANKS)),
        step=rng.randrange(8),
        act=functools.partial(
            _signal,
            signum,
            rng.randint(1, max_times),
            rng.uniform(0, 0.05),
        ),
        is_async=True,
    )
    ended = _run_to_end(
        _run_of(layout, async_save=rng.random() < 0.5),
        folder,
        fault,
        patience=45,
    )
    is_wrong = signum == signal.SIGTERM and set(ended.codes.values()) - {143, 0}
    return _outcome(
        layout, folder, fault, ended, f"SIGTERM ends with {ended.codes}" if is_wrong else ""
    )


# ---- hanging ranks ------------------------------------------------------------------------------------------------


def _sleep() -> None:
    time.sleep(3600)


def _loop() -> None:
    while True:
        time.sleep(0)


def _barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def _dead_disk() -> None:
    """Block every write of this rank forever, in the writer threads."""
    from lightning_megatron.checkpoint.save import _ChecksummedFile

    _ChecksummedFile.write = lambda self, data: _sleep() or 0  # type: ignore[method-assign, func-returns-value]


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang(
    act: Callable[[], None], phases: tuple[str, ...], rng: random.Random, folder: Path
) -> Outcome:
    from lightning_megatron.run.heartbeat import Heartbeat

    layout = rng.choice(list(_LAYOUTS))
    rank = rng.choice(_RANKS)
    fault = Fault(
        phase=rng.choice(phases),
        ranks=(rank,),
        step=rng.randrange(2, 8),
        act=act,
        is_async=act is _stop,
    )
    run = _run_of(layout, heartbeat=Heartbeat(**_LIMITS))
    ended = _run_to_end(
        run,
        folder,
        fault,
        _LIMITS["setup"] + 15,
        (rank,) if act is _stop else (),
    )
    lines = re.findall(r"^error: .*", ended.printed, re.MULTILINE)
    stack = folder / f"stacks/rank_{rank}.txt"
    wrong = ""
    if not lines or any(not line.startswith(f"error: rank {rank} hangs") for line in lines):
        wrong = f"rank {rank} is not named in {lines}"
    elif act not in (_stop, _dead_disk) and act.__name__ not in stack.read_text():
        wrong = f"{stack} does not show where it hangs"
    return _outcome(layout, folder, fault, ended, wrong)


# ---- failing disks -----------------------------------------------------------------------------------------------


def _fill(kept: Path, rng: random.Random) -> Callable[[], None]:
    """Fill the disk; return the function that frees it."""
    left = shutil.disk_usage(kept).free - rng.choice((0, 4096, 50_000, 200_000))
    with contextlib.suppress(OSError), (kept / "filler").open("wb") as file:
        file.write(bytes(max(left, 0)))
    return lambda: (kept / "filler").unlink(missing_ok=True)


def _remount(kept: Path, rng: random.Random) -> Callable[[], None]:
    def mount(mode: str) -> None:
        subprocess.run(
            ["mount", "-o", f"remount,{mode}", kept],
            check=False,
            capture_output=True,
        )

    mount("ro")  # refused while a file is open for writing: the disk then stays writable
    return lambda: mount("rw")


def _delete(kept: Path, rng: random.Random) -> Callable[[], None]:
    for path in kept.iterdir():
        shutil.rmtree(path, ignore_errors=True)
    return lambda: None


def _break_disk(
    harm: Callable[[Path, random.Random], Callable[[], None]], rng: random.Random, folder: Path
) -> Outcome:
    """Run on a separate disk that fails and is repaired when the run has ended."""
    layout = rng.choice(list(_LAYOUTS))
    kept = folder / "kept"
    kept.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", kept], check=True)
    undo: list[Callable[[], None]] = []
    timer = threading.Timer(rng.uniform(0.3, 3), lambda: undo.append(harm(kept, rng)))
    try:
        timer.start()
        ended = _run_to_end(_run_of(layout, async_save=rng.random() < 0.5), folder)
        timer.join()
        undo[0]()
        printed = " ".join(ended.printed.split())
        codes = set(ended.codes.values())
        reasons = [
            "is not written",
            "cannot be saved",
            *(["does not exist", "No such file"] if harm is _delete else []),
        ]
        is_reported = codes == {0} or (
            codes <= {0, 1} and any(reason in printed for reason in reasons)
        )
        wrong = "" if is_reported else f"codes {ended.codes} without a reason"
        return _outcome(layout, folder, harm.__name__, ended, wrong)
    finally:
        subprocess.run(["umount", "-l", kept], check=True)


def _slow(rng: random.Random, folder: Path) -> Outcome:
    """Slow down every ``fsync``: the run waits or trains on, and its results are unchanged."""
    layout = rng.choice(list(_LAYOUTS))
    os.environ[_SLOW_FSYNC] = str(rng.uniform(0.05, 0.4))
    try:
        ended = _run_to_end(
            _run_of(layout, async_save=rng.random() < 0.5),
            folder,
            patience=120,
        )
    finally:
        del os.environ[_SLOW_FSYNC]
    return _outcome(layout, folder, "slow", ended)


CAMPAIGNS: dict[str, dict[str, Attempt]] = {
    "killed": {
        "kill -9": functools.partial(_kill, signal.SIGKILL, 1),
        "SIGTERM, up to 20 times": functools.partial(_kill, signal.SIGTERM, 20),
        "SIGINT, up to 20 times": functools.partial(_kill, signal.SIGINT, 20),
    },
    "hangs": {
        "SIGSTOP": functools.partial(_hang, _stop, _ANY),
        "sleeps in a hook": functools.partial(_hang, _sleep, _ANY),
        "loops in a hook": functools.partial(_hang, _loop, ("training", "saving", "validating")),
        "a barrier of its own": functools.partial(_hang, _barrier, ("training", "validating")),
        "a dead disk": functools.partial(_hang, _dead_disk, ("saving",)),
    },
    "disks": {"disk: slow": _slow},
}
if os.geteuid() == 0:  # mounting needs root
    CAMPAIGNS["disks"] |= {
        "disk: full": functools.partial(_break_disk, _fill),
        "disk: read-only": functools.partial(_break_disk, _remount),
        "disk: checkpoints deleted": functools.partial(_break_disk, _delete),
    }
