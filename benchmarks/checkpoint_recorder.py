"""Callback that times steps alone, saves with the steps beside them, and one load.

The device is waited for after each step: against steps of seconds that is nothing, and a save is then not charged with
the work of the step before it.
"""

from __future__ import annotations

import resource
import shutil
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.checkpoint_measurement import Save

_LAST_FILE = "meta.pt"
"""What this package and Lightning's FSDP write last into a checkpoint's folder."""
_POLL_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """How much of what."""

    folder: Path
    """Where checkpoints are written; one at a time."""
    saves: int = 3
    """How often."""
    warmup_steps: int = 4
    """Steps before the first one that is timed."""
    plain_steps: int = 4
    """Timed steps before the first save."""
    load: bool = True
    """Whether the last checkpoint is loaded into the same run at the end."""
    keep: bool = False
    """Whether the last checkpoint stays."""

    @property
    def path(self) -> Path:
        """The checkpoint's final name."""
        return self.folder / "benchmark.ckpt"

    @property
    def max_steps(self) -> int:
        """So many that a save that is never complete does not hold the machine."""
        return self.warmup_steps + self.plain_steps + 100 * max(1, self.saves)


class _Watch:
    """Notes when a file appears, from a thread of its own."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.seen: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no longer."""
        self._stop.set()
        self._thread.join()

    def look(self) -> float | None:
        """When it was there for the first time; None if it is not there."""
        if self.seen is None and self._file.exists():
            self.seen = time.perf_counter()
        return self.seen

    def _wait(self) -> None:
        while not self._stop.is_set() and self.look() is None:
            time.sleep(_POLL_SECONDS)


class SaveRecorder(Callback):
    """Trains until ``plan`` is done, then stops the Trainer."""

    def __init__(self, plan: SavePlan) -> None:
        self.plan = plan
        self.saves: list[Save] = []
        self.plain_seconds: list[float] = []
        self.gigabytes: float | None = None
        self.load_seconds: float | None = None
        self.host_gib_before: float | None = None
        self.host_gib_peak = float("nan")
        self.gpu_gib_peak: float | None = None
        self.losses: list[float] = []
        self._device = torch.device("cpu")
        self._steps = 0
        self._step_began: float | None = None
        self._watch: _Watch | None = None
        self._save_began = 0.0
        self._stall = 0.0
        self._steps_during: list[float] = []

    @property
    def plain_step(self) -> float | None:
        """Median seconds of a step without a save."""
        return statistics.median(self.plain_seconds) if self.plain_seconds else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._device = trainer.strategy.root_device
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._steps:
            return  # with accumulated gradients, a peer's microbatches, not every batch ends a step
        self._steps = trainer.global_step
        now = self._now()
        self.losses.append(float(outputs["loss"]) * trainer.accumulate_grad_batches)
        if self._save_began:
            self._go_on_saving(trainer, now)
        elif len(self.losses) > self.plan.warmup_steps and self._step_began is not None:
            self.plain_seconds.append(now - self._step_began)
        if len(self.plain_seconds) >= self.plan.plain_steps and not self._save_began:
            if len(self.saves) < self.plan.saves:
                self._save(trainer)
            else:
                trainer.should_stop = True
        self._step_began = self._now()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(self.saves) < self.plan.saves:
            raise RuntimeError(f"only {len(self.saves)} of {self.plan.saves} saves are complete: see the warnings")
        if self.plan.load and self.saves:
            self.load_seconds = self._load(trainer)
        if not self.plan.keep:
            self._delete(trainer)
        self.host_gib_peak = self._host_gib()
        if self._device.type == "cuda":
            self.gpu_gib_peak = torch.cuda.max_memory_allocated(self._device) / 2**30

    def _save(self, trainer: Trainer) -> None:
        self._delete(trainer)
        if not self.saves:
            self.host_gib_before = self._host_gib()
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            self._watch = _Watch(self.plan.path / _LAST_FILE)
        self._steps_during = []
        self._save_began = time.perf_counter()
        trainer.save_checkpoint(self.plan.path)
        self._stall = self._now() - self._save_began
        self._finish_if_complete(trainer)

    def _go_on_saving(self, trainer: Trainer, now: float) -> None:
        if self._step_began is not None:
            self._steps_during.append(now - self._step_began)
        self._finish_if_complete(trainer)

    def _finish_if_complete(self, trainer: Trainer) -> None:
        seen = trainer.strategy.broadcast(None if self._watch is None else self._watch.look())
        if seen is None:
            return
        # Rank 0's clock means nothing elsewhere, and only rank 0 reports.
        complete = max(seen - self._save_began, self._stall)
        self.saves.append(Save(stall=self._stall, complete=complete, steps_during=tuple(self._steps_during)))
        self._save_began = 0.0
        if self._watch is not None:
            self._watch.stop()
            files = [file for file in self.plan.path.rglob("*") if file.is_file()]
            self.gigabytes = sum(file.stat().st_size for file in files) / 1e9
            plain = f"{self.plain_step:.3f} s/step alone"
            print(f"save {len(self.saves)}: {self.gigabytes:.3f} GB, {plain}, {self.saves[-1]}", flush=True)

    def _load(self, trainer: Trainer) -> float:
        trainer.strategy.barrier()
        began = self._now()
        trainer.strategy.load_checkpoint(self.plan.path)
        trainer.strategy.barrier()
        return self._now() - began

    def _delete(self, trainer: Trainer) -> None:
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            shutil.rmtree(self.plan.path, ignore_errors=True)
        trainer.strategy.barrier()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _host_gib(self) -> float:
        """The most memory that each rank has held, summed; every rank must call."""
        held = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, device=self._device)
        if dist.is_initialized():
            dist.all_reduce(held)
        return float(held)
