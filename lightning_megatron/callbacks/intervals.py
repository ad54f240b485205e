"""When a callback acts: its interval in optimizer steps, and whether a validation was whole."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_megatron.errors import require_number


def check_interval(every_n_steps: int | None) -> None:
    """Refuse an interval below 1; None stands for the Trainer's."""
    if every_n_steps is not None:
        require_number("every_n_steps", every_n_steps, at_least=1)


def is_due(trainer: Trainer, every_n_steps: int | None) -> bool:
    """Whether the step that just ended is the last of an interval; reading metrics waits for the device.

    Args:
        trainer: Its ``global_step`` is counted.
        every_n_steps: The interval; None takes the Trainer's ``log_every_n_steps``, where 0 means never.
    """
    every: int = every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]  # set in Trainer.__init__
    return every > 0 and trainer.global_step % every == 0


def is_partial_validation(trainer: Trainer) -> bool:
    """Whether the validation that just ended was the sanity check before training, on a part of the batches."""
    return trainer.sanity_checking and trainer.num_sanity_val_batches != trainer.num_val_batches
