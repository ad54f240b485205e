"""Refuse options and callbacks of Lightning's Trainer that the engine cannot honour, before a model is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import callbacks

from lightning_megatron.errors import ConfigError

if TYPE_CHECKING:
    import lightning.pytorch as pl

_REFUSED_CALLBACKS: dict[type | tuple[type, ...], str] = {
    callbacks.GradientAccumulationScheduler: "does not work with MegatronStrategy, whose batches are whole optimizer "
    "steps; use MegatronStrategy(num_microbatches=...) and a larger batch_size",
    (callbacks.StochasticWeightAveraging, callbacks.WeightAveraging): "copies the module before its weights exist, and "
    "would average nothing; remove it, and average checkpoints with lightning-megatron average",
    callbacks.BaseFinetuning: "adds parameters to the optimizer while training, and Megatron's buffers are laid out "
    "once; freeze with requires_grad_(False) in configure_model, and unfreeze between two runs of fit, instead",
}
"""Callbacks of Lightning's that would do something else here than they promise, most of them silently."""


def check_trainer(trainer: pl.Trainer) -> None:
    """Refuse options and callbacks that Megatron's engine cannot honour.

    Raises:
        ConfigError: For the first of them.
    """
    if (steps := trainer.accumulate_grad_batches) != 1:
        raise ConfigError(
            f"accumulate_grad_batches={steps} does not work, a batch is a whole step; use "
            f"MegatronStrategy(num_microbatches={steps}) and a batch_size that many times as large"
        )
    algorithm = str(trainer.gradient_clip_algorithm or "norm")
    if trainer.gradient_clip_val and algorithm not in ("norm", "GradClipAlgorithmType.NORM"):
        raise ConfigError(f"gradient_clip_algorithm={algorithm!r} is not supported: Megatron clips by norm; use 'norm'")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in _REFUSED_CALLBACKS.items():
            if isinstance(callback, kind) and getattr(callback, "going_to_accumulate_grad_batches", lambda: True)():
                raise ConfigError(f"{type(callback).__name__} {reason}")
