"""Which learning rate and which weight decay has each optimizer step?

Pure functions of the step. The convention is Megatron's and torch's alike: the first optimizer step has ``step=0``, so
with warm-up it uses ``init_lr``.

Source: megatron-core 0.16.1, optimizer_param_scheduler.py, ``OptimizerParamScheduler.get_lr`` and ``get_wd``. It counts
samples where Lightning counts optimizer steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_megatron.errors import ConfigError, require_number
from lightning_megatron.foreign_names import explains_options

LRStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WSDDecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
WeightDecayStyle = Literal["constant", "linear", "cosine"]


@explains_options
@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """How learning rate and weight decay move over the steps of a run.

    Args:
        style: Shape after the warm-up. WSD (warm-up, stable, decay) holds the peak until the last ``wsd_decay_steps``.
        warmup_steps: Optimizer steps of the linear warm-up from ``init_lr`` to the peak.
        warmup_fraction: The same as a fraction of the decay's length, in [0, 1); instead of ``warmup_steps``.
        init_lr: Learning rate of the first optimizer step, where the warm-up begins; no effect without warm-up.
        min_lr: Learning rate at the end of the decay and ever after; no effect on ``constant``.
        decay_steps: Optimizer steps, warm-up included, after which ``min_lr`` is reached. None takes
            ``trainer.max_steps``. Set it if a run is trained in parts with a growing ``max_steps``: the curve would be
            stretched otherwise.
        wsd_decay_steps: Optimizer steps of WSD's final decay; required for WSD, refused elsewhere.
        wsd_decay_style: Shape of WSD's final decay.
        start_weight_decay: Weight decay of the first step, for a ramp; None is the optimizer's ``weight_decay``.
        end_weight_decay: Weight decay at ``trainer.max_steps`` and ever after, for a ramp; None is the optimizer's
            ``weight_decay``.
        weight_decay_incr_style: Shape of the ramp from ``start_weight_decay`` to ``end_weight_decay``; ``constant`` is
            no ramp.
    """

    style: LRStyle = "constant"
    warmup_steps: int = 0
    warmup_fraction: float | None = None
    init_lr: float = 0.0
    min_lr: float = 0.0
    decay_steps: int | None = None
    wsd_decay_steps: int | None = None
    wsd_decay_style: WSDDecayStyle = "exponential"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    weight_decay_incr_style: WeightDecayStyle = "constant"

    def __post_init__(self) -> None:
        """Check the rules that need neither the peak learning rate nor the number of steps.

        Raises:
            ConfigError: If a style is unknown, a value is negative, or two settings exclude each other.
        """
        _require_choice("style", self.style, get_args(LRStyle))
        _require_choice("wsd_decay_style", self.wsd_decay_style, get_args(WSDDecayStyle))
        _require_choice("weight_decay_incr_style", self.weight_decay_incr_style, get_args(WeightDecayStyle))
        for name in ("warmup_steps", "init_lr", "min_lr", "start_weight_decay", "end_weight_decay"):
            self._require_at_least(name, 0)
        for name in ("decay_steps", "wsd_decay_steps"):
            self._require_at_least(name, 1)
        self._check_warmup()
        self._check_wsd()
        self._check_ramp()

    def _require_at_least(self, name: str, least: int) -> None:
        if (value := getattr(self, name)) is not None:
            require_number(name, value, least)

    def _check_warmup(self) -> None:
        if self.warmup_fraction is None:
            return
        require_number("warmup_fraction", self.warmup_fraction)
        if self.warmup_steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} and warmup_fraction={self.warmup_fraction} both set the warm-up; "
                "leave one out"
            )
        if not 0.0 <= self.warmup_fraction < 1.0:
            raise ConfigError(
                f"warmup_fraction={self.warmup_fraction} must be a fraction of the decay, in [0, 1); correct it"
            )

    def _check_wsd(self) -> None:
        if self.style == "WSD" and self.wsd_decay_steps is None:
            raise ConfigError("style='WSD' needs the length of its final decay; set wsd_decay_steps")
        if self.style != "WSD" and self.wsd_decay_steps is not None:
            raise ConfigError(
                f"wsd_decay_steps={self.wsd_decay_steps} has no effect on style={self.style!r}; leave it out or set "
                "style='WSD'"
            )

    def _check_ramp(self) -> None:
        start, end = self.start_weight_decay, self.end_weight_decay
        if self.weight_decay_incr_style == "constant":
            if start is not None or end is not None:
                raise ConfigError(
                    f"start_weight_decay={start}, end_weight_decay={end} have no effect on "
                    "weight_decay_incr_style='constant'; leave them out or choose 'linear' or 'cosine'"
                )
        elif start is None and end is None:
            raise ConfigError(
                f"weight_decay_incr_style={self.weight_decay_incr_style!r} has nothing to ramp between; set "
                "start_weight_decay or end_weight_decay"
            )


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is unknown; choose from {', '.join(repr(c) for c in choices)}")


def check_schedule(schedule: LRSchedule, lr: float, weight_decay: float, total_steps: int | None) -> None:
    """Raise unless ``schedule`` can run with these peak values over ``total_steps`` optimizer steps.

    Args:
        schedule: What the user asked for.
        lr: Peak learning rate.
        weight_decay: The optimizer's weight decay.
        total_steps: ``trainer.max_steps``; -1 or None if it is not known.

    Raises:
        ConfigError: If a needed number of steps is unknown, the warm-up or WSD's decay does not fit into the decay, or
            the peak is below ``min_lr`` or ``init_lr``, or the weight decay would fall.
    """
    _resolve_lr(lr, schedule, total_steps)
    _resolve_weight_decay(weight_decay, schedule, total_steps)


def learning_rate_at(step: int, lr: float, schedule: LRSchedule, total_steps: int | None) -> float:
    """The learning rate that optimizer step ``step`` (the first is 0) uses.

    Source: megatron-core 0.16.1, optimizer_param_scheduler.py, ``get_lr``. With w warm-up steps, d decay steps and
    r = (step - w) / (d - w): warm-up ``init_lr + (lr - init_lr) * step / w`` up to and including step w, then
    ``min_lr + (lr - min_lr) * c`` with c = 1 - r (linear) or (1 + cos(pi * r)) / 2 (cosine); inverse-square-root is
    ``max(min_lr, lr * sqrt(w / step))``. WSD holds c = 1 until its last steps, where r runs from 0 to 1 and c may also
    be 2 * 0.5**r - 1 (exponential) or 1 - sqrt(r) (minus_sqrt). Past step d all but ``constant`` are ``min_lr``.

    Args:
        step: Optimizer steps done before this one.
        lr: Peak learning rate.
        schedule: Shape of the curve.
        total_steps: ``trainer.max_steps``; -1 or None if it is not known.

    Raises:
        ConfigError: See ``check_schedule``.
    """
    warmup, decay = _resolve_lr(lr, schedule, total_steps)
    if warmup > 0 and step <= warmup:
        return schedule.init_lr + (lr - schedule.init_lr) * step / warmup
    if schedule.style == "constant" or decay is None:
        return lr
    if step > decay:
        return schedule.min_lr
    if schedule.style == "inverse-square-root":
        return max(schedule.min_lr, lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(step, 1)))
    if schedule.style == "WSD":
        coefficient = _wsd_coefficient(step, decay, schedule)
    else:
        coefficient = _falling(schedule.style, (step - warmup) / (decay - warmup))
    return schedule.min_lr + coefficient * (lr - schedule.min_lr)


def _wsd_coefficient(step: int, decay: int, schedule: LRSchedule) -> float:
    assert schedule.wsd_decay_steps is not None, "checked by LRSchedule"
    anneal_start = decay - schedule.wsd_decay_steps
    if step <= anneal_start:
        return 1.0
    return _falling(schedule.wsd_decay_style, (step - anneal_start) / schedule.wsd_decay_steps)


def _falling(style: str, ratio: float) -> float:
    """A curve from 1 at ``ratio`` 0 to 0 at ``ratio`` 1."""
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return 2.0 * math.pow(0.5, ratio) - 1.0
    assert style == "minus_sqrt", f"{style} is not one of the styles that LRSchedule accepts"
    return 1.0 - math.sqrt(ratio)


def weight_decay_at(step: int, weight_decay: float, schedule: LRSchedule, total_steps: int | None) -> float:
    """The weight decay that optimizer step ``step`` (the first is 0) uses.

    Source: megatron-core 0.16.1, optimizer_param_scheduler.py, ``get_wd``: ``start + (end - start) * c`` with
    r = step / total_steps and c = r (linear) or (1 + cos(pi * (1 - r))) / 2 (cosine).

    Args:
        step: Optimizer steps done before this one.
        weight_decay: The optimizer's weight decay: the value without a ramp, and the default of its two ends.
        schedule: Shape of the ramp.
        total_steps: ``trainer.max_steps``, the length of the ramp; -1 or None if it is not known.

    Raises:
        ConfigError: See ``check_schedule``.
    """
    start, end, length = _resolve_weight_decay(weight_decay, schedule, total_steps)
    if length is None or step > length:
        return end
    ratio = step / length
    if schedule.weight_decay_incr_style == "cosine":
        ratio = 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0)
    return start + ratio * (end - start)


def _known(total_steps: int | None) -> int | None:
    """Lightning says -1 for "no limit"."""
    return total_steps if total_steps is not None and total_steps > 0 else None


def _resolve_lr(lr: float, schedule: LRSchedule, total_steps: int | None) -> tuple[float, int | None]:
    """Warm-up steps (a fraction need not be whole, as in Megatron) and decay steps (None: unknown and not needed)."""
    decay = schedule.decay_steps or _known(total_steps)
    if decay is None and (schedule.style != "constant" or schedule.warmup_fraction):
        what = f"style={schedule.style!r}" if schedule.style != "constant" else "warmup_fraction"
        raise ConfigError(
            f"{what} needs the number of optimizer steps, and trainer.max_steps={total_steps} does not say it; set "
            "trainer.max_steps or lr_schedule.decay_steps"
        )
    warmup = schedule.warmup_fraction * (decay or 0) if schedule.warmup_fraction else float(schedule.warmup_steps)
    _check_lengths(schedule, warmup, decay)
    _check_peak(lr, schedule, has_warmup=warmup > 0)
    return warmup, decay


def _check_lengths(schedule: LRSchedule, warmup: float, decay: int | None) -> None:
    if decay is None:
        return
    source = "decay_steps" if schedule.decay_steps else "trainer.max_steps"
    if warmup >= decay:
        raise ConfigError(
            f"warmup_steps={schedule.warmup_steps} must be less than {source}={decay}; lower it or raise {source}"
        )
    if schedule.wsd_decay_steps is not None and schedule.wsd_decay_steps > decay - warmup:
        raise ConfigError(
            f"wsd_decay_steps={schedule.wsd_decay_steps} is more than the {decay - warmup:g} steps that the warm-up "
            f"leaves of {source}={decay}; lower wsd_decay_steps"
        )


def _check_peak(lr: float, schedule: LRSchedule, has_warmup: bool) -> None:
    require_number("lr", lr)
    if schedule.style != "constant" and schedule.min_lr > lr:
        raise ConfigError(f"min_lr={schedule.min_lr} is above the peak lr={lr}; lower min_lr or raise lr")
    if has_warmup and schedule.init_lr > lr:
        raise ConfigError(f"init_lr={schedule.init_lr} is above the peak lr={lr}; lower init_lr or raise lr")


def _resolve_weight_decay(
    weight_decay: float, schedule: LRSchedule, total_steps: int | None
) -> tuple[float, float, int | None]:
    """Both ends of the ramp and its length in steps (None: no ramp)."""
    require_number("weight_decay", weight_decay)
    if schedule.weight_decay_incr_style == "constant":
        return weight_decay, weight_decay, None
    start = weight_decay if schedule.start_weight_decay is None else schedule.start_weight_decay
    end = weight_decay if schedule.end_weight_decay is None else schedule.end_weight_decay
    if start > end:
        raise ConfigError(f"start_weight_decay={start} is above end_weight_decay={end}; a ramp rises, swap them")
    length = _known(total_steps)
    if length is None:
        raise ConfigError(
            f"weight_decay_incr_style={schedule.weight_decay_incr_style!r} needs the number of optimizer steps, and "
            f"trainer.max_steps={total_steps} does not say it; set trainer.max_steps"
        )
    return start, end, length
