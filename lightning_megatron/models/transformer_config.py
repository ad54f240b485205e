"""Build Megatron-Core's ``TransformerConfig`` from a ``ModelConfig`` and run settings; no other module builds one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from lightning_megatron.engine.ops.fp8 import Recipe, check_fp8
from lightning_megatron.engine.overrides import SAME_NAME_FIELDS, Overrides, build_config
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError, require_choice, require_number
from lightning_megatron.models.config import Activation, ModelConfig
from lightning_megatron.models.rotary import rope_softmax_scale


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Activation recomputation (activation checkpointing)."""

    granularity: Literal["selective", "full"] | None = None
    """``selective`` recomputes norms and MLP activations, ``full`` entire layers, None nothing."""
    method: Literal["uniform", "block"] = "uniform"
    """For ``full``: all layers in groups (uniform), or only the first ``num_layers`` of each model chunk (block)."""
    num_layers: int = 1
    """For ``full``: layers per recomputed group (uniform), or recomputed layers per model chunk (block)."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ConfigError: If a field is not one of its choices.
        """
        if self.granularity is not None:
            require_choice("recompute", self.granularity, ("selective", "full"))
        require_choice("recompute_method", self.method, ("uniform", "block"))
        require_number("recompute_num_layers", self.num_layers, at_least=1)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Run settings that determine how model chunks are built, but not what they compute."""

    parallel: ParallelConfig
    params_dtype: torch.dtype
    device: torch.device
    distributed_optimizer: bool = True
    """Whether the optimizer state is sharded over data-parallel ranks (ZeRO-1)."""
    overlap_communication: bool = False
    """Whether gradient reduction overlaps the backward pass, and parameter all-gathers the next forward pass."""
    recompute: Recompute = field(default_factory=Recompute)
    overrides: Overrides = field(default_factory=Overrides)
    fp8: Recipe | None = None
    """fp8 recipe of the linear layers; None to compute them in ``params_dtype``."""
    cuda_graphs: bool = False
    """Whether training microbatches are captured in CUDA graphs and replayed."""

    @property
    def overlaps_gathers(self) -> bool:
        """Whether parameter all-gathers overlap computation, which needs the distributed optimizer."""
        return self.overlap_communication and self.distributed_optimizer

    def check_model(self, model: ModelConfig, function: str | None = None) -> None:
        """Check that ``model`` supports these settings.

        Args:
            model: The model's config.
            function: Trainer function, e.g. ``fit`` or ``predict``; None if unknown.

        Raises:
            ConfigError: If the model does not support the layout, recomputation, CUDA graphs, dtype or fp8 recipe.
        """
        self.parallel.check_model(model)
        _check_expert_fields(model, self.overrides.transformer)
        if self.recompute.granularity == "selective":
            _check_recompute_modules(
                model, self.overrides.transformer.get("recompute_modules") or ()
            )
        if model.experts is not None:
            _check_experts(self)
            if function is not None:  # conversions compute nothing
                _check_grouped_mm(
                    self.params_dtype, model.hidden_size, model.experts.ffn_hidden_size
                )
            self.parallel.check_function(model, function)
        if self.cuda_graphs:
            _check_graphs(self)
        if self.fp8 is not None:
            check_fp8(model, self.parallel.tp, self.params_dtype, self.device)


def _refuse(option: str, expected: str, reasons: Mapping[str, bool]) -> None:
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise ConfigError(f"{option}: expected {expected}, got {reason}; leave it out")


def _check_graphs(settings: EngineSettings) -> None:
    tp, pp, cp = settings.parallel.tp, settings.parallel.pp, settings.parallel.cp
    reasons = {
        f"tp={tp}, pp={pp} and cp={cp} (ranks would wait for each other)": tp * pp * cp > 1,
        f"a {settings.device.type}": settings.device.type != "cuda",
        "16-mixed (its loss scale changes)": settings.params_dtype is torch.float16,
        "recompute='full' (it reads RNG states)": settings.recompute.granularity == "full",
        "overlap_communication=True (gradients are reduced after the replays)": settings.overlap_communication,
        "fp8 (weights are quantized once a step, not once a microbatch)": settings.fp8 is not None,
    }
    _refuse("cuda_graphs=True", "tp=1, pp=1 and cp=1 on GPUs, in bf16 or fp32", reasons)


def _check_experts(settings: EngineSettings) -> None:
    reasons = {
        "cuda_graphs=True (the host must know how many tokens go to each expert)": settings.cuda_graphs,
        "fp8 (experts are computed in bf16)": settings.fp8 is not None,
        "16-mixed (megatron-core has a separate loss scale for experts)": settings.params_dtype
        is torch.float16,
    }
    _refuse("a model with experts", "bf16-mixed or 32-true", reasons)


def _check_grouped_mm(dtype: torch.dtype, hidden_size: int, ffn_hidden_size: int) -> None:
    multiple = (
        16 // dtype.itemsize
    )  # torch.nn.functional.grouped_mm needs rows of a multiple of 16 bytes
    for name, size in (("hidden_size", hidden_size), ("experts' ffn_hidden_size", ffn_hidden_size)):
        if size % multiple:
            dtype_name = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"{name}={size}: expected a multiple of {multiple} in {dtype_name}; choose another"
            )


def _check_recompute_modules(model: ModelConfig, modules: Collection[str]) -> None:
    """Raise if the model does not support a user's ``recompute_modules``.

    An MLP with biases returns its output bias, a parameter, beside its output. megatron-core 0.16.1,
    tensor_parallel/random.py:CheckpointFunction treats it as recomputed, and its backward pass recurses endlessly.
    """
    refused = {
        "recompute_modules with 'core_attn' cannot train T5's attention bias: the engine would walk through its graph "
        "once per layer (and the attention in use keeps no scores that recomputing could save); leave it out": (
            model.architecture == "t5" and "core_attn" in modules
        ),
        f"recompute_modules={sorted(modules)} is not supported by a layer with parallel attention and MLP; use "
        "'core_attn' and 'layernorm', or recompute='full'": (
            model.parallel_attention and not {"core_attn", "layernorm"}.issuperset(modules)
        ),
        "recompute_modules with 'mlp': expected MLPs without biases; use 'layernorm', or recompute='full'": (
            model.add_bias_linear and "mlp" in modules
        ),
    }
    for message, holds in refused.items():
        if holds:
            raise ConfigError(message)


def _check_expert_fields(model: ModelConfig, overrides: Mapping[str, Any]) -> None:
    """Check a user's ``moe_*`` overrides; a sigmoid router needs an expert bias, by which checkpoints identify it."""
    for name in overrides:
        if name.startswith("moe_") and model.experts is None:
            raise ConfigError(
                f"{name}: expected a model with experts, got {model.family} without; leave it out"
            )
    names = "moe_router_score_function", "moe_router_enable_expert_bias"
    is_sigmoid, has_bias = overrides.get(names[0]) == "sigmoid", overrides.get(names[1], False)
    if is_sigmoid != has_bias:
        raise ConfigError(
            f"transformer_config_overrides: expected {names[0]}='sigmoid' and {names[1]}=True together, got one of "
            "them; set both, or none"
        )


ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def transformer_config(model: ModelConfig, settings: EngineSettings) -> TransformerConfig:
    """Build Megatron's config of ``model`` under ``settings``.

    Raises:
        ConfigError: If the model does not support the settings, or a user's overrides do not fit the other fields.
    """
    settings.check_model(model)
    fields = {
        **_architecture(model, settings.device),
        **_layout(settings.parallel, settings.params_dtype),
        "cp_comm_type": settings.parallel.comm_type_of(model),
        **_numerics(model, settings),
        **_recompute(settings.recompute),
        **_experts(model, settings.parallel),
    }
    return build_config(TransformerConfig, fields, settings.overrides.transformer)


def _architecture(model: ModelConfig, device: torch.device) -> dict[str, Any]:
    scaling = model.rope_scaling if model.position_embedding_type == "rope" else None
    return {
        **{name: getattr(model, name) for name in SAME_NAME_FIELDS},
        "activation_func": ACTIVATIONS[model.activation],
        "bias_activation_fusion": device.type == "cuda"
        and model.gated_linear_unit
        and model.activation == "silu",
        "layernorm_zero_centered_gamma": model.zero_centered_norms,
        "no_rope_freq": [int(layer in model.no_rope_layers) for layer in range(model.num_layers)]
        if model.no_rope_layers and model.position_embedding_type == "rope"
        else None,
        "softmax_scale": rope_softmax_scale(model.softmax_scale, model.kv_channels, scaling),
    }


def _layout(parallel: ParallelConfig, dtype: torch.dtype) -> dict[str, Any]:
    interleaved = parallel.vpp is not None
    implies_last = parallel.pp == 2 and parallel.num_layers_in_first_pipeline_stage is not None
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_pipeline_stage,
        # With pp=2 the first stage implies the last: megatron-core 0.16.1, transformer/transformer_layer.py, would
        # divide by the number of stages in between.
        "num_layers_in_last_pipeline_stage": None
        if implies_last
        else parallel.num_layers_in_last_pipeline_stage,
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
    dtype, on_gpu = settings.params_dtype, settings.device.type == "cuda"
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
    """Whether QKV split and rotary embedding can be fused: full heads, rotated as halves, in all layers, no QK norm."""
    is_full = (
        model.rotary_width == model.kv_channels
        and not model.rotary_interleaved
        and not model.no_rope_layers
    )
    is_rotary = model.position_embedding_type == "rope" and is_full
    return is_rotary and not model.qk_layernorm and model.num_query_groups >= parallel.tp


def _skip_init(weight: torch.Tensor) -> torch.Tensor:
    """Return a new weight unchanged: models/build.py initializes it, the same on every layout.

    With ``perform_initialization=False`` megatron-core 0.16.1, tensor_parallel/layers.py, would not mark the weight as
    tensor-parallel either, and the gradient norm would miss every shard but the first.
    """
    return weight


def _experts(model: ModelConfig, parallel: ParallelConfig) -> dict[str, Any]:
    if (experts := model.experts) is None:
        return {}
    layers = [int(model.has_experts(layer)) for layer in range(model.num_layers)]
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.topk,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": experts.shared_ffn_hidden_size > 0,
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
    return {
        f"recompute_{name}": value
        for name, value in vars(recompute).items()
        if recompute.granularity
    }
