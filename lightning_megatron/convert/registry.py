"""Registry of model families, and ``ModelConfig`` from anything that Hugging Face calls a config."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_megatron.convert import families
from lightning_megatron.convert.family import Family, Rule, adapter_rules
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.models.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HFConfigLike: TypeAlias = "PretrainedConfig | Mapping[str, Any] | str | Path"

_COMMON_KEYS = {
    "num_labels",  # kept as the length of id2label
    *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "tie_word_embeddings"),
    *("is_encoder_decoder", "decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id"),
}
"""Keys that a ``config.json`` may have though the class does not list them (transformers moved some to generation)."""
_LEGACY_ROPE_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
_LEGACY_KEYS = {
    "gpt_neox": {"rotary_pct", "rotary_emb_base"},
    "gemma3_text": {"rope_local_base_freq", "sliding_window_pattern"},
    "qwen3_moe": {"head_dim", "max_window_layers"},  # in the published files; the model reads the first
}
"""What transformers' classes have no field for, but the config files of (earlier) models, by ``model_type``."""
_MAX_LAYERS = 100_000

_POST_NORM = "it normalizes after each block (post-LN), and the engine's layers normalize before; use model_type='{}'"
_BIASED_HEAD = "its output layer has a bias, and the engine's has none"
REFUSED_TYPES: dict[str, str] = {
    **dict.fromkeys(
        ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert", "deberta", "deberta-v2"),
        _POST_NORM.format("megatron-bert"),
    ),
    "bart": _POST_NORM.format("t5"),
    **dict.fromkeys(("gptj", "codegen", "phi"), _BIASED_HEAD),
    "gemma3": "it reads images, too; use its text_config, of model_type='gemma3_text'",
    "olmo": "its norms have no weights; use model_type='olmo2'",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "its attention keeps latent vectors instead of keys and values"),
    "gpt_oss": "its attention has sinks",
}
"""Types that users expect, and why this package cannot compute them."""


@functools.cache
def known_families() -> dict[str, Family]:
    """Every family by its ``model_type``, found in ``convert/families``."""
    names = (f"{families.__name__}.{module.name}" for module in pkgutil.iter_modules(families.__path__))
    return {family.model_type: family for name in names for family in importlib.import_module(name).FAMILIES}


def family_of(model_type: str) -> Family:
    """The family of a Hugging Face ``model_type``.

    Raises:
        ConfigError: If it is not known, or its mathematics cannot be computed; the message lists the known ones.
    """
    known = ", ".join(sorted(known_families()))
    if model_type in REFUSED_TYPES:
        raise ConfigError(
            f"model_type={model_type!r} cannot be computed: {REFUSED_TYPES[model_type]} (known families: {known})"
        )
    if model_type not in known_families():
        raise ConfigError(f"model_type={model_type!r} is not a known model family; choose from {known}")
    return known_families()[model_type]


def rules_of(model: ModelConfig) -> list[Rule]:
    """How each weight of ``model``, those of its adapters included, is named here and by Hugging Face."""
    family = family_of(model.family)
    rules = list(family.rules(family.names, model))
    return rules if model.lora is None else rules + adapter_rules(rules, model.lora)


def config_fields(model: HFConfigLike) -> dict[str, Any]:
    """Plain data of a config, whatever form it has: an object, a dict, a ``config.json`` or a model directory.

    Raises:
        ConfigError: If it is none of these, the path does not exist, is not JSON, or names no ``model_type``.
    """
    from transformers import PretrainedConfig

    if isinstance(model, (str, Path)):
        fields = read_json(Path(model))
    elif isinstance(model, Mapping):
        fields = dict(model)
    elif isinstance(model, PretrainedConfig):
        fields = model.to_dict()
    else:
        raise ConfigError(
            f"model is a {type(model).__name__}; give a Hugging Face config object, a dict of one, or the path of a "
            "model directory or a config.json"
        )
    if not isinstance(fields.get("model_type"), str):
        raise ConfigError(f"the model config has no 'model_type'; add one of {', '.join(sorted(known_families()))}")
    return fields


def read_json(path: Path) -> dict[str, Any]:
    """The fields of a JSON file of a model directory, of which ``config.json`` if it is the directory that is given.

    Raises:
        ConfigError: If there is none, or it holds no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"model config {file} does not exist; give a model directory, a config.json, or the fields")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model config {file} cannot be read as JSON ({error}); correct the file") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"model config {file} holds a {type(fields).__name__}, not an object; correct the file")
    return fields


def model_config(model: HFConfigLike, task: str | None = None) -> ModelConfig:
    """Megatron's description of a Hugging Face model.

    Args:
        model: A config object, a dict of one, a path to a ``config.json``, or a path to a model directory.
        task: Which head, one of the family's ``architectures``; None for the one that the config names.

    Raises:
        ConfigError: If the family is unknown, a key does not exist, or a field cannot be honoured.
    """
    hf_config = config_object(model)
    return family_of(hf_config.model_type).model_config(hf_config, task)


def config_object(model: HFConfigLike, *, check_keys: bool = True) -> Any:
    """The Hugging Face config object of ``model``, whatever form it was given in.

    Args:
        model: As for ``model_config``.
        check_keys: Whether a dict may have no key that the class does not know.

    Raises:
        ConfigError: If the family is unknown, transformers refuses a field, a key does not exist, or the weights are
            quantized.
    """
    from transformers import CONFIG_MAPPING

    fields = config_fields(model)
    family_of(fields["model_type"])
    config_class = CONFIG_MAPPING[fields["model_type"]]
    arguments = {k: v for k, v in fields.items() if k != "model_type"}
    for name, value in arguments.items():
        # Before transformers and this package make lists with an entry for each.
        if "layer" in name and isinstance(value, int) and value > _MAX_LAYERS:
            raise ConfigError(f"{name}={value} is more than {_MAX_LAYERS} layers; correct the model's config")
    if quantization := arguments.pop("quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ConfigError(
            f"quantization_config of the {fields['model_type']} config ({method}) is not supported: weights are "
            "trained in floating point; use the model that it was made from"
        )
    if check_keys and isinstance(model, Mapping):
        # transformers keeps unknown keys as attributes, so that a misspelt one silently leaves the default.
        default = config_class()
        known = set(default.to_dict()) | set(config_class.attribute_map) | set(vars(default))
        known |= _LEGACY_ROPE_KEYS if "rope_parameters" in known else set()
        known |= _LEGACY_KEYS.get(fields["model_type"], set())
        known |= _COMMON_KEYS
        for key in arguments:
            if key not in known:
                raise ConfigError(
                    f"model config key {key!r} does not exist in {config_class.__name__}; remove or correct it"
                )
    try:
        made = config_class(**arguments)
        made.to_dict()  # it is written again, and not all is checked before
        return made
    except Exception as error:  # transformers validates with errors of its own
        reason = " ".join(str(error).split())  # they span lines, and the first one only names the field
        raise ConfigError(f"the {fields['model_type']} config is invalid: {reason}; correct it") from None


def stored_config(fields: Mapping[str, Any], origin: str) -> Any:
    """The Hugging Face config object that a checkpoint holds as plain data.

    Args:
        fields: ``model_type`` and the others.
        origin: What holds them, for messages.

    Raises:
        CheckpointError: If its family is not known, or transformers refuses it.
    """
    try:
        return config_object(fields, check_keys=False)
    except ConfigError as error:
        raise CheckpointError(f"{origin} holds a config that is refused: {error}") from None


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The fields that two descriptions of models have and in which they differ, as JSON, where lists are tuples."""
    one, other = (json.loads(json.dumps(dict(each))) for each in (one, other))
    return [name for name in one if name in other and one[name] != other[name]]


def config_for_task(hf_config: Any, model: ModelConfig) -> Any:
    """A copy of ``hf_config`` that names the class with the head of ``model``."""
    config = copy.deepcopy(hf_config)
    config.architectures = [family_of(model.family).architectures[model.task]]
    return config
