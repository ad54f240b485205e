"""Lightning callbacks: throughput, loss curve, perplexity, generated samples and a progress line."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger
from typing_extensions import override

from lightning_megatron.accounting import Precision, model_flops, peak_flops_per_s
from lightning_megatron.data.tokenizer import check_vocabulary, load_tokenizer
from lightning_megatron.errors import ConfigError, require_choice, require_number
from lightning_megatron.foreign_names import explains_options
from lightning_megatron.generate.inputs import (
    build_request,
    decode_completions,
    encode_prompts,
    prepend_token,
)
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.planner import DEVICES, GIB, make_run, plan
from lightning_megatron.storage.paths import open_to_append, save_figure

if TYPE_CHECKING:
    from lightning_megatron.engine.step import StepShape

__all__ = ["LossCurve", "PerplexityReport", "ProgressLine", "SampleText", "ThroughputMonitor"]


def _check_interval(every_n_steps: int | None) -> None:
    if every_n_steps is not None:
        require_number("every_n_steps", every_n_steps, at_least=1)


def _is_due(trainer: Trainer, every_n_steps: int | None) -> bool:
    """Whether the step that just ended is the last of an interval; reading metrics waits for the device.

    Args:
        trainer: Its ``global_step`` is counted.
        every_n_steps: The interval; None takes the Trainer's ``log_every_n_steps``, where 0 means never.
    """
    every: int = every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]  # set in Trainer.__init__
    return every > 0 and trainer.global_step % every == 0


class _LogDirCallback(Callback):
    """Callback that writes to the log directory of the first logger, or to ``default_root_dir`` without loggers."""

    _log_dir: Path | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the directory: the Trainer's ``log_dir`` is a broadcast, which every rank must join."""
        self._log_dir = Path(trainer.log_dir or trainer.default_root_dir)


# ---- throughput -----------------------------------------------------------------------------------------------------


@explains_options
class ThroughputMonitor(Callback):
    """Logs throughput, model FLOP/s, model FLOPs utilization (MFU) and peak memory.

    A step is timed from the end of one training batch to the end of the next, so waiting for data counts; steps with a
    validation, a checkpoint or a ``SampleText`` in between are left out. Each metric is of the steps since the last
    report. The host waits for the device only when a report is due.

    Logged: ``tokens_per_s`` over all ranks, padding included (also in the progress bar); ``tokens_per_s_per_device``;
    ``step_seconds``, the median, and ``step_seconds_mean``, from which throughput is computed; on models whose FLOPs
    are known ``model_tflops_per_s_per_device`` (forward and backward pass, causal attention counted half, see
    ``accounting.py``); on devices whose peak is known ``mfu``, its fraction of the dense peak; on GPUs
    ``peak_memory_gib``, the most that PyTorch had allocated since the process started; ``step_seconds_expected`` and
    ``peak_memory_gib_expected``, the estimates of ``planner.py`` for devices that it knows. Each rank measures its own;
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
        _check_interval(every_n_steps)
        require_number("warmup_steps", warmup_steps, at_least=1)
        self.every_n_steps, self.warmup_steps = every_n_steps, warmup_steps
        self._clock, self._steps_seen = StepClock(torch.device("cpu")), 0

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
        self._clock, self._steps_seen = StepClock(trainer.strategy.root_device), 0

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Record the end of a step, and log a report if it is due."""
        self._steps_seen += 1
        strategy: Any = trainer.strategy
        shape: StepShape | None = strategy.step_shape
        if (
            self._steps_seen < self.warmup_steps or shape is None
        ):  # None: no step has run, there is nothing to count
            return
        known, flops = _model_and_lengths(pl_module, shape), 0.0
        if known is not None:
            padded_vocab_size = known[0].padded_vocab_size(strategy.tp)
            flops = model_flops(*known, padded_vocab_size) * shape.tokens / shape.seq_length
        self._clock.mark(tokens=shape.tokens, flops=flops)
        if not _is_due(trainer, self.every_n_steps) or not (metrics := self._take_metrics(trainer)):
            return
        if strategy.root_device.type == "cuda" and known is not None:
            metrics |= _estimates(strategy, *known, world_size=trainer.world_size)
        for name, value in metrics.items():
            pl_module.log(
                name, value, prog_bar=name == "tokens_per_s", on_step=True, on_epoch=False
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
        seconds, device = sum(times), trainer.strategy.root_device
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
            tf32: Precision = (
                "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"
            )
            dtypes: dict[str, Precision] = {"bf16": "bf16", "16": "fp16", "32": tf32}
            peak = peak_flops_per_s(
                torch.cuda.get_device_name(device), dtypes[str(trainer.precision).split("-")[0]]
            )
            if flops_per_s > 0 and peak is not None:
                metrics["mfu"] = flops_per_s / peak
        return metrics


class StepClock:
    """Times steps by CUDA events, or by the host's clock on a CPU, and waits for the device only in ``take``."""

    def __init__(self, device: torch.device) -> None:
        """Start without a step.

        Args:
            device: Device on which the steps run.
        """
        self._device = device
        self._last: Any = None
        self._steps: list[tuple[Any, Any, int, float]] = []

    def mark(self, tokens: int, flops: float) -> None:
        """Mark the end of a step; the step counts if the end of the previous one was marked."""
        now: Any = time.perf_counter()
        if self._device.type == "cuda":
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self._device))
        if self._last is not None:
            self._steps.append((self._last, now, tokens, flops))
        self._last = now

    def interrupt(self) -> None:
        """Leave out the current step, in which something else than training happens."""
        self._last = None

    def take(self) -> tuple[list[float], int, float]:
        """Seconds of each step since the last call, and their total tokens and FLOPs. Waits for the device."""
        steps, self._steps = self._steps, []
        if self._device.type == "cuda" and steps:
            steps[-1][1].synchronize()
            seconds = [start.elapsed_time(end) / 1e3 for start, end, *_ in steps]
        else:
            seconds = [end - start for start, end, *_ in steps]
        return seconds, sum(tokens for *_, tokens, _ in steps), sum(flops for *_, flops in steps)


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
    lengths = shape.lengths if model.architecture == "t5" else (shape.seq_length,)
    return (model, lengths) if lengths else None


def _estimates(
    strategy: Any, model: ModelConfig, lengths: tuple[int, ...], *, world_size: int
) -> dict[str, float]:
    """The planner's estimates for this run; empty for GPUs that it does not know, and for fp8."""
    name = torch.cuda.get_device_name(strategy.root_device)
    device = next((each for each in DEVICES.values() if each.name == name), None)
    if device is None or strategy.fp8 is not None:
        return {}
    rows = strategy.step_shape.micro_batch_size
    expected = plan(
        make_run(model, strategy.settings, rows=rows, lengths=lengths, world_size=world_size),
        device,
    )
    return {
        "step_seconds_expected": expected.time.total,
        "peak_memory_gib_expected": expected.memory.total / GIB,
    }


# ---- losses ---------------------------------------------------------------------------------------------------------


@explains_options
class LossCurve(_LogDirCallback):
    """Records training and validation loss, and writes a plot of both when training ends.

    The curves are saved in checkpoints, so a resumed run continues them in any layout; a vertical line marks where. The
    plot is written to the log directory of the Trainer's first logger, or to ``default_root_dir`` without loggers.
    """

    def __init__(
        self,
        filename: str = "loss_curve.png",
        every_n_steps: int | None = None,
        max_points: int = 5000,
        log_scale: bool = False,
        monitor: tuple[str, str] = ("train_loss", "val_loss"),
    ) -> None:
        """Set what to plot.

        Args:
            filename: File name of the plot; its suffix is the format.
            every_n_steps: Optimizer steps between points of the training loss; None takes the Trainer's
                ``log_every_n_steps``. Reading a loss waits for the device.
            max_points: Maximum number of points of a curve, which is thinned out evenly beyond it.
            log_scale: Whether the loss axis is logarithmic.
            monitor: Names of the logged training and validation loss.

        Raises:
            ConfigError: If a number is out of range, or matplotlib does not write the suffix's format.
        """
        from matplotlib.backend_bases import FigureCanvasBase

        _check_interval(every_n_steps)
        require_number("max_points", max_points, at_least=2)
        require_choice(
            "filename", Path(filename).suffix[1:].lower() or "png", FigureCanvasBase.filetypes
        )
        self.filename, self.every_n_steps, self.log_scale = filename, every_n_steps, log_scale
        self.train_name, self.val_name = monitor
        self.train, self.validation = Curve(max_points), Curve(max_points)
        self.resumed_at: list[int] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Clear the curves of an earlier run; those of a resumed run are loaded later."""
        if stage == "fit" and trainer.global_step == 0:
            self.train, self.validation = Curve(self.train.max_points), Curve(self.train.max_points)
            self.resumed_at = []

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Add a point to the training curve if it is due."""
        # The first step, too, since the initial loss is of interest.
        if trainer.global_step == 1 or _is_due(trainer, self.every_n_steps):
            self.train.add(trainer.global_step, trainer.callback_metrics.get(self.train_name))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add a point to the validation curve, unless only a part of the validation set was used."""
        if not _is_partial_validation(trainer):
            self.validation.add(trainer.global_step, trainer.callback_metrics.get(self.val_name))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Write the plot on rank 0, also for a failed run."""
        if self._log_dir is not None and trainer.is_global_zero and self.train.points:
            path = self._log_dir / self.filename
            path.parent.mkdir(parents=True, exist_ok=True)
            save_figure(self._draw(), path)

    on_exception = on_train_end  # type: ignore[assignment]

    @override
    def state_dict(self) -> dict[str, Any]:
        """Both curves, and the steps at which the run was resumed, as plain numbers."""
        curves = {"train": self.train.state_dict(), "validation": self.validation.state_dict()}
        return {**curves, "resumed_at": list(self.resumed_at)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the saved curves."""
        self.train.load_state_dict(state_dict["train"])
        self.validation.load_state_dict(state_dict["validation"])
        self.resumed_at = [*state_dict["resumed_at"], *(step for step, _ in self.train.points[-1:])]

    def _draw(self) -> Any:
        """Figure of the losses over the optimizer steps."""
        # The figure class draws without pyplot, which would choose a backend for the whole process.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9.0, 5.2), dpi=150, layout="constrained")
        axes = figure.add_subplot(
            xlabel="optimizer step", ylabel="loss (nats per token)", title="Loss"
        )
        # The NaN of a step that on_nan="skip" skipped would spread over whole windows of the smoothed line.
        finite = [point for point in self.train.points if math.isfinite(point[1])]
        steps, losses = zip(*finite or self.train.points, strict=True)
        width = len(losses) // 25 | 1  # odd: the middle of a window is a step
        axes.plot(
            steps,
            losses,
            "C0",
            alpha=0.3 if width > 1 else 1.0,
            label=None if width > 1 else "training",
        )
        if width > 1:  # a trailing window would lag behind a falling loss
            means = numpy.convolve(losses, numpy.full(width, 1 / width), "valid")
            axes.plot(steps[width // 2 : -(width // 2)], means, "C0", label="training (smoothed)")
        if self.validation.points:
            steps, losses = zip(*self.validation.points, strict=True)
            axes.plot(
                steps,
                losses,
                "C1",
                marker="o",
                markersize=4,
                label=f"validation (last {losses[-1]:.3f})",
            )
        for index, step in enumerate(self.resumed_at):
            # One legend entry for all lines: matplotlib leaves out labels that begin with an underscore.
            label = "_resumed" if index else "resumed from a checkpoint"
            axes.axvline(step, color="grey", linestyle="--", label=label)
        if self.log_scale:
            axes.set_yscale("log")
        axes.grid(which="both", color="#dddddd", linewidth=0.7)
        axes.legend()
        return figure


class Curve:
    """Points (step, value) in bounded memory: when full, every second point is dropped, and the stride is doubled."""

    def __init__(self, max_points: int) -> None:
        """Start empty.

        Args:
            max_points: Maximum number of points to keep.
        """
        self.max_points = max_points
        self.points: list[tuple[int, float]] = []
        self._stride, self._seen = 1, 0

    def add(self, step: int, value: Any) -> None:
        """Add a point, unless ``value`` is None or the curve's current stride leaves it out."""
        if value is None:
            return
        if self._seen % self._stride == 0:
            self.points.append((step, float(value)))
        self._seen += 1
        while len(self.points) > self.max_points:
            self.points = self.points[::2]
            self._stride *= 2

    def state_dict(self) -> dict[str, Any]:
        """Points and stride as plain numbers."""
        steps, values = [step for step, _ in self.points], [value for _, value in self.points]
        return {"steps": steps, "values": values, "stride": self._stride, "seen": self._seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the saved points."""
        self.points = list(zip(state_dict["steps"], state_dict["values"], strict=True))
        self._stride, self._seen = state_dict["stride"], state_dict["seen"]


def _is_partial_validation(trainer: Trainer) -> bool:
    """Whether the validation that just ended was the sanity check before training, on a part of the batches."""
    return trainer.sanity_checking and trainer.num_sanity_val_batches != trainer.num_val_batches


@explains_options
class PerplexityReport(Callback):
    """Prints the validation perplexity before and after training when ``fit`` ends; ``val_perplexity`` is in the log.

    "Before" is the validation that the Trainer runs before the first step, with ``Trainer(num_sanity_val_steps=-1)`` on
    the whole validation set; it is saved in checkpoints. The loss must be logged by ``validation_step``.
    """

    def __init__(self, monitor: str = "val_loss") -> None:
        """Set the metric to read.

        Args:
            monitor: Name of the logged validation loss, in nats per token.
        """
        self.monitor = monitor
        self._reset()

    def _reset(self) -> None:
        self._state: dict[str, Any] = {
            "before": None,
            "before_is_partial": False,
            "after": None,
            "after_step": 0,
        }

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Clear the losses of an earlier run; those of a resumed run are loaded later."""
        if stage == "fit" and trainer.global_step == 0:
            self._reset()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the loss for the report."""
        loss = trainer.callback_metrics.get(self.monitor)
        if loss is None:
            return
        if trainer.sanity_checking or trainer.global_step == 0:
            self._state |= {
                "before": float(loss),
                "before_is_partial": _is_partial_validation(trainer),
            }
        else:
            self._state |= {"after": float(loss), "after_step": trainer.global_step}

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the report on rank 0."""
        if trainer.is_global_zero:
            print(self.report(), flush=True)

    def report(self) -> str:
        """One line, e.g. "validation perplexity: 4187.2 before, 61.3 after 300 steps"."""
        before, after = self._state["before"], self._state["after"]
        if before is None and after is None:
            return f"validation perplexity: unknown, because no validation logged {self.monitor}"
        initial = "unknown before (num_sanity_val_steps=-1 measures it)"
        if before is not None:
            part = " (on the first batches only)" if self._state["before_is_partial"] else ""
            initial = f"{_perplexity(before)} before{part}"
        if after is None:
            return (
                f"validation perplexity: {initial}, unknown after, because no validation ran since"
            )
        return f"validation perplexity: {initial}, {_perplexity(after)} after {self._state['after_step']} steps"

    @override
    def state_dict(self) -> dict[str, Any]:
        """The losses of the report."""
        return dict(self._state)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the saved report."""
        self._state = dict(state_dict)


def _perplexity(loss: float) -> str:
    value = math.inf if loss > 700 else math.exp(loss)
    return f"{value:.1f}" if value < 1e7 else f"{value:.2e}"


# ---- generated samples ----------------------------------------------------------------------------------------------


@explains_options
class SampleText(_LogDirCallback):
    """Generates completions of prompts every few steps, on all ranks together, without an effect on training.

    A T5's encoder reads the prompts, and its decoder generates the text.

    Loggers with ``add_text`` (TensorBoard) get each text under ``samples/0``, ``samples/1``, ... For other loggers
    the texts are JSON lines in the file ``samples.jsonl`` of their directory; without a logger they are printed. With a
    fixed ``seed`` differences between steps are due to the model, not to chance.
    """

    def __init__(
        self,
        tokenizer: str | Path | Any,
        prompts: Sequence[str],
        every_n_steps: int | None = None,
        generation: GenerationOptions | None = None,
    ) -> None:
        """Set the prompts and the options of generation.

        Args:
            tokenizer: Directory of a transformers tokenizer, its name on the Hugging Face hub, or the tokenizer itself.
            prompts: Texts to continue, as one batch.
            every_n_steps: Optimizer steps between samples; None takes the Trainer's ``log_every_n_steps``.
            generation: Generation options; None takes the module's ``generation``.

        Raises:
            ConfigError: If there is no prompt, ``tokenizer`` is not a tokenizer, or the interval is below 1.
        """
        _check_interval(every_n_steps)
        if not isinstance(tokenizer, (str, Path)) and not hasattr(tokenizer, "get_vocab"):
            raise ConfigError(
                f"tokenizer={tokenizer!r}: expected a directory, a name or a tokenizer of transformers"
            )
        if not prompts or isinstance(prompts, str):
            raise ConfigError(
                f"prompts={prompts!r}: expected a list of texts to continue; give at least one"
            )
        self.tokenizer, self.prompts = tokenizer, list(prompts)
        self.every_n_steps, self.generation = every_n_steps, generation

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Tokenize the prompts.

        Raises:
            ConfigError: If the module cannot continue the prompts.
            DataError: If there is no tokenizer.
        """
        if stage != "fit":
            return
        model = getattr(pl_module, "model_config", None)
        if model is None or model.architecture not in ("gpt", "t5"):
            raise ConfigError(
                f"SampleText: expected a GPT or T5, got {type(pl_module).__name__}; remove the callback"
            )
        is_folder = isinstance(self.tokenizer, (str, Path))
        self._tokenizer = load_tokenizer(self.tokenizer) if is_folder else self.tokenizer
        check_vocabulary(
            self._tokenizer,
            getattr(self.tokenizer, "name_or_path", self.tokenizer),
            model.vocab_size,
        )
        self._is_t5 = model.architecture == "t5"
        module_options: Any = pl_module.generation
        self._options: GenerationOptions = self.generation or module_options
        ids, mask = encode_prompts(self.prompts, self._tokenizer)
        if (
            self._options.bos_token_id is not None
        ):  # here, so that the columns match those of generate's output
            ids, mask = prepend_token(ids, mask, self._options.bos_token_id)
        self._rows = {"input_ids": ids, "attention_mask": mask}
        build_request(self._rows, vars(self._options), model)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Continue the prompts if a sample is due."""
        if not _is_due(trainer, self.every_n_steps):
            return
        generate: Any = pl_module.generate
        sequences = generate(**self._rows, **vars(self._options))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set in Trainer.__init__
            if isinstance(callback, ThroughputMonitor):
                callback.interrupt()
        if trainer.is_global_zero:
            texts = decode_completions(self._tokenizer, sequences, **self._rows, is_t5=self._is_t5)
            per_prompt = self._options.num_return_sequences
            self._write(
                trainer,
                [(self.prompts[index // per_prompt], text) for index, text in enumerate(texts)],
            )

    def _write(self, trainer: Trainer, texts: list[tuple[str, str]]) -> None:
        without_add_text: list[Logger] = []
        for logger in trainer.loggers:
            add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
            if add_text is None:
                without_add_text.append(logger)
                continue
            for index, (prompt, completion) in enumerate(texts):
                # An indented code block of Markdown shows texts verbatim.
                prompt, completion = (
                    "    " + text.replace("\n", "\n    ") for text in (prompt, completion)
                )
                add_text(
                    f"samples/{index}",
                    f"prompt\n\n{prompt}\n\ncontinued\n\n{completion}\n",
                    trainer.global_step,
                )
        assert self._log_dir is not None
        for folder in {Path(logger.log_dir or self._log_dir) for logger in without_add_text}:
            folder.mkdir(parents=True, exist_ok=True)
            with open_to_append(folder / "samples.jsonl") as file:
                for prompt, completion in texts:
                    row = {"step": trainer.global_step, "prompt": prompt, "text": completion}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        if not trainer.loggers:
            for prompt, completion in texts:
                print(f"step {trainer.global_step}: {prompt!r} -> {completion!r}", flush=True)


# ---- progress -------------------------------------------------------------------------------------------------------


@explains_options
class ProgressLine(ProgressBar):
    """Progress in one line: step, time, time left, and metrics logged with ``prog_bar=True``.

    Lightning's bars take several rows of a narrow terminal, and show nothing, or one endless line, in a file. On a
    terminal this is one row, truncated to the terminal's width; in a file it is a line every ``every_seconds``.
    """

    def __init__(self, every_seconds: float = 10.0) -> None:
        """Set how often to write a line to a file.

        Args:
            every_seconds: Time between two lines, if the output is not a terminal.
        """
        super().__init__()
        self.every_seconds = every_seconds
        self._is_enabled = True
        self._first_step, self._start_time, self._next_time = 0, 0.0, 0.0

    @override
    def disable(self) -> None:
        """Show nothing, as on ranks other than 0."""
        self._is_enabled = False

    @override
    def enable(self) -> None:
        """Show lines again."""
        self._is_enabled = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the first step and the start time."""
        self._first_step, self._start_time = trainer.global_step, time.monotonic()

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Show the step, the first one at once, to tell that training has started."""
        if (
            trainer.global_step < trainer.estimated_stepping_batches
        ):  # the last step is shown after its validation
            self._show(lambda: self._line(trainer), now=trainer.global_step == self._first_step + 1)

    @override
    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Show the last step with the metrics of the validation after it."""
        self._show(lambda: self._line(trainer), now=True, end="\n")

    @override
    def on_validation_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        """Show the number of batches so far."""
        stage: Any = trainer.state.stage
        self._show(lambda: f"{stage.value.replace('_', ' ')}: batch {arguments[3] + 1}")

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def _line(self, trainer: Trainer) -> str:
        step, seconds = trainer.global_step, time.monotonic() - self._start_time
        total: float = trainer.estimated_stepping_batches
        parts = [f"step {step}", _format_time(seconds)]
        if 0 < total < math.inf:
            remaining = seconds / max(step - self._first_step, 1) * (total - step)
            parts = [f"step {step}/{total:.0f}", parts[1], f"{_format_time(remaining)} left"]
        for name, value in trainer.progress_bar_metrics.items():
            parts.append(f"{name} {value:,.0f}" if abs(value) >= 1000 else f"{name} {value:.4g}")
        return ", ".join(parts)

    def _show(self, line: Callable[[], str], *, now: bool = False, end: str = "\r") -> None:
        current = time.monotonic()
        if not self._is_enabled or not (now or current >= self._next_time):
            return
        if sys.stdout.isatty():
            self._next_time = current + 0.1
            print(f"\x1b[K{line()[: shutil.get_terminal_size().columns - 1]}", end=end, flush=True)
        else:
            self._next_time = current + self.every_seconds
            print(line(), flush=True)


def _format_time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")
