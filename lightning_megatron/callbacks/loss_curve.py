"""``LossCurve``: training and validation loss as a plot."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_megatron.callbacks.intervals import check_interval, is_due, is_partial_validation
from lightning_megatron.callbacks.log_dir import LogDirCallback
from lightning_megatron.errors import require_choice, require_number
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.storage.paths import save_figure


@checks_options
class LossCurve(LogDirCallback):
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
        # matplotlib's import takes a second.
        from matplotlib.backend_bases import FigureCanvasBase

        check_interval(every_n_steps)
        require_number("max_points", max_points, at_least=2)
        suffix = Path(filename).suffix[1:].lower()
        require_choice("filename", suffix or "png", FigureCanvasBase.filetypes)
        self.filename = filename
        self.every_n_steps = every_n_steps
        self.log_scale = log_scale
        self.train_name, self.val_name = monitor
        self.train = Curve(max_points)
        self.validation = Curve(max_points)
        self.resumed_at: list[int] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Clear the curves of an earlier run; those of a resumed run are loaded later."""
        if stage == "fit" and trainer.global_step == 0:
            self.train = Curve(self.train.max_points)
            self.validation = Curve(self.train.max_points)
            self.resumed_at = []

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *_: Any,
    ) -> None:
        """Add a point to the training curve if it is due."""
        # The first step, too, since the initial loss is of interest.
        if trainer.global_step == 1 or is_due(trainer, self.every_n_steps):
            loss = trainer.callback_metrics.get(self.train_name)
            self.train.add(trainer.global_step, loss)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add a point to the validation curve, unless only a part of the validation set was used."""
        if not is_partial_validation(trainer):
            loss = trainer.callback_metrics.get(self.val_name)
            self.validation.add(trainer.global_step, loss)

    @override
    def on_train_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *_: Any,
    ) -> None:
        """Write the plot on rank 0, also for a failed run."""
        if self._log_dir is not None and trainer.is_global_zero and self.train.points:
            path = self._log_dir / self.filename
            path.parent.mkdir(parents=True, exist_ok=True)
            save_figure(self._draw(), path)

    on_exception = on_train_end  # type: ignore[assignment]

    @override
    def state_dict(self) -> dict[str, Any]:
        """Both curves, and the steps at which the run was resumed, as plain numbers."""
        return {
            "train": self.train.state_dict(),
            "validation": self.validation.state_dict(),
            "resumed_at": list(self.resumed_at),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the saved curves."""
        self.train.load_state_dict(state_dict["train"])
        self.validation.load_state_dict(state_dict["validation"])
        self.resumed_at = list(state_dict["resumed_at"])
        if self.train.points:
            last_step, _ = self.train.points[-1]
            self.resumed_at.append(last_step)

    def _draw(self) -> Any:
        """Figure of the losses over the optimizer steps."""
        # The figure class draws without pyplot, which would choose a backend for the whole process.
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9.0, 5.2), dpi=150, layout="constrained")
        axes = figure.add_subplot(
            xlabel="optimizer step",
            ylabel="loss (nats per token)",
            title="Loss",
        )
        self._draw_training(axes)
        if self.validation.points:
            steps, losses = zip(*self.validation.points, strict=True)
            label = f"validation (last {losses[-1]:.3f})"
            axes.plot(
                steps,
                losses,
                "C1",
                marker="o",
                markersize=4,
                label=label,
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

    def _draw_training(self, axes: Any) -> None:
        """Draw the training loss; that of many points pale, with its moving average."""
        # The NaN of a step that on_nan="skip" skipped would spread over whole windows of the smoothed line.
        finite = [point for point in self.train.points if math.isfinite(point[1])]
        steps, losses = zip(*finite or self.train.points, strict=True)
        width = len(losses) // 25 | 1  # odd: the middle of a window is a step
        if width == 1:
            axes.plot(steps, losses, "C0", alpha=1.0, label="training")
            return
        axes.plot(steps, losses, "C0", alpha=0.3, label=None)
        # A trailing window would lag behind a falling loss.
        weights = numpy.full(width, 1 / width)
        means = numpy.convolve(losses, weights, "valid")
        middle = slice(width // 2, -(width // 2))
        axes.plot(steps[middle], means, "C0", label="training (smoothed)")


class Curve:
    """Points (step, value) in bounded memory: when full, every second point is dropped, and the stride is doubled."""

    def __init__(self, max_points: int) -> None:
        """Start empty.

        Args:
            max_points: Maximum number of points to keep.
        """
        self.max_points = max_points
        self.points: list[tuple[int, float]] = []
        self._stride = 1
        self._seen = 0

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
        return {
            "steps": [step for step, _ in self.points],
            "values": [value for _, value in self.points],
            "stride": self._stride,
            "seen": self._seen,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the saved points."""
        self.points = list(zip(state_dict["steps"], state_dict["values"], strict=True))
        self._stride = state_dict["stride"]
        self._seen = state_dict["seen"]
