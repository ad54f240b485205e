"""What must be said about a model family? The row type that every module in ``families/`` fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import Activation, ModelConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """One Hugging Face ``model_type`` in Megatron's words."""

    model_type: str
    """As in ``config.json``."""
    describe: Callable[[Any], ModelConfig]
    """From a Hugging Face config object of this type to Megatron's description."""
    required: Mapping[str, tuple[Any, ...]]
    """Config fields that change the result, and the values that are honoured; any other value is refused by name."""

    def model_config(self, hf_config: Any) -> ModelConfig:
        """Describe ``hf_config``.

        Raises:
            ConfigError: If a field has a value that this family cannot honour.
        """
        for name, honoured in self.required.items():
            value = getattr(hf_config, name, honoured[0])
            if value not in honoured:
                choices = " or ".join(repr(v) for v in honoured)
                raise ConfigError(
                    f"{name}={value!r} of this {self.model_type} config changes the result and is not supported; "
                    f"use {name}={choices}"
                )
        return self.describe(hf_config)


_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def activation(name: str) -> Activation:
    """Megatron's name of a Hugging Face activation.

    Raises:
        ConfigError: If there is none.
    """
    if name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not supported; use one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]
