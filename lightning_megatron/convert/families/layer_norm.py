"""Decoders with LayerNorm: GPT-NeoX, StableLM, StarCoder 2, Cohere and OPT.

GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): attention beside the MLP, a quarter of each head is
rotated. StableLM (Bellagente et al. 2024): the same share, a gated MLP. StarCoder 2 (Lozhkov et al. 2024): Llama's
attention with biases and windows. Command R (Cohere 2024): one norm, without bias, for attention and a gated MLP beside
it, neighbours rotated in pairs. OPT (Zhang et al. 2022): GPT-2's mathematics with ReLU, whose positions begin at row 2.
"""

from __future__ import annotations

from typing import Any

from lightning_megatron.convert.family import activation
from lightning_megatron.convert.gpt_tables import DecoderNames, decoder, described, rope_fields
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig


def _check_dropout(hf: Any, name: str = "hidden_dropout") -> None:
    """Refuse what Hugging Face drops behind each of two parallel blocks; ours drops once, behind their sum."""
    if hf.use_parallel_residual and getattr(hf, name) > 0.0:
        raise ConfigError(
            f"{name}={getattr(hf, name)} of this {hf.model_type} config: expected 0.0 with use_parallel_residual=True, "
            "where the outputs of attention and MLP are not dropped apart; use 0.0"
        )


def _gpt_neox(hf: Any) -> ModelConfig:
    _check_dropout(hf)
    own = {
        "num_query_groups": hf.num_attention_heads,
        "layernorm_epsilon": hf.layer_norm_eps,
        "add_qkv_bias": hf.attention_bias,
        "add_attention_output_bias": hf.attention_bias,
        "parallel_attention": hf.use_parallel_residual,
        "parallel_attention_norms": 2,
        "embedding_dropout": hf.hidden_dropout,
        "hidden_dropout": hf.hidden_dropout,
    }
    return described(hf, {**rope_fields(hf, may_be_partial=True), **own})


def _stablelm(hf: Any) -> ModelConfig:
    _check_dropout(hf)
    own = {
        "layernorm_epsilon": hf.layer_norm_eps,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": hf.use_qkv_bias,
        "parallel_attention": hf.use_parallel_residual,
        "hidden_dropout": hf.hidden_dropout,
        "attention_output_dropout": 0.0,
    }
    return described(hf, {**rope_fields(hf, may_be_partial=True), **own})


def _starcoder2(hf: Any) -> ModelConfig:
    own = {
        "layernorm_epsilon": hf.norm_epsilon,
        "add_bias_linear": hf.use_bias,
        "add_qkv_bias": hf.use_bias,
        "sliding_window": hf.sliding_window,
        "embedding_dropout": hf.embedding_dropout,
        "hidden_dropout": hf.residual_dropout,
    }
    return described(hf, {**rope_fields(hf), **own})


def _cohere(hf: Any) -> ModelConfig:
    own = {
        "norm_bias": False,
        "layernorm_epsilon": hf.layer_norm_eps,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": hf.attention_bias,
        "add_attention_output_bias": hf.attention_bias,
        "parallel_attention": True,
        "rotary_interleaved": True,
        "logits_multiplier": hf.logit_scale,
    }
    return described(hf, {**rope_fields(hf), **own})


def _opt(hf: Any) -> ModelConfig:
    if hf.word_embed_proj_dim != hf.hidden_size:
        raise ConfigError(
            f"word_embed_proj_dim={hf.word_embed_proj_dim} of this opt config: expected hidden_size={hf.hidden_size}, "
            "as there is no projection of the embeddings; use another size of OPT"
        )
    own = {
        "ffn_hidden_size": hf.ffn_dim,
        "num_query_groups": hf.num_attention_heads,
        "layernorm_epsilon": 1e-5,
        "activation": activation(hf.activation_function),
        "add_bias_linear": hf.enable_bias,
        "add_qkv_bias": hf.enable_bias,
        "position_offset": 2,
        "hidden_dropout": hf.dropout,
        "init_method_std": hf.init_std,
    }
    return described(hf, own)


_GPT_NEOX = DecoderNames(
    base="gpt_neox.",
    embedding="embed_in",
    final_norm="final_layer_norm",
    qkv=("attention.query_key_value",),
    is_in_megatrons_order=True,
    proj="attention.dense",
    fc1=("mlp.dense_h_to_4h",),
    fc2="mlp.dense_4h_to_h",
    output="embed_out",  # in files; transformers 5 calls it lm_head when it has read them
)
_OPT = DecoderNames(
    embedding="decoder.embed_tokens",
    positions="decoder.embed_positions",
    final_norm="decoder.final_layer_norm",
    layer="decoder.layers.{layer}.",
    input_norm="self_attn_layer_norm",
    proj="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    fc1=("fc1",),
    fc2="fc2",
)

FAMILIES = (
    decoder(
        *("gpt_neox", "GPTNeoXForCausalLM", _gpt_neox, _GPT_NEOX),
        old_names={"lm_head.weight": "embed_out.weight"},
    ),
    # Norms of queries and keys have weights for each head, in StableLM 2 12B and Command R+.
    decoder("stablelm", "StableLmForCausalLM", _stablelm, required={"qk_layernorm": (False,)}),
    decoder("starcoder2", "Starcoder2ForCausalLM", _starcoder2, DecoderNames(fc1=("mlp.c_fc",), fc2="mlp.c_proj")),
    decoder("cohere", "CohereForCausalLM", _cohere, required={"use_qk_norm": (False, None)}),
    decoder(
        *("opt", "OPTForCausalLM", _opt, _OPT),
        required={
            # OPT 350m normalizes after each block, and so on.
            "do_layer_norm_before": (True,),
            "_remove_final_layer_norm": (False,),
            "layer_norm_elementwise_affine": (True,),
            "layerdrop": (0.0,),
        },
    ),
)
