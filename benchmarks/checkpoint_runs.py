"""Runs of the checkpoint benchmark: saves by this package or by Lightning's FSDP, and a resume.

The device is waited for after each step: against steps of seconds that is nothing, and a save is then not charged with
the work of the step before it.
"""

from __future__ import annotations

import resource
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from typing_extensions import override

from benchmarks.cases import Case
from benchmarks.data import loader
from benchmarks.peer import LAYERS, PeerModule
from benchmarks.runs import CLIP, LR, accumulated_batches, described, installed_versions, make_trainer
from lightning_megatron import MegatronModule, MegatronStrategy
from lightning_megatron.convert.registry import model_config

_LAST_FILE = "meta.pt"
"""What this package and Lightning's FSDP write last into a checkpoint's folder."""


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


class SaveRecorder(Callback):
    """Trains until ``plan`` is done, then stops the Trainer."""

    def __init__(self, plan: SavePlan) -> None:
        self.plan = plan
        self.saves: list[dict[str, Any]] = []
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
            if self._step_began is not None:
                self._steps_during.append(now - self._step_began)
            self._finish_if_complete(trainer)
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
        self._steps_during = []
        self._save_began = time.time()  # files know no other clock
        began = time.perf_counter()
        trainer.save_checkpoint(self.plan.path)
        self._stall = self._now() - began
        self._finish_if_complete(trainer)

    def _finish_if_complete(self, trainer: Trainer) -> None:
        is_complete = trainer.is_global_zero and (self.plan.path / _LAST_FILE).exists()
        if not trainer.strategy.broadcast(is_complete):
            return
        if trainer.is_global_zero:
            # Its last file, and its name, were entered then.
            complete = max(self.plan.path.stat().st_ctime - self._save_began, self._stall)
            self.saves.append({"stall": self._stall, "complete": complete, "steps_during": self._steps_during})
            files = [file for file in self.plan.path.rglob("*") if file.is_file()]
            self.gigabytes = sum(file.stat().st_size for file in files) / 1e9
            print(f"save {len(self.saves)}: {self.gigabytes:.3f} GB, {self.saves[-1]}", flush=True)
        else:
            self.saves.append({})
        self._save_began = 0.0

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


class _TimedStrategy(MegatronStrategy):
    """Knows how long its checkpoint took to load."""

    load_seconds: float | None = None

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self.barrier()
        began = time.perf_counter()
        loaded = super().load_checkpoint(checkpoint_path, weights_only)
        self.barrier()
        self.load_seconds = time.perf_counter() - began
        return loaded


def run_saves(case: Case, plan: SavePlan, asynchronous: bool) -> SimpleNamespace:
    """Save with ``MegatronStrategy`` while training goes on or stands still, and load at the same layout."""
    strategy = MegatronStrategy(num_microbatches=case.num_microbatches, async_save=asynchronous, **case.layout)
    module = MegatronModule(model=dict(case.model), lr=LR)
    recorder = SaveRecorder(plan)
    trainer = make_trainer(case, strategy, recorder, max_steps=plan.max_steps, gradient_clip_val=CLIP)
    # As runs have one that save; it saves nothing, but says that there will be saves, for which memory is pinned early.
    trainer.callbacks.append(ModelCheckpoint(plan.folder, every_n_train_steps=sys.maxsize))  # type: ignore[attr-defined]
    data = loader(case, module.model_config, case.rows)
    label = f"lightning-megatron{', async' if asynchronous else ''}"
    return _fit(case, recorder, label, lambda: trainer.fit(module, data))


def run_resume(case: Case, plan: SavePlan, layout: Mapping[str, Any]) -> SimpleNamespace:
    """Resume from the checkpoint that a run of ``case`` left, at another layout, and train two steps."""
    there = replace(case, layout=dict(layout))
    strategy = _TimedStrategy(num_microbatches=there.num_microbatches, **there.layout)
    module = MegatronModule(model=dict(case.model), lr=LR)
    recorder = SaveRecorder(replace(plan, saves=0, warmup_steps=1, plain_steps=1))
    trainer = make_trainer(there, strategy, recorder, max_steps=plan.max_steps, gradient_clip_val=CLIP)
    data = loader(there, module.model_config, there.rows)
    path = str(plan.path)
    record = _fit(case, recorder, "lightning-megatron, resume", lambda: trainer.fit(module, data, ckpt_path=path))
    record.load_seconds, record.load_layout, record.plain_step = strategy.load_seconds, _layout(there), None
    return record


def run_peer(case: Case, plan: SavePlan) -> SimpleNamespace:
    """Save with Lightning's FSDP, sharded, and the Hugging Face model; it runs on GPUs only."""
    rows, accumulated = accumulated_batches(case)
    module = PeerModule(dict(case.model), lr=LR, clip=CLIP, compiled=False)
    strategy = FSDPStrategy(
        auto_wrap_policy={LAYERS[case.model["model_type"]]},
        sharding_strategy="FULL_SHARD",
        use_orig_params=True,
        state_dict_type="sharded",
    )
    recorder = SaveRecorder(plan)
    trainer = make_trainer(case, strategy, recorder, max_steps=plan.max_steps, accumulate_grad_batches=accumulated)
    data = loader(case, model_config(case.model), rows)
    record = _fit(case, recorder, "Lightning FSDP, sharded", lambda: trainer.fit(module, data))
    record.load_layout = f"{case.num_devices} ranks"
    return record


def _fit(case: Case, recorder: SaveRecorder, label: str, fit: Callable[[], None]) -> SimpleNamespace:
    """The record of a run. Memory is summed over all ranks; all else is rank 0's."""
    fit()
    saves, alone = recorder.saves, recorder.plain_step
    during = [seconds for save in saves for seconds in save.get("steps_during", ())]
    # What saves cost: their stalls, and what they slowed the steps beside them down by.
    stalls = sum(save.get("stall", 0.0) for save in saves)
    lost = stalls + sum(seconds - (alone or 0.0) for seconds in during)
    return SimpleNamespace(
        **described(case, label),
        gigabytes=recorder.gigabytes,
        saves=saves,
        plain_step=alone,
        step_during=statistics.median(during) if during else None,
        lost_per_save=lost / len(saves) if saves else None,
        load_seconds=recorder.load_seconds,
        load_layout=_layout(case),
        host_gib_before=recorder.host_gib_before,
        host_gib_peak=recorder.host_gib_peak,
        gpu_gib_peak=recorder.gpu_gib_peak,
        loss_first=recorder.losses[0],
        loss_last=recorder.losses[-1],
        versions=installed_versions(),
    )


def _layout(case: Case) -> str:
    sizes = [f"{name}={case.layout[name]}" for name in ("tp", "pp", "vpp") if name in case.layout]
    return " ".join([*sizes, f"dp={case.data_parallel_size}"])
