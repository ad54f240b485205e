"""Which fields of Megatron's configs a user may set: those that act here, and no other."""

from dataclasses import fields
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from lightning_megatron.engine.overrides import Overrides
from lightning_megatron.errors import ConfigError

CONFIGS = {
    "transformer": TransformerConfig,
    "optimizer": OptimizerConfig,
    "ddp": DistributedDataParallelConfig,
}
ALLOWED = {
    "transformer": {
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
    },
    "optimizer": {"config_logger_dir", "loss_scale"},
    "ddp": {
        "bucket_size",
        "grad_reduce_in_fp32",
        "pad_buckets_for_high_nccl_busbw",
        "reduce_scatter_with_fp32_accumulation",
    },
}
"""Before one is added: a run in which it changes a result, the memory or the messages, and a checkpoint that knows."""


def _is_refused(config: str, name: str) -> bool:
    try:
        Overrides(**{config: {name: None}})
    except ConfigError as error:
        return f"expected no {name!r}" in str(error)
    return False


@pytest.mark.parametrize("config", CONFIGS)
def test_no_field_is_accepted_that_does_nothing(config: str) -> None:
    names = {field.name for field in fields(CONFIGS[config]) if field.init}
    accepted = {name for name in names if not _is_refused(config, name)}
    assert accepted == ALLOWED[config]


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        # They changed the model, and neither checkpoints nor exports knew.
        ("layernorm_zero_centered_gamma", True, "set it in the model's config"),
        ("activation_func_clamp_value", 7.0, "set it in the model's config"),
        ("no_rope_freq", 2, "set it in the model's config"),
        # They did nothing.
        ("attention_softmax_in_fp32", False, "nothing reads it here"),
        ("qk_clip", True, "nothing reads it here"),
        ("mtp_num_layers", 1, "nothing reads it here"),
        ("use_te_rng_tracker", True, "nothing reads it here"),
        ("cpu_offloading_num_layers", 2, r"use MegatronStrategy\(recompute=\)"),
        ("deterministic_mode", True, r"use Trainer\(deterministic=True\)"),
        # They raised in the first step.
        (
            "num_microbatches_with_partial_activation_checkpoints",
            1,
            r"use MegatronStrategy\(recompute=\)",
        ),
        ("fused_single_qkv_rope", True, "this package's layers and schedules"),
    ],
)
def test_a_refusal_says_what_to_do(name: str, value: Any, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"got {name}={value!r}; .*{fix}"):
        Overrides(transformer={name: value})
