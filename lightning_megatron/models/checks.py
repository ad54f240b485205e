"""Whether a model can run with the settings of a run; checked before anything is built."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from lightning_megatron.engine.ops.fp8 import ALIGNMENT, MEASURED_SPEEDUPS
from lightning_megatron.engine.settings import EngineSettings
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.layout import check_function, check_layout


def check_model(
    model: ModelConfig,
    settings: EngineSettings,
    function: str | None = None,
) -> None:
    """Check that ``model`` supports the settings of a run.

    Args:
        model: The model's config.
        settings: The run's settings.
        function: Trainer function, e.g. ``fit`` or ``predict``; None if unknown.

    Raises:
        ConfigError: If the model does not support the layout, recomputation, CUDA graphs, dtype or fp8 recipe.
    """
    overrides = settings.overrides.transformer
    check_layout(model, settings.parallel)
    _check_expert_overrides(model, overrides)
    _check_overrides_act(settings, overrides)
    if settings.recompute.granularity == "selective":
        _check_recompute_modules(model, overrides.get("recompute_modules") or ())
    if model.experts is not None:
        _check_settings_of_experts(settings)
        if function is not None:  # conversions compute nothing
            width = model.experts.ffn_hidden_size
            _check_grouped_mm(settings.params_dtype, model.hidden_size, width)
        check_function(model, settings.parallel, function)
    if settings.cuda_graphs:
        _check_graphs(settings)
    if settings.fp8 is not None:
        check_fp8(model, settings.parallel.tp, settings.params_dtype, settings.device)


def _refuse(
    option: str,
    expected: str,
    reasons: Mapping[str, bool],
) -> None:
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"{option}: expected {expected}, got {reason}; leave it out")


def _check_graphs(settings: EngineSettings) -> None:
    tp = settings.parallel.tp
    pp = settings.parallel.pp
    cp = settings.parallel.cp
    reasons = {
        f"tp={tp}, pp={pp} and cp={cp} (ranks would wait for each other)": tp * pp * cp > 1,
        f"a {settings.device.type}": settings.device.type != "cuda",
        "16-mixed (its loss scale changes)": settings.params_dtype is torch.float16,
        "recompute='full' (it reads RNG states)": settings.recompute.granularity == "full",
        "overlap_communication=True (gradients are reduced after the replays)": (
            settings.overlap_communication
        ),
        "fp8 (weights are quantized once a step, not once a microbatch)": settings.fp8 is not None,
    }
    _refuse("cuda_graphs=True", "tp=1, pp=1 and cp=1 on GPUs, in bf16 or fp32", reasons)


def _check_settings_of_experts(settings: EngineSettings) -> None:
    reasons = {
        "cuda_graphs=True (the host must know how many tokens go to each expert)": (
            settings.cuda_graphs
        ),
        "fp8 (experts are computed in bf16)": settings.fp8 is not None,
        "16-mixed (megatron-core has a separate loss scale for experts)": (
            settings.params_dtype is torch.float16
        ),
    }
    _refuse("a model with experts", "bf16-mixed or 32-true", reasons)


def _check_grouped_mm(dtype: torch.dtype, hidden_size: int, ffn_hidden_size: int) -> None:
    # torch.nn.functional.grouped_mm needs rows of a multiple of 16 bytes.
    multiple = 16 // dtype.itemsize
    for name, size in (("hidden_size", hidden_size), ("experts' ffn_hidden_size", ffn_hidden_size)):
        if size % multiple:
            dtype_name = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"{name}={size}: expected a multiple of {multiple} in {dtype_name}; choose another"
            )


def _check_overrides_act(settings: EngineSettings, overrides: Mapping[str, Any]) -> None:
    """Raise if an override would do nothing with the other options, or would be refused in the first step."""
    parallel = settings.parallel
    recompute = settings.recompute.granularity
    group = "microbatch_group_size_per_vp_stage"
    size = overrides.get(group) or 0
    count = parallel.num_microbatches
    rest = count % size if size else 0
    is_group = parallel.pp <= size <= count and (rest == 0 or rest >= parallel.pp)
    needs = {
        "recompute_modules": (
            "recompute='selective', whose parts they are",
            recompute == "selective",
        ),
        "distribute_saved_activations": (
            "recompute='full' and tp > 1",
            recompute == "full" and parallel.tp > 1,
        ),
        "tp_comm_overlap": ("sequence_parallel=True and tp > 1", parallel.uses_sequence_parallel),
        group: (
            f"vpp, and a number of microbatches from pp={parallel.pp} to num_microbatches={count} with a rest of 0, or "
            "of at least pp",
            parallel.vpp is not None and is_group,
        ),
    }
    for name, (expected, acts) in needs.items():
        if overrides.get(name) and not acts:
            raise ConfigError(
                f"transformer_config_overrides: {name}={overrides[name]!r}: expected {expected}, got other options; "
                "leave it out, or set them"
            )
    for name in ("pad_buckets_for_high_nccl_busbw", "reduce_scatter_with_fp32_accumulation"):
        if settings.overrides.ddp.get(name) and not settings.distributed_optimizer:
            raise ConfigError(
                f"ddp_config_overrides: {name}=True: expected distributed_optimizer=True, whose messages it changes, "
                "got False; leave it out"
            )
    scale = settings.overrides.optimizer.get("loss_scale")
    is_scaled = settings.distributed_optimizer or settings.params_dtype is not torch.float32
    if scale is not None and not is_scaled:
        raise ConfigError(
            f"optimizer_config_overrides: loss_scale={scale}: expected precision='16-mixed', whose losses it scales, "
            "got 32-true; leave it out"
        )


def _check_recompute_modules(model: ModelConfig, modules: Collection[str]) -> None:
    """Raise if the model does not support a user's ``recompute_modules``.

    An MLP with biases returns its output bias, a parameter, beside its output. megatron-core 0.16.1,
    tensor_parallel/random.py:CheckpointFunction treats it as recomputed, and its backward pass recurses endlessly.
    """
    experts = model.experts
    has_dense = experts is None or not all(map(model.has_experts, range(model.num_layers)))
    parts = {
        "moe": experts is not None,
        "shared_experts": experts is not None and experts.shared_ffn_hidden_size > 0,
        "mlp": has_dense,
    }
    for name, exists in parts.items():
        if name in modules and not exists:
            raise ConfigError(
                f"recompute_modules={sorted(modules)}: expected parts of the model, got {name!r}, which no layer of "
                f"this {model.family} has; leave it out"
            )
    if model.architecture == "t5" and "core_attn" in modules:
        raise ConfigError(
            "recompute_modules with 'core_attn' cannot train T5's attention bias: the engine would walk through its "
            "graph once per layer (and the attention in use keeps no scores that recomputing could save); leave it out"
        )
    if model.parallel_attention and not {"core_attn", "layernorm"}.issuperset(modules):
        raise ConfigError(
            f"recompute_modules={sorted(modules)} is not supported by a layer with parallel attention and MLP; use "
            "'core_attn' and 'layernorm', or recompute='full'"
        )
    if model.add_bias_linear and "mlp" in modules:
        raise ConfigError(
            "recompute_modules with 'mlp': expected MLPs without biases; use 'layernorm', or recompute='full'"
        )


def _check_expert_overrides(model: ModelConfig, overrides: Mapping[str, Any]) -> None:
    """Check a user's ``moe_*`` overrides; a sigmoid set by them needs an expert bias, by which checkpoints know it."""
    for name in overrides:
        if name.startswith("moe_") and model.experts is None:
            raise ConfigError(
                f"{name}: expected a model with experts, got {model.family} without; leave it out"
            )
    function = "moe_router_score_function"
    bias = "moe_router_enable_expert_bias"
    experts = model.experts
    if experts is not None and (experts.score_function == "sigmoid" or experts.has_selection_bias):
        for name in (function, bias):
            if name in overrides:
                raise ConfigError(
                    f"transformer_config_overrides: {name} is given by the {model.family} config; leave it out"
                )
        return
    rate = "moe_router_bias_update_rate"
    if rate in overrides and not overrides.get(bias):
        raise ConfigError(
            f"transformer_config_overrides: {rate}={overrides[rate]!r}: expected {bias}=True, got no bias to update; "
            "leave it out, or set both"
        )
    is_sigmoid = overrides.get(function) == "sigmoid"
    if is_sigmoid != overrides.get(bias, False):
        raise ConfigError(
            f"transformer_config_overrides: expected {function}='sigmoid' and {bias}=True together, got one of "
            "them; set both, or none"
        )


# ---- fp8 -------------------------------------------------------------------------------------------------------------


def check_fp8(
    model: ModelConfig,
    tp: int,
    params_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Check that the linears of ``model`` can run in fp8.

    Raises:
        ConfigError: If the run is not in bf16, the GPU has no fp8, or a matrix dimension is not a multiple of 16.
    """
    if model.latent_attention is not None:
        raise ConfigError(
            f"fp8: expected queries, keys and values with projections of their own, got latent attention "
            f"({model.family}), whose latents are computed in bf16; leave fp8 out"
        )
    if model.linear_attention is not None:
        raise ConfigError(
            f"fp8: expected attention in every layer, got linear attention ({model.family}), whose projections are "
            "computed in bf16; leave fp8 out"
        )
    if params_dtype is not torch.bfloat16:
        name = str(params_dtype).removeprefix("torch.")
        raise ConfigError(
            f"fp8: expected precision='bf16-mixed', got weights in {name}; set Trainer(precision=)"
        )
    if device.type == "cuda":
        _check_gpu_has_fp8(device)
    queries = model.num_attention_heads * model.kv_channels
    keys = model.num_query_groups * model.kv_channels
    sizes = {
        "hidden_size": model.hidden_size,
        "ffn_hidden_size / tp": model.ffn_hidden_size / tp,
        "num_attention_heads * kv_channels / tp": queries / tp,
        "(num_attention_heads + 2 * num_query_groups) * kv_channels / tp": (queries + 2 * keys)
        / tp,
    }
    for name, size in sizes.items():
        if size % ALIGNMENT:
            raise ConfigError(
                f"fp8: expected {name} to be a multiple of {ALIGNMENT}, got {size:g}; choose another"
            )


def _check_gpu_has_fp8(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        major, minor = capability
        raise ConfigError(
            "fp8: expected a GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell), got "
            f"{torch.cuda.get_device_name(device)} with {major}.{minor}; leave fp8 out"
        )


def size_warning(model: ModelConfig) -> str | None:
    """Warning for a model narrower than those that fp8 was measured with; None for others."""
    smallest = min(MEASURED_SPEEDUPS)
    if model.hidden_size >= smallest:
        return None
    figures = ", ".join(
        f"{gain} x the speed of bf16 at {size}" for size, gain in MEASURED_SPEEDUPS.items()
    )
    return (
        f"fp8: hidden_size={model.hidden_size} is below {smallest}, the smallest size measured to be faster "
        f"({figures}, on an H200); compare a few steps with and without fp8"
    )
