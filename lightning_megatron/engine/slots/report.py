"""Which part fills each slot of the engine on this machine, and why?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_megatron import features

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Fillers:
    """What is chosen where there is a choice; the same decision feeds the patches and the report."""

    native_adam: bool
    """Adam on torch's fused kernel instead of TE's or Apex's."""
    native_multi_tensor: bool
    """Norm and scale on torch._foreach_* instead of TE's or Apex's."""
    native_wgrad: bool
    """Weight gradients by torch.addmm instead of Apex's extension."""
    compiled_rope: bool
    """RoPE by torch.compile."""
    liger: bool
    """SwiGLU by liger-kernel."""


def fillers(device_type: DeviceType) -> Fillers:
    """The choice for a strategy that runs on ``device_type``; TE, Apex and liger-kernel only run on CUDA."""
    cuda = device_type == "cuda"
    has_te, has_apex = features.has_transformer_engine(), features.has_apex()
    return Fillers(
        native_adam=not (cuda and (has_te or has_apex)),
        native_multi_tensor=not (cuda and (has_te or has_apex)),
        native_wgrad=not (cuda and features.has_apex_wgrad()),
        compiled_rope=cuda,
        liger=cuda and features.has_liger(),
    )


@dataclass(frozen=True, kw_only=True)
class SlotLine:
    """One line of ``doctor``."""

    slot: str
    """What the engine leaves open, e.g. ``core attention``."""
    filler: str
    """What fills it, e.g. ``torch SDPA``."""
    reason: str
    """Why this one."""


def slot_report(device_type: DeviceType) -> tuple[SlotLine, ...]:
    """What fills each slot when a strategy runs on ``device_type``."""
    choice = fillers(device_type)
    fused_library = "Transformer Engine" if features.has_transformer_engine() else "NVIDIA Apex"
    absent = "runs on the CPU" if device_type == "cpu" else "neither Transformer Engine nor NVIDIA Apex is installed"
    on_cpu_or = "runs on the CPU" if device_type == "cpu" else "{} is not installed"
    liger_missing = on_cpu_or.format("liger-kernel")
    return (
        SlotLine(
            slot="core attention",
            filler="torch SDPA" if device_type == "cpu" else "torch SDPA, FlexAttention where a mask hides tokens",
            reason="takes masks, biases and grouped heads",
        ),
        SlotLine(slot="norm", filler="torch layer_norm and rms_norm", reason="allow sequence parallelism"),
        _line("weight gradient", choice.native_wgrad, "torch addmm into fp32", on_cpu_or.format("Apex"), "NVIDIA Apex"),
        _line("Adam", choice.native_adam, "torch fused kernel", absent, fused_library),
        SlotLine(slot="SGD", filler="torch fused kernel", reason="only this one can be sharded and saved"),
        _line("gradient norm", choice.native_multi_tensor, "torch foreach", absent, fused_library),
        SlotLine(
            slot="RoPE",
            filler="torch.compile" if choice.compiled_rope else "eager",
            reason="one kernel instead of eight" if choice.compiled_rope else "runs on the CPU",
        ),
        _line("SwiGLU", not choice.liger, "Megatron-Core", liger_missing, "liger-kernel"),
        SlotLine(
            slot="cross-entropy",
            filler="torch.compile" if device_type == "cuda" else "eager",
            reason="a third of the memory and time of the others" if device_type == "cuda" else "runs on the CPU",
        ),
    )


def _line(slot: str, native: bool, native_filler: str, why_native: str, library: str) -> SlotLine:
    if native:
        return SlotLine(slot=slot, filler=native_filler, reason=why_native)
    return SlotLine(slot=slot, filler=library, reason="installed and at least as fast")


def one_line(report: tuple[SlotLine, ...]) -> str:
    """The report as one line of a log."""
    return "; ".join(f"{line.slot}: {line.filler}" for line in report)
