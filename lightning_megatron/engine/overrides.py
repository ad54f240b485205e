"""Fields of Megatron-Core's three configs that a user sets by hand, and which of them may be.

What an option of this package or of the Trainer says is refused with that option: two places for one setting would be
two truths, and checkpoints, planner and checks know only the first. Refused, too, is what would change nothing here.

Read in megatron-core 0.16.1 for the optimizer: ``use_precision_aware_optimizer`` is Transformer Engine's FusedAdam, and
``OptimizerConfig`` raises without it. ``optimizer_cpu_offload`` needs none, and has three gaps: on CPUs
``HybridDeviceOptimizer`` fails in its first step (``cpu_copys_map_gpu_param`` has no weight that is there already); it
loads a state only where all weights have 16 bits (``_update_fp32_params_by_new_state`` looks for fp32 copies of fp32
weights); and masters live inside of it, so that shards of the parameter groups, which a checkpoint takes for masters,
are the 16-bit weights.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeVar, get_type_hints

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from lightning_megatron.errors import ConfigError, require_choice, require_kind, require_number

_Config = TypeVar("_Config", TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
LEAST_LOSS_SCALE = 2.0**-24
"""The smallest number of fp16."""
_OPTIONS = {
    TransformerConfig: "transformer_config_overrides",
    OptimizerConfig: "optimizer_config_overrides",
    DistributedDataParallelConfig: "ddp_config_overrides",
}
_OURS = "leave it out: it is set as this package's layers and schedules need it"
_FP8 = "use MegatronStrategy(fp8=)"
_MODEL = "set it in the model's config"
_OVERLAP = "use MegatronStrategy(overlap_communication=)"
_PRECISION = "use Trainer(precision=)"
_SHARDED = "use MegatronStrategy(distributed_optimizer=)"
_SHARDED_WEIGHTS = "leave it out: Megatron's FSDP is not used; tp and pp split the weights"
_UNREAD = "leave it out: nothing reads it here"
_OFFLOAD = (
    "leave it out: megatron-core 0.16.1 keeps offloaded masters where no checkpoint of this package finds them; "
    "distributed_optimizer=True divides the optimizer's state by dp"
)
_INSTEAD: dict[type, dict[str, str]] = {
    TransformerConfig: {
        _MODEL: "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels normalization "
        "layernorm_epsilon activation_func gated_linear_unit add_bias_linear add_qkv_bias qk_layernorm softmax_scale "
        "hidden_dropout attention_dropout init_method_std num_moe_experts moe_layer_freq moe_router_topk "
        "moe_ffn_hidden_size moe_router_pre_softmax moe_aux_loss_coeff moe_shared_expert_intermediate_size "
        "moe_shared_expert_gate",
        "use MegatronStrategy(ep=)": "expert_model_parallel_size",
        _UNREAD: "moe_shared_expert_overlap moe_enable_routing_replay moe_router_topk_limited_devices "
        "moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_router_num_groups moe_router_group_topk "
        "moe_router_topk_scaling_factor moe_grouped_gemm moe_use_legacy_grouped_gemm moe_z_loss_coeff "
        "moe_token_dropping moe_enable_deepep moe_flex_dispatcher_backend moe_per_layer_logging moe_permute_fusion "
        "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_router_fusion "
        "moe_apply_probs_on_input moe_latent_size moe_deepep_num_sms moe_hybridep_num_sms",
        "use MegatronStrategy(tp=)": "tensor_model_parallel_size",
        "use MegatronStrategy(pp=)": "pipeline_model_parallel_size",
        "use MegatronStrategy(vpp=)": "virtual_pipeline_model_parallel_size",
        "use MegatronStrategy(cp=)": "context_parallel_size",
        "use MegatronStrategy(cp_comm_type=)": "cp_comm_type",
        "use MegatronStrategy(sequence_parallel=)": "sequence_parallel",
        "use the option of MegatronStrategy of this name": "num_layers_in_first_pipeline_stage "
        "num_layers_in_last_pipeline_stage",
        "use MegatronStrategy(recompute=)": "recompute_granularity recompute_method recompute_num_layers "
        "moe_layer_recompute",
        "use MegatronStrategy(cuda_graphs=)": "enable_cuda_graph cuda_graph_impl cuda_graph_scope",
        "leave it out: it is for attention of Transformer Engine and norms of Apex": "window_size softmax_type "
        "persist_layer_norm memory_efficient_layer_norm",
        _FP8: "fp8 fp8_recipe fp8_param",
        _PRECISION: "params_dtype pipeline_dtype bf16 fp16",
        _OURS: "calculate_per_token_loss overlap_p2p_comm batch_p2p_comm perform_initialization init_method "
        "output_layer_init_method embedding_init_method deallocate_pipeline_outputs expert_tensor_parallel_size "
        "moe_router_dtype moe_router_load_balancing_type defer_embedding_wgrad_compute wgrad_deferral_limit",
    },
    OptimizerConfig: {
        "use MegatronModule(lr=)": "lr",
        "use LRSchedule(min_lr=)": "min_lr",
        "use MegatronModule(optimizer=OptimizerOptions(...))": "optimizer weight_decay adam_beta1 adam_beta2 adam_eps "
        "decoupled_weight_decay sgd_momentum initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        "use OptimizerOptions(multipliers=)": "decoupled_lr decoupled_min_lr apply_wd_to_qk_layernorm",
        "use Trainer(gradient_clip_val=)": "clip_grad",
        _PRECISION: "params_dtype bf16 fp16",
        _FP8: "fp8_recipe reuse_grad_buf_for_mxfp8_param_ag",
        _SHARDED: "use_distributed_optimizer",
        _OVERLAP: "overlap_param_gather overlap_param_gather_with_optimizer_step",
        _OFFLOAD: "optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload "
        "overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params",
        "leave it out: it is Transformer Engine's Adam, and moments and masters are fp32 here": "main_grads_dtype "
        "use_precision_aware_optimizer store_param_remainders main_params_dtype exp_avg_dtype exp_avg_sq_dtype",
        _UNREAD: "log_num_zeros_in_grad muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode "
        "muon_fp32_matmul_prec muon_num_ns_steps muon_tp_mode muon_extra_scale_factor",
    },
    DistributedDataParallelConfig: {
        _SHARDED: "use_distributed_optimizer",
        _OVERLAP: "overlap_grad_reduce overlap_param_gather",
        "use MegatronStrategy(on_nan=)": "check_for_nan_in_grad",
        "leave it out: losses are divided by the targets of the global batch": "average_in_collective",
        "leave it out: the optimizer's state is split over all copies": "num_distributed_optimizer_instances",
        _FP8: "fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache",
        _SHARDED_WEIGHTS: "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy preserve_fp32_weights "
        "suggested_communication_unit_size fsdp_double_buffer outer_dp_sharding_strategy fsdp_manual_registration "
        "gradient_reduce_div_fusion",
        _UNREAD: "align_param_gather delay_wgrad_compute",
    },
}
"""Fields that are refused, by what to do instead."""


@dataclass(frozen=True)
class Overrides:
    """What a user sets by hand: fields of Megatron's configs, and their values."""

    transformer: Mapping[str, Any] = field(default_factory=dict)
    """Of ``TransformerConfig``."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Of ``OptimizerConfig``."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Of ``DistributedDataParallelConfig``."""

    @classmethod
    def of(cls, *given: Mapping[str, Any] | None) -> Self:
        """Those of the fields above, in their order; None for none."""
        return cls(*(dict(each or {}) for each in given))

    def __post_init__(self) -> None:
        """Check each field by itself, before any process is started.

        Raises:
            ConfigError: If there is no such field, its value is of another type, or something else says it here.
        """
        for kind, given in ((TransformerConfig, self.transformer), (OptimizerConfig, self.optimizer),
                            (DistributedDataParallelConfig, self.ddp)):  # fmt: skip
            for name, value in given.items():
                _check(kind, name, value)


def _check(kind: type, name: str, value: object) -> None:
    option, known = _OPTIONS[kind], {each.name: each for each in fields(kind) if each.init}
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        fix = f"did you mean {close[0]!r}?" if close else "remove it"
        raise ConfigError(f"{option}: expected fields of Megatron's {kind.__name__}, got {name!r}; {fix}")
    for instead, refused in _INSTEAD[kind].items():
        if name in refused.split():
            raise ConfigError(f"{option}: expected no {name!r}, got {name}={value!r}; {instead}")
    if value is not None or known[name].default is not None:
        require_kind(f"{option}: {name}", value, _annotations(kind)[name])
    if name == "moe_token_dispatcher_type":
        require_choice(f"{option}: {name}", value, ("alltoall", "allgather"))
    if name == "loss_scale" and value is not None:
        require_number(f"{option}: {name}", value, LEAST_LOSS_SCALE)


@functools.cache
def _annotations(kind: type) -> dict[str, str]:
    """Types of the fields as ``require_kind`` spells them; those that it does not know are not checked."""
    plain: dict[Any, str] = {each: each.__name__ for each in (bool, int, float, str)}
    plain |= {each | None: f"{name} | None" for each, name in plain.items()}
    return {name: plain.get(hint, "") for name, hint in get_type_hints(kind).items()}


def configured(kind: type[_Config], chosen: Mapping[str, Any], overrides: Mapping[str, Any]) -> _Config:
    """A config of Megatron's, with what this package has chosen and ``overrides`` by hand, which win.

    Raises:
        ConfigError: If fields that were set by hand do not go together with the others.
    """
    try:
        return kind(**{**chosen, **overrides})
    except (AssertionError, ValueError, TypeError) as error:
        if not overrides:
            raise
        given = ", ".join(f"{name}={value!r}" for name, value in overrides.items())
        raise ConfigError(f"{_OPTIONS[kind]}: got {given}, and Megatron says: {error}; correct it") from error
