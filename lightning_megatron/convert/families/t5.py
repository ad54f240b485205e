"""T5 (Raffel et al. 2020), T5 v1.1 and mT5 (Xue et al. 2021): encoder and decoder, relative positions, unscaled scores.

What T5's config cannot say
---------------------------
Whether the output layer is the embedding. The published configs of v1.1 say ``tie_word_embeddings=False``; transformers
5 makes that True whatever the config says, and keeps from it only that the decoder's output is not scaled. A model
built by it from a config is tied. ``from_pretrained`` ties, too, unless the files have both ``shared.weight`` and
``lm_head.weight`` and they differ; then it leaves them apart. The same happens here: ``describe`` says tied, and
``describe_weights`` looks into the files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_megatron.convert.family import (
    LAYER,
    LLAMA,
    DecoderNames,
    Family,
    Rule,
    activation,
    described,
    linear,
    norm,
    output_layer,
    qkv_order,
    stack_rules,
)
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig

if TYPE_CHECKING:
    from lightning_megatron.convert.hugging_face import WeightFiles

_UNLIMITED = 1 << 30
"""Tokens: distances past the last row of the table share it, so that no sequence is too long."""


def describe(hf: Any) -> ModelConfig:
    """T5's and mT5's config in Megatron's words; the latter has no ``scale_decoder_outputs`` and never scales."""
    if hf.num_decoder_layers < 1:
        raise ConfigError(f"num_decoder_layers={hf.num_decoder_layers} must be at least 1; correct the model's config")
    pad = 0 if hf.pad_token_id is None else hf.pad_token_id
    start = getattr(hf, "decoder_start_token_id", None)
    dropouts = [f"{of}_dropout" for of in ("embedding", "hidden", "attention", "activation")]
    own = {
        **LLAMA,
        "architecture": "t5",
        "num_decoder_layers": hf.num_decoder_layers,
        "ffn_hidden_size": hf.d_ff,
        "num_query_groups": hf.num_heads,
        "kv_channels": hf.d_kv,
        "max_position_embeddings": _UNLIMITED,
        "layernorm_epsilon": hf.layer_norm_epsilon,
        "activation": activation(hf.dense_act_fn),
        "gated_linear_unit": hf.is_gated_act,
        "position_embedding_type": "relative",
        "relative_attention_num_buckets": hf.relative_attention_num_buckets,
        "relative_attention_max_distance": hf.relative_attention_max_distance,
        "softmax_scale": 1.0,
        "scale_decoder_outputs": getattr(hf, "scale_decoder_outputs", False),
        # Where the config is silent transformers refuses to shift labels; T5 starts with the padding token.
        "decoder_start_token_id": pad if start is None else start,
        "pad_token_id": pad,
        "share_embeddings_and_output_weights": True,
        **dict.fromkeys(dropouts, hf.dropout_rate),
        "init_method_std": hf.initializer_factor,
    }
    return described(hf, own)


def describe_weights(model: ModelConfig, weights: WeightFiles) -> ModelConfig:
    """``model`` with an output layer of its own if the files have one that differs from the embedding."""
    names = ("shared.weight", "lm_head.weight")
    if not all(name in weights.tensors for name in names) or weights.are_equal(*names):
        return model
    return replace(model, share_embeddings_and_output_weights=False)


def rules(model: ModelConfig) -> list[Rule]:
    """Where each weight of T5 and mT5 is."""
    embedding = linear("embedding.word_embeddings", ("shared",))
    return embedding + _stack(model, "encoder") + _stack(model, "decoder") + output_layer(model)


def _stack(model: ModelConfig, stack: str) -> list[Rule]:
    ours, theirs = f"{stack}.layers.", f"{stack}.block.{LAYER}."
    heads, width = model.num_attention_heads, model.num_attention_heads * model.kv_channels
    mlp, up = f"layer.{1 if stack == 'encoder' else 2}.", ("wi_0", "wi_1") if model.gated_linear_unit else ("wi",)
    names = DecoderNames(
        base=f"{stack}.",
        final_norm="final_layer_norm",
        layer=f"block.{LAYER}.",
        input_norm="layer.0.layer_norm",
        qkv=tuple(f"layer.0.SelfAttention.{name}" for name in "qkv"),
        proj="layer.0.SelfAttention.o",
        mlp_norm=mlp + "layer_norm",
        fc1=tuple(f"{mlp}DenseReluDense.{name}" for name in up),
        fc2=mlp + "DenseReluDense.wo",
    )
    table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
    rules = linear(f"{stack}_relative_pos_emb.relative_attention_bias", (table,)) + stack_rules(names, model, stack)
    if stack == "encoder":
        return rules
    attention = theirs + "layer.1.EncDecAttention."
    return [
        *rules,
        *norm(ours + "pre_cross_attn_layernorm.", theirs + "layer.1.layer_norm", model),
        *linear(ours + "cross_attention.linear_q", (attention + "q",)),
        *linear(
            ours + "cross_attention.linear_kv",
            (attention + "k", attention + "v"),
            rows=(width, width),
            order=qkv_order(0, heads, model.kv_channels),
        ),
        *linear(ours + "cross_attention.linear_proj", (attention + "o",)),
    ]


def _family(model_type: str, architecture: str) -> Family:
    return Family(
        model_type=model_type,
        describe=describe,
        describe_weights=describe_weights,
        rules=rules,
        architectures={"seq2seq_lm": architecture},
        base_prefix="",
        # Files of 2020 have a table for cross-attention, which nothing ever read.
        buffers=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
        required={"is_decoder": (False,), "is_encoder_decoder": (True,)},
    )


FAMILIES = (_family("t5", "T5ForConditionalGeneration"), _family("mt5", "MT5ForConditionalGeneration"))
