"""The one table of functions of Megatron-Core, Lightning and torch that are replaced in a run, and how it is applied.

Each row names the upstream versions, file and function, and the reason above it, so that the list of all patches can be
read and tested: a test of the stand-in fails when upstream no longer needs it. Classes that a layer's spec plugs in
(``SDPAttention``, ``Norm``) need no row. What changes around saves and loads is a table of its own, beside them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from packaging.requirements import Requirement

from lightning_megatron.engine import cpu
from lightning_megatron.engine.fillers import adam, kernels
from lightning_megatron.engine.fillers.choice import DeviceType, has_liger
from lightning_megatron.engine.fillers.experts import AllGatherDispatcher, AllToAllDispatcher, dispatcher


class Patch(NamedTuple):
    """One attribute of one upstream object that is replaced while the patch is active."""

    module: str
    """Importable module, e.g. ``megatron.core.optimizer``."""
    attribute: str
    """Dotted path below the module, e.g. ``Adam`` or ``DistributedOptimizer._set_main_param_and_optimizer_states``."""
    replacement: Callable[[Any], Any]
    """Gets the original (None if absent) and returns what stands in for it."""
    engine: str = "megatron-core>=0.16.1,<0.20"
    """The versions that need it, all of which were read."""


def replacements(patches: Iterable[Patch]) -> list[tuple[Any, str, Any]]:
    """For each patch the object, its attribute, and what stands in for it while the patch is active."""
    found = []
    for patch in patches:
        *path, name = patch.attribute.split(".")
        owner: Any = functools.reduce(getattr, path, importlib.import_module(patch.module))
        found.append((owner, name, patch.replacement(getattr(owner, name, None))))
    return found


def patches(device_type: DeviceType) -> tuple[Patch, ...]:
    """Every change while the engine is held on ``device_type``, from the model's construction to the last step."""
    on_gpu = (*ROPE, *(SWIGLU if has_liger() else ()))
    rows = (*MEGATRON, *WEIGHT_GRADIENTS, *LIGHTNING, *(on_gpu if device_type == "cuda" else ()))
    return tuple(row for row in rows if _is_installed(row.engine))


@functools.cache
def _is_installed(requirement: str) -> bool:
    wanted = Requirement(requirement)
    return wanted.specifier.contains(importlib.metadata.version(wanted.name), prereleases=True)


def _being(stand_in: Any) -> Callable[[Any], Any]:
    """A replacement that is ``stand_in`` itself."""
    return lambda original: stand_in


def _returning(value: Callable[[], Any]) -> Callable[[Any], Any]:
    """A replacement that ignores its arguments and returns ``value()``."""
    return lambda original: lambda *args, **kwargs: value()


def _setting_state(original: Any) -> Any:
    return lambda state, *args, **kwargs: torch.set_rng_state(state)


_FACTORY = "megatron.core.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"
_LAYERS = "megatron.core.tensor_parallel.layers"
_RANDOM = "megatron.core.tensor_parallel.random"
_MOE = "megatron.core.transformer.moe.moe_layer"

MEGATRON: tuple[Patch, ...] = (
    # It reads the logits often, its fused gradient is always bfloat16, and ignored labels have a gradient.
    Patch(
        "megatron.core.models.common.language_module.language_module",
        "LanguageModule.compute_language_model_loss",
        _being(kernels.language_model_loss),
    ),
    # Torch's is unfused; Apex's clips and copies in passes apart.
    Patch(_FACTORY, "Adam", _being(adam.FusedAdam)),
    # It is unfused, and cannot leave a step out without the host.
    Patch(_FACTORY, "SGD", _being(adam.FusedSGD)),
    # If set, torch.optim.AdamW is taken whatever Adam is.
    Patch(_FACTORY, "USING_PYTORCH_OPTIMIZER", _being(False)),
    # It asserts that it shards an Adam, and uses the name for nothing but isinstance(), which takes a tuple as well.
    Patch(_DISTRIBUTED, "Adam", lambda original: (original, adam.MasterOptimizer)),
    # Float32 shards are views with a grad_fn: torch warns whenever the optimizer reads their .grad.
    Patch(_DISTRIBUTED, "DistributedOptimizer._build_model_and_main_param_groups", adam.with_leaf_shards),
    # A loop with one kernel per bf16 parameter.
    Patch("megatron.core.optimizer.optimizer", "_multi_tensor_copy_this_to_that", _being(kernels.copy)),
    # A loop with one kernel per parameter, for fp32 parameters onto themselves.
    Patch(_DISTRIBUTED, "DistributedOptimizer._copy_main_params_to_model_params", _being(kernels.copy_shards)),
    # It needs Transformer Engine, and saves and restores random streams that norms do not draw from.
    Patch("megatron.core.tensor_parallel", "CheckpointWithoutOutput", _being(kernels.RecomputedOutput)),
    # The router asks whether it is None, and without Transformer Engine there is no such name: NameError.
    Patch(
        "megatron.core.transformer.moe.moe_utils", "te_general_gemm", lambda original: original, "megatron-core<0.19"
    ),
    # The host waits three times a layer, a token is sent once for each expert, sums are atomic additions in bf16.
    Patch(_MOE, "MoEAlltoAllTokenDispatcher", _being(dispatcher(AllToAllDispatcher))),
    # It gathers all probabilities of all experts, and needs as many rows on all ranks.
    Patch(_MOE, "MoEAllGatherTokenDispatcher", _being(dispatcher(AllGatherDispatcher))),
    # It recomputes the whole MLP, matrix products too, or nothing (it warns of a subclass in a layer's spec).
    Patch("megatron.core.transformer.mlp", "MLP.forward", kernels.recompute_activation),
)

LIGHTNING: tuple[Patch, ...] = (
    # Before each batch it asks rank 0 for a SIGTERM over the GPU, and waits for all that is queued there;
    # checkpointing.py has asked every rank by then, beside the step (there is no hook around it).
    Patch(
        "lightning.pytorch.loops.training_epoch_loop",
        "_TrainingEpochLoop._broadcast_sigterm_tensor",
        _returning(lambda: None),
        "lightning>=2.6.6,<2.7",
    ),
)

WEIGHT_GRADIENTS: tuple[Patch, ...] = (
    # Apex's name, which linears call.
    Patch(_LAYERS, "fused_weight_gradient_mlp_cuda", _being(kernels.WeightGradient)),
    # Linears refuse to fuse without Apex's extension.
    Patch(_LAYERS, "_grad_accum_fusion_available", _being(True)),
    # The bias is added in a pass of its own.
    Patch(_LAYERS, "LinearWithGradAccumulationAndAsyncCommunication.forward", kernels.fuse_linear_bias),
    # Dense gradients, added to the buffer.
    Patch(_LAYERS, "F", _being(SimpleNamespace(embedding=kernels.embedding))),
)
"""For ``gradient_accumulation_fusion=True``."""

_ATTENTION = "megatron.core.transformer.attention"


def _rope() -> Any:
    return importlib.import_module("lightning_megatron.engine.fillers.triton_kernels")


ROPE: tuple[Patch, ...] = (
    # fused_single_qkv_rope asserts without Transformer Engine, whose function it is.
    Patch(_ATTENTION, "HAVE_FUSED_QKV_ROPE", _being(True)),
    Patch(_ATTENTION, "apply_fused_qkv_rotary_pos_emb", lambda _: _rope().split_and_rotate),
    # Eight kernels per call; its fused variant (apply_rope_fusion) needs Transformer Engine.
    Patch(
        "megatron.core.models.common.embeddings.rope_utils",
        "_apply_rotary_pos_emb_bshd",
        lambda original: _rope().use_rope_kernel(original),
    ),
)
"""On CUDA."""

SWIGLU: tuple[Patch, ...] = (
    # One Triton kernel that recomputes silu in the backward is faster and keeps less than torch.compile's.
    Patch("megatron.core.fusions.fused_bias_swiglu", "SwiGLUFunction", kernels.liger_swiglu),
)
"""Where liger-kernel is installed; needs ``bias_activation_fusion=True`` and a MLP without biases."""

_CUDA: dict[str, Callable[[Any], Any]] = {
    "current_device": _returning(lambda: cpu.DEVICE),  # every buffer is created there
    "current_stream": _returning(torch.cpu.Stream),  # distributed/param_and_grad_buffer.py orders its communication
    "default_stream": _returning(torch.cpu.Stream),  # pipeline_parallel/schedules.py returns to the default stream
    "stream": _returning(contextlib.nullcontext),  # overlapped communication runs on a side stream
    "Stream": _returning(torch.cpu.Stream),  # side streams are created in constructors
    "synchronize": _returning(lambda: None),  # a CPU operation is finished when it returns
    "empty_cache": _returning(lambda: None),  # dist_checkpointing frees the GPU cache around saves
    "manual_seed": _being(torch.manual_seed),  # tensor_parallel/random.py seeds the device generator
    "get_rng_state": _returning(torch.get_rng_state),  # tensor_parallel/random.py reads the device generator
    "set_rng_state": _setting_state,  # tensor_parallel/random.py sets the device generator
    "FloatTensor": _being(torch.FloatTensor),  # optimizer/optimizer.py builds loss scales with it
}

CPU: tuple[Patch, ...] = (
    *(Patch("torch.cuda", attribute, replacement) for attribute, replacement in _CUDA.items()),
    Patch(_RANDOM, "_get_cuda_rng_state", _returning(torch.get_rng_state)),  # reads torch.cuda.random directly
    Patch(_RANDOM, "_set_cuda_rng_state", _setting_state),  # sets torch.cuda.default_generators
)
"""Every CUDA call on the trained path of the engine, and what stands in for it where there is no GPU."""
