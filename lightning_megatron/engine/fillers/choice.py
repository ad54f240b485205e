"""Optional libraries that are installed, and what fills each slot of the engine on a device."""

from __future__ import annotations

import functools
import importlib
import importlib.util
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


@functools.cache
def has_triton() -> bool:
    """Triton, which torch's wheels for CUDA bring with them."""
    return importlib.util.find_spec("triton") is not None


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
    cuda = device_type == "cuda"
    triton, liger = cuda and has_triton(), cuda and has_liger()
    missing = "{} is not installed" if cuda else "runs on the CPU"

    def line(slot: str, is_fast: bool, fast: tuple[str, str], plain: tuple[str, str]) -> SlotLine:
        return SlotLine(slot, *(fast if is_fast else plain))

    kernel, no_triton = "Triton kernel", missing.format("Triton")
    takes, allow = "takes masks, biases and grouped heads", "allow sequence parallelism"
    flex = "torch SDPA, FlexAttention where a mask hides tokens"
    norm = (f"{kernel} with the addition before it, else torch's", f"one pass over memory; {allow}")
    return (
        line("core attention", cuda, (flex, takes), ("torch SDPA", takes)),
        line("norm", triton, norm, ("torch's", allow)),
        SlotLine("weight gradient", "torch addmm into fp32", "multiplies and adds in one product"),
        line("Adam", triton, (kernel, "clips, updates and copies in one pass"), ("torch fused kernel", no_triton)),
        SlotLine("SGD", "torch fused kernel", "clips as it updates"),
        SlotLine("gradient norm", "torch foreach", "the host does not wait for it"),
        line("RoPE", triton, (kernel, "one kernel with the split into q, k and v"), ("eager", no_triton)),
        line(
            "SwiGLU",
            liger,
            ("liger-kernel", "recomputes in its backward pass"),
            ("Megatron-Core", missing.format("liger-kernel")),
        ),
        line(
            "cross-entropy",
            cuda,
            ("torch.compile", "a third of the memory and time of the others"),
            ("eager", "runs on the CPU"),
        ),
    )
