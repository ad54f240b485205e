"""Model families of Hugging Face in Megatron's words: what a config describes, and which weight is which.

A family is data, one module in ``families/`` for those that share a table. Its rules work in both directions, for
weights and for gradients, and for any slice: a rank reads only the rows that it holds. Two namings disagree on a
concatenation along the first axis, an order of rows, or a transposition.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_megatron.engine.adapter_names import ADAPTER
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import Activation, Adapters, ModelConfig

if TYPE_CHECKING:
    from lightning_megatron.convert.hugging_face import WeightFiles

LAYER = "{layer}"
"""Stands for the layer's number (from 0) in Hugging Face's names."""
EXPERT = "{expert}"
"""Stands for the expert's number (from 0) there."""
POSITIONS = "embedding.position_embeddings.weight"
"""The table of learned positions."""
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""Megatron's tensors with a row for each token, and with rows that pad the vocabulary."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """One tensor (of every layer, if its name says so) in both namings."""

    megatron: str
    """Key in Megatron's sharded checkpoints without the layer's number: ``decoder.layers.mlp.linear_fc1.weight``."""
    hugging_face: tuple[str, ...]
    """Names, with ``LAYER`` where the number stands; concatenated along the first axis they are Megatron's tensor."""
    rows: tuple[int, ...] = ()
    """Rows of each of several tensors; empty for one, which has all."""
    order: torch.Tensor | None = None
    """[rows], int64: which row of the concatenation is Megatron's i-th row; None if they are the same."""
    transposed: bool = False
    """Whether Hugging Face keeps the matrix transposed (GPT-2's Conv1D)."""

    def names(self, layer: int | None, expert: int | None = None) -> tuple[str, ...]:
        """The Hugging Face names in one layer, of one expert."""
        return tuple(name.replace(LAYER, str(layer)).replace(EXPERT, str(expert)) for name in self.hugging_face)

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Shapes of the Hugging Face tensors that make a Megatron tensor of ``shape``."""
        rows = self.rows or (shape[0],)
        assert len(rows) == len(self.hugging_face), self.megatron
        assert sum(rows) == shape[0], f"{self.megatron} has {shape[0]} rows, its rule {sum(rows)}"
        shapes = [(length, *shape[1:]) for length in rows]
        return tuple(each[::-1] if self.transposed else each for each in shapes)


def qkv_order(num_attention_heads: int, num_query_groups: int, kv_channels: int) -> torch.Tensor:
    """From all queries, all keys, all values to Megatron's order: each group's queries, then its key, then its value.

    Cross-attention has no queries there: each head's key, then its value.

    Returns:
        [(heads + 2 * groups) * kv_channels], int64, for ``Rule.order``.
    """
    per_group = num_attention_heads // num_query_groups
    queries = torch.arange(num_attention_heads).view(num_query_groups, per_group)
    keys = num_attention_heads + torch.arange(num_query_groups)[:, None]
    values = keys + num_query_groups
    heads = torch.cat([queries, keys, values], dim=1).flatten()
    return (heads[:, None] * kv_channels + torch.arange(kv_channels)).flatten()


_LINEAR = re.compile(r"\w+\.layers\.\w+\.linear_\w+")


def linears_of(rules: Sequence[Rule]) -> dict[str, Rule]:
    """The rule of the weight of each linear of attention and MLPs, not of experts, by its name in Megatron."""
    named = {rule.megatron.removesuffix(".weight"): rule for rule in rules if rule.megatron.endswith(".weight")}
    return {name: rule for name, rule in named.items() if _LINEAR.fullmatch(name)}


def adapter_rules(rules: Sequence[Rule], adapters: Adapters) -> list[Rule]:
    """The weights of adapters, in the names of ``peft``'s files; a matrix without one has a B of zeros here.

    A of a linear that fuses several matrices is theirs, one below the other; B is cut and ordered as its rows are.
    """
    linears, made = linears_of(rules), []
    for name, parts in adapters.linears:
        rule = linears[name]
        modules = [f"base_model.model.{each.removesuffix('.weight')}" for each in rule.hugging_face]
        adapted = tuple(f"{module}.lora_A.weight" for module, has_one in zip(modules, parts, strict=True) if has_one)
        rows = (adapters.rank,) * len(adapted)
        made.append(Rule(megatron=f"{name}{ADAPTER}.A", hugging_face=adapted, rows=rows))
        matrices = tuple(f"{module}.lora_B.weight" for module in modules)
        made.append(Rule(megatron=f"{name}{ADAPTER}.B", hugging_face=matrices, rows=rule.rows, order=rule.order))
    return made


# ---- families -------------------------------------------------------------------------------------------------------


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
    old_names: Mapping[str, str] = field(default_factory=dict)
    """What tensors were called in files of earlier versions of transformers."""
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
