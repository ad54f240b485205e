"""Callbacks in an ordinary Lightning run with predefined losses and step times."""

import csv
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron.callbacks.loss_curve import Curve, LossCurve
from lightning_megatron.callbacks.perplexity import PerplexityReport
from lightning_megatron.callbacks.progress_line import ProgressLine
from lightning_megatron.callbacks.step_clock import StepClock
from lightning_megatron.callbacks.throughput import ThroughputMonitor
from lightning_megatron.convert.registry import model_config
from lightning_megatron.errors import ConfigError
from lightning_megatron.planning.flops import model_flops
from tests.models import QUIET

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

LOSSES = [
    8.0,
    7.0,
    6.5,
    6.25,
    6.0,
    5.75,
    5.5,
    5.25,
    5.0,
    4.75,
]
EVERY_SECOND_STEP = {"val_check_interval": 2, "check_val_every_n_epoch": None}
EVERY_THIRD_STEP = {"val_check_interval": 3, "check_val_every_n_epoch": None}
PNG = b"\x89PNG\r\n"


class ToyModule(LightningModule):
    """Logs ``losses[step]`` while training and ``val_losses`` in turn while validating."""

    def __init__(
        self,
        losses: list[float],
        val_losses: list[float] | None = None,
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.losses = losses
        self.val_losses = list(val_losses or [])
        self.on_progress_bar: dict[str, float] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("train_loss", self.losses[self.trainer.global_step])
        self.log_dict(self.on_progress_bar, prog_bar=True)
        outputs: Tensor = self.layer(batch)
        return outputs.sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.val_losses:
            self.log("val_loss", self.val_losses[0])

    def on_validation_end(self) -> None:
        del self.val_losses[:1]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def loader(rows: int = 4) -> DataLoader[Any]:
    return DataLoader(torch.ones(rows, 1))  # type: ignore[arg-type]


def toy_trainer(
    folder: Path,
    callbacks: list[Any],
    **options: Any,
) -> Trainer:
    steps = {"max_steps": 6, "num_sanity_val_steps": 0, "log_every_n_steps": 1}
    return Trainer(
        default_root_dir=folder,
        callbacks=callbacks,
        **{"accelerator": "cpu", "devices": 1, **QUIET, **steps, **options},
    )


def test_invalid_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="every_n_steps=0 must be at least 1"):
        ThroughputMonitor(every_n_steps=0)
    with pytest.raises(ConfigError, match="max_points=1 must be at least 2"):
        LossCurve(max_points=1)
    with pytest.raises(ConfigError, match="filename='xyz' is unknown; choose from"):
        LossCurve("folder/loss.xyz")


# ---- LossCurve ------------------------------------------------------------------------------------------------------


def test_curve_has_the_logged_losses_at_their_steps(tmp_path: Path) -> None:
    curve = LossCurve("pictures/loss_curve.png", every_n_steps=2)
    trainer = toy_trainer(tmp_path, [curve], **EVERY_THIRD_STEP, num_sanity_val_steps=-1)
    trainer.fit(
        ToyModule(LOSSES, [9.0, 6.0, 5.0]),
        loader(3),
        loader(2),
    )
    assert curve.train.points == [(1, 8.0), (2, 7.0), (4, 6.25), (6, 5.75)]
    assert curve.validation.points == [(0, 9.0), (3, 6.0), (6, 5.0)]
    assert (tmp_path / "pictures/loss_curve.png").read_bytes().startswith(PNG)


def test_failed_run_writes_a_picture_and_callback_can_be_reused(tmp_path: Path) -> None:
    curve = LossCurve(log_scale=True)
    with pytest.raises(IndexError):  # the module has no loss for the third step
        toy_trainer(tmp_path, [curve]).fit(ToyModule([3.0, 2.0]), loader(6))
    assert (tmp_path / "loss_curve.png").read_bytes().startswith(PNG)
    toy_trainer(
        tmp_path,
        [curve],
        max_steps=3,
    ).fit(ToyModule(LOSSES), loader(6))
    assert curve.train.points == [(1, 8.0), (2, 7.0), (3, 6.5)]
    assert curve.resumed_at == []


def test_resume_continues_curve_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {**EVERY_SECOND_STEP, "num_sanity_val_steps": -1}
    first = toy_trainer(
        tmp_path,
        [LossCurve(), PerplexityReport()],
        max_steps=4,
        **options,
    )
    first.fit(
        ToyModule(LOSSES, [math.log(900.0), 4.0, 4.0]),
        loader(10),
        loader(3),
    )
    checkpoint = tmp_path / "last.ckpt"
    first.save_checkpoint(checkpoint)
    assert torch.load(checkpoint, weights_only=True)["callbacks"]
    curve = LossCurve()
    second = toy_trainer(
        tmp_path,
        [curve, PerplexityReport()],
        max_steps=8,
        **options,
    )
    second.fit(
        ToyModule(LOSSES, [3.0, math.log(7.0)]),
        loader(10),
        loader(3),
        ckpt_path=checkpoint,
    )
    assert curve.train.points == list(enumerate(LOSSES[:8], start=1))
    assert curve.resumed_at == [4]
    assert "validation perplexity: 900.0 before, 7.0 after 8 steps" in capsys.readouterr().out


def test_nonfinite_loss_leaves_no_gap_in_the_smoothed_line() -> None:
    curve = LossCurve("loss.PNG")
    for step in range(100):
        curve.train.add(step, math.nan if step == 50 else 2.0)
    smoothed = curve._draw().axes[0].lines[1].get_ydata()
    assert len(smoothed) == 97
    assert smoothed == pytest.approx(2.0)


def test_long_curve_is_bounded_and_evenly_spaced() -> None:
    curve = Curve(max_points=10)
    for step in range(1000):
        curve.add(step, float(step))
    assert [step for step, _ in curve.points] == list(range(0, 1000, 128))


# ---- PerplexityReport -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sanity_steps", "val_losses", "line"),
    [
        (
            -1,
            [math.log(4187.2), 6.0, 5.0, math.log(61.3)],
            "perplexity: 4187.2 before, 61.3 after 6 steps",
        ),
        (
            2,
            [math.log(50.0), 3.0, 3.0, 800.0],
            "50.0 before (on the first batches only), inf after 6 steps",
        ),
        (0, [], "perplexity: unknown, because no validation logged val_loss"),
    ],
)
def test_report_shows_first_and_last_perplexity(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sanity_steps: int,
    val_losses: list[float],
    line: str,
) -> None:
    report = PerplexityReport()
    of_another_run = {"before": 1.0, "before_is_partial": False, "after": 2.0, "after_step": 3}
    report.load_state_dict(of_another_run)
    trainer = toy_trainer(
        tmp_path, [report], **EVERY_SECOND_STEP, num_sanity_val_steps=sanity_steps
    )
    trainer.fit(
        ToyModule([1.0] * 20, val_losses),
        loader(4),
        loader(3),
    )
    assert line in capsys.readouterr().out.splitlines()[-1]


# ---- ProgressLine ---------------------------------------------------------------------------------------------------


def _print_progress(
    capsys: pytest.CaptureFixture[str], folder: Path, line: ProgressLine
) -> list[str]:
    trainer = toy_trainer(folder, [line], enable_progress_bar=True, **EVERY_SECOND_STEP)
    module = ToyModule([1.0] * 20, [1.0] * 9)
    module.on_progress_bar = {
        f"quantity_{number}": 12345.678 if number else 0.5 for number in range(9)
    }
    trainer.fit(module, loader(4), loader(3))
    return re.split(r"[\r\n]", capsys.readouterr().out.replace("\x1b[K", ""))


def test_progress_is_one_terminal_row_or_several_file_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for line, steps in ((ProgressLine(), (1, 6)), (ProgressLine(every_seconds=0), range(1, 7))):
        rows = _print_progress(capsys, tmp_path, line)
        assert [row.split(",")[0] for row in rows if row.startswith("step")] == [
            f"step {step}/6" for step in steps
        ]
    assert "validate: batch 3" in rows
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    rows = _print_progress(capsys, tmp_path, ProgressLine())
    assert max(map(len, rows)) == 59  # one column less than the terminal
    assert re.match(r"step 6/6, 00:\d\d, 00:00 left, quantity_0 0.5, quantity_1", rows[-2])


# ---- ThroughputMonitor ----------------------------------------------------------------------------------------------

MODEL = model_config(
    {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_embd": 32,
        "n_head": 4,
        "vocab_size": 300,
    }
)


class _FakeClock(Callback):
    """Advances the clock in each training step, validation batch and checkpoint."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        step_seconds: list[float],
        checkpoint_after: int | None = None,
    ):
        self.now = 100.0
        self.step_seconds = step_seconds
        self.checkpoint_after = checkpoint_after
        patch.setattr(
            "lightning_megatron.callbacks.step_clock.time",
            SimpleNamespace(perf_counter=lambda: self.now),
        )

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.now += self.step_seconds[trainer.global_step]

    def on_validation_batch_start(self, *args: Any) -> None:
        self.now += 1000.0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.checkpoint_after:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "a.ckpt")
            self.now += 5000.0


def _measure(
    folder: Path, monitor: ThroughputMonitor, clock: _FakeClock, **options: Any
) -> tuple[list[dict[str, float]], Trainer]:
    """Logged throughput of a run whose strategy reports 64 tokens per step, and its Trainer."""
    # The monitor comes before the callback that saves, as Lightning moves ModelCheckpoint to the end.
    trainer = toy_trainer(
        folder,
        [monitor, clock],
        logger=CSVLogger(folder, name=None, version="log"),
        **options,
    )
    strategy: Any = trainer.strategy
    strategy.tp = 2
    strategy.step_shape = SimpleNamespace(
        tokens=64,
        seq_length=16,
        lengths=(12, 4),
    )
    module: Any = ToyModule([1.0] * 20, [1.0] * 20)
    module.model_config = MODEL
    trainer.fit(module, loader(20), loader(2))
    with (folder / "log" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("tokens_per_s")]
    return [{name: float(value) for name, value in row.items() if value} for row in rows], trainer


def test_throughput_covers_the_steps_since_the_last_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _FakeClock(
        monkeypatch,
        [
            50.0,
            50.0,
            1.0,
            2.0,
            6.0,
            4.0,
            4.0,
            4.0,
        ],
    )
    (row,), trainer = _measure(
        tmp_path, ThroughputMonitor(warmup_steps=2), clock, max_steps=8, log_every_n_steps=5
    )
    assert row.pop("step") == 4  # Lightning numbers the fifth step 4
    flops = model_flops(MODEL, (16,), 512) / 16  # 300 tokens, padded to a multiple of 128 x tp=2
    assert {name: row[name] for name in row if name not in ("epoch", "train_loss")} == {
        "tokens_per_s": pytest.approx(3 * 64 / 9.0),
        "tokens_per_s_per_device": row["tokens_per_s"],
        "step_seconds": 2.0,
        "step_seconds_mean": 3.0,
        "model_tflops_per_s_per_device": pytest.approx(flops * 64 / 3.0 / 1e12, rel=1e-6),
    }  # no MFU and memory on a CPU
    assert trainer.progress_bar_metrics.keys() == {"tokens_per_s"}


def test_validation_and_checkpoints_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _FakeClock(monkeypatch, [1.0] * 10, checkpoint_after=7)
    monitor = ThroughputMonitor(warmup_steps=1)
    (row,), _ = _measure(
        tmp_path, monitor, clock, **EVERY_THIRD_STEP, max_steps=10, log_every_n_steps=10
    )
    assert row["step_seconds_mean"] == 1.0
    assert row["tokens_per_s"] == pytest.approx(64.0)


def test_other_strategy_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="ThroughputMonitor needs MegatronStrategy, got SingleDeviceStrategy"
    ):
        toy_trainer(tmp_path, [ThroughputMonitor()]).fit(ToyModule([1.0] * 6), loader(6))


@pytest.mark.gpu
def test_step_clock_times_the_gpu() -> None:
    device = torch.device("cuda")
    clock = StepClock(device)
    matrix = torch.randn(4096, 4096, device=device)
    matrix @ matrix
    torch.cuda.synchronize()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    clock.mark(tokens=0, flops=0.0)
    start.record()
    for _ in range(50):
        matrix @ matrix
    end.record()
    clock.mark(tokens=7, flops=1.0)
    seconds, tokens, flops = clock.take()
    assert (tokens, flops) == (7, 1.0)
    assert seconds == pytest.approx([start.elapsed_time(end) / 1e3], rel=0.2)
