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
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.models.config import ModelConfig, variant_of

_log = logging.getLogger(__name__)
_PUBLISHED: Mapping[str, Any] = {
    "gpt": (
        (24, 1024, 4096, 1024),
        (50257,),
        {"openai_gelu": True, "tokenizer_type": "GPT2BPETokenizer"},
    ),
    "bert": ((24, 1024, 4096, 512), (28996, 30522), {"openai_gelu": False}),
}
"""NVIDIA's GPT-2 345M and BERT 345M: (num_layers, hidden_size, ffn_hidden_size, max_position_embeddings), vocabulary
sizes without padding, and arguments that no tensor shows. All of them have 16 heads."""
_GPT2_VOCABULARY = 50257
_MAX_PADDING = 128
"""Vocabulary padding is less than this times tp rows (Megatron-LM's ``--make-vocab-size-divisible-by``)."""
_CLASSIFIERS = {"classification_head.dense.weight", "token_head.dense.weight"}
_UNSUPPORTED = (
    *(
        "apply_layernorm_1p",
        "apply_residual_connection_post_layernorm",
        "multi_latent_attention",
        "num_experts",
    ),
    *(
        "rotary_interleaved",
        "squared_relu",
        "quick_geglu",
        "activation_func_clamp_value",
        "glu_linear_offset",
    ),
    *("qk_l2_norm", "no_rope_freq", "window_attn_skip_freq", "softmax_type"),
)
"""Arguments that no known family supports, unless their value is one of ``_OFF``."""
_OFF = (None, False, 0, "vanilla")


def describe_model(
    arguments: Mapping[str, Any],
    shapes: Mapping[Key, tuple[int, ...]],
    tp: int,
    config: Path | None,
    path: Path,
) -> tuple[ModelConfig, Any]:
    """Find the model of a checkpoint of Megatron-LM or Megatron-Core, and its Hugging Face config object.

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
        except (
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:  # arguments and shapes can be anything
            raise CheckpointError(
                f"{path}: args and shapes describe no model ({error!r}); {GIVE_A_CONFIG}"
            ) from None
    family, names = family_of(hf_config.model_type), {key.name for key in shapes}
    model = family.model_config(hf_config)
    if config is None and HUGGING_FACE_CONFIG in arguments:
        model = variant_of(model, arguments)
    if model.architecture == "bert":
        tasks = (model.task, *family.architectures)  # the first task whose head is stored
        models = [family.model_config(hf_config, task) for task in tasks]
        model = next(
            (candidate for candidate in models if _names_outside_layers(candidate) <= names), model
        )
    if model.architecture == "t5" and VOCABULARY[1] in names:
        model = replace(
            model, share_embeddings_and_output_weights=False
        )  # not in its config: families/encoders.py
    return model, hf_config


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
        stacks = {key.name.split(".")[0] for key in shapes if key.layer is not None}
        self.architecture = "t5" if len(stacks) > 1 else "bert" if "encoder" in stacks else "gpt"
        self.names, self.tp, self.path = {key.name for key in shapes}, tp, path
        self.shapes = {
            re.sub(r"^(?:encoder|decoder)\.(?:layers\.)?", "", key.name): shape
            for key, shape in shapes.items()
            if not key.layer
        }
        """Shapes of tensors of the first layer and outside layers, by names without their stack."""
        self.rows, self.positions = (
            self.shapes.get(name, (0,))[0] for name in (VOCABULARY[0], POSITIONS)
        )
        num_layers = 1 + max((key.layer for key in shapes if key.layer is not None), default=-1)
        (width, ffn), branches = (
            self.shapes["mlp.linear_fc2.weight"],
            self.shapes["mlp.linear_fc1.weight"][0],
        )
        self.arguments = arguments or self.published_arguments(num_layers, width, branches)
        get, heads = self.arguments.get, self.arguments["num_attention_heads"]
        head_dim, remainder = divmod(self.shapes["self_attention.linear_proj.weight"][1], heads)
        if remainder != 0:
            raise ValueError(
                f"num_attention_heads={heads} does not divide {head_dim * heads + remainder} columns"
            )
        untied, window = get("untie_embeddings_and_output_weights"), get("window_size")
        untied = "output_layer.weight" in self.shapes if untied is None else untied
        positions = (
            "rope" if get("use_rotary_position_embeddings") else get("position_embedding_type")
        )
        self.fields = {
            "vocab_size": self.vocab_size(),
            **{"num_layers": num_layers, "hidden_size": width, "ffn_hidden_size": ffn},
            "num_query_groups": (
                self.shapes["self_attention.linear_qkv.weight"][0] // head_dim - heads
            )
            // 2,
            **{"num_attention_heads": heads, "kv_channels": head_dim},
            "gated_linear_unit": branches == 2 * ffn and bool(get("swiglu", True)),
            "layernorm_epsilon": self.get_float(
                "norm_epsilon", self.get_float("layernorm_epsilon", 1e-5)
            ),
            "add_qkv_bias": "self_attention.linear_qkv.bias" in self.shapes,
            "add_bias_linear": "mlp.linear_fc1.bias" in self.shapes,
            "share_embeddings_and_output_weights": self.architecture == "bert" or not untied,
            "position_embedding_type": positions
            or ("learned_absolute" if self.positions else None),
            "rotary_percent": self.get_float("rotary_percent", 1.0),
            "max_position_embeddings": self.positions
            or get("max_position_embeddings")
            or get("seq_length")
            or 4096,
            "num_tokentypes": self.shapes.get("embedding.tokentype_embeddings.weight", (0,))[0],
            # Hugging Face's window includes the token itself.
            "sliding_window": window[0] + 1 if isinstance(window, Sequence) else window,
        }
        """Fields that the ``ModelConfig`` must have."""

    def published_arguments(self, num_layers: int, width: int, ffn: int) -> dict[str, Any]:
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
        size, padding = self.arguments.get("orig_vocab_size"), self.rows - _GPT2_VOCABULARY
        if type(size) is int and 0 < size <= self.rows:
            return size
        is_gpt2 = (
            self.architecture == "gpt"
            and self.arguments.get("tokenizer_type") == "GPT2BPETokenizer"
        )
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
            for name in _UNSUPPORTED
            if self.arguments.get(name) not in _OFF
        ]
        if self.architecture == "t5":
            wrong.append(
                "the scaled scores of Megatron-LM's encoder-decoder (if it was made from a T5, say so)"
            )
        elif not wrong and self.architecture == "bert":
            return self.config_for("megatron-bert")
        if not wrong:
            mismatches = []
            for family in (
                ("gpt2", "gpt_bigcode")
                if self.positions
                else ("llama", "qwen2", "qwen3", "mistral")
            ):
                config = self.config_for(family)
                model = family_of(family).model_config(config)
                fields = [
                    f"{name}={value}"
                    for name, value in self.fields.items()
                    if getattr(model, name) != value
                ]
                names = {rule.megatron for rule in rules_of(model)}
                # With several pipeline stages the last one of a tied model has a copy of the embedding.
                mismatches.append(
                    fields + sorted(names ^ (self.names - ({"output_layer.weight"} - names)))
                )
                if not mismatches[-1]:
                    return config
            wrong = min(mismatches, key=len)
        raise CheckpointError(
            f"{self.path}: no known model family has {', '.join(wrong[:10])}; {GIVE_A_CONFIG}"
        )

    def config_for(self, family: str) -> Any:
        """Hugging Face config object of ``family`` with all fields that are known."""
        default, get, fields = (
            config_object({"model_type": family}),
            self.arguments.get,
            dict(self.fields),
        )
        if not fields["gated_linear_unit"]:
            # Megatron-LM's fused kernel and OpenAI's formula are both GELU's tanh approximation.
            fields["activation"] = (
                "gelu_fast"
                if get("bias_gelu_fusion")
                else "gelu_new"
                if get("openai_gelu")
                else "gelu"
            )
        fields |= dict.fromkeys(
            ("hidden_dropout", "embedding_dropout"), self.get_float("hidden_dropout", 0.1)
        )
        fields["attention_dropout"] = self.get_float("attention_dropout", 0.1)
        fields["init_method_std"] = self.get_float("init_method_std", 0.02)
        names, extra = config_field_names(default), dict[str, Any](rope_parameters=self.rope())
        extra |= {"n_inner": fields["ffn_hidden_size"], "head_dim": fields["kv_channels"]}
        if self.architecture == "gpt" and self.positions:
            end = min(_GPT2_VOCABULARY, fields["vocab_size"]) - 1
            extra |= dict.fromkeys(("bos_token_id", "eos_token_id"), end)
        for classifier in _CLASSIFIERS & self.shapes.keys():
            extra["num_labels"] = self.shapes[classifier][0]
        known = {names[field]: value for field, value in fields.items() if field in names}
        known |= {name: value for name, value in extra.items() if hasattr(default, name)}
        return config_object({"model_type": family, **known})

    def rope(self) -> dict[str, Any]:
        """``rope_parameters`` of the Hugging Face config."""
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": self.get_float("rotary_base", 10000.0),
        }
        if self.arguments.get("use_rope_scaling"):
            # Megatron-Core fixes the other values to those of Llama 3.1 (common/embeddings/rotary_pos_embedding.py).
            rope |= {"rope_type": "llama3", "factor": self.get_float("rope_scaling_factor", 8.0)}
            rope |= {
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        elif self.arguments.get("rotary_seq_len_interpolation_factor"):
            rope |= {
                "rope_type": "linear",
                "factor": self.get_float("rotary_seq_len_interpolation_factor", 1.0),
            }
        return rope
