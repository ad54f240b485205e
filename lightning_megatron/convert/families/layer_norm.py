"""Decoders with LayerNorm: GPT-2, GPT-BigCode, Bloom, Falcon, GPT-NeoX, StableLM, StarCoder 2, Cohere and OPT.

GPT-2 (Radford et al. 2019): learned absolute positions, a tied output layer. GPT-BigCode (Allal et al. 2023,
SantaCoder; Li et al. 2023, StarCoder): heads share one key and value. Bloom (Le Scao et al. 2022): ALiBi instead of
positions, and a LayerNorm on the embeddings. Falcon (Almazrouei et al. 2023): attention beside the MLP, few key/value
heads, rotary positions or ALiBi. GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): attention beside the
MLP, a quarter of each head is rotated. StableLM (Bellagente et al. 2024): the same share, a gated MLP. StarCoder 2
(Lozhkov et al. 2024): Llama's attention with biases and windows. Command R (Cohere 2024): one norm, without bias, for
attention and a gated MLP beside it, neighbours rotated in pairs. OPT (Zhang et al. 2022): GPT-2's mathematics with
ReLU, whose positions begin at row 2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_megatron.convert.family import (
    DecoderNames,
    Rule,
    attention_biases,
    decoder,
    decoder_rules,
    described,
    rope_fields,
    rotary,
)
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig


def _gpt2(hf: Any) -> ModelConfig:
    own = {
        "ffn_hidden_size": 4 * hf.n_embd if hf.n_inner is None else hf.n_inner,
        "num_query_groups": 1 if hf.model_type == "gpt_bigcode" and hf.multi_query else hf.n_head,
        "softmax_scale": None if hf.scale_attn_weights else 1.0,
        "embedding_dropout": hf.embd_pdrop,
        "scaled_residual_init": True,
    }
    return described(hf, own)


def _bloom(hf: Any) -> ModelConfig:
    own = {
        "ffn_hidden_size": 4 * hf.hidden_size,
        # Of the training; nothing in the model ends there.
        "max_position_embeddings": getattr(hf, "seq_length", 2048),
        "activation": "gelu_tanh",
        "embedding_layernorm": True,
        "position_embedding_type": "alibi",
    }
    return described(hf, own)


def _falcon(hf: Any) -> ModelConfig:
    groups = hf.num_kv_heads if hf.new_decoder_architecture else 1 if hf.multi_query else hf.num_attention_heads
    own = {
        "num_query_groups": groups,
        "add_bias_linear": bool(hf.bias),
        "add_qkv_bias": bool(hf.bias),
        "parallel_attention": bool(hf.parallel_attn),
        "parallel_attention_norms": (hf.num_ln_in_parallel_attn or 2) if hf.new_decoder_architecture else 1,
        # Hugging Face drops what attention returns with the probability for attention weights, unless the two blocks
        # are parallel, and attention weights with ALiBi only.
        "attention_output_dropout": None if hf.parallel_attn else hf.attention_dropout,
        "attention_dropout": hf.attention_dropout if hf.alibi else 0.0,
    }
    positions = {"position_embedding_type": "alibi", "alibi_scaled": True} if hf.alibi else rope_fields(hf)
    return described(hf, {**own, **positions})


def _falcon_rules(model: ModelConfig) -> list[Rule]:
    has_two = model.parallel_attention and model.parallel_attention_norms == 2
    return decoder_rules(replace(_BLOOM, input_norm="ln_attn", mlp_norm="ln_mlp") if has_two else _BLOOM, model)


def _check_dropout(hf: Any) -> None:
    """Refuse what Hugging Face drops behind each of two parallel blocks; ours drops once, behind their sum."""
    if hf.use_parallel_residual and hf.hidden_dropout > 0.0:
        raise ConfigError(
            f"hidden_dropout={hf.hidden_dropout} of this {hf.model_type} config: expected 0.0 with "
            "use_parallel_residual=True, where the outputs of attention and MLP are not dropped apart; use 0.0"
        )


def _gpt_neox(hf: Any) -> ModelConfig:
    _check_dropout(hf)
    own = {
        **attention_biases(hf),
        "parallel_attention": hf.use_parallel_residual,
        "parallel_attention_norms": 2,
        "embedding_dropout": hf.hidden_dropout,
    }
    return rotary(hf, own, may_be_partial=True)


def _stablelm(hf: Any) -> ModelConfig:
    _check_dropout(hf)
    own = {
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": hf.use_qkv_bias,
        "parallel_attention": hf.use_parallel_residual,
        "attention_output_dropout": 0.0,
    }
    return rotary(hf, own, may_be_partial=True)


def _starcoder2(hf: Any) -> ModelConfig:
    own = {
        "add_bias_linear": hf.use_bias,
        "add_qkv_bias": hf.use_bias,
        "sliding_window": hf.sliding_window,
        "embedding_dropout": hf.embedding_dropout,
    }
    return rotary(hf, own)


def _cohere(hf: Any) -> ModelConfig:
    own = {
        "norm_bias": False,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        **attention_biases(hf),
        "parallel_attention": True,
        "rotary_interleaved": True,
        "logits_multiplier": hf.logit_scale,
    }
    return rotary(hf, own)


def _opt(hf: Any) -> ModelConfig:
    if hf.word_embed_proj_dim != hf.hidden_size:
        raise ConfigError(
            f"word_embed_proj_dim={hf.word_embed_proj_dim} of this opt config: expected hidden_size={hf.hidden_size}, "
            "as there is no projection of the embeddings; use another size of OPT"
        )
    own = {
        "layernorm_epsilon": 1e-5,
        "add_bias_linear": hf.enable_bias,
        "add_qkv_bias": hf.enable_bias,
        "position_offset": 2,
        "hidden_dropout": hf.dropout,
    }
    return described(hf, own)


_GPT2 = DecoderNames(
    base="transformer.",
    embedding="wte",
    positions="wpe",
    final_norm="ln_f",
    layer="h.{layer}.",
    input_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.c_attn",),
    proj="attn.c_proj",
    fc1=("mlp.c_fc",),
    fc2="mlp.c_proj",
    is_transposed=True,
)
_BLOOM = DecoderNames(
    base="transformer.",
    embedding="word_embeddings",
    embedding_norm="word_embeddings_layernorm",
    final_norm="ln_f",
    layer="h.{layer}.",
    qkv=("self_attention.query_key_value",),
    is_in_megatrons_order=True,
    proj="self_attention.dense",
    fc1=("mlp.dense_h_to_4h",),
    fc2="mlp.dense_4h_to_h",
)
"""Falcon's, too."""
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
        *("gpt2", "GPT2LMHeadModel", _gpt2, _GPT2),
        # reorder_and_upcast_attn changes the rounding of 16-bit scores only, and ours are added in float32.
        required={"scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    ),
    decoder(
        *("gpt_bigcode", "GPTBigCodeForCausalLM", _gpt2),
        # c_attn is in Megatron's order: all queries, the key, the value; without multi_query each head's.
        replace(_GPT2, is_transposed=False, is_in_megatrons_order=True),
        # attention_softmax_in_fp32 and scale_attention_softmax_in_fp32 are about rounding; our softmax is in float32.
        required={"add_cross_attention": (False,)},
    ),
    decoder(
        *("bloom", "BloomForCausalLM", _bloom, _BLOOM),
        # slow_but_exact leaves out the biases of the output projections where pretraining_tp is more than 1.
        required={"apply_residual_connection_post_layernorm": (False,), "slow_but_exact": (False,)},
    ),
    decoder("falcon", "FalconForCausalLM", _falcon, _BLOOM, rules=_falcon_rules),
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
