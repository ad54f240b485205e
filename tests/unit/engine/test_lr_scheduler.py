"""Does the scheduler write the right values into groups, at the right step, and continue after a resume?"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_megatron.engine.lr_schedule import LRSchedule
from lightning_megatron.engine.lr_scheduler import MegatronLRScheduler
from lightning_megatron.errors import ConfigError

LINEAR = LRSchedule(style="linear", warmup_steps=2, min_lr=0.0)


def _optimizer(*groups: dict[str, Any]) -> torch.optim.Optimizer:
    made = [{"params": [torch.nn.Parameter(torch.ones(2))], **group} for group in groups or ({},)]
    return torch.optim.AdamW(made, lr=1.0, weight_decay=0.1)


def _run(scheduler: MegatronLRScheduler, steps: int) -> list[tuple[float, ...]]:
    """The learning rate of each group that each optimizer step used."""
    used = []
    for _ in range(steps):
        used.append(tuple(group["lr"] for group in scheduler.optimizer.param_groups))
        scheduler.optimizer.step()
        scheduler.step()
    return used


def test_the_first_optimizer_step_uses_the_value_of_step_zero() -> None:
    scheduler = MegatronLRScheduler(_optimizer(), schedule=LINEAR, lr=1.0, total_steps=6)
    assert [lr for (lr,) in _run(scheduler, 7)] == pytest.approx([0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_group_multipliers_scale_both_values() -> None:
    optimizer = _optimizer({}, {"lr_mult": 0.5, "wd_mult": 0.0}, {"lr_mult": 2.0, "wd_mult": 3.0})
    scheduler = MegatronLRScheduler(optimizer, schedule=LINEAR, lr=1.0, weight_decay=0.1, total_steps=6)
    assert _run(scheduler, 2)[1] == pytest.approx((0.5, 0.25, 1.0))
    assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.0, 0.3])


def test_weight_decay_follows_its_ramp() -> None:
    schedule = LRSchedule(start_weight_decay=0.0, weight_decay_incr_style="linear")
    scheduler = MegatronLRScheduler(_optimizer(), schedule=schedule, lr=1.0, weight_decay=0.4, total_steps=4)
    seen = []
    for _ in range(6):
        seen.append(scheduler.optimizer.param_groups[0]["weight_decay"])
        _run(scheduler, 1)
    assert seen == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.4])


def test_groups_of_megatrons_optimizer_are_honoured_as_its_own_scheduler_does() -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    ordinary = {"max_lr": 1.0, "min_lr": 0.2, "wd_mult": 1.0, "lr_mult": 1.0, "default_config": True}
    decoupled = {**ordinary, "max_lr": 4.0, "min_lr": 0.4, "wd_mult": 0.0, "default_config": False}
    ramped = {**ordinary, "start_wd": 0.05, "end_wd": 0.5}
    schedule = LRSchedule(
        style="cosine", warmup_steps=3, min_lr=0.2, start_weight_decay=0.0, weight_decay_incr_style="cosine"
    )
    ours, reference = _optimizer(ordinary, decoupled, ramped), _optimizer(ordinary, decoupled, ramped)
    scheduler = MegatronLRScheduler(ours, schedule=schedule, lr=1.0, weight_decay=0.1, total_steps=10)
    engine = OptimizerParamScheduler(reference, 0.0, 1.0, 0.2, 3, 10, "cosine", 0.0, 0.1, 10, "cosine")
    for _ in range(12):
        for key in ("lr", "weight_decay"):
            want = [group[key] for group in reference.param_groups]
            assert [group[key] for group in ours.param_groups] == pytest.approx(want, rel=1e-12)
        _run(scheduler, 1)
        engine.step(1)


def test_a_resumed_scheduler_continues_on_the_same_curve() -> None:
    whole = _run(MegatronLRScheduler(_optimizer(), schedule=LINEAR, lr=1.0, total_steps=9), 9)
    first = MegatronLRScheduler(_optimizer(), schedule=LINEAR, lr=1.0, total_steps=9)
    before = _run(first, 4)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = MegatronLRScheduler(_optimizer(), schedule=LINEAR, lr=1.0, total_steps=9)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.get_last_lr() == first.get_last_lr()
    assert before + _run(second, 5) == whole


def test_loading_writes_the_values_of_the_current_settings() -> None:
    scheduler = MegatronLRScheduler(_optimizer({"wd_mult": 2.0}), schedule=LINEAR, lr=1.0, total_steps=6)
    scheduler.optimizer.param_groups[0]["lr"] = 77.0
    scheduler.load_state_dict({"last_epoch": 4})
    assert scheduler.optimizer.param_groups[0]["lr"] == pytest.approx(0.5)


def test_a_schedule_that_cannot_run_is_refused_before_the_optimizer_is_touched() -> None:
    optimizer = _optimizer()
    with pytest.raises(ConfigError, match="needs the number of optimizer steps"):
        MegatronLRScheduler(optimizer, schedule=LINEAR, lr=0.5, total_steps=-1)
    assert optimizer.param_groups[0]["lr"] == 1.0


class _Scheduled(LightningModule):
    """A toy whose scheduler is ours, stepped by Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1.0)
        scheduler = MegatronLRScheduler(optimizer, schedule=LINEAR, lr=1.0, total_steps=self.trainer.max_steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
def test_lightning_steps_saves_and_monitors_it(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name=None, version="log")
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": 6,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": tmp_path,
    }
    data = DataLoader(torch.ones(6, 1))  # type: ignore[arg-type]
    trainer = Trainer(logger=logger, callbacks=[LearningRateMonitor(logging_interval="step")], **options)
    trainer.fit(_Scheduled(), data)
    with (tmp_path / "log" / "metrics.csv").open() as file:
        monitored = [float(row["lr-AdamW"]) for row in csv.DictReader(file) if row["lr-AdamW"]]
    assert monitored == pytest.approx([0.0, 0.5, 1.0, 0.75, 0.5, 0.25])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    (state,) = torch.load(tmp_path / "a.ckpt", weights_only=True)["lr_schedulers"]
    assert state == {"last_epoch": 6}
