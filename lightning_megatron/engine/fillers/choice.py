"""Optional libraries that are installed, and what fills each slot of the engine on a device."""

from __future__ import annotations

import functools
import importlib
from typing import Literal, NamedTuple

DeviceType = Literal["cpu", "cuda"]


@functools.cache
def has_liger() -> bool:
    """liger-kernel with its Megatron functions (Triton, needs a GPU to run)."""
    try:
        importlib.import_module("liger_kernel.megatron")
    except Exception:  # a half-installed CUDA extension raises OSError, RuntimeError or worse
        return False
    return True


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
    cuda, on_cpu = device_type == "cuda", "runs on the CPU"

    def line(slot: str, fast: tuple[str, str], plain: tuple[str, str], *, is_fast: bool = cuda) -> SlotLine:
        return SlotLine(slot, *(fast if is_fast else plain))

    kernel = "Triton kernel"  # torch's wheels for CUDA bring Triton with them
    takes, allow = "takes masks, biases and grouped heads", "allow sequence parallelism"
    flex = "torch SDPA, FlexAttention where a mask hides tokens"
    norm = (f"{kernel} with the addition before it, else torch's", f"one pass over memory; {allow}")
    no_liger = "liger-kernel is not installed" if cuda else on_cpu
    liger = ("liger-kernel", "recomputes in its backward pass")
    compiled = ("torch.compile", "a third of the memory and time of the others")
    return (
        line("core attention", (flex, takes), ("torch SDPA", takes)),
        line("norm", norm, ("torch's", allow)),
        SlotLine("weight gradient", "torch addmm into fp32", "multiplies and adds in one product"),
        line("Adam", (kernel, "clips, updates and copies in one pass"), ("torch fused kernel", on_cpu)),
        SlotLine("SGD", "torch fused kernel", "clips as it updates"),
        SlotLine("gradient norm", "torch foreach", "the host does not wait for it"),
        line("RoPE", (kernel, "one kernel with the split into q, k and v"), ("eager", on_cpu)),
        line("SwiGLU", liger, ("Megatron-Core", no_liger), is_fast=cuda and has_liger()),
        line("cross-entropy", compiled, ("eager", on_cpu)),
    )
