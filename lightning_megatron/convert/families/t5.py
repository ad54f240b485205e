"""T5 (Raffel et al. 2020) and T5 v1.1: encoder and decoder, relative positions as a bias, RMSNorm, no scale of scores.

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

from lightning_megatron.convert.family import Family, activation
from lightning_megatron.convert.rules import LAYER, Rule, kv_order, qkv_order
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig

if TYPE_CHECKING:
    from lightning_megatron.convert.hugging_face_files import WeightFiles

_UNLIMITED = 1 << 30
"""Tokens: distances past the last row of the table share it, so that no sequence is too long."""


def describe(hf: Any) -> ModelConfig:
    """T5's and mT5's config in Megatron's words; the latter has no ``scale_decoder_outputs`` and never scales."""
    if hf.num_decoder_layers < 1:
        raise ConfigError(f"num_decoder_layers={hf.num_decoder_layers} must be at least 1; correct the model's config")
    pad = 0 if hf.pad_token_id is None else hf.pad_token_id
    start = getattr(hf, "decoder_start_token_id", None)
    return ModelConfig(
        family=hf.model_type,
        architecture="t5",
        num_layers=hf.num_layers,
        num_decoder_layers=hf.num_decoder_layers,
        hidden_size=hf.d_model,
        ffn_hidden_size=hf.d_ff,
        num_attention_heads=hf.num_heads,
        num_query_groups=hf.num_heads,
        kv_channels=hf.d_kv,
        vocab_size=hf.vocab_size,
        max_position_embeddings=_UNLIMITED,
        normalization="RMSNorm",
        layernorm_epsilon=hf.layer_norm_epsilon,
        activation=activation(hf.dense_act_fn),
        gated_linear_unit=hf.is_gated_act,
        add_bias_linear=False,
        add_qkv_bias=False,
        position_embedding_type="relative",
        relative_attention_num_buckets=hf.relative_attention_num_buckets,
        relative_attention_max_distance=hf.relative_attention_max_distance,
        softmax_scale=1.0,
        scale_decoder_outputs=getattr(hf, "scale_decoder_outputs", False),
        # Where the config is silent transformers refuses to shift labels; T5 starts with the padding token.
        decoder_start_token_id=pad if start is None else start,
        pad_token_id=pad,
        share_embeddings_and_output_weights=True,
        embedding_dropout=hf.dropout_rate,
        hidden_dropout=hf.dropout_rate,
        attention_dropout=hf.dropout_rate,
        activation_dropout=hf.dropout_rate,
        init_method_std=hf.initializer_factor,
        scaled_residual_init=False,
    )


def describe_weights(model: ModelConfig, weights: WeightFiles) -> ModelConfig:
    """``model`` with an output layer of its own if the files have one that differs from the embedding."""
    tensors = weights.tensors
    if "shared.weight" not in tensors or "lm_head.weight" not in tensors:
        return model
    shape = tensors["shared.weight"].shape
    if tensors["lm_head.weight"].shape != shape:
        return model  # what is wrong with the files is said when they are read
    if weights.are_equal("shared.weight", "lm_head.weight"):
        return model
    return replace(model, share_embeddings_and_output_weights=False)


def rules(model: ModelConfig) -> list[Rule]:
    """Where each weight of T5 and mT5 is."""
    tied = [] if model.share_embeddings_and_output_weights else [_same("output_layer.weight", "lm_head.weight")]
    return [_same("embedding.word_embeddings.weight", "shared.weight"), *_encoder(model), *_decoder(model), *tied]


def _same(megatron: str, hugging_face: str) -> Rule:
    return Rule(megatron=megatron, hugging_face=(hugging_face,))


def _encoder(model: ModelConfig) -> list[Rule]:
    return [*_around("encoder"), *_self_attention(model, "encoder"), *_mlp(model, "encoder", block=1)]


def _decoder(model: ModelConfig) -> list[Rule]:
    ours, theirs = "decoder.layers.", f"decoder.block.{LAYER}.layer.1."
    width = model.num_attention_heads * model.kv_channels
    attention = ours + "cross_attention."
    cross = [
        _same(ours + "pre_cross_attn_layernorm.weight", theirs + "layer_norm.weight"),
        _same(attention + "linear_q.weight", theirs + "EncDecAttention.q.weight"),
        Rule(
            megatron=attention + "linear_kv.weight",
            hugging_face=(theirs + "EncDecAttention.k.weight", theirs + "EncDecAttention.v.weight"),
            rows=(width, width),
            order=kv_order(model.num_attention_heads, model.kv_channels),
        ),
        _same(attention + "linear_proj.weight", theirs + "EncDecAttention.o.weight"),
    ]
    return [*_around("decoder"), *_self_attention(model, "decoder"), *cross, *_mlp(model, "decoder", block=2)]


def _around(stack: str) -> list[Rule]:
    table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return [
        _same(f"{stack}_relative_pos_emb.relative_attention_bias.weight", table),
        _same(f"{stack}.final_layernorm.weight", f"{stack}.final_layer_norm.weight"),
    ]


def _self_attention(model: ModelConfig, stack: str) -> list[Rule]:
    ours, theirs = f"{stack}.layers.self_attention.", f"{stack}.block.{LAYER}.layer.0."
    heads, width = model.num_attention_heads, model.num_attention_heads * model.kv_channels
    return [
        _same(ours + "linear_qkv.layer_norm_weight", theirs + "layer_norm.weight"),
        Rule(
            megatron=ours + "linear_qkv.weight",
            hugging_face=tuple(f"{theirs}SelfAttention.{name}.weight" for name in "qkv"),
            rows=(width, width, width),
            order=qkv_order(heads, heads, model.kv_channels),
        ),
        _same(ours + "linear_proj.weight", theirs + "SelfAttention.o.weight"),
    ]


def _mlp(model: ModelConfig, stack: str, block: int) -> list[Rule]:
    ours, theirs = f"{stack}.layers.mlp.", f"{stack}.block.{LAYER}.layer.{block}."
    up = _same(ours + "linear_fc1.weight", theirs + "DenseReluDense.wi.weight")
    if model.gated_linear_unit:
        up = Rule(
            megatron=ours + "linear_fc1.weight",
            hugging_face=(theirs + "DenseReluDense.wi_0.weight", theirs + "DenseReluDense.wi_1.weight"),
            rows=(model.ffn_hidden_size, model.ffn_hidden_size),
        )
    return [
        _same(ours + "linear_fc1.layer_norm_weight", theirs + "layer_norm.weight"),
        up,
        _same(ours + "linear_fc2.weight", theirs + "DenseReluDense.wo.weight"),
    ]


FAMILY = Family(
    model_type="t5",
    describe=describe,
    describe_weights=describe_weights,
    rules=rules,
    architectures={"seq2seq_lm": "T5ForConditionalGeneration"},
    base_prefix="",
    # Files of 2020 have a table for cross-attention, which nothing ever read.
    buffers=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    required={"is_decoder": (False,), "is_encoder_decoder": (True,)},
)
