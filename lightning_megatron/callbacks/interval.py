"""Is it time for a callback to look at the numbers? Looking waits for the device, so it is not done every step."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_megatron.errors import ConfigError


def check_interval(every_n_steps: int | None) -> None:
    """Raise unless ``every_n_steps`` can be an interval.

    Raises:
        ConfigError: If it is below 1.
    """
    if every_n_steps is not None and every_n_steps < 1:
        raise ConfigError(f"every_n_steps={every_n_steps} must be at least 1; correct it or leave it out")


def is_due(trainer: Trainer, every_n_steps: int | None) -> bool:
    """Whether the optimizer step that just ended is the last of an interval.

    Args:
        trainer: Counts the steps.
        every_n_steps: The interval; None takes the Trainer's ``log_every_n_steps``, of which 0 means never.
    """
    every: int = every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]  # set in Trainer.__init__
    return every > 0 and trainer.global_step % every == 0
