"""``ThroughputMonitor``: tokens per second, MFU and peak memory, beside the planner's estimates."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_megatron.callbacks.intervals import check_interval, is_due
from lightning_megatron.callbacks.step_clock import StepClock
from lightning_megatron.errors import ConfigError, require_number
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.planning.devices import DEVICES, GIB, Precision, peak_flops_per_s
from lightning_megatron.planning.flops import model_flops
from lightning_megatron.planning.run import make_run
from lightning_megatron.planning.search import plan

if TYPE_CHECKING:
    from lightning_megatron.engine.step import StepShape


@checks_options
class ThroughputMonitor(Callback):
    """Logs throughput, model FLOP/s, model FLOPs utilization (MFU) and peak memory.

    A step is timed from the end of one training batch to the end of the next, so waiting for data counts; steps with a
    validation, a checkpoint or a ``SampleText`` in between are left out. Each metric is of the steps since the last
    report. The host waits for the device only when a report is due.

    Logged: ``tokens_per_s`` over all ranks, padding included (also in the progress bar); ``tokens_per_s_per_device``;
    ``step_seconds``, the median, and ``step_seconds_mean``, from which throughput is computed; on models whose FLOPs
    are known ``model_tflops_per_s_per_device`` (forward and backward pass, causal attention counted half, see
    ``planning/flops.py``); on devices whose peak is known ``mfu``, its fraction of the dense peak; on GPUs
    ``peak_memory_gib``, the most that PyTorch had allocated since the process started; ``step_seconds_expected`` and
    ``peak_memory_gib_expected``, the estimates of ``planning`` for devices that it knows. Each rank measures its own;
    loggers and progress bar show rank 0.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        warmup_steps: int = 3,
    ) -> None:
        """Set how often to report.

        Args:
            every_n_steps: Optimizer steps between reports; None takes the Trainer's ``log_every_n_steps``.
            warmup_steps: Steps at the start of each ``fit`` that are not measured (compilation, caches).

        Raises:
            ConfigError: If a number is out of range.
        """
        check_interval(every_n_steps)
        require_number("warmup_steps", warmup_steps, at_least=1)
        self.every_n_steps = every_n_steps
        self.warmup_steps = warmup_steps
        self._clock = StepClock(torch.device("cpu"))
        self._steps_seen = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies that do not provide the number of tokens of a step.

        Raises:
            ConfigError: If the Trainer's strategy is not Megatron's.
        """
        if stage == "fit" and not hasattr(trainer.strategy, "step_shape"):
            raise ConfigError(
                f"ThroughputMonitor needs MegatronStrategy, got {type(trainer.strategy).__name__}"
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset the measurements."""
        self._clock = StepClock(trainer.strategy.root_device)
        self._steps_seen = 0

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *_: Any,
    ) -> None:
        """Record the end of a step, and log a report if it is due."""
        self._steps_seen += 1
        strategy: Any = trainer.strategy
        shape: StepShape | None = strategy.step_shape
        # Without a shape no step has run, and there is nothing to count.
        if self._steps_seen < self.warmup_steps or shape is None:
            return
        known = _model_and_lengths(pl_module, shape)
        flops = 0.0
        if known is not None:
            model, lengths = known
            padded = model.padded_vocab_size(strategy.tp)
            flops = model_flops(model, lengths, padded) * shape.tokens / shape.seq_length
        self._clock.mark(tokens=shape.tokens, flops=flops)
        if not is_due(trainer, self.every_n_steps):
            return
        metrics = self._take_metrics(trainer)
        if not metrics:
            return
        if strategy.root_device.type == "cuda" and known is not None:
            metrics |= _estimates(strategy, *known, world_size=trainer.world_size)
        for name, value in metrics.items():
            pl_module.log(
                name,
                value,
                prog_bar=name == "tokens_per_s",
                on_step=True,
                on_epoch=False,
            )

    def interrupt(self, *_: Any) -> None:
        """Leave out the current step, which does more than train."""
        self._clock.interrupt()

    on_validation_start = on_save_checkpoint = interrupt  # type: ignore[assignment]

    def _take_metrics(self, trainer: Trainer) -> dict[str, float]:
        """Metrics of the steps since the last call; empty if there were none."""
        times, tokens, flops = self._clock.take()
        if not times:
            return {}
        seconds = sum(times)
        device = trainer.strategy.root_device
        metrics = {
            "tokens_per_s": tokens / seconds,
            "tokens_per_s_per_device": tokens / seconds / trainer.world_size,
            "step_seconds": statistics.median(times),
            "step_seconds_mean": seconds / len(times),
        }
        flops_per_s = flops / seconds / trainer.world_size
        if flops_per_s > 0:
            metrics["model_tflops_per_s_per_device"] = flops_per_s / 1e12
        if device.type == "cuda":
            # Not reset: user code may read the same counter.
            metrics["peak_memory_gib"] = torch.cuda.max_memory_allocated(device) / GIB
            peak = peak_flops_per_s(torch.cuda.get_device_name(device), _precision(trainer))
            if flops_per_s > 0 and peak is not None:
                metrics["mfu"] = flops_per_s / peak
        return metrics


def _model_and_lengths(
    pl_module: LightningModule, shape: StepShape
) -> tuple[ModelConfig, tuple[int, ...]] | None:
    """Model config and sequence lengths of a row, or None if they are not known.

    They are not known for a module without ``model_config``, and for a T5 with a user's objective, which has only the
    sum of both lengths.
    """
    model = getattr(pl_module, "model_config", None)
    if not isinstance(model, ModelConfig):
        return None
    if model.architecture != "t5":
        return model, (shape.seq_length,)
    if not shape.lengths:
        return None
    return model, shape.lengths


def _precision(trainer: Trainer) -> Precision:
    """Precision of the matrix products."""
    bits = str(trainer.precision).split("-")[0]
    if bits == "32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    precisions: dict[str, Precision] = {"bf16": "bf16", "16": "fp16", "32": "fp32"}
    return precisions[bits]


def interrupt_clocks(trainer: Trainer) -> None:
    """Tell the ``ThroughputMonitor`` of a run that the time since the last step was no training."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set in Trainer.__init__
        if isinstance(callback, ThroughputMonitor):
            callback.interrupt()


def _estimates(
    strategy: Any,
    model: ModelConfig,
    lengths: tuple[int, ...],
    *,
    world_size: int,
) -> dict[str, float]:
    """The planner's estimates for this run; empty for GPUs that it does not know, and for fp8."""
    by_name = {device.name: device for device in DEVICES.values()}
    device = by_name.get(torch.cuda.get_device_name(strategy.root_device))
    if device is None or strategy.fp8 is not None:
        return {}
    shape = strategy.step_shape
    run = make_run(
        model,
        strategy.settings,
        rows=shape.micro_batch_size * shape.sequences_per_row,
        lengths=lengths,
        world_size=world_size,
        uses_muon=strategy.lightning_module.optimizer_options.name == "muon",
    )
    expected = plan(run, device)
    return {
        "step_seconds_expected": expected.time.total,
        "peak_memory_gib_expected": expected.memory.total / GIB,
    }
