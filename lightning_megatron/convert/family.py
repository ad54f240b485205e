"""Description of a Hugging Face model family: the row type that every module in ``families/`` fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_megatron.convert.rules import Rule
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import Activation, ModelConfig

if TYPE_CHECKING:
    from lightning_megatron.convert.hugging_face_files import WeightFiles


@dataclass(frozen=True, kw_only=True)
class Family:
    """One Hugging Face ``model_type`` in Megatron's words."""

    model_type: str
    """As in ``config.json``."""
    describe: Callable[[Any], ModelConfig]
    """From a Hugging Face config object of this type to Megatron's description."""
    required: Mapping[str, tuple[Any, ...]]
    """Config fields that change the result, and the values that are honoured; any other value is refused by name."""
    rules: Callable[[ModelConfig], Sequence[Rule]]
    """How each weight of a described model is named and laid out there and here, its head's included."""
    architectures: Mapping[str, str]
    """Each task and the Hugging Face class that has its head; the first one is meant where nothing is said."""
    base_prefix: str
    """What stands before the names of the headless model in files of a model with a head, e.g. ``transformer.``."""
    buffers: tuple[str, ...] = ()
    """Globs of tensors that old files contain and that are no weights."""
    describe_weights: Callable[[ModelConfig, WeightFiles], ModelConfig] | None = None
    """A description corrected by what only the weight files tell; None if the config says everything."""

    def task_of(self, hf_config: Any, task: str | None = None) -> str:
        """``task`` if it is given, else what the config's ``architectures`` says, else the family's first one.

        Raises:
            ConfigError: If this family has no such task.
        """
        if task is not None:
            if task not in self.architectures:
                raise ConfigError(
                    f"task={task!r} is unknown to {self.model_type} models; choose from {', '.join(self.architectures)}"
                )
            return task
        named = (getattr(hf_config, "architectures", None) or [None])[0]
        if named is None or str(named).endswith("Model"):
            return next(iter(self.architectures))
        for known, architecture in self.architectures.items():
            if architecture == named:
                return known
        raise ConfigError(
            f"architectures=[{named!r}] of this {self.model_type} config is not supported; use one of "
            f"{', '.join(self.architectures.values())} (in Python also task=, one of {', '.join(self.architectures)})"
        )

    def model_config(self, hf_config: Any, task: str | None = None) -> ModelConfig:
        """Describe ``hf_config``.

        Args:
            hf_config: A Hugging Face config object of this type.
            task: Which head; None for the one that the config names.

        Raises:
            ConfigError: If a field has a value that this family cannot honour, or there is no such task.
        """
        for name, honoured in self.required.items():
            value = getattr(hf_config, name, honoured[0])
            if value not in honoured:
                choices = " or ".join(repr(v) for v in honoured)
                raise ConfigError(
                    f"{name}={value!r} of this {self.model_type} config changes the result and is not supported; "
                    f"use {name}={choices}"
                )
        try:
            return replace(self.describe(hf_config), task=self.task_of(hf_config, task))
        except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            # Not all fields of a config.json have been checked by transformers.
            raise ConfigError(f"the {self.model_type} config is invalid ({error}); correct it") from error


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
