"""Are the figures those of the steps that were measured, and only those?"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron.accounting.flops import model_flops_per_token
from lightning_megatron.accounting.t5 import t5_model_flops_per_row
from lightning_megatron.callbacks import ThroughputMonitor
from lightning_megatron.callbacks.throughput import StepClock
from lightning_megatron.errors import ConfigError
from tests.unit.accounting.shapes import gpt2
from tests.unit.callbacks.toy import ToyModule, loader, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

MODEL = gpt2(2, 32, 4, vocab_size=300)


class _Time:
    """A clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr("lightning_megatron.callbacks.throughput.time", clock)


class _Slow(Callback):
    """Lets time pass: so much in each training step, validation and checkpoint."""

    def __init__(self, time: _Time, step_seconds: list[float], checkpoint_after: int | None = None) -> None:
        self.time = time
        self.step_seconds = step_seconds
        self.checkpoint_after = checkpoint_after

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.time.now += self.step_seconds[trainer.global_step]

    def on_validation_batch_start(self, *args: Any) -> None:
        self.time.now += 1000.0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.checkpoint_after:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "a.ckpt")
            self.time.now += 5000.0


def _fit(folder: Path, monitor: ThroughputMonitor, slow: _Slow, **options: Any) -> list[dict[str, str]]:
    """Train a toy under a strategy that claims to run 64 tokens a step, and return the rows that a logger wrote."""
    logger = CSVLogger(folder, name=None, version="log")
    # The monitor comes before the callback that saves, as Lightning orders its own ModelCheckpoint.
    trainer = toy_trainer(folder, [monitor, slow], logger=logger, **options)
    trainer.strategy.step_shape = SimpleNamespace(tokens=64, seq_length=16)
    trainer.strategy.tp = 2
    module = ToyModule([1.0] * 20, [1.0] * 20)
    module.model_config = MODEL
    trainer.fit(module, loader(20), loader(2))
    with (folder / "log" / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get("tokens_per_s")]


def test_figures_are_of_the_steps_since_the_last_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _Slow(_Time(monkeypatch), [50.0, 50.0, 1.0, 2.0, 6.0, 4.0, 4.0, 4.0])
    rows = _fit(tmp_path, ThroughputMonitor(warmup_steps=2), slow, max_steps=8, log_every_n_steps=5)
    assert len(rows) == 1
    row = {name: float(value) for name, value in rows[0].items() if value}
    assert row["step"] == 4  # Lightning numbers the fifth step 4
    assert row["tokens_per_s"] == pytest.approx(3 * 64 / 9.0)
    assert row["tokens_per_s_per_device"] == row["tokens_per_s"]
    assert row["step_seconds"] == 2.0
    assert row["step_seconds_mean"] == 3.0
    flops = model_flops_per_token(MODEL, 16, 512)  # 300 tokens, padded to a multiple of 128 x tp=2
    assert row["model_tflops_per_s_per_device"] == pytest.approx(flops * 64 / 3.0 / 1e12, rel=1e-6)
    assert "mfu" not in row  # a CPU's peak is not known
    assert "peak_memory_gib" not in row


def test_validation_and_checkpoints_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _Slow(_Time(monkeypatch), [1.0] * 10, checkpoint_after=7)
    options = {"val_check_interval": 3, "check_val_every_n_epoch": None, "max_steps": 10, "log_every_n_steps": 10}
    (row,) = _fit(tmp_path, ThroughputMonitor(warmup_steps=1), slow, **options)
    assert float(row["step_seconds_mean"]) == 1.0
    assert float(row["tokens_per_s"]) == pytest.approx(64.0)


def test_speed_is_in_the_progress_bar_and_the_rest_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Look(Callback):
        def on_train_end(self, trainer: Any, *args: Any) -> None:
            seen.update(trainer.progress_bar_metrics)

    slow = _Slow(_Time(monkeypatch), [1.0] * 6)
    trainer = toy_trainer(tmp_path, [ThroughputMonitor(), slow, Look()])
    trainer.strategy.step_shape = SimpleNamespace(tokens=64, seq_length=16)
    trainer.fit(ToyModule([1.0] * 6), loader(6))
    assert seen == {"tokens_per_s": 64.0}


def test_a_t5_counts_both_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t5 = replace(MODEL, architecture="t5", num_decoder_layers=3)
    slow = _Slow(_Time(monkeypatch), [1.0] * 6)
    trainer = toy_trainer(tmp_path, [ThroughputMonitor(), slow])
    trainer.strategy.step_shape = SimpleNamespace(tokens=64, seq_length=16, lengths=(12, 4))
    module = ToyModule([1.0] * 6)
    module.model_config = t5
    trainer.fit(module, loader(6))
    flops = t5_model_flops_per_row(t5, 12, 4, 384) * 4  # four rows of 16 tokens
    assert trainer.callback_metrics["model_tflops_per_s_per_device"].item() == pytest.approx(flops / 1e12, rel=1e-6)


def test_another_strategy_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="strategy SingleDeviceStrategy does not tell the tokens of a step"):
        toy_trainer(tmp_path, [ThroughputMonitor()]).fit(ToyModule([1.0] * 6), loader(6))


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="every_n_steps=0 must be at least 1"):
        ThroughputMonitor(every_n_steps=0)
    with pytest.raises(ConfigError, match="warmup_steps=0 must be at least 1"):
        ThroughputMonitor(warmup_steps=0)


@pytest.mark.gpu
def test_a_gpus_clock_times_what_the_gpu_does_and_not_what_the_host_waits() -> None:
    device = torch.device("cuda")
    clock = StepClock(device)
    matrix = torch.randn(4096, 4096, device=device)
    matrix @ matrix
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    clock.mark(tokens=0, flops=0.0)
    start.record()
    for _ in range(50):
        matrix @ matrix
    end.record()
    clock.mark(tokens=7, flops=1.0)
    window = clock.take()
    assert window is not None
    assert window.tokens == 7
    assert window.seconds == pytest.approx([start.elapsed_time(end) / 1e3], rel=0.2)
