"""Do the schedules match hand values and Megatron's own scheduler, and refuse what cannot work?"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_megatron.engine.lr_schedule import LRSchedule, check_schedule, learning_rate_at, weight_decay_at
from lightning_megatron.errors import ConfigError

TOTAL = 40
SCHEDULES = [
    LRSchedule(),
    LRSchedule(warmup_steps=4, init_lr=1e-5),
    LRSchedule(style="linear", warmup_steps=5, min_lr=1e-5),
    LRSchedule(style="linear", decay_steps=25, min_lr=1e-5),
    LRSchedule(style="cosine", warmup_steps=7, init_lr=2e-5, min_lr=1e-4),
    LRSchedule(style="cosine", warmup_fraction=0.11),
    LRSchedule(style="cosine", warmup_fraction=0.25, decay_steps=20),
    LRSchedule(style="inverse-square-root", min_lr=3e-4),
    LRSchedule(style="inverse-square-root", warmup_steps=9),
    *(
        LRSchedule(style="WSD", warmup_steps=5, wsd_decay_steps=11, wsd_decay_style=style, min_lr=1e-5)
        for style in ("linear", "cosine", "exponential", "minus_sqrt")
    ),
]


def _engine_scheduler(schedule: LRSchedule, lr: float, **weight_decay: Any) -> Any:
    """Megatron's scheduler on one group, and the group."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    decay = schedule.decay_steps or TOTAL
    fraction = schedule.warmup_fraction
    group: dict[str, Any] = {}
    ramp = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": TOTAL, "wd_incr_style": "constant"} | weight_decay
    return OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=schedule.init_lr,
        max_lr=lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=schedule.warmup_steps if fraction is None else fraction * decay,
        lr_decay_steps=decay,
        lr_decay_style=schedule.style,
        wsd_decay_steps=schedule.wsd_decay_steps,
        lr_wsd_decay_style=schedule.wsd_decay_style,
        **ramp,
    ), group


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.style}-{s.wsd_decay_style}-{s.warmup_steps}")
def test_learning_rate_equals_that_of_megatrons_scheduler_at_every_step(schedule: LRSchedule) -> None:
    engine, group = _engine_scheduler(schedule, lr=1e-3)
    for step in range(TOTAL + 10):
        assert learning_rate_at(step, 1e-3, schedule, TOTAL) == pytest.approx(group["lr"], rel=1e-12, abs=1e-18), step
        engine.step(1)


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_weight_decay_ramp_equals_that_of_megatrons_scheduler_at_every_step(style: Any) -> None:
    schedule = LRSchedule(start_weight_decay=0.01, end_weight_decay=0.1, weight_decay_incr_style=style)
    engine, group = _engine_scheduler(schedule, lr=1e-3, start_wd=0.01, end_wd=0.1, wd_incr_style=style)
    for step in range(TOTAL + 10):
        assert weight_decay_at(step, 0.3, schedule, TOTAL) == pytest.approx(group["weight_decay"], rel=1e-12), step
        engine.step(1)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LRSchedule(), {0: 8.0, 100: 8.0, 10**6: 8.0}),
        (LRSchedule(warmup_steps=4, init_lr=4.0), {0: 4.0, 1: 5.0, 3: 7.0, 4: 8.0, 5: 8.0}),
        (LRSchedule(style="linear", min_lr=2.0), {0: 8.0, 50: 5.0, 75: 3.5, 100: 2.0, 101: 2.0}),
        (LRSchedule(style="linear", warmup_steps=20), {0: 0.0, 10: 4.0, 20: 8.0, 60: 4.0, 100: 0.0}),
        (LRSchedule(style="cosine", min_lr=2.0), {0: 8.0, 50: 5.0, 100: 2.0, 25: 5.0 + 3.0 * math.sqrt(0.5)}),
        (LRSchedule(style="cosine", warmup_fraction=0.2), {10: 4.0, 20: 8.0, 60: 4.0}),
        (LRSchedule(style="cosine", decay_steps=50), {25: 4.0, 50: 0.0, 100: 0.0}),
        (LRSchedule(style="inverse-square-root", warmup_steps=4), {2: 4.0, 4: 8.0, 16: 4.0, 64: 2.0, 101: 0.0}),
        (LRSchedule(style="inverse-square-root", min_lr=3.0), {0: 8.0, 1: 8.0, 4: 4.0, 16: 3.0}),
        (LRSchedule(style="WSD", wsd_decay_steps=40, wsd_decay_style="linear"), {1: 8.0, 60: 8.0, 80: 4.0, 100: 0.0}),
        (LRSchedule(style="WSD", wsd_decay_steps=40, wsd_decay_style="minus_sqrt"), {60: 8.0, 70: 4.0, 100: 0.0}),
        (LRSchedule(style="WSD", wsd_decay_steps=40, wsd_decay_style="cosine"), {60: 8.0, 80: 4.0, 100: 0.0}),
        (LRSchedule(style="WSD", wsd_decay_steps=40), {60: 8.0, 80: 8.0 * (math.sqrt(2.0) - 1.0), 100: 0.0}),
    ],
    ids=lambda value: value.style if isinstance(value, LRSchedule) else "",
)
def test_learning_rate_has_the_value_worked_out_by_hand(schedule: LRSchedule, expected: dict[int, float]) -> None:
    got = {step: learning_rate_at(step, 8.0, schedule, 100) for step in expected}
    assert got == pytest.approx(expected, abs=1e-12)


def test_weight_decay_without_a_ramp_is_the_optimizers() -> None:
    assert [weight_decay_at(step, 0.1, LRSchedule(), None) for step in (0, 7, 10**6)] == [0.1] * 3


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LRSchedule(start_weight_decay=0.0, weight_decay_incr_style="linear"), [0.0, 0.1, 0.2, 0.4, 0.4]),
        (LRSchedule(end_weight_decay=0.8, weight_decay_incr_style="linear"), [0.4, 0.5, 0.6, 0.8, 0.8]),
        (
            LRSchedule(start_weight_decay=0.0, end_weight_decay=1.0, weight_decay_incr_style="cosine"),
            [0.0, (1.0 - math.sqrt(0.5)) / 2.0, 0.5, 1.0, 1.0],
        ),
    ],
)
def test_weight_decay_ramps_between_its_ends_over_the_whole_run(schedule: LRSchedule, expected: list[float]) -> None:
    got = [weight_decay_at(step, 0.4, schedule, 100) for step in (0, 25, 50, 100, 1000)]
    assert got == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"style": "square"}, r"style='square' is unknown; choose from 'constant', 'linear', 'cosine'"),
        ({"wsd_decay_style": "steps"}, r"wsd_decay_style='steps' is unknown; choose from 'linear'"),
        ({"weight_decay_incr_style": "WSD"}, r"weight_decay_incr_style='WSD' is unknown; choose from 'constant'"),
        ({"warmup_steps": -1}, r"warmup_steps=-1 must be at least 0; correct warmup_steps"),
        ({"warmup_steps": "10"}, r"warmup_steps='10' must be a number, and is a str; correct warmup_steps"),
        ({"init_lr": -1e-3}, r"init_lr=-0.001 must be at least 0"),
        ({"min_lr": float("nan")}, r"min_lr=nan must be at least 0"),
        ({"decay_steps": 0}, r"decay_steps=0 must be at least 1"),
        ({"wsd_decay_steps": -2, "style": "WSD"}, r"wsd_decay_steps=-2 must be at least 1"),
        ({"start_weight_decay": -0.1}, r"start_weight_decay=-0.1 must be at least 0"),
        ({"warmup_steps": 5, "warmup_fraction": 0.1}, r"warmup_steps=5 and warmup_fraction=0.1 .*leave one out"),
        ({"warmup_fraction": 1.0}, r"warmup_fraction=1.0 must be a fraction of the decay, in \[0, 1\)"),
        ({"style": "WSD"}, r"set wsd_decay_steps"),
        ({"style": "cosine", "wsd_decay_steps": 5}, r"wsd_decay_steps=5 has no effect on style='cosine'"),
        ({"end_weight_decay": 0.1}, r"end_weight_decay=0.1 have no effect on weight_decay_incr_style='constant'"),
        ({"weight_decay_incr_style": "linear"}, r"nothing to ramp between; set start_weight_decay or end_weight_decay"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LRSchedule(**settings)


@pytest.mark.parametrize(
    ("schedule", "total", "message"),
    [
        (LRSchedule(style="linear"), -1, r"style='linear' needs .* trainer.max_steps=-1 .*; set trainer.max_steps or"),
        (LRSchedule(style="inverse-square-root"), None, r"trainer.max_steps=None does not say it"),
        (LRSchedule(warmup_fraction=0.1), -1, r"warmup_fraction needs the number of optimizer steps"),
        (LRSchedule(warmup_steps=30), 30, r"warmup_steps=30 must be less than trainer.max_steps=30"),
        (LRSchedule(style="cosine", warmup_steps=9, decay_steps=8), 30, r"warmup_steps=9 must be .* decay_steps=8"),
        (LRSchedule(style="cosine", min_lr=0.5), 30, r"min_lr=0.5 is above the peak lr=0.1"),
        (LRSchedule(warmup_steps=3, init_lr=0.5), 30, r"init_lr=0.5 is above the peak lr=0.1"),
        (LRSchedule(style="WSD", warmup_steps=21, wsd_decay_steps=10), 30, r"wsd_decay_steps=10 is more than the 9"),
        (
            LRSchedule(start_weight_decay=0.5, weight_decay_incr_style="linear"),
            30,
            r"start_weight_decay=0.5 is above end_weight_decay=0.01",
        ),
        (
            LRSchedule(start_weight_decay=0.0, weight_decay_incr_style="cosine"),
            -1,
            r"weight_decay_incr_style='cosine' needs .*; set trainer.max_steps",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_its_run_is_refused(schedule: LRSchedule, total: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_schedule(schedule, lr=0.1, weight_decay=0.01, total_steps=total)


@pytest.mark.parametrize(
    ("schedule", "total"),
    [
        (LRSchedule(warmup_steps=2000), -1),
        (LRSchedule(warmup_steps=29), 30),
        (LRSchedule(min_lr=0.5), 30),
        (LRSchedule(init_lr=0.5), 30),
        (LRSchedule(style="cosine", decay_steps=100), -1),
        (LRSchedule(style="WSD", warmup_steps=20, wsd_decay_steps=10), 30),
    ],
)
def test_a_schedule_that_just_fits_its_run_is_accepted(schedule: LRSchedule, total: int) -> None:
    check_schedule(schedule, lr=0.1, weight_decay=0.01, total_steps=total)


def test_negative_peak_values_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lr=-0.1 must be at least 0"):
        check_schedule(LRSchedule(), lr=-0.1, weight_decay=0.0, total_steps=1)
    with pytest.raises(ConfigError, match=r"weight_decay=-0.1 must be at least 0"):
        check_schedule(LRSchedule(), lr=0.1, weight_decay=-0.1, total_steps=1)
