"""Megatron-LM's arguments and Hugging Face configs, told from each other.

From arguments to a config: sizes come from the shapes of the tensors, which cannot be wrong; arguments say what no
tensor shows. The oldest checkpoints have no arguments: of these only NVIDIA's published 345M models are known, by their
shapes. From a config to arguments: what they cannot say (ALiBi's scaling, sliding windows, whether there is a binary
head) stands in an argument of our own, ``hugging_face_config``.
"""

from __future__ import annotations

import copy
import json
import logging
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from lightning_megatron.convert.registry import config_object, family_of, stored_config
from lightning_megatron.convert.shards import Key, Source
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import ModelConfig

if TYPE_CHECKING:
    from lightning_megatron.convert.megatron_lm_save import Pipeline

_log = logging.getLogger(__name__)

HUGGING_FACE_CONFIG = "hugging_face_config"
"""The argument that holds the text of a ``config.json``."""
_GIVE_A_CONFIG = "give the Hugging Face config.json of the same model with --config"
_PUBLISHED: Mapping[str, Any] = {
    "gpt": ((24, 1024, 4096, 1024), (50257,), {"openai_gelu": True, "tokenizer_type": "GPT2BPETokenizer"}),
    "bert": ((24, 1024, 4096, 512), (28996, 30522), {"openai_gelu": False}),
}
"""NVIDIA's GPT-2 345M and BERT 345M: layers, width, width of the MLP and positions; tokens without padding; and what no
tensor shows. All of them have 16 heads."""
_GPT2_VOCABULARY = 50257
_LARGEST_PADDING = 128
"""Rows, times tp: Megatron-LM's ``--make-vocab-size-divisible-by``."""

_REFUSED = {
    "apply_layernorm_1p": "the weights of its norms are stored less 1",
    "apply_residual_connection_post_layernorm": "its residuals come after the norms",
    "multi_latent_attention": "it has latent attention",
    "num_experts": "it has experts",
    "rotary_interleaved": "its rotary positions turn neighbouring numbers",
    "squared_relu": "its activation is a squared ReLU",
    "quick_geglu": "its activation is a quick GELU",
}
"""Arguments that change the mathematics into one that no known family has."""


class Shapes:
    """The whole tensors of a model, vocabulary padding included.

    Args:
        of: The shape of each.
        tp: Tensor parallel size of the checkpoint, by which its vocabulary may be padded.
    """

    def __init__(self, *, of: Mapping[Key, tuple[int, ...]], tp: int) -> None:
        self.of, self.tp = of, tp
        layered = [key for key in of if key.layer is not None]
        stacks = {key.name.split(".")[0] for key in layered}
        self.stack = "encoder" if "encoder" in stacks else "decoder"
        """The only or first stack of layers."""
        self.architecture = "t5" if len(stacks) > 1 else "bert" if "encoder" in stacks else "gpt"
        self.num_layers = 1 + max((key.layer or 0 for key in layered if key.name.startswith(self.stack)), default=-1)
        """Of ``stack``."""

    def has(self, name: str) -> bool:
        """Whether there is such a tensor, in the first layer if it is one of a layer."""
        return self.shape(name) is not None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of the tensor ``name`` (Megatron-Core's, from the layer on), in the first layer if it is one of a layer."""
        keys = (Key(name), Key(f"{self.stack}.layers.{name}", 0), Key(f"{self.stack}.{name}"))
        return next((self.of[key] for key in keys if key in self.of), None)

    def size(self, name: str, axis: int) -> int:
        """Length of a tensor that must be there.

        Raises:
            CheckpointError: If it is not.
        """
        shape = self.shape(name)
        if shape is None or len(shape) <= axis:
            raise CheckpointError(f"the checkpoint has no {name}, without which it is no model; use another copy")
        return shape[axis]

    @property
    def is_gated(self) -> bool:
        """Whether the MLP's first matrix makes two branches."""
        return self.size("mlp.linear_fc1.weight", 0) == 2 * self.size("mlp.linear_fc2.weight", 1)


def arguments_of(state: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Megatron-LM's arguments by name, as a legacy file or ``common.pt`` keeps them; none if it has none."""
    stored = state.get("args")
    if isinstance(stored, (Namespace, SimpleNamespace)):
        return vars(stored)
    return stored if isinstance(stored, Mapping) else {}


def own_config(arguments: Mapping[str, Any]) -> Any:
    """The Hugging Face config object that ``convert`` wrote beside Megatron-LM's arguments; None in other checkpoints.

    Raises:
        CheckpointError: If it is damaged.
        ConfigError: If its family is not known.
    """
    text = arguments.get(HUGGING_FACE_CONFIG)
    if not isinstance(text, str):
        return None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"args.{HUGGING_FACE_CONFIG} is damaged ({error}); {_GIVE_A_CONFIG}") from None
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise CheckpointError(f"args.{HUGGING_FACE_CONFIG} names no model_type; {_GIVE_A_CONFIG}")
    return stored_config(fields, f"args.{HUGGING_FACE_CONFIG}")


def told_config(path: Path, arguments: Mapping[str, Any], shapes: Shapes) -> Any:
    """The Hugging Face config object that arguments and shapes tell.

    Args:
        path: For messages.
        arguments: Megatron-LM's, by name; without any, only NVIDIA's published models are known.
        shapes: Of the whole tensors.

    Raises:
        CheckpointError: If no known family computes what Megatron-LM computed, or layers are missing.
    """
    arguments = arguments or published_arguments(shapes)
    layers = arguments.get("num_layers")
    if type(layers) is int and layers > shapes.num_layers:
        raise CheckpointError(
            f"{path} was written with num_layers={layers} and has {shapes.num_layers} layers; give the folder of all "
            "stages, or if the model has no more, its Hugging Face config.json with --config"
        )
    hf_config = config_object(hf_config_of(arguments, shapes))
    if not vocab_size(arguments, shapes)[1]:
        _log.warning(
            "%s does not say whether some rows of its vocabulary of %d only pad it: all are kept; give the model's "
            "config with --config if it has fewer",
            path,
            hf_config.vocab_size,
        )
    return hf_config


def hf_config_of(arguments: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """The fields of a Hugging Face config, ``model_type`` and ``architectures`` included.

    Args:
        arguments: Megatron-LM's, by name.
        shapes: Of the whole tensors.

    Raises:
        CheckpointError: If no known family computes what Megatron-LM computed.
    """
    for name, reason in _REFUSED.items():
        if arguments.get(name):
            raise CheckpointError(f"the checkpoint has {name}={arguments[name]}: {reason}, as in no known family")
    if shapes.architecture == "t5":
        raise CheckpointError(
            "the checkpoint is an encoder-decoder of Megatron-LM, whose scaled scores (and, by default, learned "
            "positions and biases) no Hugging Face model has; if it was made from a T5, " + _GIVE_A_CONFIG
        )
    if shapes.architecture == "bert":
        return _bert(arguments, shapes)
    return _gpt(arguments, shapes)


def published_arguments(shapes: Shapes) -> dict[str, Any]:
    """What NVIDIA trained a model of these shapes with, whose file does not say it.

    Raises:
        CheckpointError: If it is none of those that NVIDIA published: heads are never guessed.
    """
    sizes, vocabularies, arguments = _PUBLISHED.get(shapes.architecture, ((), (), {}))
    rows = shapes.size("embedding.word_embeddings.weight", 0)
    found = (
        shapes.num_layers,
        shapes.size("embedding.word_embeddings.weight", 1),
        shapes.size("mlp.linear_fc1.weight", 0),
        (shapes.shape("embedding.position_embeddings.weight") or (0,))[0],
    )
    if found != sizes or not any(0 <= rows - known < _LARGEST_PADDING * shapes.tp for known in vocabularies):
        raise CheckpointError(
            f"the checkpoint has no arguments (args), and its shapes ({found[0]} layers of {found[1]} columns, "
            f"{rows} rows of vocabulary) are not those of NVIDIA's GPT-2 345M or BERT 345M, so that nothing says how "
            f"many heads its attention has; {_GIVE_A_CONFIG}"
        )
    return {"num_attention_heads": 16, **arguments}


def vocab_size(arguments: Mapping[str, Any], shapes: Shapes) -> tuple[int, bool]:
    """Tokens without padding, and whether something says so; else all rows of the embedding are counted."""
    rows = shapes.size("embedding.word_embeddings.weight", 0)
    original = arguments.get("orig_vocab_size")
    if type(original) is int and 0 < original <= rows:
        return original, True
    is_gpt2s = arguments.get("tokenizer_type") == "GPT2BPETokenizer"
    if shapes.architecture == "gpt" and is_gpt2s and 0 <= rows - _GPT2_VOCABULARY < _LARGEST_PADDING * shapes.tp:
        return _GPT2_VOCABULARY, True
    return rows, False


def num_heads(arguments: Mapping[str, Any], shapes: Shapes) -> int:
    """Attention heads, which no tensor shows.

    Raises:
        CheckpointError: If nothing says how many, or they do not divide the width of the attention.
    """
    width = shapes.size("self_attention.linear_proj.weight", 1)
    heads = arguments.get("num_attention_heads")
    if type(heads) is not int or heads < 1 or width == 0 or width % heads != 0:
        raise CheckpointError(
            f"args.num_attention_heads={str(heads)[:40]} does not divide the {width} columns of the attention's "
            f"projection; {_GIVE_A_CONFIG}"
        )
    return heads


def _number(arguments: Mapping[str, Any], name: str, default: float) -> float:
    """An argument that must be a number; ``default`` if it is not given."""
    value = arguments.get(name)
    if value is None:
        return default
    if type(value) not in (int, float):
        raise CheckpointError(f"args.{name} is a {type(value).__name__}, not a number; {_GIVE_A_CONFIG}")
    return float(value)


def _epsilon(arguments: Mapping[str, Any]) -> float:
    return _number(arguments, "norm_epsilon", _number(arguments, "layernorm_epsilon", 1e-5))


def _gelu(arguments: Mapping[str, Any]) -> str:
    """Which approximation; Megatron-LM's fused kernel and OpenAI's formula are the same function, with tanh."""
    if arguments.get("bias_gelu_fusion"):
        return "gelu_fast"
    return "gelu_new" if arguments.get("openai_gelu") else "gelu"


def _dropouts(arguments: Mapping[str, Any]) -> tuple[float, float]:
    return _number(arguments, "hidden_dropout", 0.1), _number(arguments, "attention_dropout", 0.1)


def _sizes(arguments: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """What every family has, under the names that configs of all of them understand."""
    return {
        "vocab_size": vocab_size(arguments, shapes)[0],
        "hidden_size": shapes.size("embedding.word_embeddings.weight", 1),
        "num_hidden_layers": shapes.num_layers,
        "intermediate_size": shapes.size("mlp.linear_fc2.weight", 1),
        "initializer_range": _number(arguments, "init_method_std", 0.02),
    }


# ---- BERT -----------------------------------------------------------------------------------------------------------


def bert_task(shapes: Shapes) -> str:
    """The task whose head is there."""
    if shapes.has("classification_head.dense.weight"):
        return "sequence_classification"
    if shapes.has("token_head.dense.weight"):
        return "token_classification"
    return "pretraining" if shapes.has("binary_head.weight") and shapes.has("pooler.dense.weight") else "masked_lm"


def _bert(arguments: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    hidden_dropout, attention_dropout = _dropouts(arguments)
    task = bert_task(shapes)
    head = {"sequence_classification": "classification_head", "token_classification": "token_head"}.get(task)
    return {
        "model_type": "megatron-bert",
        "architectures": [family_of("megatron-bert").architectures[task]],
        **_sizes(arguments, shapes),
        "num_attention_heads": num_heads(arguments, shapes),
        "hidden_act": _gelu(arguments),
        "hidden_dropout_prob": hidden_dropout,
        "attention_probs_dropout_prob": attention_dropout,
        "max_position_embeddings": shapes.size("embedding.position_embeddings.weight", 0),
        "type_vocab_size": shapes.size("embedding.tokentype_embeddings.weight", 0),
        "layer_norm_eps": _epsilon(arguments),
        **({} if head is None else {"num_labels": shapes.size(f"{head}.dense.weight", 0)}),
    }


# ---- decoders -------------------------------------------------------------------------------------------------------


def _gpt(arguments: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    is_rms = not shapes.has("final_layernorm.bias")
    if shapes.has("embedding.position_embeddings.weight"):
        if not is_rms and not shapes.is_gated and shapes.has("mlp.linear_fc1.bias"):
            return _gpt2(arguments, shapes)
        raise _no_family("learned positions with RMSNorm, a gated MLP or without biases")
    kind = arguments.get("position_embedding_type")
    if kind == "alibi" or shapes.has("embedding.norm.weight"):
        raise _no_family("ALiBi, of which its arguments do not say enough")
    is_rotary = kind == "rope" or arguments.get("use_rotary_position_embeddings")
    if is_rotary and is_rms and shapes.is_gated and arguments.get("swiglu", True):
        return _llama(arguments, shapes)
    raise _no_family(
        f"position_embedding_type={kind}, {'RMSNorm' if is_rms else 'LayerNorm'} and "
        f"{'a gated MLP' if shapes.is_gated else 'a plain MLP'}"
    )


def _no_family(combination: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint is a decoder with {combination}, for which no Hugging Face family is told from Megatron-LM's "
        f"arguments; {_GIVE_A_CONFIG}"
    )


def _gpt2(arguments: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    sizes = _sizes(arguments, shapes)
    hidden_dropout, attention_dropout = _dropouts(arguments)
    has_one_key = shapes.size("self_attention.linear_qkv.weight", 0) != 3 * sizes["hidden_size"]
    end = min(_GPT2_VOCABULARY, sizes["vocab_size"]) - 1
    return {
        "model_type": "gpt_bigcode" if has_one_key else "gpt2",
        "architectures": ["GPTBigCodeForCausalLM" if has_one_key else "GPT2LMHeadModel"],
        "n_inner": sizes.pop("intermediate_size"),
        **sizes,
        "num_attention_heads": num_heads(arguments, shapes),
        "n_positions": shapes.size("embedding.position_embeddings.weight", 0),
        "activation_function": _gelu(arguments),
        "resid_pdrop": hidden_dropout,
        "embd_pdrop": hidden_dropout,
        "attn_pdrop": attention_dropout,
        "layer_norm_epsilon": _epsilon(arguments),
        "bos_token_id": end,
        "eos_token_id": end,
        "tie_word_embeddings": is_tied(arguments, shapes),
    }


def is_tied(arguments: Mapping[str, Any], shapes: Shapes) -> bool:
    """Whether the output layer is the embedding; on the last of several stages a tied model has a copy, too."""
    untied = arguments.get("untie_embeddings_and_output_weights")
    return not shapes.has("output_layer.weight") if untied is None else not untied


def _llama(arguments: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    heads = num_heads(arguments, shapes)
    width = shapes.size("self_attention.linear_proj.weight", 1) // heads
    groups = (shapes.size("self_attention.linear_qkv.weight", 0) // width - heads) // 2
    positions = arguments.get("max_position_embeddings") or arguments.get("seq_length") or 4096
    fields: dict[str, Any] = {
        **_sizes(arguments, shapes),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": width,
        "max_position_embeddings": positions,
        "rms_norm_eps": _epsilon(arguments),
        "hidden_act": "silu",
        "rope_parameters": _rope(arguments),
        "attention_dropout": _dropouts(arguments)[1],
        "tie_word_embeddings": is_tied(arguments, shapes),
    }
    return _kind_of_llama(arguments, shapes, fields)


def _kind_of_llama(arguments: Mapping[str, Any], shapes: Shapes, fields: dict[str, Any]) -> dict[str, Any]:
    """Which of the families that differ in biases, norms and windows."""
    biases = tuple(
        shapes.has(f"{name}.bias")
        for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1")
    )
    window = arguments.get("window_size")
    if shapes.has("self_attention.q_layernorm.weight") and biases in ((False,) * 3, (True, True, False)):
        own = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": biases[0]}
    elif biases == (True, False, False):
        own = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
        fields.pop("head_dim")
    elif window is not None and not any(biases):
        tokens = window[0] + 1 if isinstance(window, (list, tuple)) else window
        own = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": tokens}
    elif biases[0] == biases[1] and window is None:
        own = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        own |= {"attention_bias": biases[0], "mlp_bias": biases[2]}
    else:
        raise _no_family(f"biases {biases} of queries, projection and MLP, and window_size={window}")
    return {**own, **fields}


def _rope(arguments: Mapping[str, Any]) -> dict[str, Any]:
    if arguments.get("rotary_percent", 1.0) != 1.0:
        raise _no_family(f"rotary_percent={arguments['rotary_percent']}")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _number(arguments, "rotary_base", 10000.0)}
    if arguments.get("use_rope_scaling"):
        # Megatron-Core's other numbers are those of Llama 3.1, too (models/common/embeddings/rotary_pos_embedding.py).
        factor = _number(arguments, "rope_scaling_factor", 8.0)
        rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 8192
    elif arguments.get("rotary_seq_len_interpolation_factor"):
        rope |= {"rope_type": "linear", "factor": _number(arguments, "rotary_seq_len_interpolation_factor", 1.0)}
    return rope


# ---- from a config to arguments --------------------------------------------------------------------------------------

_T5_SEQ_LENGTH = 512
"""That of its pre-training; relative positions have no end, and an argument must have a value."""


def megatron_arguments(
    source: Source, model: ModelConfig, layout: ParallelConfig, cut: Pipeline, dtype: torch.dtype
) -> Namespace:
    """Megatron-LM's arguments for this model at this layout.

    Args:
        source: What the weights were read from.
        model: Its model, with the padding of its vocabulary that is written.
        layout: The sizes of tensor and pipeline parallelism.
        cut: The model's stages.
        dtype: Of the weights.
    """
    return Namespace(
        **_shape(model),
        **_mathematics(model),
        **_activation(model, source.hf_config),
        **_layout(model, layout, cut),
        iteration=source.iteration,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        orig_vocab_size=model.vocab_size,
        padded_vocab_size=model.padded_vocab_size(layout.tp),
        params_dtype=dtype,
        fp16=dtype == torch.float16,
        bf16=dtype == torch.bfloat16,
        tokenizer_type="GPT2BPETokenizer" if model.family == "gpt2" else "HuggingFaceTokenizer",
        **{HUGGING_FACE_CONFIG: config_text(model, source.hf_config)},
    )


def config_text(model: ModelConfig, hf_config: Any) -> str:
    """The model's Hugging Face config as JSON, its head's class and its output layer's tie included."""
    config = copy.deepcopy(hf_config)
    config.architectures = [family_of(model.family).architectures[model.task]]
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


def _activation(model: ModelConfig, hf_config: Any) -> Mapping[str, bool]:
    """As the scripts of transformers spell it: their ``gelu_fast`` is Megatron-LM's fused kernel."""
    named = [getattr(hf_config, field, None) for field in ("activation_function", "hidden_act")]
    is_fused = model.activation == "gelu_tanh" and "gelu_fast" in named and not model.gated_linear_unit
    return {
        "swiglu": model.gated_linear_unit and model.activation == "silu",
        "bias_gelu_fusion": is_fused,
        "openai_gelu": model.activation == "gelu_tanh" and not is_fused,
        "onnx_safe": False,
        "squared_relu": False,
    }


def _layout(model: ModelConfig, layout: ParallelConfig, cut: Pipeline) -> Mapping[str, Any]:
    per_chunk = None if layout.vpp is None else model.num_layers // (layout.pp * layout.vpp)
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "num_layers_per_virtual_pipeline_stage": per_chunk,
        "pipeline_model_parallel_split_rank": cut.split_rank,
        "decoder_first_pipeline_num_layers": cut.first_num_layers,
        "decoder_last_pipeline_num_layers": cut.last_num_layers,
        "context_parallel_size": 1,
        "data_parallel_size": 1,
        "world_size": layout.tp * layout.pp,
        "rank": 0,
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "use_distributed_optimizer": False,
    }
