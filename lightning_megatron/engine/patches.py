"""Table of all functions of Megatron-Core, Lightning and torch that are patched during a run.

Each row names the upstream versions, module and attribute, with the reason above it, so that the list of all patches
can be read and tested: a test of the replacement fails when upstream no longer needs it. Classes that a layer spec
plugs in (``SDPAttention``, ``Norm``) need no row. Patches of saving and loading are in a table next to that code.
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
from lightning_megatron.engine.ops import adam, gelu_mlp, loss, recompute, weight_gradients
from lightning_megatron.engine.ops.gathered_dispatch import (
    AllGatherDispatcher,
    compute_by_dispatcher,
)
from lightning_megatron.engine.ops.report import DeviceType
from lightning_megatron.engine.ops.token_dispatch import AllToAllDispatcher, dispatcher


class Patch(NamedTuple):
    """Replacement of one attribute of an upstream module or class."""

    module: str
    """Importable module, e.g. ``megatron.core.optimizer``."""
    attribute: str
    """Dotted path below the module, e.g. ``Adam`` or ``DistributedOptimizer._set_main_param_and_optimizer_states``."""
    replacement: Callable[[Any], Any]
    """Function from the original attribute (None if absent) to its replacement."""
    requirement: str = "megatron-core>=0.16.1,<0.20"
    """Package and versions that need the patch; the source of all of them was read."""


def replacements(patches: Iterable[Patch]) -> list[tuple[Any, str, Any]]:
    """The object, attribute name and replacement of each patch."""
    resolved = []
    for patch in patches:
        *path, name = patch.attribute.split(".")
        owner: Any = importlib.import_module(patch.module)
        for each in path:
            owner = getattr(owner, each)
        original = getattr(owner, name, None)
        resolved.append((owner, name, patch.replacement(original)))
    return resolved


def patches(device_type: DeviceType) -> tuple[Patch, ...]:
    """All patches of a run on ``device_type``, from the model's construction to the last step."""
    rows = [*MEGATRON, *WEIGHT_GRADIENTS, *LIGHTNING]
    if device_type == "cuda":
        rows += KERNELS
    return tuple(row for row in rows if _is_installed(row.requirement))


@functools.cache
def _is_installed(requirement: str) -> bool:
    parsed = Requirement(requirement)
    return parsed.specifier.contains(
        importlib.metadata.version(parsed.name),
        prereleases=True,
    )


def _use(replacement: Any) -> Callable[[Any], Any]:
    """Replace the original by ``replacement``."""
    return lambda original: replacement


def _returning(value: Callable[[], Any]) -> Callable[[Any], Any]:
    """Replace the original by a function that ignores its arguments and returns ``value()``."""
    return lambda original: lambda *args, **kwargs: value()


def _with_experts_only(original: Any) -> Any:
    """``original(config, model)`` for models with experts."""
    return lambda config, model: config.num_moe_experts and original(config, model)


def _set_rng_state(original: Any) -> Any:
    return lambda state, *args, **kwargs: torch.set_rng_state(state)


_FACTORY = "megatron.core.optimizer"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer"
_LAYERS = "megatron.core.tensor_parallel.layers"
_RANDOM = "megatron.core.tensor_parallel.random"
_MOE = "megatron.core.transformer.moe.moe_layer"

MEGATRON: tuple[Patch, ...] = (
    # It makes many passes over the logits; its fused gradient is always bfloat16; ignored labels have a gradient.
    Patch(
        "megatron.core.models.common.language_module.language_module",
        "LanguageModule.compute_language_model_loss",
        _use(loss.language_model_loss),
    ),
    # Torch's is unfused; Apex's clips and copies in separate passes.
    Patch(_FACTORY, "Adam", _use(adam.FusedAdam)),
    # It is unfused, and cannot skip a step without the host.
    Patch(_FACTORY, "SGD", _use(adam.FusedSGD)),
    # If set, torch.optim.AdamW is used, whatever Adam is.
    Patch(_FACTORY, "USING_PYTORCH_OPTIMIZER", _use(False)),
    # It asserts that it shards an Adam, and uses the name only in isinstance(), which takes a tuple as well.
    Patch(_DISTRIBUTED, "Adam", lambda original: (original, adam.MasterOptimizer)),
    # Float32 shards are views with a grad_fn: torch warns whenever the optimizer reads their .grad.
    Patch(
        _DISTRIBUTED,
        "DistributedOptimizer._build_model_and_main_param_groups",
        adam.with_leaf_shards,
    ),
    # It loops with one kernel per bf16 parameter.
    Patch("megatron.core.optimizer.optimizer", "_multi_tensor_copy_this_to_that", _use(adam.copy)),
    # It loops with one kernel per parameter, also to copy fp32 parameters onto themselves.
    Patch(
        _DISTRIBUTED,
        "DistributedOptimizer._copy_main_params_to_model_params",
        _use(adam.copy_shards),
    ),
    # They make a view of the gradients' buffer for each parameter in each step, while the GPU may wait for the host.
    Patch(_DISTRIBUTED, "DistributedOptimizer.zero_grad", adam.keep_gradients),
    Patch(
        _DISTRIBUTED,
        "DistributedOptimizer._copy_model_grads_to_main_grads",
        adam.use_kept_gradients,
    ),
    # It asks each parameter whether Transformer Engine has quantized it.
    Patch(
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBucketGroup._post_param_sync",
        _returning(lambda: None),
        "megatron-core>=0.18,<0.20",
    ),
    # A run with reduce_scatter_with_fp32_accumulation sets it for all later runs of the process; patches are undone.
    Patch(
        "megatron.core.distributed.param_and_grad_buffer",
        "dist_reduce_scatter_func",
        functools.partial,
    ),
    # It asks each module whether it is a router.
    Patch(
        "megatron.core.distributed.finalize_model_grads",
        "reset_model_temporary_tensors",
        _with_experts_only,
    ),
    # It needs Transformer Engine, and saves and restores random states that norms do not use.
    Patch(
        "megatron.core.tensor_parallel", "CheckpointWithoutOutput", _use(recompute.RecomputedOutput)
    ),
    # The router checks whether it is None, but without Transformer Engine the name is not defined: NameError.
    Patch(
        "megatron.core.transformer.moe.moe_utils",
        "te_general_gemm",
        lambda original: original,
        "megatron-core<0.17",
    ),
    # The host waits three times per layer, a token is sent once per expert, sums are atomic additions in bf16.
    Patch(_MOE, "MoEAlltoAllTokenDispatcher", _use(dispatcher(AllToAllDispatcher))),
    # It gathers the probabilities of all experts, needs the same number of rows on all ranks, and waits for counts.
    Patch(_MOE, "MoEAllGatherTokenDispatcher", _use(dispatcher(AllGatherDispatcher))),
    # It calls the experts once, for all rows; the dispatcher above calls them for each part, while others are sent.
    Patch(_MOE, "MoELayer.routed_experts_compute", _use(compute_by_dispatcher)),
    # It recomputes the complete MLP with its matrix products, or nothing (and warns of a subclass in a layer spec).
    Patch("megatron.core.transformer.mlp", "MLP.forward", recompute.recompute_activation),
)

LIGHTNING: tuple[Patch, ...] = (
    # Before each batch it broadcasts from rank 0, over the GPU, whether SIGTERM came, and waits for all queued work;
    # run/checkpointing.py has asked every rank by then, in parallel with the step (there is no hook around it).
    Patch(
        "lightning.pytorch.loops.training_epoch_loop",
        "_TrainingEpochLoop._broadcast_sigterm_tensor",
        _returning(lambda: None),
        "lightning>=2.6.6,<2.7",
    ),
)

WEIGHT_GRADIENTS: tuple[Patch, ...] = (
    # Name of Apex's extension, which linear layers call.
    Patch(_LAYERS, "fused_weight_gradient_mlp_cuda", _use(weight_gradients.WeightGradient)),
    # Linear layers refuse to fuse without Apex's extension.
    Patch(_LAYERS, "_grad_accum_fusion_available", _use(True)),
    # Its autograd function prepares for communication and autocast, in many lines of Python for each linear.
    Patch(
        _LAYERS,
        "linear_with_grad_accumulation_and_async_allreduce",
        weight_gradients.local_linear,
    ),
    # It returns no gradient of the bias.
    Patch(_LAYERS, "linear_with_frozen_weight", weight_gradients.with_trained_bias),
    # Autograd functions that do nothing without tensor parallelism, two of them in each pass of a layer.
    Patch(_LAYERS, "copy_to_tensor_model_parallel_region", weight_gradients.unless_alone),
    Patch(_LAYERS, "reduce_from_tensor_model_parallel_region", weight_gradients.unless_alone),
    # The bias is added in a separate pass.
    Patch(
        _LAYERS,
        "LinearWithGradAccumulationAndAsyncCommunication.forward",
        weight_gradients.fuse_linear_bias,
    ),
    # Its gradient is a dense tensor, which is then added to the buffer.
    Patch(_LAYERS, "F", _use(SimpleNamespace(embedding=weight_gradients.embedding))),
)
"""Patches for ``gradient_accumulation_fusion=True``."""

_ATTENTION = "megatron.core.transformer.attention"


def _kernels(name: str) -> Any:
    """A module of ``ops/triton``, imported when a patch is applied: Triton is on GPUs only."""
    return importlib.import_module(f"lightning_megatron.engine.ops.triton.{name}")


KERNELS: tuple[Patch, ...] = (
    # fused_single_qkv_rope asserts without Transformer Engine, whose function it is.
    Patch(_ATTENTION, "HAVE_FUSED_QKV_ROPE", _use(True)),
    Patch(
        _ATTENTION, "apply_fused_qkv_rotary_pos_emb", lambda _: _kernels("rope").split_and_rotate
    ),
    # Eight kernels per call; its fused variant (apply_rope_fusion) needs Transformer Engine.
    Patch(
        "megatron.core.models.common.embeddings.rope_utils",
        "_apply_rotary_pos_emb_bshd",
        lambda original: _kernels("rope").use_rope_kernel(original),
    ),
    # One kernel that recomputes silu in the backward pass is faster and saves less than torch.compile's. It needs
    # ``bias_activation_fusion=True`` and an MLP without biases.
    Patch(
        "megatron.core.fusions.fused_bias_swiglu",
        "SwiGLUFunction",
        lambda original: _kernels("swiglu").use_swiglu_kernel(original),
    ),
    # It runs GELU and its derivative as kernels of their own, between the products of the linears.
    Patch(
        "megatron.core.transformer.mlp",
        "MLP.forward",
        lambda original: gelu_mlp.fuse_gelu(recompute.recompute_activation(original)),
    ),
)
"""Patches on CUDA."""


class _SideStream(torch.cpu.Stream):
    """CPU stream for any device and priority; a class, as modules imported during a run use it in annotations."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    # host_state.py orders its copies by events, which torch's streams of CPUs do not have in every version.

    def record_event(self) -> None:
        """Nothing to wait for: what was queued has ended."""

    def wait_event(self, event: object) -> None:
        """Do nothing."""


_CUDA: dict[str, Callable[[Any], Any]] = {
    "current_device": _returning(lambda: cpu.DEVICE),  # buffers are created on it
    # distributed/param_and_grad_buffer.py orders its communication.
    "current_stream": _returning(_SideStream),
    # pipeline_parallel/schedules.py returns to the default stream.
    "default_stream": _returning(torch.cpu.Stream),
    "stream": _returning(contextlib.nullcontext),  # overlapped communication runs on a side stream
    "Stream": _use(_SideStream),  # side streams are created in constructors
    "synchronize": _returning(lambda: None),  # a CPU operation is finished when it returns
    "empty_cache": _returning(lambda: None),  # dist_checkpointing frees the GPU cache around saves
    "manual_seed": _use(torch.manual_seed),  # tensor_parallel/random.py seeds the device generator
    # tensor_parallel/random.py reads the device generator.
    "get_rng_state": _returning(torch.get_rng_state),
    "set_rng_state": _set_rng_state,  # tensor_parallel/random.py sets the device generator
    "FloatTensor": _use(torch.FloatTensor),  # optimizer/optimizer.py builds loss scales with it
}

CPU: tuple[Patch, ...] = (
    *(Patch("torch.cuda", attribute, replacement) for attribute, replacement in _CUDA.items()),
    # It reads torch.cuda.random directly.
    Patch(_RANDOM, "_get_cuda_rng_state", _returning(torch.get_rng_state)),
    Patch(_RANDOM, "_set_cuda_rng_state", _set_rng_state),  # sets torch.cuda.default_generators
)
"""Replacements of every CUDA call that the engine makes in training, where there is no GPU."""
