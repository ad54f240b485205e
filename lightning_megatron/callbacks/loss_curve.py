"""How did the loss fall over the whole run, resumed parts included?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_megatron.callbacks.interval import check_interval, is_due
from lightning_megatron.callbacks.loss_picture import LossHistory, draw_loss_picture
from lightning_megatron.errors import ConfigError
from lightning_megatron.features import has_matplotlib


class LossCurve(Callback):
    """Keeps the curves of training and validation loss and writes them as a picture when training ends.

    The curves travel in checkpoints, so a resumed run, in whatever layout, continues them; a vertical line marks where.
    The picture goes into the log folder of the Trainer's first logger, or its ``default_root_dir`` without loggers.
    """

    def __init__(
        self,
        filename: str = "loss_curve.png",
        every_n_steps: int | None = None,
        max_points: int = 5000,
        log_scale: bool = False,
        monitor: tuple[str, str] = ("train_loss", "val_loss"),
    ) -> None:
        """Set what to draw.

        Args:
            filename: Name of the picture; its suffix is the format.
            every_n_steps: Optimizer steps between points of the training loss; None takes the Trainer's
                ``log_every_n_steps``. Reading a loss waits for the device.
            max_points: Each curve is thinned out evenly when it has more points.
            log_scale: Whether the loss axis is logarithmic.
            monitor: Names of the logged training and validation loss.

        Raises:
            ConfigError: If a number is out of range.
        """
        check_interval(every_n_steps)
        if max_points < 2:
            raise ConfigError(f"max_points={max_points} must be at least 2; correct max_points")
        self.filename = filename
        self.every_n_steps = every_n_steps
        self.log_scale = log_scale
        self.train_name, self.val_name = monitor
        self.train, self.validation = Curve(max_points), Curve(max_points)
        self.resumed_at: list[int] = []
        self._was_loaded = False
        self._folder: Path | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget another run's curves; those of a resumed run are loaded later.

        Raises:
            ConfigError: If there is nothing to draw with.
        """
        if stage != "fit":
            return
        if not has_matplotlib():
            raise ConfigError(
                f"{self.filename} cannot be drawn without matplotlib; pip install 'matplotlib>=3.8' or remove LossCurve"
            )
        if trainer.global_step == 0:
            self.train.clear()
            self.validation.clear()
            self.resumed_at.clear()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Settle on the folder: asking the Trainer is a broadcast, which every rank must join."""
        self._folder = Path(trainer.log_dir or trainer.default_root_dir)
        if self._was_loaded and trainer.global_step not in self.resumed_at:
            self.resumed_at.append(trainer.global_step)
        self._was_loaded = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add a point to the training curve if it is time."""
        # The first step too: the height at which a run begins is what one looks for.
        if trainer.global_step == 1 or is_due(trainer, self.every_n_steps):
            self._add(self.train, trainer, self.train_name)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add a point to the validation curve, unless only a part of the validation ran."""
        if trainer.sanity_checking and trainer.num_sanity_val_batches != trainer.num_val_batches:
            return
        self._add(self.validation, trainer, self.val_name)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the picture on rank 0."""
        self._write(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write what there is on rank 0."""
        self._write(trainer)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Both curves and the points where the run was resumed, as plain numbers."""
        return {
            "train": self.train.state_dict(),
            "validation": self.validation.state_dict(),
            "resumed_at": list(self.resumed_at),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue another run's curves."""
        self.train.load_state_dict(state_dict["train"])
        self.validation.load_state_dict(state_dict["validation"])
        self.resumed_at = list(state_dict["resumed_at"])
        self._was_loaded = True

    def _add(self, curve: Curve, trainer: Trainer, name: str) -> None:
        value = trainer.callback_metrics.get(name)
        if value is not None:
            curve.add(trainer.global_step, float(value))

    def _write(self, trainer: Trainer) -> None:
        if self._folder is None or not trainer.is_global_zero or not self.train.points:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        history = LossHistory(
            train=tuple(self.train.points),
            validation=tuple(self.validation.points),
            resumed_at=tuple(self.resumed_at),
        )
        draw_loss_picture(history, self._folder / self.filename, log_scale=self.log_scale)


class Curve:
    """Points (step, value) in bounded memory: when full, every second one goes, and only every second new one comes."""

    def __init__(self, max_points: int) -> None:
        """Start empty.

        Args:
            max_points: Most points to keep.
        """
        self.max_points = max_points
        self.points: list[tuple[int, float]] = []
        self._stride = 1
        self._seen = 0

    def add(self, step: int, value: float) -> None:
        """Add a point, if it falls on the spacing that the curve has by now."""
        if self._seen % self._stride == 0:
            self.points.append((step, value))
        self._seen += 1
        while len(self.points) > self.max_points:
            self.points = self.points[::2]
            self._stride *= 2

    def clear(self) -> None:
        """Start again."""
        self.points, self._stride, self._seen = [], 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "steps": [step for step, _ in self.points],
            "values": [value for _, value in self.points],
            "stride": self._stride,
            "seen": self._seen,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the saved points."""
        self.points = list(zip(state_dict["steps"], state_dict["values"], strict=True))
        self._stride, self._seen = state_dict["stride"], state_dict["seen"]
