"""Optional libraries that are installed, and what fills each slot of the engine on a device."""

from __future__ import annotations

import functools
import importlib
from typing import Literal

DeviceType = Literal["cpu", "cuda"]


@functools.cache
def has_liger() -> bool:
    """liger-kernel with its Megatron functions (Triton, needs a GPU to run)."""
    try:
        importlib.import_module("liger_kernel.megatron")
    except Exception:  # a half-installed CUDA extension raises OSError, RuntimeError or worse
        return False
    return True


_ON_CPU = {
    "core attention": ("torch SDPA", "takes masks, biases and grouped heads"),
    "norm": ("torch's", "allow sequence parallelism"),
    "weight gradient": ("torch addmm into fp32", "multiplies and adds in one product"),
    "Adam": ("torch fused kernel", "runs on the CPU"),
    "SGD": ("torch fused kernel", "clips as it updates"),
    "gradient norm": ("torch foreach", "the host does not wait for it"),
    "RoPE": ("eager", "runs on the CPU"),
    "SwiGLU": ("Megatron-Core", "runs on the CPU"),
    "cross-entropy": ("eager", "runs on the CPU"),
}
_ON_CUDA = {  # torch's wheels for CUDA bring Triton with them
    "core attention": ("torch SDPA, FlexAttention where a mask hides tokens", "takes masks, biases and grouped heads"),
    "norm": ("Triton kernel with the addition before it, else torch's", "one pass over memory"),
    "Adam": ("Triton kernel", "clips, updates and copies in one pass"),
    "RoPE": ("Triton kernel", "one kernel with the split into q, k and v"),
    "SwiGLU": ("Megatron-Core", "liger-kernel is not installed"),
    "cross-entropy": ("torch.compile", "a third of the memory and time of the others"),
}


def slot_report(device_type: DeviceType) -> list[tuple[str, str, str]]:
    """When a strategy runs on ``device_type``: each slot that the engine leaves open, what fills it, and why this."""
    slots = _ON_CPU if device_type == "cpu" else {**_ON_CPU, **_ON_CUDA}
    if device_type == "cuda" and has_liger():
        slots = {**slots, "SwiGLU": ("liger-kernel", "recomputes in its backward pass")}
    return [(slot, *chosen) for slot, chosen in slots.items()]
