"""Build Megatron-Core's ``TransformerConfig`` from a ``ModelConfig`` and run settings; no other module builds one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from lightning_megatron.engine.overrides import SAME_NAME_FIELDS, build_config
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.engine.settings import EngineSettings, Recompute
from lightning_megatron.models.checks import check_model
from lightning_megatron.models.config import Activation, ModelConfig
from lightning_megatron.models.layout import comm_type_of
from lightning_megatron.models.rotary import rope_softmax_scale


def _of_each_layer(x: Tensor) -> Tensor:
    raise AssertionError("xIELU has parameters: models/layers.py sets the function of each layer")


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": squared_relu,
    "silu": F.silu,
    "xielu": _of_each_layer,
}


def transformer_config(model: ModelConfig, settings: EngineSettings) -> TransformerConfig:
    """Build Megatron's config of ``model`` under ``settings``.

    Raises:
        ConfigError: If the model does not support the settings, or a user's overrides do not fit the other fields.
    """
    check_model(model, settings)
    fields = {
        **_architecture(model, settings.device),
        **_layout(settings.parallel, settings.params_dtype),
        "cp_comm_type": comm_type_of(model, settings.parallel),
        **_numerics(model, settings),
        **_recompute(settings.recompute),
        **_experts(model, settings.parallel),
    }
    return build_config(TransformerConfig, fields, settings.overrides.transformer)


def _architecture(model: ModelConfig, device: torch.device) -> dict[str, Any]:
    scaling = None
    softmax_scale = model.softmax_scale
    without_rope = None
    if model.position_embedding_type == "rope":
        # Latent attention multiplies the rotated dimensions, a part of each head.
        if model.latent_attention is None:
            scaling = model.rope_scaling
        elif softmax_scale is None:
            # By the width of heads, also where queries are as wide as latents, in generation.
            softmax_scale = model.kv_channels**-0.5
        if model.no_rope_layers:
            layers = range(model.num_layers)
            without_rope = [int(layer in model.no_rope_layers) for layer in layers]
    is_swiglu = model.gated_linear_unit and model.activation == "silu"
    return {
        **{name: getattr(model, name) for name in SAME_NAME_FIELDS},
        "activation_func": ACTIVATIONS[model.activation],
        "bias_activation_fusion": device.type == "cuda" and is_swiglu,
        "layernorm_zero_centered_gamma": model.zero_centered_norms,
        "no_rope_freq": without_rope,
        **_linear_attention(model),
        "softmax_scale": rope_softmax_scale(softmax_scale, model.kv_channels, scaling),
        # Of the output projection's input; models/latent_attention.py knows the width of queries and keys.
        "kv_channels": model.value_width,
    }


def _linear_attention(model: ModelConfig) -> dict[str, Any]:
    linear = model.linear_attention
    if linear is None:
        return {}
    layers = range(model.num_layers)
    return {
        # Checkpoints then have the number of a layer in the names of its weights, as layers differ.
        "linear_attention_freq": [int(model.has_linear_attention(layer)) for layer in layers],
        "linear_conv_kernel_dim": linear.conv_kernel_dim,
        "linear_key_head_dim": linear.key_head_dim,
        "linear_value_head_dim": linear.value_head_dim,
        "linear_num_key_heads": linear.num_key_heads,
        "linear_num_value_heads": linear.num_value_heads,
    }


def _layout(parallel: ParallelConfig, dtype: torch.dtype) -> dict[str, Any]:
    interleaved = parallel.vpp is not None
    first = parallel.num_layers_in_first_pipeline_stage
    last = parallel.num_layers_in_last_pipeline_stage
    if parallel.pp == 2 and first is not None:
        # The first stage implies the last: megatron-core 0.16.1, transformer/transformer_layer.py, would divide by the
        # number of stages in between.
        last = None
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "num_layers_in_first_pipeline_stage": first,
        "num_layers_in_last_pipeline_stage": last,
        "context_parallel_size": parallel.cp,
        "sequence_parallel": parallel.uses_sequence_parallel,
        "pipeline_dtype": dtype,
        # pipeline_parallel/p2p_communication.py: batched messages deadlock in the interleaved schedule with pp=2.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # Synchronizing after each batched message works around a race in PyTorch before 2.0.
        "batch_p2p_sync": False,
    }


def _numerics(model: ModelConfig, settings: EngineSettings) -> dict[str, Any]:
    dtype = settings.params_dtype
    on_gpu = settings.device.type == "cuda"
    return {
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "bias_dropout_fusion": on_gpu,
        "gradient_accumulation_fusion": True,
        # engine/ops/peer_copies.py, measured for two ranks; it keeps the activations that "selective" recomputes.
        "tp_comm_overlap": on_gpu
        and settings.parallel.tp == 2
        and settings.parallel.uses_sequence_parallel
        and settings.recompute.granularity != "selective",
        # fusions/fused_cross_entropy.py casts its gradient to bf16 for logits of any dtype.
        "cross_entropy_loss_fusion": on_gpu and dtype is torch.bfloat16,
        "cross_entropy_fusion_impl": "native",
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
        "fused_single_qkv_rope": on_gpu and _can_fuse_qkv_rope(model, settings.parallel),
        # pipeline_parallel/schedules.py:pp_pre_forward frees outputs that the interleaved schedule is still sending;
        # and gloo always sends from the tensor itself.
        "deallocate_pipeline_outputs": on_gpu and settings.parallel.vpp is None,
        # The loss is a sum; engine/schedule.py divides it exactly by the number of targets of the global batch.
        "calculate_per_token_loss": True,
        # The default, "full", is a deprecated name for the same, with a warning on every rank.
        "cuda_graph_scope": [],
        "init_method": _skip_init,
        "output_layer_init_method": _skip_init,
        "embedding_init_method": _skip_init,
    }


def _can_fuse_qkv_rope(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Whether QKV split and rotary embedding can be fused: nothing comes between, whole heads rotate, as halves."""
    is_full = (
        model.rotary_width == model.kv_channels
        and not model.rotary_interleaved
        and not model.no_rope_layers
    )
    is_rotary = model.position_embedding_type == "rope" and is_full
    is_plain = (
        not model.qk_layernorm and not model.query_scaling_beta and not model.attention_output_gate
    )
    return is_rotary and is_plain and model.num_query_groups >= parallel.tp


def _skip_init(weight: Tensor) -> Tensor:
    """Return a new weight unchanged: models/build.py initializes it, the same on every layout.

    With ``perform_initialization=False`` megatron-core 0.16.1, tensor_parallel/layers.py, would not mark the weight as
    tensor-parallel either, and the gradient norm would miss every shard but the first.
    """
    return weight


def _experts(model: ModelConfig, parallel: ParallelConfig) -> dict[str, Any]:
    experts = model.experts
    if experts is None:
        return {}
    layers = [int(model.has_experts(layer)) for layer in range(model.num_layers)]
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.topk,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": experts.shared_ffn_hidden_size > 0 and experts.has_shared_gate,
        "moe_router_score_function": experts.score_function,
        # Megatron refuses it with a softmax, whose router here has its bias nevertheless.
        "moe_router_enable_expert_bias": experts.has_selection_bias
        and experts.score_function == "sigmoid",
        "moe_router_topk_scaling_factor": experts.scaling_factor,
        "moe_router_num_groups": experts.num_groups if experts.num_groups > 1 else None,
        "moe_router_group_topk": experts.topk_groups if experts.num_groups > 1 else None,
        "moe_router_pre_softmax": not experts.normalizes_topk,
        "moe_router_dtype": "fp32",
        "moe_aux_loss_coeff": experts.load_balancing_loss_coef,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_token_dispatcher_type": "alltoall",
        # An integer lets checkpoints stack the layers, as for models without experts.
        "moe_layer_freq": 1 if all(layers) else layers,
        "expert_model_parallel_size": parallel.ep,
        # Experts are narrow: distributing them over ranks beats sharding each one. And gloo gathers no uneven shards.
        "expert_tensor_parallel_size": 1,
    }


def _recompute(recompute: Recompute) -> dict[str, Any]:
    if recompute.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    if recompute.granularity is None:
        return {}
    return {f"recompute_{name}": value for name, value in vars(recompute).items()}
