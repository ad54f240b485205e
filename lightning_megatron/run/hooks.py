"""Hooks that a module or data module overrides: honoured as Lightning documents them, or refused with the reason.

Megatron's schedule runs forward and backward of all microbatches inside ``MegatronModule.training_step``, and one rank
of each replica reads its batches. A few of Lightning's hooks would therefore be called too late, or not at all. These
are refused before a run begins. What ``training_step`` returns is checked in every step: the gradients belong to the
engine's loss, whatever else is returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_megatron.datamodules.base import MegatronDataModule
from lightning_megatron.errors import ConfigError

if TYPE_CHECKING:
    import lightning.pytorch as pl

_ONE_READER = "one rank reads the batch and broadcasts it to its replica's other ranks"
_REPLICA_HAS_ONE_READER = f"{_ONE_READER}; override get_batch of the TrainStep"
_NEVER_CALLED = {
    "backward": "Megatron's schedule runs it; override loss_func of the TrainStep",
    "transfer_batch_to_device": _REPLICA_HAS_ONE_READER,
    "on_after_batch_transfer": _REPLICA_HAS_ONE_READER,
}
"""Hooks that would never be called; and the reason."""

_CHANGE_THE_LOSS = "change the loss in loss_func of a TrainStep, or add a term to it (docs/training.md, Objectives)"


@dataclass(frozen=True, kw_only=True)
class EngineLoss:
    """A loss whose gradients the engine has computed, as it was then."""

    tensor: torch.Tensor
    """[], on the device."""
    version: int
    """Torch's count of in-place operations on ``tensor``."""

    @classmethod
    def of(cls, loss: torch.Tensor) -> Self:
        """Remember ``loss``, before user code gets it."""
        return cls(tensor=loss, version=loss._version)

    def is_same(self, returned: object) -> bool:
        """Whether ``returned`` is this loss, or an alias such as ``loss.detach()``. Does not wait for a GPU."""
        if not isinstance(returned, torch.Tensor):
            return False
        if returned.requires_grad or returned.numel() != 1:
            return False
        is_alias = returned.data_ptr() == self.tensor.data_ptr()
        return is_alias and returned._version == self.version


def check_hooks(
    model: pl.LightningModule,
    datamodule: pl.LightningDataModule | None,
    phase: TrainerFn | None,
    *,
    is_replica_of_several: bool,
) -> None:
    """Refuse hooks that would have no effect, or get something else than Lightning promises.

    Args:
        model: The user's module.
        datamodule: The user's data module.
        phase: The Trainer's function.
        is_replica_of_several: Whether a replica of the model has several ranks, of which one reads data.

    Raises:
        ConfigError: For the first such hook.
    """
    if not model.automatic_optimization:
        raise ConfigError(
            "automatic_optimization=False does not work here; leave it True, and override loss_func"
        )
    if model._compiler_ctx is not None:
        raise ConfigError("torch.compile(module) does not work here; pass the module itself")
    parts = [part for part in (model, datamodule) if part is not None]
    for part in parts:
        for hook, reason in _NEVER_CALLED.items():
            if _overrides(part, hook):
                raise ConfigError(f"{_name(part, hook)} would not be called: {reason}")
        if is_replica_of_several and isinstance(datamodule, MegatronDataModule):
            _check_before_transfer(part)
    if is_replica_of_several:
        _check_steps(model)
    if _overrides(model, "optimizer_zero_grad"):
        raise ConfigError(
            f"{_name(model, 'optimizer_zero_grad')} would have no effect: the engine zeroes gradients before each "
            "step's first microbatch; leave it out, and accumulate with MegatronStrategy(num_microbatches=...)"
        )
    is_predicting = phase is TrainerFn.PREDICTING
    if is_predicting and _is_replaced(model, "forward") and not _is_replaced(model, "predict_step"):
        raise ConfigError(
            f"{_name(model, 'forward')} would not be called: predict_step generates, or computes logits; override "
            "predict_step, too"
        )


def _check_steps(model: pl.LightningModule) -> None:
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        if is_param_in_hook_signature(getattr(model, step), "dataloader_iter", explicit=True):
            raise ConfigError(
                f"{_name(model, step)} with dataloader_iter would read another batch on each rank of a replica: "
                f"{_ONE_READER}; take batch and batch_idx"
            )


def _check_before_transfer(part: object) -> None:
    hook = "on_before_batch_transfer"
    if _overrides(part, hook):
        raise ConfigError(
            f"{_name(part, hook)} would get placeholders on all ranks but the one that reads data; override "
            "get_batch of the TrainStep, or give fit an ordinary DataLoader"
        )


def check_returned_loss(
    module: object,
    returned: Any,
    losses: Sequence[EngineLoss],
) -> None:
    """Check that ``training_step`` returned the loss whose gradients the engine has computed.

    Args:
        module: The user's module.
        returned: What its ``training_step`` returned: a tensor, or a dict with ``loss``.
        losses: Losses of the engine's forward and backward passes within that call.

    Raises:
        ConfigError: If it is another loss or none, or the engine has not run exactly once.
    """
    name = _name(module, "training_step")
    if len(losses) != 1:
        raise ConfigError(
            f"{name}: expected one call of super().training_step(batch, batch_idx), which computes the gradients, got "
            f"{len(losses)}; call it once and return its loss; {_CHANGE_THE_LOSS}"
        )
    loss = returned
    if isinstance(returned, Mapping):
        loss = returned.get("loss")
    if losses[0].is_same(loss):
        return
    got = "another tensor" if isinstance(loss, torch.Tensor) else repr(loss)
    raise ConfigError(
        f"{name}: expected the loss that super().training_step(...) returned, unchanged, since its gradients are "
        f"computed by then, got {got}; {_CHANGE_THE_LOSS}"
    )


def check_trained(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Check that what is to be trained is in Megatron's optimizer.

    Args:
        module: The user's module, with its model chunks.
        optimizer: Megatron's optimizer; None if ``configure_optimizers`` returned none.

    Raises:
        ConfigError: If there is no such optimizer, or a weight outside of the chunks is to be trained.
    """
    if optimizer is None:
        raise ConfigError(
            f"{_name(module, 'configure_optimizers')}: expected Megatron's optimizer, got none; return "
            "self.megatron.build_optimizer(options, lr), alone or with a schedule"
        )
    for name, weight in module.named_parameters():
        if weight.requires_grad and not name.startswith("model_chunks."):
            raise ConfigError(
                f"{type(module).__name__}.{name}: expected all trained weights in the model's chunks, got one outside, "
                "which no rank would train; freeze it with requires_grad_(False), or add it in a model_provider"
            )


def has_own_training_step(module: object) -> bool:
    """Whether a user wrote the ``training_step`` of this module, which may then differ between ranks."""
    return _is_replaced(module, "training_step")


def overrides_clipping(module: object) -> bool:
    """Whether the module overrides ``configure_gradient_clipping``."""
    return _overrides(module, "configure_gradient_clipping")


def _overrides(part: object, hook: str) -> bool:
    """Whether a hook of Lightning's module or data module is overridden."""
    return hasattr(part, hook) and is_overridden(hook, part)


def _is_replaced(module: object, hook: str) -> bool:
    """Whether a method is not the one of this package, in a subclass or on the object."""
    method = getattr(module, hook)
    function = getattr(method, "__func__", method)
    return not str(function.__module__).startswith("lightning_megatron.")


def _name(part: object, hook: str) -> str:
    return f"{type(part).__name__}.{hook}"
