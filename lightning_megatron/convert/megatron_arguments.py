"""Megatron-LM's arguments in checkpoints: reading them, and building those of a model.

What they cannot express (ALiBi's scaling, sliding windows, whether there is a binary head) is in an additional argument
of this package, ``hugging_face_config``.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lightning_megatron.checkpoint.pickles import StandIn
from lightning_megatron.convert.registry import (
    config_for_task,
)
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import ModelConfig, RopeScaling

HUGGING_FACE_CONFIG = "hugging_face_config"
"""Argument that stores the text of a ``config.json``."""
GIVE_A_CONFIG = "give the Hugging Face config.json of the same model with --config"
_MAX_LENGTH = 200
"""Maximum characters of an argument that ``inspect`` shows, and items of a list."""


def arguments_of(state: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Megatron-LM's arguments in the state of a legacy file or ``common.pt``, by name; empty if there are none."""
    stored = state.get("args")
    if isinstance(stored, (Namespace, SimpleNamespace)):
        return vars(stored)
    if isinstance(stored, Mapping):
        return stored
    return {}


def embedded_config(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Fields of the Hugging Face config that ``convert`` stored among the arguments; None in other checkpoints.

    Raises:
        CheckpointError: If the stored config is damaged.
    """
    text = arguments.get(HUGGING_FACE_CONFIG)
    if not isinstance(text, str):
        return None
    try:
        fields: dict[str, Any] = json.loads(text)
        fields["model_type"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"args.{HUGGING_FACE_CONFIG} is damaged ({error!r}); {GIVE_A_CONFIG}"
        ) from None
    return fields


def metadata_of(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Plain data for ``inspect`` from the state of a checkpoint: iteration, arguments and stored config."""
    arguments = arguments_of(state)
    names = sorted((name for name in arguments if name != HUGGING_FACE_CONFIG), key=str)
    return {
        "checkpoint_version": as_plain_data(state.get("checkpoint_version")),
        "iteration": as_plain_data(state.get("iteration")),
        "consumed_samples": as_plain_data(arguments.get("consumed_train_samples")) or None,
        "args": {str(name): as_plain_data(arguments[name]) for name in names},
        "config": embedded_config(arguments),
    }


def as_plain_data(value: Any) -> Any:
    """Convert a value to plain data: numbers, lists, and strings for everything else; a file can hold anything."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [as_plain_data(item) for item in value[:_MAX_LENGTH]]
    if isinstance(value, (str, torch.dtype, Path, StandIn)):
        return str(value)[:_MAX_LENGTH].removeprefix("torch.")
    return type(value).__name__


_T5_SEQ_LENGTH = 512
"""Sequence length of T5's pre-training, as the argument must have a value; relative positions have no limit."""
SHARED_NAMES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "num_query_groups",
    "normalization",
    "layernorm_epsilon",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "position_embedding_type",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
    "num_tokentypes",
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "make_vocab_size_divisible_by",
)
"""Arguments with the same name and meaning as fields of ``ModelConfig``."""
_FALSE = (
    "apply_residual_connection_post_layernorm",
    "onnx_safe",
    "use_distributed_optimizer",
)
WITHOUT_ARGUMENT = (
    "norm_bias",
    "pre_norms",
    "post_norms",
    "qk_layernorm_of_all_heads",
    "qk_layernorm_after_rotary",
    "embedding_layernorm",
    "parallel_attention",
    "rotary_base_of_windows",
    "no_rope_layers",
    "position_offset",
    "query_scaling_beta",
    "softmax_scale",
    "attention_sinks",
    "attention_softcap",
    "logits_softcap",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_multiplier",
    "scale_decoder_outputs",
)
"""Fields of ``ModelConfig`` that change what a model computes, and that no argument says."""
_ACTIVATIONS = {
    False: ("gelu", "gelu_tanh", "relu_squared"),
    True: ("silu",),
}
"""Activations that arguments say, of MLPs without gate and with one."""


def _long_context_arguments(model: ModelConfig) -> dict[str, Any]:
    """Arguments for scaled rotary embeddings and for one sliding window in all layers, if Megatron-LM has them."""
    arguments: dict[str, Any] = {}
    scaling = model.rope_scaling
    if scaling is not None and scaling.rope_type == "linear":
        arguments["rotary_seq_len_interpolation_factor"] = scaling.factor
    elif scaling is not None and replace(scaling, factor=8.0) == RopeScaling():
        arguments["use_rope_scaling"] = True
        arguments["rope_scaling_factor"] = scaling.factor
    if model.sliding_window is not None and model.sliding_window_layers is None:
        arguments["window_size"] = (model.sliding_window - 1, 0)
    return arguments


def fields_without_argument(model: ModelConfig) -> list[str]:
    """Fields that change what a model computes, and whose values the arguments cannot say, with these values.

    Megatron-LM computes another model from such weights; this package has the config that is stored with them.
    """
    found = {
        name: getattr(model, name)
        for name in WITHOUT_ARGUMENT
        if getattr(model, name) != ModelConfig.__dataclass_fields__[name].default
    }
    long_context = _long_context_arguments(model)
    if model.position_embedding_type == "alibi":
        found["position_embedding_type"] = "alibi"
    if model.rope_scaling is not None and not long_context.keys() - {"window_size"}:
        found["rope_scaling"] = model.rope_scaling.rope_type
    if model.sliding_window is not None and "window_size" not in long_context:
        found["sliding_window_layers"] = model.sliding_window_layers
    if model.activation not in _ACTIVATIONS[model.gated_linear_unit]:
        found["activation"] = model.activation
    has_bias = model.add_bias_linear
    if model.add_attention_output_bias not in (None, has_bias):
        found["add_attention_output_bias"] = model.add_attention_output_bias
    if has_bias and not model.add_qkv_bias:
        found["add_qkv_bias"] = False
    return [f"{name}={value}" for name, value in found.items()]


def megatron_arguments(
    model: ModelConfig,
    hf_config: Any,
    layout: ParallelConfig,
    dtype: torch.dtype,
    more: Mapping[str, Any],
) -> Namespace:
    """Build Megatron-LM's arguments of a model at a layout.

    Args:
        model: Config of the model, with the vocabulary padding to write.
        hf_config: Hugging Face config object of ``model``.
        layout: Sizes of tensor and pipeline parallelism.
        dtype: Dtype of the weights.
        more: Additional arguments.
    """
    is_t5 = model.architecture == "t5"
    seq_length = _T5_SEQ_LENGTH if is_t5 else model.max_position_embeddings
    positions = model.position_embedding_type
    is_tanh = model.activation == "gelu_tanh"
    is_fused = is_tanh and _names_fused_gelu(hf_config) and not model.gated_linear_unit
    layers_per_chunk = None
    if layout.vpp is not None:
        layers_per_chunk = model.num_layers // (layout.pp * layout.vpp)
    config = config_for_task(hf_config, model)
    return Namespace(
        **{name: getattr(model, name) for name in SHARED_NAMES},
        **dict.fromkeys(_FALSE, False),
        **_long_context_arguments(model),
        max_position_embeddings=seq_length,
        seq_length=seq_length,
        encoder_seq_length=seq_length,
        encoder_num_layers=model.num_layers,
        decoder_num_layers=model.num_decoder_layers if is_t5 else None,
        decoder_seq_length=seq_length if is_t5 else None,
        group_query_attention=model.num_query_groups != model.num_attention_heads,
        norm_epsilon=model.layernorm_epsilon,
        apply_layernorm_1p=model.zero_centered_norms,
        add_position_embedding=positions == "learned_absolute",
        use_rotary_position_embeddings=positions == "rope",
        untie_embeddings_and_output_weights=not model.share_embeddings_and_output_weights,
        bert_binary_head=model.task == "pretraining",
        swiglu=model.gated_linear_unit and model.activation == "silu",
        bias_gelu_fusion=is_fused,
        squared_relu=model.activation == "relu_squared",
        openai_gelu=is_tanh and not is_fused,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        num_layers_per_virtual_pipeline_stage=layers_per_chunk,
        context_parallel_size=1,
        data_parallel_size=1,
        world_size=layout.tp * layout.pp,
        rank=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        orig_vocab_size=model.vocab_size,
        padded_vocab_size=model.padded_vocab_size(layout.tp),
        params_dtype=dtype,
        fp16=dtype == torch.float16,
        bf16=dtype == torch.bfloat16,
        tokenizer_type="GPT2BPETokenizer" if model.family == "gpt2" else "HuggingFaceTokenizer",
        **{HUGGING_FACE_CONFIG: str(config.to_json_string())},
        **more,
    )


def _names_fused_gelu(hf_config: Any) -> bool:
    """Whether the activation is ``gelu_fast``: transformers' conversion scripts name Megatron-LM's fused kernel so."""
    fields = ("activation_function", "hidden_act")
    return any(getattr(hf_config, field, None) == "gelu_fast" for field in fields)
