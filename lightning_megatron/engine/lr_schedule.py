"""Learning-rate and weight-decay schedules: options, and Megatron's scheduler with the interface of torch's.

After ``n`` optimizer steps the parameter groups hold the values of step ``n`` (the first is 0), which the next
optimizer step uses. Megatron counts samples; this package counts steps, as Lightning does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from lightning_megatron.errors import ConfigError, require_choice, require_number
from lightning_megatron.foreign_names import checks_options

LRStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WSDDecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
WeightDecayStyle = Literal["constant", "linear", "cosine"]
_STYLES = {
    "style": get_args(LRStyle),
    "wsd_decay_style": get_args(WSDDecayStyle),
    "weight_decay_incr_style": get_args(WeightDecayStyle),
}


@checks_options
@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """Schedule of learning rate and weight decay over the steps of a run.

    Args:
        style: Shape after the warm-up. WSD (warm-up, stable, decay) holds the peak until the last ``wsd_decay_steps``.
        warmup_steps: Optimizer steps of the linear warm-up from ``init_lr`` to the peak.
        warmup_fraction: Warm-up as a fraction of ``decay_steps``, in [0, 1); instead of ``warmup_steps``.
        init_lr: Learning rate of the first optimizer step, where the warm-up begins; refused without warm-up.
        min_lr: Learning rate at the end of the decay and afterwards; refused with ``constant``, which has none.
        decay_steps: Optimizer steps, warm-up included, after which ``min_lr`` is reached. None: the steps of the run,
            from the Trainer's ``max_steps`` or ``max_epochs``. Set it if a run is trained in parts with a growing
            ``max_steps``, which would stretch the curve otherwise. Refused with ``constant``, unless it is what
            ``warmup_fraction`` is a fraction of.
        wsd_decay_steps: Optimizer steps of WSD's final decay; required for WSD, refused elsewhere.
        wsd_decay_style: Shape of WSD's final decay; refused elsewhere.
        start_weight_decay: Weight decay at the first step of a ramp; None: the optimizer's ``weight_decay``.
        end_weight_decay: Weight decay at the run's last step and afterwards, for a ramp; None: the optimizer's
            ``weight_decay``.
        weight_decay_incr_style: Shape of the ramp from ``start_weight_decay`` to ``end_weight_decay``; ``constant``: no
            ramp.
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

    @property
    def follows_run(self) -> bool:
        """Whether the curves depend on the number of steps of the run."""
        has_length = self.style != "constant" or bool(self.warmup_fraction)
        return (
            has_length and self.decay_steps is None
        ) or self.weight_decay_incr_style != "constant"

    def __post_init__(self) -> None:
        """Check everything that depends on neither the peak learning rate nor the number of steps.

        Raises:
            ConfigError: If a style is unknown, a value is negative, or two settings exclude each other.
        """
        for name, value in vars(self).items():
            if name in _STYLES:
                require_choice(name, value, _STYLES[name])
            elif value is not None:
                smallest = 1 if name in ("decay_steps", "wsd_decay_steps") else 0
                require_number(name, value, at_least=smallest)
        if self.warmup_fraction is not None and self.warmup_steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} and warmup_fraction={self.warmup_fraction} differ; leave one out"
            )
        if self.warmup_fraction is not None and not self.warmup_fraction < 1.0:
            raise ConfigError(
                f"warmup_fraction={self.warmup_fraction} must be in [0, 1); correct it"
            )
        self._check_acts()
        if self.style == "WSD" and self.wsd_decay_steps is None:
            raise ConfigError(
                "style='WSD' needs the length of its final decay; set wsd_decay_steps"
            )
        if self.style != "WSD" and self.wsd_decay_steps is not None:
            raise ConfigError(
                f"wsd_decay_steps={self.wsd_decay_steps} has no effect on style={self.style!r}; omit it"
            )
        if self.style != "WSD" and self.wsd_decay_style != "exponential":
            raise ConfigError(
                f"wsd_decay_style={self.wsd_decay_style!r} has no effect on style={self.style!r}; omit it"
            )
        start = self.start_weight_decay
        end = self.end_weight_decay
        style = self.weight_decay_incr_style
        has_ends = start is not None or end is not None
        if style == "constant" and has_ends:
            raise ConfigError(
                f"start_weight_decay={start}, end_weight_decay={end} have no effect; set weight_decay_incr_style"
            )
        if style != "constant" and not has_ends:
            raise ConfigError(
                f"weight_decay_incr_style={style!r} has nothing to ramp between; set end_weight_decay"
            )

    def _check_acts(self) -> None:
        """Refuse settings of a decay or a warm-up that the schedule does not have: ``constant`` is the default."""
        needs = {
            "min_lr": ("a style with a decay", self.style != "constant"),
            "decay_steps": (
                "a style with a decay, or warmup_fraction",
                self.style != "constant" or bool(self.warmup_fraction),
            ),
            "init_lr": (
                "warmup_steps or warmup_fraction",
                bool(self.warmup_steps or self.warmup_fraction),
            ),
        }
        for name, (expected, acts) in needs.items():
            if getattr(self, name) and not acts:
                raise ConfigError(
                    f"{name}={getattr(self, name)}: expected {expected}, got style={self.style!r} without; set it, or "
                    f"leave {name} out"
                )


def scheduler_settings(
    schedule: LRSchedule,
    lr: float,
    weight_decay: float,
    total_steps: int | None,
) -> Mapping[str, Any]:
    """Arguments of Megatron's scheduler for a run of ``total_steps`` optimizer steps.

    Args:
        schedule: The user's options.
        lr: Peak learning rate.
        weight_decay: The optimizer's weight decay: the value without a ramp, and the default of a ramp's two ends.
        total_steps: Steps of the whole run; -1 or None if it has no end.

    Raises:
        ConfigError: If a needed number of steps is unknown, the warm-up or WSD's decay does not fit into the decay, or
            the peak is below ``min_lr`` or ``init_lr``, or the weight decay would fall.
    """
    known_steps = total_steps
    if total_steps is not None and total_steps <= 0:  # Lightning's -1: no limit
        known_steps = None
    decay = schedule.decay_steps or known_steps
    if decay is None and (schedule.style != "constant" or schedule.warmup_fraction):
        what = f"style={schedule.style!r}" if schedule.style != "constant" else "warmup_fraction"
        raise ConfigError(
            f"{what} needs the number of steps; set max_steps or max_epochs of Trainer, or decay_steps"
        )
    warmup: float = schedule.warmup_steps
    if schedule.warmup_fraction:
        # As in Megatron, a fraction need not give a whole number of steps.
        warmup = schedule.warmup_fraction * (decay or 0)
    if decay is not None:
        source = "decay_steps" if schedule.decay_steps else "trainer.max_steps"
        if warmup >= decay:
            raise ConfigError(
                f"warmup_steps={schedule.warmup_steps} must be less than {source}={decay}; lower it"
            )
        if schedule.wsd_decay_steps is not None and schedule.wsd_decay_steps > decay - warmup:
            raise ConfigError(
                f"wsd_decay_steps={schedule.wsd_decay_steps}: expected at most {decay - warmup:g}, what warm-up leaves"
            )
    if schedule.style != "constant" and schedule.min_lr > lr:
        raise ConfigError(
            f"min_lr={schedule.min_lr} is above the peak lr={lr}; lower min_lr or raise lr"
        )
    if warmup and schedule.init_lr > lr:
        raise ConfigError(
            f"init_lr={schedule.init_lr} is above the peak lr={lr}; lower init_lr or raise lr"
        )
    start = schedule.start_weight_decay
    if start is None:
        start = weight_decay
    end = schedule.end_weight_decay
    if end is None:
        end = weight_decay
    if start > end:
        raise ConfigError(
            f"start_weight_decay={start} is above end_weight_decay={end}; a ramp rises, swap them"
        )
    if schedule.weight_decay_incr_style != "constant" and known_steps is None:
        raise ConfigError(
            f"weight_decay_incr_style={schedule.weight_decay_incr_style!r} needs max_steps or max_epochs"
        )
    return {
        # Megatron refuses values above the peak even if they have no effect.
        "init_lr": min(schedule.init_lr, lr),
        "max_lr": lr,
        "min_lr": min(schedule.min_lr, lr),
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay or warmup + 1,
        "lr_decay_style": schedule.style,
        "start_wd": start,
        "end_wd": end,
        "wd_incr_steps": known_steps or 1,
        "wd_incr_style": schedule.weight_decay_incr_style,
        "wsd_decay_steps": schedule.wsd_decay_steps,
        "lr_wsd_decay_style": schedule.wsd_decay_style,
    }


class MegatronLRScheduler(OptimizerParamScheduler):
    """Megatron's scheduler with learning-rate multipliers and the state dict of a torch scheduler.

    Every group follows the run's settings, times its ``lr_mult`` and ``wd_mult`` if it has them. The state is only the
    number of steps done, so a resumed run follows the settings that it is started with. ``max_lr`` and ``min_lr`` of
    groups, which Megatron's scheduler prefers, are ignored: Megatron's optimizer leaves ``min_lr`` None.
    """

    def get_lr(self, param_group: Mapping[str, Any]) -> float:
        """Learning rate of a group, times its ``lr_mult``, which Megatron's scheduler ignores."""
        return float(super().get_lr({}) * param_group.get("lr_mult", 1.0))

    def get_wd(
        self,
        param_group: Mapping[str, Any] | None = None,
    ) -> float:
        """Weight decay of a group, without its ``wd_mult``."""
        return float(super().get_wd())

    def get_last_lr(self) -> list[float]:
        """Learning rate of each group, as in torch's schedulers."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, increment: int = 1) -> None:
        """Set the values of the next optimizer step; called after each step."""
        super().step(increment)

    def state_dict(self) -> dict[str, Any]:
        """Number of steps done, under torch's key."""
        return {"last_epoch": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume after the saved number of steps, and set the values of the next step."""
        self.num_steps = int(state_dict["last_epoch"])
        self.step(0)
