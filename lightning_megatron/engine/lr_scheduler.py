"""Who writes the learning rate and the weight decay of each step into the optimizer?

After ``n`` optimizer steps the groups hold the values of ``step=n``, which the next optimizer step uses. Lightning
calls ``step`` after each optimizer step, as Megatron's training loop does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from lightning_megatron.engine.lr_schedule import LRSchedule, check_schedule, learning_rate_at, weight_decay_at
from lightning_megatron.errors import CheckpointError


class MegatronLRScheduler(torch.optim.lr_scheduler.LRScheduler):
    """Writes learning rate and weight decay of the coming step into each group of an optimizer.

    Honours what Megatron's groups carry (megatron-core 0.16.1, optimizer/__init__.py, ``_get_param_groups``):
    ``lr_mult`` (which the engine's own scheduler ignores) and ``wd_mult`` multiply, and in a group that is not marked
    ``default_config`` the keys ``max_lr``, ``min_lr``, ``start_wd`` and ``end_wd`` stand in for the run's values.
    Groups without these keys (any torch optimizer) get the run's values.

    The state is one number, the steps done. Everything else comes from the arguments, so a resumed run follows the
    settings that it was started with.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: LRSchedule,
        lr: float,
        weight_decay: float = 0.0,
        total_steps: int | None = None,
    ) -> None:
        """Write the values of the first step.

        Args:
            optimizer: Its groups must have the keys ``lr`` and ``weight_decay``.
            schedule: Shape of the curves.
            lr: Peak learning rate.
            weight_decay: Weight decay; both ends of the ramp unless ``schedule`` sets them.
            total_steps: ``trainer.max_steps``; -1 or None if it is not known.

        Raises:
            ConfigError: See ``check_schedule``.
        """
        check_schedule(schedule, lr, weight_decay, total_steps)
        self.schedule = schedule
        self.lr = lr
        self.weight_decay = weight_decay
        self.total_steps = total_steps
        super().__init__(optimizer)

    @override
    def get_lr(self) -> list[float | torch.Tensor]:
        """Learning rate of each group at the current step."""
        return [self._group_lr(group) for group in self.optimizer.param_groups]

    @override
    def step(self, epoch: int | None = None) -> None:
        """Move to the next optimizer step; call it after each one."""
        super().step(epoch)
        self._write_weight_decay()

    @override
    def state_dict(self) -> dict[str, Any]:
        """The steps done, under torch's own key."""
        return {"last_epoch": self.last_epoch}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the saved number of steps, and write the values of the coming step.

        Raises:
            CheckpointError: If the state is not that of a learning-rate scheduler.
        """
        if "last_epoch" not in state_dict:
            raise CheckpointError(
                f"learning-rate scheduler state has the keys {sorted(state_dict)} and no 'last_epoch'; resume with the "
                "kind of scheduler that wrote the checkpoint"
            )
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = self.last_epoch + 1
        # The groups may hold what another schedule left in the checkpoint's optimizer state.
        for group in self.optimizer.param_groups:
            group["lr"] = self._group_lr(group)
        self._last_lr: list[float | torch.Tensor] = [group["lr"] for group in self.optimizer.param_groups]
        self._write_weight_decay()

    def _group_lr(self, group: Mapping[str, Any]) -> float:
        lr, schedule = self.lr, self.schedule
        if not group.get("default_config", False):
            lr = _or(group.get("max_lr"), lr)
            schedule = replace(schedule, min_lr=_or(group.get("min_lr"), schedule.min_lr))
        return learning_rate_at(self.last_epoch, lr, schedule, self.total_steps) * float(group.get("lr_mult", 1.0))

    def _write_weight_decay(self) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self._group_weight_decay(group)

    def _group_weight_decay(self, group: Mapping[str, Any]) -> float:
        schedule = self.schedule
        if schedule.weight_decay_incr_style != "constant":
            schedule = replace(
                schedule,
                start_weight_decay=_or(group.get("start_wd"), schedule.start_weight_decay),
                end_weight_decay=_or(group.get("end_wd"), schedule.end_weight_decay),
            )
        value = weight_decay_at(self.last_epoch, self.weight_decay, schedule, self.total_steps)
        return value * float(group.get("wd_mult", 1.0))


def _or(value: Any, default: Any) -> Any:
    """``value`` unless it is None: Megatron's groups carry ``min_lr=None`` where nobody set one."""
    return default if value is None else value
