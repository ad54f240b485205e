"""User overrides of fields of Megatron-Core's three configs, and which fields may be overridden.

Those that act here and that nothing else sets may be (``_ALLOWED``), and no other: of the 300 fields most are read by
layers, kernels, optimizers and schedules in whose place this package has its own, and each version adds some. A field
that an option of this package or of the Trainer sets is refused with the name of that option: checkpoints, planner and
checks know only the option. So is one that changes what a model computes, as its exported config would not tell it.

Notes on the optimizer of megatron-core 0.16.1: ``use_precision_aware_optimizer`` is Transformer Engine's FusedAdam, and
``OptimizerConfig`` raises without it. ``optimizer_cpu_offload`` does not need it, and has gaps: on CPUs
``HybridDeviceOptimizer`` fails in its first step (``cpu_copys_map_gpu_param`` lacks weights that are on the CPU
already); it loads a state only if all weights have 16 bits (``_update_fp32_params_by_new_state`` looks for fp32 copies
of fp32 weights); and it keeps the master weights to itself, so that the shards of the parameter groups, which a
checkpoint takes for master weights, are the 16-bit weights. It also updates on the host, and not to the same bits.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from typing import Any, Self, TypeVar, get_type_hints

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from lightning_megatron.engine.parallel import UNEVEN_STAGES
from lightning_megatron.errors import ConfigError, require_choice, require_kind, require_number

_Config = TypeVar("_Config", TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
MIN_LOSS_SCALE = 2.0**-24
"""Smallest positive fp16 number."""
_OPTIONS = {
    TransformerConfig: "transformer_config_overrides",
    OptimizerConfig: "optimizer_config_overrides",
    DistributedDataParallelConfig: "ddp_config_overrides",
}
SAME_NAME_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "normalization",
    "layernorm_epsilon",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "attention_output_gate",
    "qk_layernorm",
    "rotary_interleaved",
    "hidden_dropout",
    "attention_dropout",
)
"""Fields that have the same name in ``TransformerConfig`` and ``ModelConfig``."""
_SAME = "use the option of MegatronStrategy with this name"
_OURS = "leave it out: it is set as this package's layers and schedules need it"
_FP8 = "use MegatronStrategy(fp8=)"
_MODEL = "set it in the model's config"
_OVERLAP = "use MegatronStrategy(overlap_communication=)"
_PRECISION = "use Trainer(precision=)"
_SHARDED = "use MegatronStrategy(distributed_optimizer=)"
_SHARDED_WEIGHTS = "leave it out: Megatron's FSDP is not used; tp and pp split the weights"
_UNREAD = "leave it out: nothing reads it here"
_OFFLOAD = "use MegatronStrategy(offload_optimizer=)"
_REFUSED: dict[type, dict[str, str]] = {
    TransformerConfig: {
        _MODEL: f"{' '.join(SAME_NAME_FIELDS)} activation_func softmax_scale init_method_std num_moe_experts "
        "moe_layer_freq moe_router_topk moe_ffn_hidden_size moe_router_pre_softmax moe_aux_loss_coeff "
        "moe_shared_expert_intermediate_size moe_shared_expert_gate experimental_attention_variant "
        "linear_attention_freq linear_*_dim linear_num_*_heads layernorm_zero_centered_gamma glu_linear_offset "
        "activation_func_clamp_value qk_l2_norm multi_latent_attention no_rope_freq mrope_section "
        "window_attn_skip_freq apply_residual_connection_post_layernorm embedding_init_method_std",
        "use MegatronStrategy(ep=)": "expert_model_parallel_size",
        "use MegatronStrategy(tp=)": "tensor_model_parallel_size",
        "use MegatronStrategy(pp=)": "pipeline_model_parallel_size",
        "use MegatronStrategy(vpp=)": "virtual_pipeline_model_parallel_size",
        "use MegatronStrategy(cp=)": "context_parallel_size",
        _SAME: f"cp_comm_type sequence_parallel {' '.join(UNEVEN_STAGES)}",
        "use MegatronStrategy(recompute=)": "recompute_granularity recompute_method recompute_num_layers "
        "moe_layer_recompute num_microbatches_with_partial_activation_checkpoints cpu_offloading*",
        "use MegatronStrategy(num_layers_in_first_pipeline_stage=, num_layers_in_last_pipeline_stage=)": (
            "account_for_*_in_pipeline_split"
        ),
        "use Trainer(deterministic=True)": "deterministic_mode",
        "use Trainer(profiler=)": "timers barrier_with_L1_time",
        "use MegatronStrategy(cuda_graphs=)": "*cuda_graph*",
        "leave it out: it is for attention of Transformer Engine and norms of Apex": "window_size softmax_type "
        "persist_layer_norm memory_efficient_layer_norm",
        _FP8: "fp8*",
        _PRECISION: "params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype",
        _OURS: "calculate_per_token_loss overlap_p2p_comm batch_p2p_comm perform_initialization init_method "
        "output_layer_init_method embedding_init_method deallocate_pipeline_outputs expert_tensor_parallel_size "
        "moe_router_dtype moe_router_load_balancing_type defer_embedding_wgrad_compute wgrad_deferral_limit "
        "variable_seq_lengths batch_p2p_sync use_cpu_initialization *_func cross_entropy_* *_fusion fused_*",
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
        _OFFLOAD: "*offload* *cpu*",
        "leave it out: it is Transformer Engine's Adam, and moments and masters are fp32 here": "exp_avg_* "
        "main_*_dtype use_precision_aware_optimizer store_param_remainders",
        "use Trainer(profiler=)": "timers barrier_with_L1_time",
    },
    DistributedDataParallelConfig: {
        _SHARDED: "use_distributed_optimizer",
        _OVERLAP: "overlap_grad_reduce overlap_param_gather",
        "use MegatronStrategy(on_nan=)": "check_for_nan_in_grad",
        "use the callback SpikeGuard": "check_for_large_grads",
        "leave it out: losses are divided by the targets of the global batch": "average_in_collective",
        "leave it out: the optimizer's state is sharded over all replicas": "num_distributed_optimizer_instances",
        _FP8: "*fp8*",
        _SHARDED_WEIGHTS: "*fsdp* *sharding_strategy preserve_fp32_weights suggested_communication_unit_size "
        "gradient_reduce_div_fusion",
        "leave it out: Megatron compiles its allocator while the run starts": "nccl_ub disable_symmetric_registration",
    },
}
"""Fixes that errors name for refused fields, as globs; the first match wins, and ``_UNREAD`` is for all others."""
_ALLOWED: dict[type, tuple[str, ...]] = {
    TransformerConfig: (
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "config_logger_dir",
        "distribute_saved_activations",
        "fp32_residual_connection",
        "gradient_accumulation_fusion",
        "microbatch_group_size_per_vp_stage",
        "moe_input_jitter_eps",
        "moe_router_bias_update_rate",
        "moe_router_enable_expert_bias",
        "moe_router_force_load_balancing",
        "moe_router_score_function",
        "moe_token_dispatcher_type",
        "pipeline_model_parallel_layout",
        "recompute_modules",
        "tp_comm_overlap",
    ),
    OptimizerConfig: ("config_logger_dir", "loss_scale"),
    DistributedDataParallelConfig: (
        "bucket_size",
        "grad_reduce_in_fp32",
        "pad_buckets_for_high_nccl_busbw",
        "reduce_scatter_with_fp32_accumulation",
    ),
}
"""Fields that may be overridden: each acts, and no option sets it."""


@dataclass(frozen=True)
class Overrides:
    """Fields of Megatron's configs that a user sets by hand, and their values."""

    transformer: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``TransformerConfig``."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``OptimizerConfig``."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``DistributedDataParallelConfig``."""

    @classmethod
    def of(cls, *overrides: Mapping[str, Any] | None) -> Self:
        """Overrides of the three configs, in the order of the fields above; None for none."""
        return cls(*(dict(each or {}) for each in overrides))

    def __post_init__(self) -> None:
        """Check each field by itself, before any process is started.

        Raises:
            ConfigError: If there is no such field, its value has another type, or it may not be overridden.
        """
        of_kinds = (self.transformer, self.optimizer, self.ddp)
        for kind, overrides in zip(_OPTIONS, of_kinds, strict=True):
            for name, value in overrides.items():
                _check(kind, name, value)


def _check(kind: type, name: str, value: object) -> None:
    option = _OPTIONS[kind]
    known = {each.name: each for each in fields(kind) if each.init}
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        fix = f"did you mean {close[0]!r}?" if close else "remove it"
        raise ConfigError(
            f"{option}: expected fields of Megatron's {kind.__name__}, got {name!r}; {fix}"
        )
    if name not in _ALLOWED[kind]:
        raise ConfigError(
            f"{option}: expected no {name!r}, got {name}={value!r}; {_fix(kind, name)}"
        )
    if value is not None or known[name].default is not None:
        require_kind(f"{option}: {name}", value, _annotations(kind)[name])
    if name == "moe_token_dispatcher_type":
        require_choice(f"{option}: {name}", value, ("alltoall", "allgather"))
    if name == "loss_scale" and value is not None:
        require_number(f"{option}: {name}", value, MIN_LOSS_SCALE, math.inf)


def _fix(kind: type, name: str) -> str:
    """What to do in place of a field that is refused."""
    for fix, globs in _REFUSED[kind].items():
        if any(fnmatch(name, glob) for glob in globs.split()):
            return fix
    return _UNREAD


@functools.cache
def _annotations(kind: type) -> dict[str, str]:
    """Types of a config's fields as ``require_kind`` spells them; "" for types that it does not check."""
    spelled: dict[Any, str] = {}
    for each in (bool, int, float, str):
        spelled[each] = each.__name__
        spelled[each | None] = f"{each.__name__} | None"
    return {name: spelled.get(hint, "") for name, hint in get_type_hints(kind).items()}


def build_config(
    kind: type[_Config],
    chosen: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> _Config:
    """Build a Megatron config from this package's choices and the user's overrides, which win.

    Raises:
        ConfigError: If Megatron refuses the overrides together with the other fields.
    """
    try:
        return kind(**{**chosen, **overrides})
    except (AssertionError, ValueError, TypeError) as error:
        if not overrides:
            raise
        fields_set = ", ".join(f"{name}={value!r}" for name, value in overrides.items())
        raise ConfigError(
            f"{_OPTIONS[kind]}: got {fields_set}, and Megatron says: {error}; correct it"
        ) from error
