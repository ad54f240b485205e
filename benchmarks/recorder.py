"""Callback that measures a training run: warm-up, host waits, timed steps, bare engine steps, a profile.

Blocks of Trainer steps alternate with blocks of bare engine steps, so that a GPU that gets warm slows both. Timed steps
do not synchronize with the GPU: CUDA events are recorded, and read at the end of a block.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_megatron.callbacks.step_clock import StepClock
from lightning_megatron.module import MegatronModule
from lightning_megatron.steps.base import Batch

_MESSAGE = "called a synchronizing CUDA operation"
_OURS = ("lightning_megatron", "megatron")
_LIGHTNING = ("lightning", "pytorch_lightning")
NUM_BLOCKS = 2
COUNTED_STEPS = 2
PROFILED_STEPS = 3
_LEAST_WARMUP = COUNTED_STEPS + 2
"""Minimum warm-up: compilation and first allocations synchronize too, and must not be counted."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Number of steps of each phase."""

    warmup_steps: int = 10
    """Steps before the first timed one."""
    steps: int = 20
    """Timed steps of the Trainer."""
    bare_steps: int = 20
    """Timed steps of the engine without the Trainer; 0 for none."""
    count_host_waits: bool = True
    """Whether to run the last warm-up steps in PyTorch's sync debug mode, on a GPU."""
    profile: bool = False
    """Whether to run a few additional steps in the profiler."""

    def __post_init__(self) -> None:
        """Check the numbers of steps.

        Raises:
            ValueError: If the warm-up is too short, or the timed steps do not split into blocks.
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
        """Total number of Trainer steps."""
        return self.warmup_steps + self.steps + (PROFILED_STEPS if self.profile else 0)


def engine_step(trainer: Trainer, module: MegatronModule, batch: Batch) -> Callable[[], None]:
    """Return a function that runs one engine step on ``batch``, with the Trainer's model chunks and optimizer."""
    from lightning_megatron.engine.optimizer import Gradients, MegatronOptimizer
    from lightning_megatron.engine.schedule import Schedule
    from lightning_megatron.strategy import MegatronStrategy

    strategy = trainer.strategy
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, MegatronOptimizer)
    assert isinstance(strategy, MegatronStrategy), (
        "only this package's engine runs without the Trainer"
    )
    schedule = Schedule(list(module.model_chunks or []), strategy.topology)

    def step() -> None:
        loss = schedule.train(batch, module.train_step, optimizer).loss
        optimizer.accept(Gradients(loss, check_finite=lambda grad_norm: None))
        optimizer.step()

    return step


class HostWaitCounter:
    """Counts host synchronizations with the GPU between ``start`` and ``stop``, by line of code.

    PyTorch's sync debug mode reports those of its own operators: reading a tensor, blocking copies, data-dependent
    shapes; not explicit ``torch.cuda.synchronize()`` calls, nor waits for communication on the host.
    """

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()
        self.lines: Counter[tuple[bool, str]] = Counter()
        """Number of synchronizations by (in this package or Megatron-Core, line of code)."""

    def start(self) -> None:
        """Start to count."""
        self._undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # Warns that it is a prototype.
        torch.cuda.set_sync_debug_mode("warn")
        self._undo.callback(torch.cuda.set_sync_debug_mode, "default")
        warnings.simplefilter("always")
        warnings.showwarning = self._count

    def stop(self) -> None:
        """Stop counting."""
        self._undo.close()

    def _count(self, message: Any, *args: Any, **kwargs: Any) -> None:
        if _MESSAGE in str(message):
            self.lines[attribute(traceback.extract_stack())] += 1


def attribute(stack: Iterable[traceback.FrameSummary]) -> tuple[bool, str]:
    """Whether this package or Megatron-Core is in the stack, and its innermost line of code, else Lightning's."""
    frames = [
        (_package(frame.filename), f"{Path(frame.filename).name}:{frame.lineno} {frame.name}")
        for frame in stack
    ]
    # The strategy's launcher is below every frame of the Trainer, and does not count as this package.
    frames = [
        frame
        for frame in frames
        if not (frame[1].startswith("strategy.py:") and frame[1].endswith(" launch"))
    ]
    for is_ours, packages in ((True, _OURS), (False, _LIGHTNING)):
        lines = [f"{package}/{line}" for package, line in frames if package in packages]
        if lines:
            return is_ours, lines[-1]
    return False, frames[-1][1]


def _package(file: str) -> str:
    """Top-level package of a file, wherever it is installed; empty for other packages than these."""
    parts = Path(file).parts
    return next((part for part in reversed(parts[:-1]) if part in (*_OURS, *_LIGHTNING)), "")


class StepRecorder(Callback):
    """Times the Trainer's steps and, with ``MegatronStrategy``, in between bare steps of the engine."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.seconds: list[float] = []
        self.bare_seconds: list[float] = []
        self.host_waits_ours: float | None = None
        self.host_waits_trainer: float | None = None
        self.host_wait_places: dict[str, float] = {}
        self.losses: tuple[float, float] = (float("nan"), float("nan"))
        self.peak_allocated_gib: float | None = None
        self.peak_reserved_gib: float | None = None
        self.profile_text = ""
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
            # Excludes temporary memory of building the model.
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
        self.peak_allocated_gib, self.peak_reserved_gib = peak_gib(device)

    def _is_end_of_step(self, trainer: Trainer) -> bool:
        """Whether an optimizer step has just ended; a peer accumulates gradients over several batches per step."""
        return trainer.global_step > self._done

    def _count_waits(self, trainer: Trainer) -> None:
        plan = self.plan
        if not plan.count_host_waits or trainer.strategy.root_device.type != "cuda":
            return
        if self._done == plan.warmup_steps - 1 - COUNTED_STEPS:
            self._waits.start()
        elif self._done == plan.warmup_steps - 1:
            self._waits.stop()
            lines = self._waits.lines
            self.host_wait_places = {
                line: n / COUNTED_STEPS for (_, line), n in lines.most_common()
            }
            self.host_waits_ours = (
                sum(n for (is_ours, _), n in lines.items() if is_ours) / COUNTED_STEPS
            )
            self.host_waits_trainer = sum(self.host_wait_places.values()) - self.host_waits_ours

    def _run_bare(self, trainer: Trainer, module: LightningModule, batch: Batch) -> None:
        if not self.plan.bare_steps or not isinstance(module, MegatronModule):
            return
        step = engine_step(trainer, module, batch)
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
        self._profiler = torch.profiler.profile(
            activities=[activity.CUDA if on_gpu else activity.CPU]
        )
        self._profiler.start()


def peak_gib(device: torch.device) -> tuple[float | None, float | None]:
    """Peak GiB that PyTorch has allocated and reserved, maximum over ranks; None on CPUs. Collective over the world."""
    if device.type != "cuda":
        return None, None
    sizes = (torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    peaks = torch.tensor(sizes, dtype=torch.float64, device=device) / 2**30
    if dist.is_initialized():
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    allocated, reserved = peaks.tolist()
    return allocated, reserved


def _profile_text(profiler: Any, device: torch.device) -> str:
    """Format the kernels that took the most time, and the share of time in which any kernel ran."""
    on_gpu = device.type == "cuda"
    table: str = profiler.key_averages().table(
        sort_by="self_cuda_time_total" if on_gpu else "self_cpu_time_total",
        row_limit=25,
        max_name_column_width=90,
    )
    if not on_gpu:
        return table
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in profiler.events()
        if e.device_type.name == "CUDA"
    )
    return f"{table}\n{busy_line(spans, PROFILED_STEPS)}"


def busy_line(spans: list[tuple[float, float]], num_steps: int) -> str:
    """Format the share of the total time that ``spans`` (start and end in microseconds, sorted) cover."""
    if not spans:
        return "no kernel ran"
    busy, latest = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, latest))
        latest = max(latest, end)
    total = latest - spans[0][0]
    return f"a kernel ran in {busy / total:.1%} of {total / 1e3:.1f} ms ({num_steps} steps)"
