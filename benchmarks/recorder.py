"""Callback of a timed run: warm-up, host waits, timed steps, the bare engine, a profile.

The Trainer's steps and the engine's alone take turns in blocks, so that a GPU that grows warm slows both. Nothing here
waits for the GPU between two timed steps: CUDA events are recorded and read at the end of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.host_waits import HostWaitCounter
from benchmarks.measurement import HostWaits
from lightning_megatron.callbacks import StepClock
from lightning_megatron.module import MegatronModule
from lightning_megatron.steps.base import Batch

NUM_BLOCKS = 2
COUNTED_STEPS = 2
PROFILED_STEPS = 3
_LEAST_WARMUP = COUNTED_STEPS + 2
"""Compilation and the first allocations wait for the GPU too and must not be counted."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How many steps of each kind."""

    warmup_steps: int = 10
    """Steps before the first one that is timed."""
    steps: int = 20
    """Timed steps of the Trainer."""
    bare_steps: int = 20
    """Timed steps of the engine alone; 0 for none."""
    count_host_waits: bool = True
    """Whether the last steps of the warm-up run in PyTorch's sync debug mode, on a GPU."""
    profile: bool = False
    """Whether a few more steps run under the profiler."""

    def __post_init__(self) -> None:
        """Check that the phases fit.

        Raises:
            ValueError: If they do not.
        """
        if self.warmup_steps < _LEAST_WARMUP:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be at least {_LEAST_WARMUP}")
        if self.steps % NUM_BLOCKS or self.bare_steps % NUM_BLOCKS or self.steps < 2 * NUM_BLOCKS:
            raise ValueError(
                f"steps={self.steps} and bare_steps={self.bare_steps} must be multiples of {NUM_BLOCKS}, steps at "
                f"least {2 * NUM_BLOCKS}"
            )

    @property
    def trainer_steps(self) -> int:
        """Steps that the Trainer makes in all."""
        return self.warmup_steps + self.steps + (PROFILED_STEPS if self.profile else 0)


class BareLoop(Protocol):
    """Training steps on one batch without the Trainer."""

    def __call__(self, trainer: Trainer, module: LightningModule, batch: Batch) -> Callable[[], None]:
        """What runs one step."""


def engine_step(trainer: Trainer, module: LightningModule, batch: Batch) -> Callable[[], None]:
    """One step of the engine: gradients of ``batch``, then the optimizer, on the same chunks as the Trainer's."""
    from lightning_megatron.engine.schedule import Schedule
    from lightning_megatron.strategy import MegatronStrategy

    strategy, optimizer = trainer.strategy, trainer.optimizers[0]
    assert isinstance(strategy, MegatronStrategy), "only our engine can run without the Trainer"
    assert isinstance(module, MegatronModule), "only our engine can run without the Trainer"
    schedule = Schedule(list(module.model_chunks or []), strategy.topology)

    def step() -> None:
        schedule.train(batch, module.train_step, optimizer)  # type: ignore[arg-type]
        optimizer.step()

    return step


class StepRecorder(Callback):
    """Times the steps of a Trainer, and those of ``bare_loop`` in between."""

    def __init__(self, plan: Plan, bare_loop: BareLoop | None) -> None:
        self.plan = plan
        self.seconds: list[float] = []
        self.bare_seconds: list[float] = []
        self.host_waits: HostWaits | None = None
        self.losses: tuple[float, float] = (float("nan"), float("nan"))
        self.peak_allocated_gib: float | None = None
        self.peak_reserved_gib: float | None = None
        self.profile_text = ""
        self._bare_loop = bare_loop if plan.bare_steps else None
        self._clock = StepClock(torch.device("cpu"))
        self._waits = HostWaitCounter()
        self._profiler: Any = None
        self._done = 0
        self._loss_first: torch.Tensor | None = None
        self._loss_last: torch.Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        self._clock = StepClock(device)
        if device.type == "cuda":
            # What building the model took for a moment is not what training needs.
            torch.cuda.reset_peak_memory_stats(device)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_end_of_step(trainer):
            return
        self._done += 1
        self._loss_last = outputs["loss"]
        if self._loss_first is None:
            self._loss_first = self._loss_last
        plan = self.plan
        self._count_waits(trainer)
        if plan.warmup_steps <= self._done <= plan.warmup_steps + plan.steps:
            self._clock.mark(tokens=0, flops=0.0)
            timed, block = self._done - plan.warmup_steps, plan.steps // NUM_BLOCKS
            if timed > 0 and timed % block == 0:
                self.seconds += self._take()
                self._run_bare(trainer, pl_module, batch)
                self._clock.mark(tokens=0, flops=0.0)
        if plan.profile and self._done == plan.warmup_steps + plan.steps:
            self._start_profile()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        if self._profiler is not None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self._profiler.stop()
            self.profile_text = _profile_text(self._profiler, device)
        if self._loss_first is not None and self._loss_last is not None:
            # Lightning divides the loss of a batch by the number of batches that it accumulates.
            batches = trainer.accumulate_grad_batches
            self.losses = (float(self._loss_first) * batches, float(self._loss_last) * batches)
        if device.type == "cuda":
            self.peak_allocated_gib = most_gib(torch.cuda.max_memory_allocated(device), device)
            self.peak_reserved_gib = most_gib(torch.cuda.max_memory_reserved(device), device)

    def _is_end_of_step(self, trainer: Trainer) -> bool:
        """With accumulated gradients, a peer's way to microbatches, not every batch ends an optimizer step."""
        return trainer.global_step > self._done

    def _count_waits(self, trainer: Trainer) -> None:
        plan = self.plan
        if not plan.count_host_waits or trainer.strategy.root_device.type != "cuda":
            return
        if self._done == plan.warmup_steps - 1 - COUNTED_STEPS:
            self._waits.start()
        elif self._done == plan.warmup_steps - 1:
            self._waits.stop()
            self.host_waits = self._waits.per_step(COUNTED_STEPS)

    def _run_bare(self, trainer: Trainer, module: LightningModule, batch: Batch) -> None:
        if self._bare_loop is None:
            return
        step = self._bare_loop(trainer, module, batch)
        with trainer.strategy.engine(), torch.enable_grad():  # type: ignore[attr-defined]
            self._clock.mark(tokens=0, flops=0.0)
            for _ in range(self.plan.bare_steps // NUM_BLOCKS):
                step()
                self._clock.mark(tokens=0, flops=0.0)
        self.bare_seconds += self._take()

    def _take(self) -> list[float]:
        seconds, _, _ = self._clock.take()
        self._clock.interrupt()
        return seconds

    def _start_profile(self) -> None:
        on_gpu = torch.cuda.is_available()
        activity = torch.profiler.ProfilerActivity
        self._profiler = torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU])
        self._profiler.start()


def most_gib(num_bytes: int, device: torch.device) -> float:
    """The largest ``num_bytes`` of all ranks, each of which must call, in GiB."""
    most = torch.tensor(float(num_bytes), dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most) / 2**30


def _profile_text(profiler: Any, device: torch.device) -> str:
    """The kernels that took most of the profiled steps, and how much of the time any ran."""
    on_gpu = device.type == "cuda"
    table: str = profiler.key_averages().table(
        sort_by="self_cuda_time_total" if on_gpu else "self_cpu_time_total", row_limit=25, max_name_column_width=90
    )
    if not on_gpu:
        return table
    spans = sorted((e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type.name == "CUDA")
    return f"{table}\n{busy_line(spans, PROFILED_STEPS)}"


def busy_line(spans: list[tuple[float, float]], num_steps: int) -> str:
    """How much of the time from the first to the last of ``spans`` (microseconds, sorted) at least one covers."""
    if not spans:
        return "no kernel ran"
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    total = reached - spans[0][0]
    return f"a kernel ran in {busy / total:.1%} of {total / 1e3:.1f} ms ({num_steps} steps)"
