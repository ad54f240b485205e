"""The arguments of a module: checked, as plain data in loggers and checkpoints, and back."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lightning_megatron.convert.registry import HFConfigLike, model_config
from lightning_megatron.engine.checkpoint_safety import META, load_plain
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.load_from import LoadFrom
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps.base import TrainStep
from lightning_megatron.steps.registry import train_step_named

if TYPE_CHECKING:
    from lightning_megatron.module import MegatronModule

Module = TypeVar("Module", bound="MegatronModule")

_OF_ONES_OWN = ("train_step", "model_provider")
"""Arguments that may be objects, of which a checkpoint has only the name."""


def described_object(value: Any) -> str | None:
    """A name as it is; of an object where it comes from: a tokenizer's folder, or its class or function with module."""
    if value is None or isinstance(value, str):
        return value
    if getattr(value, "name_or_path", None):
        return str(value.name_or_path)
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def hyper_parameters_of(module: MegatronModule, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``module`` as plain data.

    Args:
        module: Whose attributes have most of them, checked.
        given: The others.
    """
    return {
        **given,
        "train_step": described_object(given["train_step"] or module.model_config.architecture),
        "pretrained": str(module.pretrained_path or "") or False,
        "task": module.model_config.task,
        "model_provider": described_object(module.model_provider),
        "lr": module.lr,
        "optimizer": asdict(module.optimizer_options),
        "lr_schedule": asdict(module.lr_schedule),
        "generation": {**vars(module.generation), "tokenizer": described_object(module.generation.tokenizer)},
        "return_logits": module.return_logits,
        "make_vocab_size_divisible_by": module.model_config.make_vocab_size_divisible_by,
    }


def saved_module(kind: type[Module], path: str | Path, given: Mapping[str, Any]) -> Module:
    """A module as in the run that wrote a checkpoint, but for what is ``given``; see ``load_from_checkpoint``.

    Raises:
        CheckpointError: If the checkpoint is missing, does not hold the arguments, or would run code.
        ConfigError: If ``kind`` has no such argument, or one must be given.
    """
    source = LoadFrom(path=str(path))
    path = source.found()
    meta = load_plain(path / META)
    saved = meta.get("lightning", {}).get("hyper_parameters", {}) if isinstance(meta, Mapping) else {}
    if not isinstance(saved, Mapping) or "model" not in saved:
        raise CheckpointError(f"checkpoint {path} does not hold the arguments of a MegatronModule; use load_from=PATH")
    known = inspect.signature(kind).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    # The checkpoint has the weights; the directory that the run began with may be gone.
    arguments = {k: v for k, v in saved.items() if (takes_any or k in known) and k != "pretrained"} | dict(given)
    for name in _OF_ONES_OWN:
        if name not in given and "." in str(arguments.get(name)):
            raise ConfigError(
                f"checkpoint {path} is of a run with {name}={arguments[name]}, and has only its name; give it: "
                f"load_from_checkpoint(PATH, {name}=...)"
            )
    module = kind(**arguments)
    # What only the weight files have told, of a run that began with pretrained=True.
    tied = meta["model_description"]["share_embeddings_and_output_weights"]
    module.model_config = replace(module.model_config, share_embeddings_and_output_weights=tied)
    module.load_from = source
    return module


def checked_return_logits(value: bool | Literal["last_stage"]) -> bool | Literal["last_stage"]:
    """``return_logits``, if it is a choice that there is."""
    if value not in (True, False, "last_stage"):
        raise ConfigError(f"return_logits={value!r} is unknown; choose from True, False and 'last_stage'")
    return value


def describe_model(model: HFConfigLike | Mapping[str, Any], task: str | None, divisible_by: int) -> ModelConfig:
    """The model in Megatron's words."""
    if divisible_by < 1:
        raise ConfigError(f"make_vocab_size_divisible_by={divisible_by} must be at least 1; Megatron's default is 128")
    return replace(model_config(model, task), make_vocab_size_divisible_by=divisible_by)


def bound_step(train_step: str | TrainStep | None, model: ModelConfig) -> TrainStep:
    """The objective, told which model it is for."""
    step = train_step if isinstance(train_step, TrainStep) else train_step_named(train_step or model.architecture)
    step.bind(model)
    return step
