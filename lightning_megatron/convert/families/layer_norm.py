"""Decoders with LayerNorm: GPT-2, GPT-BigCode, Bloom, Falcon, GPT-NeoX, StableLM, StarCoder 2, Cohere, Nemotron, OPT.

GPT-2 (Radford et al. 2019): learned absolute positions, a tied output layer. GPT-BigCode (Allal et al. 2023,
SantaCoder; Li et al. 2023, StarCoder): multi-query attention. Bloom (Le Scao et al. 2022): ALiBi, and a LayerNorm
on the embeddings. Falcon (Almazrouei et al. 2023): parallel attention and MLP, few key/value heads, rotary embeddings
or ALiBi. GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): parallel attention and MLP, rotary embeddings
on a quarter of each head. StableLM (Bellagente et al. 2024): the same rotary share, gated MLP. StarCoder 2 (Lozhkov et
al. 2024): Llama's attention with biases and sliding windows. Command R (Cohere 2024): parallel attention and gated MLP
with one shared norm without bias, interleaved rotary embeddings. OPT (Zhang et al. 2022): GPT-2 with ReLU, positions
start at row 2. Nemotron (Parmar et al. 2024, arXiv 2402.16819): LayerNorms multiply by 1 + weight, squared ReLU,
rotary embeddings on half of each head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_megatron.convert.decoder_rules import DecoderNames, decoder_rules
from lightning_megatron.convert.family import Family, causal_lm, classifiers
from lightning_megatron.convert.model_fields import Fields
from lightning_megatron.convert.rules import Rule
from lightning_megatron.errors import ConfigError, require_divides
from lightning_megatron.models.config import ModelConfig


def _gpt2(hf: Any) -> Fields:
    return {
        "ffn_hidden_size": 4 * hf.n_embd if hf.n_inner is None else hf.n_inner,
        "num_query_groups": 1 if getattr(hf, "multi_query", False) else hf.n_head,
        "softmax_scale": None if hf.scale_attn_weights else 1.0,
    }


def _bloom(hf: Any) -> Fields:
    # seq_length is that of the training; ALiBi itself has no limit.
    return {
        "ffn_hidden_size": 4 * hf.hidden_size,
        "max_position_embeddings": getattr(hf, "seq_length", 2048),
    }


def _falcon(hf: Any) -> Fields:
    # head_dim is derived.
    require_divides("num_attention_heads", hf.num_attention_heads, "hidden_size", hf.hidden_size)
    norms = 1
    if hf.new_decoder_architecture:
        groups = hf.num_kv_heads
        norms = hf.num_ln_in_parallel_attn or 2
    elif hf.multi_query:
        groups = 1
    else:
        groups = hf.num_attention_heads
    positions = {"position_embedding_type": "alibi", "alibi_scaled": True} if hf.alibi else {}
    return {
        "num_query_groups": groups,
        "parallel_attention_norms": norms,
        # Hugging Face applies attention_dropout to the output of attention, unless attention and MLP are parallel, and
        # to attention weights only with ALiBi.
        "attention_output_dropout": None if hf.parallel_attn else hf.attention_dropout,
        "attention_dropout": hf.attention_dropout if hf.alibi else 0.0,
        **positions,
    }


def _falcon_rules(names: DecoderNames, model: ModelConfig) -> Sequence[Rule]:
    if model.parallel_attention and model.parallel_attention_norms == 2:
        names = replace(names, input_norm="ln_attn", mlp_norm="ln_mlp")
    return decoder_rules(names, model)


def _gpt_neox(hf: Any) -> Fields:
    # Hugging Face applies dropout to the output of each parallel block; here it is applied once, to their sum.
    if hf.use_parallel_residual and hf.hidden_dropout > 0.0:
        raise ConfigError(
            f"hidden_dropout={hf.hidden_dropout} of this {hf.model_type} config: expected 0.0 with "
            "use_parallel_residual=True, where attention and MLP have no separate dropout; use 0.0"
        )
    if hf.model_type == "stablelm":
        return {"attention_output_dropout": 0.0}
    return {"parallel_attention_norms": 2, "embedding_dropout": hf.hidden_dropout}


def _opt(hf: Any) -> Fields:
    if hf.word_embed_proj_dim != hf.hidden_size:
        raise ConfigError(
            f"word_embed_proj_dim={hf.word_embed_proj_dim} of this opt config: expected hidden_size={hf.hidden_size}, "
            "as there is no projection of the embeddings; use another size of OPT"
        )
    return {"layernorm_epsilon": 1e-5, "position_offset": 2}


_GPT2_NAMES = DecoderNames(
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
_BLOOM_NAMES = DecoderNames(
    base="transformer.",
    embedding="word_embeddings",
    embedding_norm="word_embeddings_layernorm",
    final_norm="ln_f",
    layer="h.{layer}.",
    qkv=("self_attention.query_key_value",),
    is_megatron_order=True,
    proj="self_attention.dense",
    fc1=("mlp.dense_h_to_4h",),
    fc2="mlp.dense_4h_to_h",
)
"""Also used for Falcon."""
_GPT_NEOX_NAMES = DecoderNames(
    base="gpt_neox.",
    embedding="embed_in",
    final_norm="final_layer_norm",
    qkv=("attention.query_key_value",),
    is_megatron_order=True,
    proj="attention.dense",
    fc1=("mlp.dense_h_to_4h",),
    fc2="mlp.dense_4h_to_h",
    output="embed_out",
)
_OPT_NAMES = DecoderNames(
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

_GATED = {"gated_linear_unit": True, "add_bias_linear": False}


FAMILIES = (
    Family(
        name="gpt2",
        architectures={"causal_lm": "GPT2LMHeadModel"},
        heads=classifiers("GPT2", token_module="classifier"),
        defaults={"scaled_residual_init": True},
        custom_fields=_gpt2,
        names=_GPT2_NAMES,
        # reorder_and_upcast_attn only changes the rounding of 16-bit scores, which here are accumulated in float32.
        required={
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
    ),
    Family(
        name="gpt_bigcode",
        architectures=causal_lm("GPTBigCode"),
        heads=classifiers("GPTBigCode", token_module="classifier"),
        defaults={"scaled_residual_init": True},
        custom_fields=_gpt2,
        # c_attn is in Megatron's order: all queries, the key, the value; without multi_query these of each head.
        names=replace(_GPT2_NAMES, is_transposed=False, is_megatron_order=True),
        # attention_softmax_in_fp32 and scale_attention_softmax_in_fp32 only change rounding: softmax here is float32.
        required={"add_cross_attention": (False,)},
    ),
    Family(
        name="bloom",
        architectures=causal_lm("Bloom"),
        heads=classifiers("Bloom", token_module="classifier"),
        defaults={
            "activation": "gelu_tanh",
            "embedding_layernorm": True,
            "position_embedding_type": "alibi",
        },
        custom_fields=_bloom,
        names=_BLOOM_NAMES,
        required={
            "apply_residual_connection_post_layernorm": (False,),
            # It omits the biases of the output projections if pretraining_tp is more than 1.
            "slow_but_exact": (False,),
        },
    ),
    Family(
        name="falcon",
        architectures=causal_lm("Falcon"),
        heads=classifiers("Falcon", token_module="classifier"),
        defaults={},
        custom_fields=_falcon,
        names=_BLOOM_NAMES,
        rules=_falcon_rules,
    ),
    Family(
        name="gpt_neox",
        architectures=causal_lm("GPTNeoX"),
        heads=classifiers("GPTNeoX", token_module="classifier"),
        defaults={},
        custom_fields=_gpt_neox,
        names=_GPT_NEOX_NAMES,
        partial_rotary=True,
    ),
    # StableLM 2 12B and Command R+ have QK norms with separate weights for each head, which are not supported.
    Family(
        name="stablelm",
        architectures=causal_lm("StableLm"),
        heads=classifiers("StableLm"),
        defaults=_GATED,
        custom_fields=_gpt_neox,
        required={"qk_layernorm": (False,)},
        partial_rotary=True,
    ),
    Family(
        name="starcoder2",
        architectures=causal_lm("Starcoder2"),
        heads=classifiers("Starcoder2"),
        defaults={},
        names=DecoderNames(fc1=("mlp.c_fc",), fc2="mlp.c_proj"),
    ),
    Family(
        name="cohere",
        architectures=causal_lm("Cohere"),
        defaults={
            **_GATED,
            "norm_bias": False,
            "parallel_attention": True,
            "rotary_interleaved": True,
        },
        required={"use_qk_norm": (False, None)},
    ),
    Family(
        name="nemotron",
        architectures=causal_lm("Nemotron"),
        heads=classifiers("Nemotron"),
        defaults={"zero_centered_norms": True},
        names=DecoderNames(fc1=("mlp.up_proj",)),
        partial_rotary=True,
    ),
    Family(
        name="opt",
        architectures=causal_lm("OPT"),
        heads=classifiers("OPT", has_tokens=False),
        defaults={},
        custom_fields=_opt,
        names=_OPT_NAMES,
        required={
            # E.g. OPT 350m normalizes after each block.
            "do_layer_norm_before": (True,),
            "_remove_final_layer_norm": (False,),
            "layer_norm_elementwise_affine": (True,),
            "layerdrop": (0.0,),
        },
    ),
)
