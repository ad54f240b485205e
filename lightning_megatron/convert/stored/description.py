"""Which model is a distributed checkpoint of? What it says of itself, or a config that is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_megatron.convert.legacy.arguments import Shapes, own_config, told_config
from lightning_megatron.convert.legacy.arguments_out import HUGGING_FACE_CONFIG
from lightning_megatron.convert.registry import config_object, family_of
from lightning_megatron.convert.stored.base import Key
from lightning_megatron.convert.stored.chunks import ChunkedFiles
from lightning_megatron.convert.stored.distributed_names import entry_of, is_weightless
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import Architecture, ModelConfig, variant_of

_SAID_BY_THE_RUN = ("make_vocab_size_divisible_by", "share_embeddings_and_output_weights")
"""What a run may have decided that its config does not say: T5's weight files tell whether its output layer is tied."""


def describe_run(path: Path, meta: Mapping[str, Any], config: Path | None) -> tuple[ModelConfig, Any]:
    """The model of a checkpoint of ``MegatronStrategy``.

    Args:
        path: For messages.
        meta: Its ``meta.pt``.
        config: A ``config.json`` to use instead of the checkpoint's own.

    Returns:
        Its description, that of a variant included, and a Hugging Face config object.

    Raises:
        CheckpointError: If it names no Hugging Face config, or is of another model.
        ConfigError: If the config is not valid.
    """
    stored: Mapping[str, Any] = meta["model_description"]
    hf_config = config_object(config) if config is not None else _own_config(path, meta)
    model = family_of(hf_config.model_type).model_config(hf_config, stored.get("task"))
    model = replace(model, **{name: stored[name] for name in _SAID_BY_THE_RUN if name in stored})
    model = variant_of(model, stored)
    described = model.to_dict()
    others = [name for name, value in stored.items() if name in described and _plain(described[name]) != _plain(value)]
    if others:
        pairs = ", ".join(f"{name}={stored[name]} (the config says {described[name]})" for name in others)
        raise CheckpointError(
            f"checkpoint {path} is not of the model that its Hugging Face config describes: {pairs}; give the right "
            "one with --config (no config describes models trained with a model_provider)"
        )
    return model, hf_config


def describe_arguments(
    path: Path, arguments: Mapping[str, Any] | None, files: ChunkedFiles, config: Path | None
) -> tuple[ModelConfig, Any]:
    """The model of a checkpoint of another program.

    Args:
        path: For messages.
        arguments: Megatron-LM's command line, if the checkpoint has it.
        files: Its tensors.
        config: A ``config.json``, which says more than arguments.

    Raises:
        CheckpointError: If nothing says what the model is, or no known family computes it.
        ConfigError: If the config is not valid.
    """
    if config is None and arguments is None:
        raise CheckpointError(
            f"checkpoint {path} does not say which model it is of; give the model's Hugging Face config.json (or the "
            "folder with it) with --config"
        )
    hf_config = _told_config(path, arguments or {}, files) if config is None else config_object(config)
    model = family_of(hf_config.model_type).model_config(hf_config)
    if config is None and arguments and HUGGING_FACE_CONFIG in arguments:
        model = variant_of(model, arguments)
    return model, hf_config


def _told_config(path: Path, arguments: Mapping[str, Any], files: ChunkedFiles) -> Any:
    own = own_config(arguments)
    return told_config(path, arguments, _shapes(arguments, files)) if own is None else own


def _shapes(arguments: Mapping[str, Any], files: ChunkedFiles) -> Shapes:
    """The shapes of the weights, by which arguments are completed."""
    shapes: dict[Key, tuple[int, ...]] = {}
    for name, tensor in files.tensors.items():
        entry = None if is_weightless(name) else entry_of(name)
        if entry is None:
            continue
        layers = range(tensor.shape[0]) if entry.is_stacked else [entry.layer]
        shape = tensor.shape[1:] if entry.is_stacked else tensor.shape
        shapes |= {Key(entry.name, layer): shape for layer in layers}
    num_layers: dict[str, int] = {}
    for key in shapes:
        if key.layer is not None:
            stack = key.name.split(".")[0]
            num_layers[stack] = max(num_layers.get(stack, 0), key.layer + 1)
    architecture: Architecture = "gpt" if set(num_layers) == {"decoder"} else "t5"
    return Shapes(
        of=shapes,
        num_layers=num_layers,
        architecture="bert" if set(num_layers) == {"encoder"} else architecture,
        tp=int(arguments.get("tensor_model_parallel_size") or 1),
    )


def _own_config(path: Path, meta: Mapping[str, Any]) -> Any:
    if "hugging_face_config" in meta:
        fields = meta["hugging_face_config"]
    else:  # checkpoints of the first releases
        fields = meta["lightning"].get("hyper_parameters", {}).get("model")
    if not isinstance(fields, Mapping) or "model_type" not in fields:
        raise CheckpointError(
            f"checkpoint {path} does not hold its model's Hugging Face config, as those of a model_provider do not; if "
            "a Hugging Face model computes the same, give its config.json (or the folder with it) with --config"
        )
    known = family_of(str(fields["model_type"]))  # refuses families that are unknown
    from transformers import CONFIG_MAPPING

    arguments = {name: value for name, value in fields.items() if name != "model_type"}
    try:
        return CONFIG_MAPPING[known.model_type](**arguments)
    except Exception as error:  # transformers validates with errors of its own
        reason = " ".join(str(error).split())
        raise CheckpointError(f"checkpoint {path} holds a config that transformers refuses: {reason}") from None


def _plain(value: Any) -> Any:
    """Tuples and lists of the same values are the same."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
