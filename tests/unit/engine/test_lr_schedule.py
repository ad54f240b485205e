"""Learning rate and weight decay schedules: values computed by hand, refusals, and precedence over param groups."""

import math
from typing import Any

import pytest
import torch

from lightning_megatron.engine.lr_schedule import (
    LRSchedule,
    MegatronLRScheduler,
    scheduler_settings,
)
from lightning_megatron.errors import ConfigError


def _optimizer(*groups: dict[str, Any]) -> torch.optim.Optimizer:
    param_groups = [
        {
            "params": [torch.nn.Parameter(torch.ones(2))],
            **group,
        }
        for group in groups or ({},)
    ]
    return torch.optim.AdamW(param_groups, lr=1.0, weight_decay=0.1)


def _scheduler(
    optimizer: torch.optim.Optimizer, schedule: LRSchedule, lr: float, **more: Any
) -> MegatronLRScheduler:
    settings = {"weight_decay": 0.0, "total_steps": None, **more}
    return MegatronLRScheduler(optimizer, **scheduler_settings(schedule, lr, **settings))


def _values(
    key: str,
    steps: Any,
    schedule: LRSchedule,
    **settings: Any,
) -> dict[int, float]:
    """Value of ``lr`` or ``weight_decay`` at each step."""
    scheduler = _scheduler(_optimizer(), schedule, **settings)
    values = {}
    for step in steps:
        scheduler.load_state_dict({"last_epoch": step})
        values[step] = scheduler.optimizer.param_groups[0][key]
    return values


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            LRSchedule(),
            {0: 8.0, 100: 8.0, 10**6: 8.0},
        ),
        (
            LRSchedule(warmup_steps=4, init_lr=4.0),
            {
                0: 4.0,
                1: 5.0,
                3: 7.0,
                4: 8.0,
                5: 8.0,
            },
        ),
        (
            LRSchedule(style="linear", warmup_steps=20),
            {
                0: 0.0,
                10: 4.0,
                20: 8.0,
                60: 4.0,
                100: 0.0,
            },
        ),
        (
            LRSchedule(style="cosine", warmup_fraction=0.2),
            {10: 4.0, 20: 8.0, 60: 4.0},
        ),
        (
            LRSchedule(style="inverse-square-root", warmup_steps=4),
            {
                2: 4.0,
                4: 8.0,
                16: 4.0,
                64: 2.0,
                101: 0.0,
            },
        ),
        (
            LRSchedule(style="WSD", wsd_decay_steps=40, wsd_decay_style="linear"),
            {1: 8.0, 60: 8.0, 80: 4.0, 100: 0.0},
        ),
        (
            LRSchedule(style="WSD", wsd_decay_steps=40),
            {
                60: 8.0,
                80: 8.0 * (math.sqrt(2.0) - 1.0),
                100: 0.0,
            },
        ),
    ],
    ids=lambda value: value.style if isinstance(value, LRSchedule) else "",
)
def test_learning_rate_equals_values_computed_by_hand(
    schedule: LRSchedule, expected: dict[int, float]
) -> None:
    assert _values("lr", expected, schedule, lr=8.0, total_steps=100) == pytest.approx(
        expected, abs=1e-12
    )


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            LRSchedule(start_weight_decay=0.0, weight_decay_incr_style="linear"),
            [0.0, 0.1, 0.2, 0.4, 0.4],
        ),
        (
            LRSchedule(
                start_weight_decay=0.0, end_weight_decay=1.0, weight_decay_incr_style="cosine"
            ),
            [
                0.0,
                (1.0 - math.sqrt(0.5)) / 2.0,
                0.5,
                1.0,
                1.0,
            ],
        ),
    ],
)
def test_weight_decay_ramps_over_the_run(schedule: LRSchedule, expected: list[float]) -> None:
    values = _values(
        "weight_decay",
        (0, 25, 50, 100, 1000),
        schedule,
        lr=1.0,
        weight_decay=0.4,
        total_steps=100,
    )
    assert [*values.values()] == pytest.approx(expected)


@pytest.mark.parametrize(("settings", "total", "message"), [
    ({"style": "square"}, 30, r"style='square' is unknown; choose from constant, linear, cosine"),
    ({"warmup_steps": 5, "warmup_fraction": 0.1}, 30, r"warmup_steps=5 and warmup_fraction=0.1 .*leave one out"),
    ({"style": "cosine", "wsd_decay_steps": 5}, 30, r"wsd_decay_steps=5 has no effect on style='cosine'"),
    ({"style": "linear", "wsd_decay_style": "cosine"}, 30, r"wsd_decay_style='cosine' has no effect on style='linear'"),
    ({"min_lr": 0.01}, 30, r"min_lr=0.01: expected a style with a decay, got style='constant' without"),
    ({"warmup_steps": 5, "decay_steps": 20}, 30, r"decay_steps=20: expected a style with a decay, or warmup_fraction"),
    ({"style": "cosine", "init_lr": 0.01}, 30, r"init_lr=0.01: expected warmup_steps or warmup_fraction, got .*"),
    ({"style": "linear"}, -1, "style='linear' needs the number of steps; set max_steps"),
    ({"warmup_steps": 30}, 30, r"warmup_steps=30 must be less than trainer.max_steps=30"),
    ({"style": "cosine", "min_lr": 0.5}, 30, r"min_lr=0.5 is above the peak lr=0.1"),
    ({"style": "WSD", "warmup_steps": 21, "wsd_decay_steps": 10}, 30, r"wsd_decay_steps=10: expected at most 9"),
])  # fmt: skip
def test_contradictory_settings_are_refused(
    settings: dict[str, Any], total: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        scheduler_settings(LRSchedule(**settings), lr=0.1, weight_decay=0.01, total_steps=total)


def test_schedule_takes_precedence_over_param_groups() -> None:
    """Megatron's optimizer writes ``min_lr=None`` into its param groups; foreign checkpoints may have rates there."""
    schedule = LRSchedule(style="linear", min_lr=0.2)
    rates = []
    optimizer = _optimizer(
        {"default_config": False, "max_lr": 7.0, "min_lr": None, "start_wd": 5.0}
    )
    scheduler = _scheduler(optimizer, schedule, lr=1.0, weight_decay=0.1, total_steps=4)
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
