"""Runs of the checkpoint benchmark: saves with this package or Lightning's FSDP, and a resume.

The device is synchronized after each step, so that the time of a save does not include the step before it. For steps
of seconds the cost is negligible.
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
from benchmarks.runs import (
    CLIP,
    LR,
    accumulated_batches,
    case_fields,
    installed_versions,
    make_trainer,
)
from lightning_megatron import MegatronModule, MegatronStrategy
from lightning_megatron.convert.registry import model_config

_LAST_FILE = "meta.pt"
"""File that this package and Lightning's FSDP write last into a checkpoint directory."""


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """Number of saves and steps."""

    folder: Path
    """Directory of the checkpoints, one at a time."""
    saves: int = 3
    """Number of saves."""
    warmup_steps: int = 4
    """Steps before the first timed one."""
    plain_steps: int = 4
    """Timed steps before the first save."""
    load: bool = True
    """Whether to load the last checkpoint into the same run at the end."""
    keep: bool = False
    """Whether to keep the last checkpoint."""

    @property
    def path(self) -> Path:
        """Path of the complete checkpoint."""
        return self.folder / "benchmark.ckpt"

    @property
    def max_steps(self) -> int:
        """Limit of steps, so that a save that never completes does not block the machine."""
        return self.warmup_steps + self.plain_steps + 100 * max(1, self.saves)


class SaveRecorder(Callback):
    """Saves checkpoints and times them until ``plan`` is done, then stops the Trainer."""

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
            return  # a peer accumulates gradients over several batches per step
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
            raise RuntimeError(
                f"only {len(self.saves)} of {self.plan.saves} saves are complete: see the warnings"
            )
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
        self._save_began = time.time()  # the clock of files' timestamps
        start = time.perf_counter()
        trainer.save_checkpoint(self.plan.path)
        self._stall = self._now() - start
        self._finish_if_complete(trainer)

    def _finish_if_complete(self, trainer: Trainer) -> None:
        is_complete = trainer.is_global_zero and (self.plan.path / _LAST_FILE).exists()
        if not trainer.strategy.broadcast(is_complete):
            return
        if trainer.is_global_zero:
            # The directory's ctime is when its last file was created or it was renamed.
            complete = max(self.plan.path.stat().st_ctime - self._save_began, self._stall)
            self.saves.append(
                {"stall": self._stall, "complete": complete, "steps_during": self._steps_during}
            )
            files = [file for file in self.plan.path.rglob("*") if file.is_file()]
            self.gigabytes = sum(file.stat().st_size for file in files) / 1e9
            print(f"save {len(self.saves)}: {self.gigabytes:.3f} GB, {self.saves[-1]}", flush=True)
        else:
            self.saves.append({})
        self._save_began = 0.0

    def _load(self, trainer: Trainer) -> float:
        trainer.strategy.barrier()
        start = self._now()
        trainer.strategy.load_checkpoint(self.plan.path)
        trainer.strategy.barrier()
        return self._now() - start

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
        """Peak host memory in GiB, summed over ranks. Collective over the world."""
        peak = torch.tensor(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, device=self._device
        )
        if dist.is_initialized():
            dist.all_reduce(peak)
        return float(peak)


class _TimedStrategy(MegatronStrategy):
    """Strategy that times checkpoint loading."""

    load_seconds: float | None = None

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self.barrier()
        start = time.perf_counter()
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self.barrier()
        self.load_seconds = time.perf_counter() - start
        return checkpoint


def run_saves(case: Case, plan: SavePlan, asynchronous: bool) -> SimpleNamespace:
    """Save with ``MegatronStrategy``, asynchronously or not, and load in the same layout."""
    strategy = MegatronStrategy(
        num_microbatches=case.num_microbatches, async_save=asynchronous, **case.layout
    )
    module = MegatronModule(model=dict(case.model), lr=LR)
    recorder = SaveRecorder(plan)
    trainer = make_trainer(
        case, strategy, recorder, max_steps=plan.max_steps, gradient_clip_val=CLIP
    )
    # It never saves, but as in ordinary runs its presence makes the strategy pin memory for saves early.
    trainer.callbacks.append(ModelCheckpoint(plan.folder, every_n_train_steps=sys.maxsize))  # type: ignore[attr-defined]
    data = loader(case, module.model_config, case.rows)
    label = f"lightning-megatron{', async' if asynchronous else ''}"
    return _fit(case, recorder, label, lambda: trainer.fit(module, data))


def run_resume(case: Case, plan: SavePlan, layout: Mapping[str, Any]) -> SimpleNamespace:
    """Resume from the checkpoint of a run of ``case`` in a different layout, and train two steps."""
    resumed = replace(case, layout=dict(layout))
    strategy = _TimedStrategy(num_microbatches=resumed.num_microbatches, **resumed.layout)
    module = MegatronModule(model=dict(case.model), lr=LR)
    recorder = SaveRecorder(replace(plan, saves=0, warmup_steps=1, plain_steps=1))
    trainer = make_trainer(
        resumed, strategy, recorder, max_steps=plan.max_steps, gradient_clip_val=CLIP
    )
    data = loader(resumed, module.model_config, resumed.rows)
    path = str(plan.path)
    record = _fit(
        case,
        recorder,
        "lightning-megatron, resume",
        lambda: trainer.fit(module, data, ckpt_path=path),
    )
    record.load_seconds, record.load_layout, record.plain_step = (
        strategy.load_seconds,
        _layout(resumed),
        None,
    )
    return record


def run_peer(case: Case, plan: SavePlan) -> SimpleNamespace:
    """Save sharded checkpoints with Lightning's FSDP and the Hugging Face model, on GPUs only."""
    rows, accumulated = accumulated_batches(case)
    module = PeerModule(dict(case.model), lr=LR, clip=CLIP, compiled=False)
    strategy = FSDPStrategy(
        auto_wrap_policy={LAYERS[case.model["model_type"]]},
        sharding_strategy="FULL_SHARD",
        use_orig_params=True,
        state_dict_type="sharded",
    )
    recorder = SaveRecorder(plan)
    trainer = make_trainer(
        case, strategy, recorder, max_steps=plan.max_steps, accumulate_grad_batches=accumulated
    )
    data = loader(case, model_config(case.model), rows)
    record = _fit(case, recorder, "Lightning FSDP, sharded", lambda: trainer.fit(module, data))
    record.load_layout = f"{case.num_devices} ranks"
    return record


def _fit(
    case: Case, recorder: SaveRecorder, label: str, fit: Callable[[], None]
) -> SimpleNamespace:
    """Run ``fit`` and build the record. Memory is summed over ranks; all other measurements are rank 0's."""
    fit()
    saves, plain_step = recorder.saves, recorder.plain_step
    during = [seconds for save in saves for seconds in save.get("steps_during", ())]
    # Cost of the saves: stalls, plus slowdown of the steps during asynchronous saves.
    stalls = sum(save.get("stall", 0.0) for save in saves)
    lost = stalls + sum(seconds - (plain_step or 0.0) for seconds in during)
    return SimpleNamespace(
        **case_fields(case, label),
        gigabytes=recorder.gigabytes,
        saves=saves,
        plain_step=plain_step,
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
