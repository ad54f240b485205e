"""Hugging Face model families: mapping of their configs to ``ModelConfig`` and of their weights to Megatron's.

A family is data, with one module in ``families/`` per group of similar ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_megatron.convert.decoder_rules import DecoderNames, decoder_rules
from lightning_megatron.convert.model_fields import (
    Fields,
    activation,
    config_field_names,
    has_field,
    head_dim,
    window_fields,
)
from lightning_megatron.convert.rope import read_rope, rotated_part
from lightning_megatron.convert.rules import Rule
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig

_CLASSIFIER_DROPOUT = 0.1
"""Dropout before a decoder's head for tokens if its config gives none."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """Classification head of a decoder, a linear layer on its last hidden states."""

    architecture: str | None
    """Hugging Face class that has it; None: transformers has none, so the model trains but cannot be exported."""
    module: str
    """Hugging Face's name of the linear layer."""
    has_bias: bool


def classifiers(
    name: str | None = None,
    *,
    has_sequences: bool = True,
    has_tokens: bool = True,
    token_module: str = "score",
) -> Mapping[str, Head]:
    """``Family.heads`` of a decoder.

    Args:
        name: Prefix of Hugging Face's classes; None if there are none.
        has_sequences: Whether there is a class for sequences.
        has_tokens: Whether there is a class for tokens.
        token_module: Name of the linear layer of the class for tokens.
    """
    sequences = None
    tokens = None
    if name is not None and has_sequences:
        sequences = f"{name}ForSequenceClassification"
    if name is not None and has_tokens:
        tokens = f"{name}ForTokenClassification"
    return {
        "sequence_classification": Head(
            architecture=sequences,
            module="score",
            has_bias=False,
        ),
        "token_classification": Head(
            architecture=tokens,
            module=token_module,
            has_bias=True,
        ),
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Mapping of one Hugging Face ``model_type`` to Megatron.

    Fields of the ``ModelConfig`` come from ``custom_fields``, else from the config under a common name, else from
    ``defaults``. ``pad_token_id`` has no common name: Hugging Face never trains that row of the input embedding; here
    the row is trained where the token is part of a sentence, and padding is excluded by the attention mask.
    """

    name: str
    """``model_type`` in ``config.json``."""
    aliases: tuple[str, ...] = ()
    """Other values of ``model_type`` in files of this family, which transformers knows by its name; saved as that."""
    architectures: Mapping[str, str]
    """Hugging Face class with the head of each task, except those of ``heads``; the first task is the default."""
    heads: Mapping[str, Head] = field(default_factory=classifiers)
    """Classification heads of a decoder, by task; none for other models, which name theirs in ``rules``."""
    module: str = "transformers"
    """Module that has these classes; ``__name__`` for a family registered by the module that defines them."""
    defaults: Fields
    """Fields of all models of the family, unless the config says otherwise."""
    custom_fields: Callable[[Any], Fields] = lambda hf_config: {}
    """Fields computed from a Hugging Face config object of this type; they override all others."""
    names: DecoderNames = DecoderNames()
    """Hugging Face's names of the weights."""
    rules: Callable[[DecoderNames, ModelConfig], Sequence[Rule]] = lambda names, model: (
        decoder_rules(names, model)
    )
    """Returns the rules of all weights of a model, including its head."""
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Config fields that change the result, and their supported values; any other value raises."""
    partial_rotary: bool = False
    """See ``read_rope``."""
    quantizations: tuple[str, ...] = ()
    """Values of ``quant_method`` in ``quantization_config`` whose weights are read, dequantized."""

    @property
    def classes(self) -> dict[str, str]:
        """Hugging Face class of each task that has one."""
        of_heads = {task: head.architecture for task, head in self.heads.items()}
        return {
            **self.architectures,
            **{task: name for task, name in of_heads.items() if name is not None},
        }

    def class_of(self, task: str) -> str:
        """Hugging Face class that computes a task.

        Raises:
            ConfigError: If there is none.
        """
        if task not in self.classes:
            raise ConfigError(
                f"transformers has no {self.name} model for task={task!r}; keep it as a checkpoint "
                "(trainer.save_checkpoint, or convert --to megatron), or train a family that has one"
            )
        return self.classes[task]

    def load_class(self, name: str) -> Any:
        """The Hugging Face class ``name`` of this family.

        Raises:
            ConfigError: If ``module`` has none of this name.
        """
        # transformers' import takes seconds.
        found = getattr(importlib.import_module(self.module), name, None)
        if found is None:
            raise ConfigError(
                f"architectures of the family {self.name!r}: expected a class of the module {self.module}, got "
                f"{name!r}, which it does not have; give Family(module=...) where it is defined"
            )
        return found

    def describe(self, hf: Any) -> ModelConfig:
        """Build the ``ModelConfig`` of a Hugging Face config object of this type, without its task.

        Raises:
            ConfigError: If the config has an unsupported value.
        """
        custom = dict(self.custom_fields(hf))
        if has_field(hf, "rope_parameters") and "position_embedding_type" not in custom:
            base, scaling = read_rope(hf, hf.rope_parameters, partial_rotary=self.partial_rotary)
            custom |= {
                "position_embedding_type": "rope",
                "rotary_base": base,
                "rope_scaling": scaling,
            }
            if self.partial_rotary:
                custom["rotary_percent"] = rotated_part(hf.rope_parameters)
        if has_field(hf, "layer_types") and "sliding_window" not in custom:
            custom |= window_fields(hf)
        fields = {
            "scaled_residual_init": False,
            "kv_channels": head_dim(hf),
            **self.defaults,
        }
        for ours, name in config_field_names(hf).items():
            if ours in custom:
                continue
            value = getattr(hf, name)
            fields[ours] = activation(value) if ours == "activation" else value
        fields |= custom
        return ModelConfig(family=self.name, **fields)

    def task_of(self, hf_config: Any, task: str | None = None) -> str:
        """The task: ``task`` if given, else that of the config's ``architectures``, else the family's first one.

        Raises:
            ConfigError: If this family has no such task.
        """
        named = task or (getattr(hf_config, "architectures", None) or [None])[0]
        if task is None and (named is None or str(named).endswith("Model")):
            return next(iter(self.architectures))
        for known, architecture in self.classes.items():
            if named in (known, architecture):
                return known
        if task is not None and task in self.heads:
            return task
        option = "architectures" if task is None else "task"
        tasks = ", ".join((*self.architectures, *self.heads))
        classes = ", ".join(self.classes.values())
        raise ConfigError(
            f"{option}={named!r} is unknown to {self.name} models; choose from {tasks}, in config.json {classes}"
        )

    def model_config(self, hf_config: Any, task: str | None = None) -> ModelConfig:
        """Convert a Hugging Face config object to a ``ModelConfig``, checking all fields.

        Args:
            hf_config: A Hugging Face config object of this type.
            task: Task of the head; None: that of the config.

        Raises:
            ConfigError: If a field has a value that this family does not support, or there is no such task.
        """
        for name, supported in self.required.items():
            value = getattr(hf_config, name, supported[0])
            if value not in supported:
                choices = " or ".join(repr(v) for v in supported)
                raise ConfigError(
                    f"{name}={value!r} of this {self.name} config changes the result and is not supported; "
                    f"use {name}={choices}"
                )
        try:
            task = self.task_of(hf_config, task)
            head = self.heads.get(task)
            fields = {} if head is None else _head_fields(hf_config, task, head)
            return replace(self.describe(hf_config), task=task, **fields)
        except ConfigError:
            raise
        # transformers does not validate all fields of a config.json.
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"the {self.name} config is invalid ({error}); correct it") from error


def _head_fields(hf: Any, task: str, head: Head) -> Fields:
    """Fields of a decoder's classification head, as transformers' ``modeling_layers`` reads them."""
    dropout = 0.0
    if task == "token_classification":
        given = (getattr(hf, name, None) for name in ("classifier_dropout", "hidden_dropout"))
        dropout = next((value for value in given if value is not None), _CLASSIFIER_DROPOUT)
    return {
        "num_labels": hf.num_labels,
        "problem_type": hf.problem_type,
        "classifier_dropout": dropout,
        "classifier_bias": head.has_bias,
    }


def causal_lm(name: str) -> Mapping[str, str]:
    """``Family.architectures`` of a decoder whose Hugging Face class is ``{name}ForCausalLM``."""
    return {"causal_lm": f"{name}ForCausalLM"}
