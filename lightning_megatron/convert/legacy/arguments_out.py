"""What does a legacy checkpoint say of itself? Megatron-LM's command line, as it lies under ``args`` in every file.

Megatron-LM reads it with ``--use-checkpoint-args``, and scripts build a config from it. What it cannot say (ALiBi's
scaling, sliding windows, whether there is a binary head) stands in an argument of our own, ``hugging_face_config``.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from lightning_megatron.convert.legacy.stages import Pipeline
from lightning_megatron.convert.options import ConvertOptions
from lightning_megatron.convert.registry import family_of
from lightning_megatron.convert.stored.base import StoredModel
from lightning_megatron.models.config import ModelConfig

HUGGING_FACE_CONFIG = "hugging_face_config"
"""The argument that holds the text of a ``config.json``."""

_T5_SEQ_LENGTH = 512
"""That of its pre-training; relative positions have no end, and an argument must have a value."""


def megatron_arguments(
    source: StoredModel, options: ConvertOptions, cut: Pipeline, padded_vocab_size: int, dtype: torch.dtype
) -> Namespace:
    """Megatron-LM's arguments for this model at this layout.

    Args:
        source: The model.
        options: The layout.
        cut: The model's stages.
        padded_vocab_size: Rows of the embedding over all ranks.
        dtype: Of the weights.
    """
    return Namespace(
        **_shape(source.model),
        **_mathematics(source.model),
        **_activation(source),
        **_layout(source.model, options, cut),
        iteration=source.iteration,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        orig_vocab_size=source.model.vocab_size,
        padded_vocab_size=padded_vocab_size,
        params_dtype=dtype,
        fp16=dtype == torch.float16,
        bf16=dtype == torch.bfloat16,
        tokenizer_type="GPT2BPETokenizer" if source.model.family == "gpt2" else "HuggingFaceTokenizer",
        **{HUGGING_FACE_CONFIG: config_text(source)},
    )


def config_text(source: StoredModel) -> str:
    """The model's Hugging Face config as JSON, its head's class and its output layer's tie included."""
    config = copy.deepcopy(source.hf_config)
    config.architectures = [family_of(source.model.family).architectures[source.model.task]]
    return str(config.to_json_string())


def _shape(model: ModelConfig) -> Mapping[str, Any]:
    is_t5 = model.architecture == "t5"
    seq_length = _T5_SEQ_LENGTH if is_t5 else model.max_position_embeddings
    return {
        "num_layers": model.num_layers,
        "encoder_num_layers": model.num_layers,
        "decoder_num_layers": model.num_decoder_layers if is_t5 else None,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "kv_channels": model.kv_channels,
        "group_query_attention": model.num_query_groups != model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "max_position_embeddings": seq_length,
        "seq_length": seq_length,
        "encoder_seq_length": seq_length,
        "decoder_seq_length": seq_length if is_t5 else None,
    }


def _mathematics(model: ModelConfig) -> Mapping[str, Any]:
    positions = model.position_embedding_type
    return {
        "normalization": model.normalization,
        "layernorm_epsilon": model.layernorm_epsilon,
        "norm_epsilon": model.layernorm_epsilon,
        "apply_layernorm_1p": False,
        "apply_residual_connection_post_layernorm": False,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "qk_layernorm": model.qk_layernorm,
        "add_position_embedding": positions == "learned_absolute",
        "position_embedding_type": positions,
        "use_rotary_position_embeddings": positions == "rope",
        "rotary_base": model.rotary_base,
        "rotary_percent": 1.0,
        "relative_attention_num_buckets": model.relative_attention_num_buckets,
        "relative_attention_max_distance": model.relative_attention_max_distance,
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        "num_tokentypes": model.num_tokentypes,
        "bert_binary_head": model.task == "pretraining",
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
    }


def _activation(source: StoredModel) -> Mapping[str, bool]:
    """As the scripts of transformers spell it: their ``gelu_fast`` is Megatron-LM's fused kernel."""
    model = source.model
    named = [getattr(source.hf_config, field, None) for field in ("activation_function", "hidden_act")]
    is_fused = model.activation == "gelu_tanh" and "gelu_fast" in named and not model.gated_linear_unit
    return {
        "swiglu": model.gated_linear_unit and model.activation == "silu",
        "bias_gelu_fusion": is_fused,
        "openai_gelu": model.activation == "gelu_tanh" and not is_fused,
        "onnx_safe": False,
        "squared_relu": False,
    }


def _layout(model: ModelConfig, options: ConvertOptions, cut: Pipeline) -> Mapping[str, Any]:
    per_chunk = None if options.vpp is None else model.num_layers // (options.pp * options.vpp)
    return {
        "tensor_model_parallel_size": options.tp,
        "pipeline_model_parallel_size": options.pp,
        "virtual_pipeline_model_parallel_size": options.vpp,
        "num_layers_per_virtual_pipeline_stage": per_chunk,
        "pipeline_model_parallel_split_rank": cut.split_rank,
        "decoder_first_pipeline_num_layers": cut.first_num_layers,
        "decoder_last_pipeline_num_layers": cut.last_num_layers,
        "context_parallel_size": 1,
        "data_parallel_size": 1,
        "world_size": options.tp * options.pp,
        "rank": 0,
        "make_vocab_size_divisible_by": options.make_vocab_size_divisible_by,
        "use_distributed_optimizer": False,
    }
