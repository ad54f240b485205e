"""Which optional libraries are installed, and what implements each slot of the engine on a device."""

from __future__ import annotations

import functools
import importlib
from typing import Literal

DeviceType = Literal["cpu", "cuda"]


@functools.cache
def has_liger() -> bool:
    """Whether liger-kernel with its Megatron functions is installed (Triton, needs a GPU to run)."""
    try:
        importlib.import_module("liger_kernel.megatron")
    except Exception:  # a half-installed CUDA extension raises OSError, RuntimeError or worse
        return False
    return True


_ON_CPU = {
    "core attention": ("torch SDPA", "supports masks, biases and grouped-query attention"),
    "norm": ("torch", "supports sequence parallelism"),
    "weight gradient": ("torch addmm into fp32", "accumulates in the GEMM"),
    "Adam": ("torch fused kernel", "runs on the CPU"),
    "SGD": ("torch fused kernel", "clips while updating"),
    "gradient norm": ("torch foreach", "no host synchronization"),
    "RoPE": ("eager", "runs on the CPU"),
    "SwiGLU": ("Megatron-Core", "runs on the CPU"),
    "cross-entropy": ("eager", "runs on the CPU"),
}
_ON_CUDA = {  # torch's wheels for CUDA bring Triton with them
    "core attention": (
        "torch SDPA, FlexAttention for masks",
        "supports masks, biases and grouped-query attention",
    ),
    "norm": ("Triton kernel fused with the residual addition, else torch", "one pass over memory"),
    "Adam": ("Triton kernel", "clips, updates and copies in one pass"),
    "RoPE": ("Triton kernel", "fused with the split into q, k and v"),
    "SwiGLU": ("Megatron-Core", "liger-kernel is not installed"),
    "cross-entropy": ("torch.compile", "a third of the memory and time of the alternatives"),
}


def slot_report(device_type: DeviceType) -> list[tuple[str, str, str]]:
    """Each slot of the engine, its implementation on ``device_type``, and the reason for that choice."""
    slots = _ON_CPU if device_type == "cpu" else {**_ON_CPU, **_ON_CUDA}
    if device_type == "cuda" and has_liger():
        slots = {**slots, "SwiGLU": ("liger-kernel", "recomputes in the backward pass")}
    return [(slot, *chosen) for slot, chosen in slots.items()]
