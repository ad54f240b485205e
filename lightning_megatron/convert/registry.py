"""Registry of Hugging Face model families, and ``ModelConfig`` from any form of a Hugging Face config."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import pkgutil
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from lightning_megatron.convert import families
from lightning_megatron.convert.decoder_rules import head_rules
from lightning_megatron.convert.family import Family
from lightning_megatron.convert.rules import Rule, adapter_rules
from lightning_megatron.errors import (
    CheckpointError,
    ConfigError,
    require_choice,
    require_number,
    type_of,
)
from lightning_megatron.models.config import CLASSIFICATION, ModelConfig, ProblemType

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HFConfigLike: TypeAlias = "PretrainedConfig | Mapping[str, Any] | str | Path"

_COMMON_KEYS = {
    "architectures",
    "bos_token_id",
    "classifier_dropout",  # read by most heads for tokens
    "decoder_start_token_id",
    "dtype",
    "eos_token_id",
    "is_encoder_decoder",
    "num_labels",  # stored as the length of id2label
    "pad_token_id",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Keys allowed in any ``config.json`` although not in the class (transformers moved some to the generation config)."""
_LEGACY_ROPE_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
_QWEN3_5_KEYS = {
    "attn_output_gate",
    "full_attention_interval",
    "mamba_ssm_dtype",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
}
_LEGACY_KEYS = {
    "gpt_neox": {"rotary_pct", "rotary_emb_base"},
    "gemma3_text": {"rope_local_base_freq", "sliding_window_pattern"},
    # In published files; only head_dim is read by the model.
    "qwen3_moe": {"head_dim", "max_window_layers"},
    "qwen3_next": {"full_attention_interval"},
    "qwen3_5_text": _QWEN3_5_KEYS,
    "qwen3_5_moe_text": _QWEN3_5_KEYS,
    "dots1": {"head_dim"},
    "glm4_moe": {"head_dim"},
    "deepseek_v3": {
        "aux_loss_alpha",
        "ep_size",
        "head_dim",
        "moe_layer_freq",
        "scoring_func",
        "seq_aux",
        "topk_method",
    },
    "ernie4_5_moe": {"head_dim"},
    # The last two are fields of transformers' class in newer versions than the oldest that is supported.
    "gpt_oss": {"experts_per_token", "initial_context_length", "swiglu_alpha", "swiglu_limit"},
}
"""Keys of published config files that transformers' classes no longer list, or not yet, by ``model_type``."""
MAX_LAYERS = 1_000
"""Maximum number of layers of a stack; each takes about 0.2 MB before it has weights."""
_MAX_LABELS = 500_000
"""Maximum number of labels without names; transformers gives a name to each."""

_POST_NORM = "it normalizes after each block (post-LN), and the engine's layers normalize before; use model_type="
_BIASED_HEAD = "its output layer has a bias, and the engine's has none"
REFUSED_TYPES: dict[str, str] = {
    "bert": f"{_POST_NORM}'megatron-bert'",
    "roberta": f"{_POST_NORM}'megatron-bert'",
    "xlm-roberta": f"{_POST_NORM}'megatron-bert'",
    "camembert": f"{_POST_NORM}'megatron-bert'",
    "electra": f"{_POST_NORM}'megatron-bert'",
    "distilbert": f"{_POST_NORM}'megatron-bert'",
    "albert": f"{_POST_NORM}'megatron-bert'",
    "deberta": f"{_POST_NORM}'megatron-bert'",
    "deberta-v2": f"{_POST_NORM}'megatron-bert'",
    "bart": f"{_POST_NORM}'t5'",
    "gptj": _BIASED_HEAD,
    "codegen": _BIASED_HEAD,
    "phi": _BIASED_HEAD,
    "gemma3": "it reads images, too; use its text_config, of model_type='gemma3_text'",
    "qwen3_5": "it reads images, too; use its text_config, of model_type='qwen3_5_text'",
    "qwen3_5_moe": "it reads images, too; use its text_config, of model_type='qwen3_5_moe_text'",
    "mistral3": "it reads images, too; use its text_config, of model_type='ministral3' or 'mistral'",
    "olmo": "its norms have no weights; use model_type='olmo2'",
    "deepseek_v2": "its router selects groups by their largest softmax score, and not as 'deepseek_v3' does",
}
"""Common model types that are not supported, and the reason."""


_ENTRY_POINTS = "lightning_megatron.families"
"""Group of the entry points of installed packages; each names a module that calls ``register_family``."""
_registered: dict[str, Family] = {}
"""Families of ``register_family`` by ``model_type``."""


def register_family(family: Family) -> None:
    """Add a family of your own: models of its ``model_type`` load, train, convert and export like those shipped.

    Register the config class with ``transformers.AutoConfig.register`` first. Every process must register the family:
    call this in the program, or in a module that an entry point of the group ``lightning_megatron.families`` names,
    which is imported wherever families are looked up, commands included. The same object may be registered again.

    Args:
        family: The family.

    Raises:
        ConfigError: If transformers does not know the ``model_type``, another family has this name or alias, or a
            class of a task does not exist.
    """
    from transformers import CONFIG_MAPPING

    if not isinstance(family, Family):
        raise ConfigError(
            f"register_family: expected a Family, got {type_of(family)}; give Family(name=..., ...)"
        )
    if _registered.get(family.name) is family:
        return
    taken = _by_type([*_shipped_families().values(), *_registered.values()])
    for model_type in (family.name, *family.aliases):
        if model_type in taken or model_type in REFUSED_TYPES:
            raise ConfigError(
                f"register_family: expected a new model_type, got {model_type!r}, which exists; choose another name"
            )
    if family.name not in CONFIG_MAPPING:
        raise ConfigError(
            f"register_family: expected a model_type of transformers, got {family.name!r}; call "
            f"transformers.AutoConfig.register({family.name!r}, CONFIG_CLASS) first"
        )
    for architecture in family.classes.values():
        family.load_class(architecture)
    _registered[family.name] = family


@functools.cache
def _shipped_families() -> dict[str, Family]:
    """Families of ``convert/families`` by ``model_type``."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(families.__path__):
        imported = importlib.import_module(f"{families.__name__}.{module.name}")
        found |= {family.name: family for family in imported.FAMILIES}
    return found


@functools.cache
def _import_entry_points() -> None:
    """Import the modules with which installed packages register their families.

    Raises:
        ConfigError: If one cannot be imported.
    """
    for point in entry_points(group=_ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:  # it is not our code
            raise ConfigError(
                f"entry point {point.name} = {point.value} of {_ENTRY_POINTS} cannot be imported ({error}); correct "
                "or uninstall its package"
            ) from error


def known_families() -> dict[str, Family]:
    """All families by ``model_type``: those of ``convert/families``, and those that are registered."""
    _import_entry_points()
    return {**_shipped_families(), **_registered}


def _by_type(known: Iterable[Family]) -> dict[str, Family]:
    """Families by each ``model_type`` of their files."""
    found: dict[str, Family] = {}
    for family in known:
        found |= dict.fromkeys((family.name, *family.aliases), family)
    return found


def family_of(model_type: str) -> Family:
    """Look up the family of a Hugging Face ``model_type``.

    Raises:
        ConfigError: If the type is unknown or not supported; the message lists the known ones.
    """
    known = ", ".join(sorted(known_families()))
    if model_type in REFUSED_TYPES:
        raise ConfigError(
            f"model_type={model_type!r} cannot be computed: {REFUSED_TYPES[model_type]} (known families: {known})"
        )
    found = _by_type(known_families().values()).get(model_type)
    if found is None:
        raise ConfigError(
            f"model_type={model_type!r} is not a known model family; choose from {known}, or add it with "
            "register_family"
        )
    return found


def rules_of(model: ModelConfig) -> list[Rule]:
    """Rules of all weights of ``model``, including its adapters."""
    family = family_of(model.family)
    rules = list(family.rules(family.names, model))
    if model.task in family.heads:
        rules += head_rules(model, family.heads[model.task].module)
    if model.lora is not None:
        rules += adapter_rules(rules, model.lora)
    return rules


def config_fields(model: HFConfigLike) -> dict[str, Any]:
    """Fields of a Hugging Face config: an object, a dict, a ``config.json`` or a model directory.

    Raises:
        ConfigError: If ``model`` is none of these, the path does not exist or is not JSON, or there is no
            ``model_type``.
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
            f"model is {type_of(model)}; give a Hugging Face config object, a dict of one, or the path of a "
            "model directory or a config.json"
        )
    if not isinstance(fields.get("model_type"), str):
        raise ConfigError(
            f"the model config has no 'model_type'; add one of {', '.join(sorted(known_families()))}"
        )
    return fields


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file, or the ``config.json`` of a model directory.

    Raises:
        ConfigError: If the file does not exist or holds no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"model config {file} does not exist; give a model directory, a config.json, or the fields"
        )
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"model config {file} cannot be read as JSON ({error}); correct the file"
        ) from None
    if not isinstance(fields, dict):
        raise ConfigError(
            f"model config {file} holds {type_of(fields)}, not an object; correct the file"
        )
    return fields


def model_config(model: HFConfigLike, task: str | None = None) -> ModelConfig:
    """Build the ``ModelConfig`` of a Hugging Face model.

    Args:
        model: A config object, a dict of one, or the path of a ``config.json`` or a model directory.
        task: Task of the head, one of the family's ``architectures`` or ``heads``; None: that of the config.

    Raises:
        ConfigError: If the family is unknown, a key does not exist, or a field has an unsupported value.
    """
    hf_config = config_object(model)
    return family_of(hf_config.model_type).model_config(hf_config, task)


def with_labels(
    model: HFConfigLike,
    task: str | None,
    num_labels: int | None,
    problem_type: str | None,
) -> HFConfigLike:
    """Replace the number and the kind of a model's labels; ``model`` itself if both are None.

    Args:
        model: See ``model_config``.
        task: See ``model_config``.
        num_labels: Outputs of a classification head; None for those of the config.
        problem_type: Kind of the labels of rows; None for that of the config.

    Raises:
        ConfigError: If a value is invalid, or the task has no such labels.
    """
    if num_labels is None and problem_type is None:
        return model
    hf_config = config_object(model)
    task = family_of(hf_config.model_type).task_of(hf_config, task)
    if num_labels is not None:
        require_number("num_labels", num_labels, at_least=1, at_most=_MAX_LABELS)
        _check_has_labels("num_labels", num_labels, task, CLASSIFICATION)
        hf_config.num_labels = num_labels
    if problem_type is not None:
        require_choice("problem_type", problem_type, get_args(ProblemType))
        _check_has_labels("problem_type", problem_type, task, ("sequence_classification",))
        hf_config.problem_type = problem_type
    return hf_config


def _check_has_labels(
    option: str,
    value: object,
    task: str,
    tasks: Collection[str],
) -> None:
    if task not in tasks:
        raise ConfigError(
            f"{option}={value!r}: expected task={' or '.join(map(repr, tasks))}, got {task!r}; set task, or leave it "
            "out"
        )


def config_object(model: HFConfigLike, *, check_keys: bool = True) -> Any:
    """Build the Hugging Face config object of ``model``.

    Args:
        model: See ``model_config``.
        check_keys: Whether to raise for keys of a dict that the config class does not know.

    Raises:
        ConfigError: If the family is unknown, transformers refuses a field, a key does not exist, or the weights are
            quantized.
    """
    # transformers' import takes seconds.
    from transformers import CONFIG_MAPPING

    fields = config_fields(model)
    family = family_of(fields["model_type"])
    del fields["model_type"]
    model_type = family.name
    config_class = CONFIG_MAPPING[model_type]
    _check_counts(fields)
    quantization = fields.pop("quantization_config", None)
    is_mapping = isinstance(quantization, Mapping)
    method = quantization.get("quant_method") if is_mapping else quantization
    if quantization and method not in family.quantizations:
        raise ConfigError(
            f"quantization_config of the {model_type} config ({method}) is not supported: weights are trained in "
            "floating point; use the model that it was made from"
        )
    if check_keys and isinstance(model, Mapping):
        _check_keys(fields, config_class, model_type)
    try:
        hf_config = config_class(**fields)
        hf_config.to_dict()  # exports need it, and it can fail for values that the constructor accepts
        return hf_config
    except Exception as error:  # transformers raises exceptions of its own
        reason = " ".join(str(error).split())  # their first line only names the field
        raise ConfigError(f"the {model_type} config is invalid: {reason}; correct it") from None


def _check_keys(
    fields: Mapping[str, Any],
    config_class: Any,
    model_type: str,
) -> None:
    """Raise for keys that the config class does not know.

    transformers keeps these as attributes, so that a misspelt one silently leaves the default.
    """
    default = config_class()
    known = set(default.to_dict()) | set(config_class.attribute_map) | set(vars(default))
    if "rope_parameters" in known:
        known |= _LEGACY_ROPE_KEYS
    known |= _LEGACY_KEYS.get(model_type, set())
    known |= _COMMON_KEYS
    for key in fields:
        if key not in known:
            raise ConfigError(
                f"model config key {key!r} does not exist in {config_class.__name__}; remove or correct it"
            )


def _check_counts(fields: Mapping[str, Any]) -> None:
    """Check counts for which transformers and this package build lists, before they do.

    Raises:
        ConfigError: If a model has more layers or labels than any has.
    """
    for kind, largest in (("layer", MAX_LAYERS), ("label", _MAX_LABELS)):
        for name, value in fields.items():
            if kind in name and isinstance(value, int) and value > largest:
                raise ConfigError(
                    f"{name}={value} is more than {largest} {kind}s; correct the model's config"
                )


def stored_config(fields: Mapping[str, Any], origin: str) -> Any:
    """Build the Hugging Face config object that a checkpoint stores as plain data.

    Args:
        fields: Fields of the config, including ``model_type``.
        origin: The checkpoint, for messages.

    Raises:
        CheckpointError: If the family is unknown, or transformers rejects the config.
    """
    try:
        return config_object(fields, check_keys=False)
    except ConfigError as error:
        raise CheckpointError(f"{origin} has an invalid Hugging Face config: {error}") from None


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of the common fields in which two model descriptions differ; compared as JSON, so lists equal tuples.

    Of fields that are groups of fields, the common ones are compared: an older checkpoint has fewer.
    """
    one = json.loads(json.dumps(dict(one)))
    other = json.loads(json.dumps(dict(other)))
    return [name for name in one if name in other and _differ(one[name], other[name])]


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return any(_differ(one[name], other[name]) for name in one.keys() & other.keys())
    return bool(one != other)


def config_for_task(hf_config: Any, model: ModelConfig) -> Any:
    """Copy of ``hf_config`` whose ``architectures`` is the class with the head of ``model.task``, or None."""
    config = copy.deepcopy(hf_config)
    name = family_of(model.family).classes.get(model.task)
    config.architectures = None if name is None else [name]
    return config
