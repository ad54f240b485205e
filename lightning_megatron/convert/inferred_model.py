"""Which model a checkpoint of Megatron-LM or Megatron-Core holds, from its arguments and the shapes of its tensors.

Sizes are taken from the tensor shapes, which cannot be wrong, and only the rest from arguments. The oldest checkpoints
have no arguments: of these only NVIDIA's published 345M models are supported, recognized by their shapes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_megatron.convert.megatron_arguments import (
    GIVE_A_CONFIG,
    HUGGING_FACE_CONFIG,
    embedded_config,
)
from lightning_megatron.convert.model_fields import config_field_names
from lightning_megatron.convert.registry import (
    config_object,
    family_of,
    rules_of,
    stored_config,
)
from lightning_megatron.convert.rules import LAYER, POSITIONS, VOCABULARY
from lightning_megatron.convert.shards import Key
from lightning_megatron.convert.source import Description
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.models.config import ModelConfig, variant_of

_log = logging.getLogger(__name__)

_PUBLISHED: Mapping[str, Any] = {
    "gpt": (
        (24, 1024, 4096, 1024),
        (50257,),
        {"openai_gelu": True, "tokenizer_type": "GPT2BPETokenizer"},
    ),
    "bert": (
        (24, 1024, 4096, 512),
        (28996, 30522),
        {"openai_gelu": False},
    ),
}
"""NVIDIA's GPT-2 345M and BERT 345M: (num_layers, hidden_size, ffn_hidden_size, max_position_embeddings), vocabulary
sizes without padding, and arguments that no tensor shows. All of them have 16 heads."""
_GPT2_VOCABULARY = 50257
_MAX_PADDING = 128
"""Vocabulary padding is less than this times tp rows (Megatron-LM's ``--make-vocab-size-divisible-by``)."""
_CLASSIFIERS = {"classification_head.dense.weight", "token_head.dense.weight"}
UNSUPPORTED = (
    "apply_layernorm_1p",
    "layernorm_zero_centered_gamma",
    "apply_residual_connection_post_layernorm",
    "multi_latent_attention",
    "num_experts",
    "rotary_interleaved",
    "squared_relu",
    "quick_geglu",
    "activation_func_clamp_value",
    "glu_linear_offset",
    "qk_l2_norm",
    "no_rope_freq",
    "window_attn_skip_freq",
    "softmax_type",
    "softmax_scale",
    "attention_output_gate",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "experimental_attention_variant",
    "linear_attention_type",
    "heterogeneous_block_specs",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "use_mup",
)
"""Arguments that no known family supports, unless their value is one of ``_OFF``."""
_OFF = (None, False, 0, "vanilla")
_ENGINE_SPECS = ("local", "megatron.core.")
"""Beginnings of ``spec``, the module and function that build the layers, in which they are the engine's own."""


def describe_model(
    arguments: Mapping[str, Any],
    shapes: Mapping[Key, tuple[int, ...]],
    tp: int,
    config: Path | None,
    path: Path,
) -> Description:
    """Find the model of a checkpoint of Megatron-LM or Megatron-Core.

    Args:
        arguments: Megatron-LM's arguments by name; if empty, only NVIDIA's published models are recognized.
        shapes: Shapes of the full tensors, vocabulary padding included.
        tp: Tensor-parallel size of the checkpoint, which bounds its vocabulary padding.
        config: Hugging Face ``config.json``, or a directory with one; None: infer it from the arguments and shapes.
        path: The checkpoint, for messages.

    Raises:
        CheckpointError: If no known family computes what Megatron-LM computed, or layers are missing.
        ConfigError: If the config is not supported.
    """
    if config is not None:
        hf_config = config_object(config)
    elif (fields := embedded_config(arguments)) is not None:
        hf_config = stored_config(fields, f"args.{HUGGING_FACE_CONFIG}")
    else:
        try:
            hf_config = _ConfigBuilder(arguments, shapes, tp, path).config()
        except ConfigError:
            raise
        # Arguments and shapes can be anything.
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: args and shapes describe no model ({error!r}); {GIVE_A_CONFIG}"
            ) from None
    family = family_of(hf_config.model_type)
    names = {key.name for key in shapes}
    model = family.model_config(hf_config)
    if config is None and HUGGING_FACE_CONFIG in arguments:
        model = variant_of(model, arguments)
    if model.architecture == "bert":
        for task in (model.task, *family.architectures):  # the first task whose head is stored
            candidate = family.model_config(hf_config, task)
            if _names_outside_layers(candidate) <= names:
                model = candidate
                break
    if model.architecture == "t5" and VOCABULARY[1] in names:
        # Not in its config: families/encoders.py.
        model = replace(model, share_embeddings_and_output_weights=False)
    return Description(model, hf_config)


def _names_outside_layers(model: ModelConfig) -> set[str]:
    return {rule.megatron for rule in rules_of(model) if LAYER not in rule.hugging_face[0]}


class _ConfigBuilder:
    """Build a Hugging Face config from arguments and shapes; for the parameters see ``describe_model``."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        shapes: Mapping[Key, tuple[int, ...]],
        tp: int,
        path: Path,
    ) -> None:
        self.tp = tp
        self.path = path
        self.names = {key.name for key in shapes}
        stacks = {key.name.split(".")[0] for key in shapes if key.layer is not None}
        self.architecture = "gpt"
        if len(stacks) > 1:
            self.architecture = "t5"
        elif "encoder" in stacks:
            self.architecture = "bert"
        self.shapes = {
            re.sub(r"^(?:encoder|decoder)\.(?:layers\.)?", "", key.name): shape
            for key, shape in shapes.items()
            if not key.layer
        }
        """Shapes of tensors of the first layer and outside layers, by names without their stack."""
        self.rows = self._rows_of(VOCABULARY[0])
        self.positions = self._rows_of(POSITIONS)
        layers = [key.layer for key in shapes if key.layer is not None]
        num_layers = 1 + max(layers, default=-1)
        width, ffn = self.shapes["mlp.linear_fc2.weight"]
        branches = self.shapes["mlp.linear_fc1.weight"][0]
        self.arguments = arguments or self.published_arguments(num_layers, width, branches)
        self.fields = {
            "vocab_size": self.vocab_size(),
            "num_layers": num_layers,
            "hidden_size": width,
            "ffn_hidden_size": ffn,
            **self._attention_fields(),
            "gated_linear_unit": branches == 2 * ffn and bool(self.arguments.get("swiglu", True)),
            "layernorm_epsilon": self._layernorm_epsilon(),
            "add_qkv_bias": "self_attention.linear_qkv.bias" in self.shapes,
            "add_bias_linear": "mlp.linear_fc1.bias" in self.shapes,
            "share_embeddings_and_output_weights": self._is_tied(),
            **self._position_fields(),
            "num_tokentypes": self._rows_of("embedding.tokentype_embeddings.weight"),
        }
        """Fields that the ``ModelConfig`` must have."""

    def _rows_of(self, name: str) -> int:
        """Rows of a tensor; 0 if it does not exist."""
        return self.shapes.get(name, (0,))[0]

    def _attention_fields(self) -> dict[str, Any]:
        heads = self.arguments["num_attention_heads"]
        columns = self.shapes["self_attention.linear_proj.weight"][1]
        head_dim, remainder = divmod(columns, heads)
        if remainder != 0:
            raise ValueError(f"num_attention_heads={heads} does not divide {columns} columns")
        query_and_key_heads = self.shapes["self_attention.linear_qkv.weight"][0] // head_dim
        return {
            "num_query_groups": (query_and_key_heads - heads) // 2,
            "num_attention_heads": heads,
            "kv_channels": head_dim,
        }

    def _layernorm_epsilon(self) -> float:
        return self.get_float("norm_epsilon", self.get_float("layernorm_epsilon", 1e-5))

    def _is_tied(self) -> bool:
        is_untied = self.arguments.get("untie_embeddings_and_output_weights")
        if is_untied is None:
            is_untied = "output_layer.weight" in self.shapes
        return self.architecture == "bert" or not is_untied

    def _position_fields(self) -> dict[str, Any]:
        get = self.arguments.get
        kind = "rope" if get("use_rotary_position_embeddings") else get("position_embedding_type")
        if not kind and self.positions:
            kind = "learned_absolute"
        longest = self.positions or get("max_position_embeddings") or get("seq_length") or 4096
        window = get("window_size")
        if isinstance(window, Sequence):
            window = window[0] + 1  # Hugging Face's window includes the token itself
        return {
            "position_embedding_type": kind or None,
            "rotary_percent": self.get_float("rotary_percent", 1.0),
            "max_position_embeddings": longest,
            "sliding_window": window,
        }

    def published_arguments(
        self,
        num_layers: int,
        width: int,
        ffn: int,
    ) -> dict[str, Any]:
        """Arguments of NVIDIA's published model with these shapes; the number of heads is never guessed for others."""
        sizes, vocabularies, arguments = _PUBLISHED.get(self.architecture, ((), (), {}))
        is_known = any(0 <= self.rows - known < _MAX_PADDING * self.tp for known in vocabularies)
        if not is_known or (num_layers, width, ffn, self.positions) != sizes:
            raise CheckpointError(
                f"{self.path} has no arguments (args), and its shapes ({num_layers} layers of {width} columns, "
                f"{self.rows} rows of vocabulary) are not those of NVIDIA's GPT-2 345M or BERT 345M, so that nothing "
                f"says how many heads its attention has; {GIVE_A_CONFIG}"
            )
        return {"num_attention_heads": 16, **arguments}

    def get_float(self, name: str, default: float) -> float:
        """Numeric argument; ``default`` if it is absent or None."""
        value = self.arguments.get(name)
        return default if value is None else float(value)

    def vocab_size(self) -> int:
        """Vocabulary size without padding if it is known, else all rows."""
        size = self.arguments.get("orig_vocab_size")
        if type(size) is int and 0 < size <= self.rows:
            return size
        padding = self.rows - _GPT2_VOCABULARY
        has_gpt2_tokenizer = self.arguments.get("tokenizer_type") == "GPT2BPETokenizer"
        is_gpt2 = self.architecture == "gpt" and has_gpt2_tokenizer
        if is_gpt2 and 0 <= padding < _MAX_PADDING * self.tp:
            return _GPT2_VOCABULARY
        _log.warning(
            "%s does not record how many rows of its vocabulary of %d are padding: all are kept; give the model's "
            "config with --config if it has fewer tokens",
            self.path,
            self.rows,
        )
        return self.rows

    def config(self) -> Any:
        """Hugging Face config object of the first family that matches all fields and tensors."""
        wrong = [
            f"{name}={self.arguments[name]}"
            for name in UNSUPPORTED
            if self.arguments.get(name) not in _OFF
        ]
        spec = self.arguments.get("spec")
        if spec and not str(spec[0]).startswith(_ENGINE_SPECS):
            wrong.append(f"layers of spec={' '.join(map(str, spec))[:100]}")
        if self.architecture == "t5":
            wrong.append(
                "the scaled scores of Megatron-LM's encoder-decoder (if it was made from a T5, say so)"
            )
        elif not wrong and self.architecture == "bert":
            config = self.config_for("megatron-bert")
            wrong = self._other_fields(family_of("megatron-bert").model_config(config))
            if not wrong:
                return config
        elif not wrong:
            mismatches = []
            for family in self._candidates():
                config = self.config_for(family)
                mismatch = self._mismatches(family, config)
                if not mismatch:
                    return config
                mismatches.append(mismatch)
            wrong = min(mismatches, key=len)
        raise CheckpointError(
            f"{self.path}: no known model family has {', '.join(wrong[:10])}; {GIVE_A_CONFIG}"
        )

    def _candidates(self) -> tuple[str, ...]:
        """Families of a GPT, the likeliest first."""
        if self.positions:
            return ("gpt2", "gpt_bigcode")
        return ("llama", "qwen2", "qwen3", "mistral")

    def _mismatches(self, family: str, config: Any) -> list[str]:
        """Fields and names of tensors in which a model of the family differs from the checkpoint."""
        model = family_of(family).model_config(config)
        fields = self._other_fields(model)
        names = {rule.megatron for rule in rules_of(model)}
        # With several pipeline stages the last one of a tied model has a copy of the embedding.
        copies = {"output_layer.weight"} - names
        return fields + sorted(names ^ (self.names - copies))

    def _other_fields(self, model: ModelConfig) -> list[str]:
        """Fields in which a model differs from the checkpoint."""
        return [
            f"{name}={value}"
            for name, value in self.fields.items()
            if getattr(model, name) != value
        ]

    def config_for(self, family: str) -> Any:
        """Hugging Face config object of ``family`` with all fields that are known."""
        default = config_object({"model_type": family})
        names = config_field_names(default)
        fields = {
            **self.fields,
            "hidden_dropout": self.get_float("hidden_dropout", 0.1),
            "embedding_dropout": self.get_float("hidden_dropout", 0.1),
            "attention_dropout": self.get_float("attention_dropout", 0.1),
            "init_method_std": self.get_float("init_method_std", 0.02),
        }
        if not fields["gated_linear_unit"]:
            fields["activation"] = self._activation()
        extra: dict[str, Any] = {
            "rope_parameters": self.rope(),
            "n_inner": fields["ffn_hidden_size"],
            "head_dim": fields["kv_channels"],
        }
        if self.architecture == "gpt" and self.positions:
            end = min(_GPT2_VOCABULARY, fields["vocab_size"]) - 1
            extra["bos_token_id"] = end
            extra["eos_token_id"] = end
        for classifier in _CLASSIFIERS & self.shapes.keys():
            extra["num_labels"] = self._rows_of(classifier)
        known = {names[field]: value for field, value in fields.items() if field in names}
        known |= {name: value for name, value in extra.items() if hasattr(default, name)}
        return config_object({"model_type": family, **known})

    def _activation(self) -> str:
        # Megatron-LM's fused kernel and OpenAI's formula are both GELU's tanh approximation.
        if self.arguments.get("bias_gelu_fusion"):
            return "gelu_fast"
        return "gelu_new" if self.arguments.get("openai_gelu") else "gelu"

    def rope(self) -> dict[str, Any]:
        """``rope_parameters`` of the Hugging Face config."""
        base = self.get_float("rotary_base", 10000.0)
        if self.arguments.get("use_rope_scaling"):
            # Megatron-Core fixes the other values to those of Llama 3.1 (common/embeddings/rotary_pos_embedding.py).
            return {
                "rope_type": "llama3",
                "rope_theta": base,
                "factor": self.get_float("rope_scaling_factor", 8.0),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        if self.arguments.get("rotary_seq_len_interpolation_factor"):
            return {
                "rope_type": "linear",
                "rope_theta": base,
                "factor": self.get_float("rotary_seq_len_interpolation_factor", 1.0),
            }
        return {"rope_type": "default", "rope_theta": base}
