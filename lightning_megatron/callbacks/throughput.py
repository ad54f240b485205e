"""How fast does training run, and how much of the hardware does it use?"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_megatron.accounting.devices import Precision, peak_flops_per_s
from lightning_megatron.accounting.flops import model_flops_per_token
from lightning_megatron.accounting.t5 import t5_model_flops_per_row
from lightning_megatron.callbacks.interval import check_interval, is_due
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig

if TYPE_CHECKING:
    from lightning_megatron.engine.schedule import StepShape


class ThroughputMonitor(Callback):
    """Logs speed, model FLOP/s, their share of the device's peak, and peak memory.

    A step is timed from the end of one training batch to the end of the next, so waiting for data counts; steps with a
    validation, a checkpoint or a ``SampleText`` in between do not. Each figure is of the steps since the last report.
    The device is waited for only when a report is due.

    Logged: ``tokens_per_s`` over all ranks, padding included (also in the progress bar); ``tokens_per_s_per_device``;
    ``step_seconds``, the median, and ``step_seconds_mean``, from which the speeds follow; on models whose FLOPs are
    known ``model_tflops_per_s_per_device`` (forward and backward pass, causal attention counted half, see
    ``accounting/flops.py``); on devices whose peak is known ``mfu``, its fraction of the dense peak; on GPUs
    ``peak_memory_gib``, the most that PyTorch had allocated since the process started. Each rank measures for itself;
    loggers and progress bar show rank 0.
    """

    def __init__(self, every_n_steps: int | None = None, warmup_steps: int = 3) -> None:
        """Set how often to report.

        Args:
            every_n_steps: Optimizer steps between reports; None takes the Trainer's ``log_every_n_steps``.
            warmup_steps: Steps at the start of each ``fit`` that are not measured (compilation, caches).

        Raises:
            ConfigError: If a number is out of range.
        """
        check_interval(every_n_steps)
        if warmup_steps < 1:
            raise ConfigError(f"warmup_steps={warmup_steps} must be at least 1, the first step; correct warmup_steps")
        self.every_n_steps = every_n_steps
        self.warmup_steps = warmup_steps
        self._clock = StepClock(torch.device("cpu"))
        self._steps_seen = 0
        self._peak: float | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies that do not tell how many tokens a step has.

        Raises:
            ConfigError: If the Trainer's strategy is not Megatron's.
        """
        if stage == "fit" and not hasattr(trainer.strategy, "step_shape"):
            raise ConfigError(
                f"strategy {type(trainer.strategy).__name__} does not tell the tokens of a step, and ThroughputMonitor "
                "needs them; use MegatronStrategy or remove the callback"
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start afresh."""
        device = trainer.strategy.root_device
        self._clock = StepClock(device)
        self._steps_seen = 0
        self._peak = _device_peak(device, str(trainer.precision))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the end of a step, and report if it is time."""
        self._steps_seen += 1
        if self._steps_seen < self.warmup_steps:
            return
        shape = getattr(trainer.strategy, "step_shape", None)
        if shape is None:  # no step has run: there is nothing to count
            return
        flops_per_token = _flops_per_token(trainer, pl_module, shape)
        self._clock.mark(tokens=shape.tokens, flops=shape.tokens * flops_per_token)
        if is_due(trainer, self.every_n_steps):
            self._report(trainer, pl_module)

    def interrupt(self) -> None:
        """Do not count the step under way: it does more than train."""
        self._clock.interrupt()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do not count the time of a validation."""
        self.interrupt()

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Do not count the time of a checkpoint."""
        self.interrupt()

    def _report(self, trainer: Trainer, pl_module: LightningModule) -> None:
        window = self._clock.take()
        if window is None:
            return
        metrics = window_metrics(window, trainer.world_size, self._peak)
        device = trainer.strategy.root_device
        if device.type == "cuda":
            # Not reset: other code of the user's may read the same counter.
            metrics["peak_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        for name, value in metrics.items():
            pl_module.log(name, value, prog_bar=name == "tokens_per_s", on_step=True, on_epoch=False)


class Window:
    """What was measured since the last report."""

    def __init__(self, seconds: list[float], tokens: int, flops: float) -> None:
        """Store it.

        Args:
            seconds: Time of each step.
            tokens: Tokens of those steps over all ranks.
            flops: Model FLOPs of those steps over all ranks; 0 if unknown.
        """
        self.seconds = seconds
        self.tokens = tokens
        self.flops = flops


class StepClock:
    """Times steps without waiting for the device before ``take``: by events on its stream, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        """Start with no step begun.

        Args:
            device: Where the steps run.
        """
        self._device = device
        self._last: Any = None
        self._intervals: list[tuple[Any, Any]] = []
        self._tokens = 0
        self._flops = 0.0

    def mark(self, tokens: int, flops: float) -> None:
        """The end of a step of so many tokens and FLOPs; it counts if the end of the step before it is known."""
        now = self._now()
        if self._last is not None:
            self._intervals.append((self._last, now))
            self._tokens += tokens
            self._flops += flops
        self._last = now

    def interrupt(self) -> None:
        """Something else than training happens now: the step under way does not count."""
        self._last = None

    def take(self) -> Window | None:
        """Everything measured since the last call, or None if that is nothing. Waits for the device."""
        if not self._intervals:
            return None
        if self._device.type == "cuda":
            self._intervals[-1][1].synchronize()
            seconds = [start.elapsed_time(end) / 1e3 for start, end in self._intervals]
        else:
            seconds = [end - start for start, end in self._intervals]
        window = Window(seconds, self._tokens, self._flops)
        self._intervals, self._tokens, self._flops = [], 0, 0.0
        return window

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def window_metrics(window: Window, world_size: int, peak_flops: float | None) -> dict[str, float]:
    """The figures of a window.

    Args:
        window: What was measured.
        world_size: Devices that did it.
        peak_flops: Peak FLOP/s of one device; None if unknown.
    """
    total_seconds = sum(window.seconds)
    metrics = {
        "tokens_per_s": window.tokens / total_seconds,
        "tokens_per_s_per_device": window.tokens / total_seconds / world_size,
        "step_seconds": statistics.median(window.seconds),
        "step_seconds_mean": total_seconds / len(window.seconds),
    }
    if window.flops > 0:
        flops_per_s_per_device = window.flops / total_seconds / world_size
        metrics["model_tflops_per_s_per_device"] = flops_per_s_per_device / 1e12
        if peak_flops is not None:
            metrics["mfu"] = flops_per_s_per_device / peak_flops
    return metrics


def _flops_per_token(trainer: Trainer, pl_module: LightningModule, shape: StepShape) -> float:
    """Model FLOPs of one token; 0 if the module does not tell its shape."""
    model = getattr(pl_module, "model_config", None)
    if not isinstance(model, ModelConfig):
        return 0.0
    tp = int(getattr(trainer.strategy, "tp", 1))
    padded_vocab_size = model.padded_vocab_size(tp)
    if model.architecture != "t5":
        return model_flops_per_token(model, shape.seq_length, padded_vocab_size)
    if len(shape.lengths) != 2:  # an objective of the user's, which tells only their sum
        return 0.0
    return t5_model_flops_per_row(model, *shape.lengths, padded_vocab_size) / shape.seq_length


def _device_peak(device: torch.device, precision: str) -> float | None:
    matrix_type = _matrix_type(precision)
    if device.type != "cuda" or matrix_type is None:
        return None
    return peak_flops_per_s(torch.cuda.get_device_name(device), matrix_type)


def _matrix_type(precision: str) -> Precision | None:
    """The type of matrix products under one of the Trainer's ``precision`` strings."""
    if precision.startswith("bf16"):
        return "bf16"
    if precision.startswith("16"):
        return "fp16"
    if precision.startswith("32"):
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"
    return None
