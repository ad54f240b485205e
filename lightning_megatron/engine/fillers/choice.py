"""Optional libraries that are installed, and what fills each slot of the engine on a device."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Literal, NamedTuple

DeviceType = Literal["cpu", "cuda"]


def _imports(module: str, *names: str) -> bool:
    """Whether ``names`` can really be imported from ``module``.

    Looking for the module is not enough: the package called ``apex`` on PyPI is not NVIDIA's.
    """
    try:
        loaded = importlib.import_module(module)
    except Exception:  # a half-installed CUDA extension raises OSError, RuntimeError or worse
        return False
    return all(hasattr(loaded, name) for name in names)


@functools.cache
def has_transformer_engine() -> bool:
    """NVIDIA Transformer Engine with its PyTorch layers."""
    return _imports("transformer_engine.pytorch", "LayerNormLinear")


@functools.cache
def has_apex() -> bool:
    """NVIDIA's Apex, not the unrelated package of that name on PyPI."""
    return _imports("apex.optimizers", "FusedAdam") and _imports("amp_C", "multi_tensor_l2norm")


@functools.cache
def has_apex_wgrad() -> bool:
    """NVIDIA Apex's extension that accumulates weight gradients in the GEMM."""
    return _imports("fused_weight_gradient_mlp_cuda", "wgrad_gemm_accum_fp32")


@functools.cache
def has_liger() -> bool:
    """liger-kernel with its Megatron functions (Triton, needs a GPU to run)."""
    return importlib.util.find_spec("liger_kernel") is not None and _imports("liger_kernel.megatron")


@functools.cache
def has_triton() -> bool:
    """Triton, which torch's wheels for CUDA bring with them."""
    return importlib.util.find_spec("triton") is not None


@dataclass(frozen=True, kw_only=True)
class Fillers:
    """What is chosen where there is a choice; the same decision feeds the patches and the report."""

    native_optimizer: bool
    """Adam on torch's fused kernel, norm and scale on torch._foreach_*, instead of TE's or Apex's."""
    native_wgrad: bool
    """Weight gradients by torch.addmm instead of Apex's extension."""
    triton: bool
    """RoPE together with the split into queries, keys and values, by a Triton kernel."""
    liger: bool
    """SwiGLU by liger-kernel."""


def fillers(device_type: DeviceType) -> Fillers:
    """The choice for a strategy that runs on ``device_type``; TE, Apex and liger-kernel only run on CUDA."""
    cuda = device_type == "cuda"
    return Fillers(
        native_optimizer=not (cuda and (has_transformer_engine() or has_apex())),
        native_wgrad=not (cuda and has_apex_wgrad()),
        triton=cuda and has_triton(),
        liger=cuda and has_liger(),
    )


class SlotLine(NamedTuple):
    """One line of ``doctor``."""

    slot: str
    """What the engine leaves open, e.g. ``core attention``."""
    filler: str
    """What fills it, e.g. ``torch SDPA``."""
    reason: str
    """Why this one."""


def slot_report(device_type: DeviceType) -> tuple[SlotLine, ...]:
    """What fills each slot when a strategy runs on ``device_type``."""
    choice, cpu = fillers(device_type), device_type == "cpu"
    library = "Transformer Engine" if has_transformer_engine() else "NVIDIA Apex"

    def line(slot: str, is_native: bool, native: str, missing: str, library: str) -> SlotLine:
        why = "runs on the CPU" if cpu else f"{missing} installed"
        return SlotLine(slot, native, why) if is_native else SlotLine(slot, library, "installed and at least as fast")

    neither = "neither Transformer Engine nor NVIDIA Apex is"
    return (
        SlotLine(
            "core attention",
            "torch SDPA" if cpu else "torch SDPA, FlexAttention where a mask hides tokens",
            "takes masks, biases and grouped heads",
        ),
        SlotLine(
            "norm",
            "Triton kernel with the addition before it, else torch's" if choice.triton else "torch's",
            "one pass over memory; allow sequence parallelism" if choice.triton else "allow sequence parallelism",
        ),
        line("weight gradient", choice.native_wgrad, "torch addmm into fp32", "Apex is not", "NVIDIA Apex"),
        line(
            "Adam",
            choice.native_optimizer,
            "Triton kernel" if choice.triton else "torch fused kernel",
            neither,
            library,
        ),
        SlotLine("SGD", "torch fused kernel", "only this one can be sharded and saved"),
        line("gradient norm", choice.native_optimizer, "torch foreach", neither, library),
        SlotLine(
            "RoPE",
            "Triton kernel" if choice.triton else "eager",
            "one kernel with the split into q, k and v" if choice.triton else "runs on the CPU",
        ),
        line("SwiGLU", not choice.liger, "Megatron-Core", "liger-kernel is not", "liger-kernel"),
        SlotLine(
            "cross-entropy",
            "eager" if cpu else "torch.compile",
            "runs on the CPU" if cpu else "a third of the memory and time of the others",
        ),
    )
