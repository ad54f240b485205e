"""Precision plugin: maps ``Trainer(precision=...)`` to dtypes of Megatron's engine, which casts and scales itself."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.errors import ConfigError, require_choice, require_number

PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed"]
_PARAMS_DTYPES: dict[str, torch.dtype] = {
    "32-true": torch.float32,
    "bf16-mixed": torch.bfloat16,
    # Megatron's bf16 is one mode: bf16 weights in the layers, fp32 masters in the optimizer. Lightning's two names
    # differ only where autocast exists.
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
}


class MegatronPrecision(Precision):
    """Mixed-precision modes of Megatron's engine, usually adopted from ``Trainer(precision=...)``.

    ========== ======================== =============== ============
    precision  weights and activations  master weights  main gradients
    ========== ======================== =============== ============
    32-true    fp32                     fp32            fp32
    bf16-mixed bf16                     fp32            fp32
    bf16-true  bf16                     fp32            fp32
    16-mixed   fp16, dynamic loss scale fp32            fp32
    ========== ======================== =============== ============

    Casting, loss scaling and gradient clipping happen in the engine. Pass the plugin explicitly only where Lightning
    would replace the precision: ``16-mixed`` on a CPU.

    Args:
        precision: One of the names above.

    Raises:
        ConfigError: If ``precision`` is none of them.
    """

    def __init__(self, precision: PrecisionName = "32-true") -> None:  # noqa: D107 (described on the class)
        require_choice("precision", precision, _PARAMS_DTYPES)
        self.params_dtype = _PARAMS_DTYPES[precision]
        """Dtype of weights and activations; master weights, main gradients and moments are fp32 in every mode."""
        self.precision = precision

    @classmethod
    def adopt(cls, plugin: Precision | None) -> MegatronPrecision:
        """Convert the plugin that Lightning made from ``Trainer(precision=...)``.

        Raises:
            ConfigError: If the engine has no such precision, or the plugin is not one of Lightning's own, or it has
                a ``scaler`` with other settings than torch's defaults.
        """
        if plugin is None or isinstance(plugin, cls):
            return plugin or cls()
        if type(plugin).__module__.split(".")[0] != "lightning":
            raise ConfigError(
                f"precision plugin {type(plugin).__name__} does nothing here; use Trainer(precision=...)"
            )
        scaler = getattr(plugin, "scaler", None)
        # Lightning makes one with torch's defaults if the user gives none.
        defaults = torch.amp.GradScaler("cpu").state_dict()
        if scaler is not None and scaler.state_dict() not in (defaults, {}):
            raise ConfigError(
                "MixedPrecision(scaler=...): expected none, since the engine scales losses itself; use "
                "OptimizerOptions(initial_loss_scale=...)"
            )
        return cls(plugin.precision)  # type: ignore[arg-type]

    @override
    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: Megatron's schedule has run the backward pass of every microbatch."""

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float = 0.0,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Set the maximum gradient norm; the optimizer clips by the norm over all shards, not by a local one."""
        check_clipping(clip_val, gradient_clip_algorithm)
        optimizer.clip_grad = float(clip_val)  # type: ignore[attr-defined]


def check_clipping(clip_val: float | None, algorithm: str | None) -> None:
    """Check that Megatron supports this gradient clipping.

    Raises:
        ConfigError: If the value is not a number of at least 0, or the algorithm is not ``norm``.
    """
    require_number("gradient_clip_val", clip_val or 0)
    if clip_val and algorithm not in (None, "norm"):
        name = getattr(algorithm, "value", algorithm)  # Lightning's is an enum
        raise ConfigError(
            f"gradient_clip_algorithm={name!r} is not supported: Megatron clips by norm; use 'norm'"
        )
