"""Which module stands in which slot of a Megatron layer?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from lightning_megatron.engine.fillers.attention import SDPAttention
from lightning_megatron.engine.fillers.norm import Norm
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.parallel_layer import ParallelTransformerLayer

CHECKPOINT_NAMES = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Transformer Engine fuses norms into the linear that follows; Megatron's checkpoints carry its names."""


class _RowParallelLinearWithBias(RowParallelLinear):
    """With a bias, whatever ``add_bias_linear`` says: the engine has one switch for attention and MLP."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": True})


class _RowParallelLinearWithoutBias(RowParallelLinear):
    """Without a bias, whatever ``add_bias_linear`` says."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": False})


def self_attention_spec(attn_mask_type: AttnMaskType) -> ModuleSpec:
    """Self-attention whose linears have the biases that the engine's config says; BERT's and T5's."""
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": attn_mask_type},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=SDPAttention, linear_proj=RowParallelLinear
        ),
    )


def gpt_layer_spec(model: ModelConfig, layer: int) -> ModuleSpec:
    """One pre-norm decoder layer: causal self-attention, then (or beside it) the MLP.

    Args:
        model: The description.
        layer: Its number in the whole model, from 0.
    """
    shares_norm = model.parallel_attention and model.parallel_attention_norms == 1
    return ModuleSpec(
        module=ParallelTransformerLayer if model.parallel_attention else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=_self_attention(model, layer),
            ),
            self_attn_bda=_bias_dropout_add(model.attention_output_dropout),
            pre_mlp_layernorm=IdentityOp if shares_norm else Norm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            ),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=dict(CHECKPOINT_NAMES),
        ),
    )


def gpt_block_spec(model: ModelConfig, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers that this rank (and this model chunk) holds, and the final norm."""
    first = get_transformer_layer_offset(config, vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    return TransformerBlockSubmodules(layer_specs=[gpt_layer_spec(model, layer) for layer in layers], layer_norm=Norm)


def _self_attention(model: ModelConfig, layer: int) -> SelfAttentionSubmodules:
    return SelfAttentionSubmodules(
        linear_qkv=_qkv_with_bias if model.add_qkv_bias else _qkv_without_bias,
        core_attention=_core_attention(model, layer),
        linear_proj=_RowParallelLinearWithBias if model.has_attention_output_bias else _RowParallelLinearWithoutBias,
        q_layernorm=Norm if model.qk_layernorm else None,
        k_layernorm=Norm if model.qk_layernorm else None,
    )


def _qkv_with_bias(*args: Any, **kwargs: Any) -> ColumnParallelLinear:
    return ColumnParallelLinear(*args, **{**kwargs, "bias": True})


def _qkv_without_bias(*args: Any, **kwargs: Any) -> ColumnParallelLinear:
    # megatron-core 0.16.1, transformer/attention.py: add_bias_linear also gives the projection of q, k, v a bias.
    return ColumnParallelLinear(*args, **{**kwargs, "bias": False})


def _core_attention(model: ModelConfig, layer: int) -> Callable[..., SDPAttention]:
    options: dict[str, Any] = {}
    if model.position_embedding_type == "alibi":
        options["alibi"] = "falcon" if model.alibi_scaled else "bloom"
    if model.sliding_window_layers is None or layer in model.sliding_window_layers:
        options["sliding_window"] = model.sliding_window
    return partial(SDPAttention, **{name: value for name, value in options.items() if value is not None})


def _bias_dropout_add(probability: float | None) -> Callable[..., Any]:
    """Megatron's bias, dropout and addition in one; ``probability`` replaces the layer's if it is given."""
    if probability is None:
        replaced: Callable[..., Any] = get_bias_dropout_add
        return replaced

    def get(training: bool, fused: bool) -> Callable[..., Any]:
        add = get_bias_dropout_add(training, fused)
        return lambda x_with_bias, residual, _: add(x_with_bias, residual, probability)

    return get
