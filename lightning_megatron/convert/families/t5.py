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

from lightning_megatron.convert.family import LAYER, Family, Rule, activation, qkv_order
from lightning_megatron.convert.gpt_tables import linear, norm, output_layer
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
    names = ("shared.weight", "lm_head.weight")
    if not all(name in weights.tensors for name in names) or weights.are_equal(*names):
        return model
    return replace(model, share_embeddings_and_output_weights=False)


def rules(model: ModelConfig) -> list[Rule]:
    """Where each weight of T5 and mT5 is."""
    embedding = linear("embedding.word_embeddings", ("shared",))
    return embedding + _stack(model, "encoder") + _stack(model, "decoder") + output_layer(model)


def _stack(model: ModelConfig, stack: str) -> list[Rule]:
    ours, theirs = f"{stack}.layers.", f"{stack}.block.{LAYER}.layer."
    heads, width = model.num_attention_heads, model.num_attention_heads * model.kv_channels
    mlp = f"{theirs}{1 if stack == 'encoder' else 2}."
    table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
    up = ("wi_0", "wi_1") if model.gated_linear_unit else ("wi",)
    rules = [
        *linear(f"{stack}_relative_pos_emb.relative_attention_bias", (table,)),
        *norm(f"{stack}.final_layernorm.", f"{stack}.final_layer_norm", model),
        *norm(ours + "self_attention.linear_qkv.layer_norm_", theirs + "0.layer_norm", model),
        *linear(
            ours + "self_attention.linear_qkv",
            tuple(f"{theirs}0.SelfAttention.{name}" for name in "qkv"),
            rows=(width,) * 3,
            order=qkv_order(heads, heads, model.kv_channels),
        ),
        *linear(ours + "self_attention.linear_proj", (theirs + "0.SelfAttention.o",)),
        *norm(ours + "mlp.linear_fc1.layer_norm_", mlp + "layer_norm", model),
        *linear(
            ours + "mlp.linear_fc1",
            tuple(f"{mlp}DenseReluDense.{name}" for name in up),
            rows=(model.ffn_hidden_size,) * len(up),
        ),
        *linear(ours + "mlp.linear_fc2", (mlp + "DenseReluDense.wo",)),
    ]
    if stack == "encoder":
        return rules
    attention = theirs + "1.EncDecAttention."
    return [
        *rules,
        *norm(ours + "pre_cross_attn_layernorm.", theirs + "1.layer_norm", model),
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
