"""GPT-2 (Radford et al. 2019): learned absolute positions, LayerNorm before each block, a tied output layer.

And GPT-BigCode (Allal et al. 2023, SantaCoder; Li et al. 2023, StarCoder), whose heads share one key and value.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_megatron.convert.family import activation
from lightning_megatron.convert.gpt_tables import DecoderNames, decoder, described
from lightning_megatron.models.config import ModelConfig

_NAMES = DecoderNames(
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


def _described(hf: Any, num_query_groups: int) -> ModelConfig:
    own = {
        "ffn_hidden_size": 4 * hf.n_embd if hf.n_inner is None else hf.n_inner,
        "num_query_groups": num_query_groups,
        "layernorm_epsilon": hf.layer_norm_epsilon,
        "activation": activation(hf.activation_function),
        "softmax_scale": None if hf.scale_attn_weights else 1.0,
        "embedding_dropout": hf.embd_pdrop,
        "hidden_dropout": hf.resid_pdrop,
        "attention_dropout": hf.attn_pdrop,
        "scaled_residual_init": True,
    }
    return described(hf, own)


def _gpt2(hf: Any) -> ModelConfig:
    return _described(hf, hf.n_head)


def _gpt_bigcode(hf: Any) -> ModelConfig:
    return _described(hf, 1 if hf.multi_query else hf.n_head)


FAMILIES = (
    decoder(
        *("gpt2", "GPT2LMHeadModel", _gpt2, _NAMES),
        # reorder_and_upcast_attn changes the rounding of 16-bit scores only, and ours are added in float32.
        required={"scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    ),
    decoder(
        *("gpt_bigcode", "GPTBigCodeForCausalLM", _gpt_bigcode),
        # c_attn is in Megatron's order: all queries, the key, the value; without multi_query each head's.
        replace(_NAMES, is_transposed=False, is_in_megatrons_order=True),
        # attention_softmax_in_fp32 and scale_attention_softmax_in_fp32 are about rounding; our softmax is in float32.
        required={"add_cross_attention": (False,)},
    ),
)
