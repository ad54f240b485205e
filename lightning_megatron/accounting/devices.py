"""How fast can a device be at best? Peaks from vendors' datasheets, without sparsity.

Only exact device names are known, as ``torch.cuda.get_device_name`` says them: a slice of a GPU (MIG), a variant with
another power limit or a new GPU has no peak here, and then no utilisation is reported rather than a wrong one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["bf16", "fp16", "tf32", "fp32"]
"""Type of the matrix products. ``fp32`` is without tensor cores; ``tf32`` is fp32 storage with tensor cores."""


@dataclass(frozen=True, kw_only=True)
class DevicePeak:
    """Peak dense speeds of one GPU in TFLOP/s (1e12); None where the datasheet or the device has none."""

    names: tuple[str, ...]
    """Names by which the driver calls the device."""
    bf16: float | None
    """Tensor cores, bfloat16 in, float32 accumulation."""
    fp16: float | None
    """Tensor cores, float16 in, float32 accumulation."""
    tf32: float | None
    """Tensor cores, float32 storage."""
    fp32: float | None
    """Without tensor cores."""
    source: str
    """Datasheet."""


_HOPPER = "NVIDIA H100 Tensor Core GPU datasheet (sparse figures halved)"
_AMPERE = "NVIDIA A100 Tensor Core GPU datasheet"

DEVICE_PEAKS: tuple[DevicePeak, ...] = (
    DevicePeak(
        names=("NVIDIA B200",),
        bf16=2250.0,
        fp16=2250.0,
        tf32=None,
        fp32=None,
        source="NVIDIA Blackwell architecture technical brief, HGX B200 (its tf32 and fp32 figures vary by edition)",
    ),
    DevicePeak(
        names=("NVIDIA H200",),
        bf16=989.0,
        fp16=989.0,
        tf32=494.0,
        fp32=67.0,
        source="NVIDIA H200 Tensor Core GPU datasheet, SXM (sparse figures halved)",
    ),
    DevicePeak(
        names=("NVIDIA H200 NVL",),
        bf16=835.0,
        fp16=835.0,
        tf32=417.0,
        fp32=60.0,
        source="NVIDIA H200 Tensor Core GPU datasheet, NVL (sparse figures halved)",
    ),
    DevicePeak(
        names=("NVIDIA H100 80GB HBM3", "NVIDIA H800"), bf16=989.0, fp16=989.0, tf32=494.0, fp32=67.0, source=_HOPPER
    ),
    DevicePeak(names=("NVIDIA H100 NVL",), bf16=835.0, fp16=835.0, tf32=417.0, fp32=60.0, source=_HOPPER),
    DevicePeak(names=("NVIDIA H100 PCIe",), bf16=756.0, fp16=756.0, tf32=378.0, fp32=51.0, source=_HOPPER),
    DevicePeak(
        names=(
            "NVIDIA A100-SXM4-40GB",
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA A100-PCIE-40GB",
            "NVIDIA A100 80GB PCIe",
            "NVIDIA A800-SXM4-80GB",
        ),
        bf16=312.0,
        fp16=312.0,
        tf32=156.0,
        fp32=19.5,
        source=_AMPERE,
    ),
    DevicePeak(names=("NVIDIA L40S",), bf16=362.0, fp16=362.0, tf32=183.0, fp32=91.6, source="NVIDIA L40S datasheet"),
    DevicePeak(names=("NVIDIA L40",), bf16=181.0, fp16=181.0, tf32=90.5, fp32=90.5, source="NVIDIA L40 datasheet"),
    DevicePeak(
        names=("NVIDIA L4",),
        bf16=121.0,
        fp16=121.0,
        tf32=60.0,
        fp32=30.3,
        source="NVIDIA L4 datasheet (sparse figures halved)",
    ),
    DevicePeak(names=("NVIDIA A40",), bf16=149.7, fp16=149.7, tf32=74.8, fp32=37.4, source="NVIDIA A40 datasheet"),
    DevicePeak(names=("NVIDIA A30",), bf16=165.0, fp16=165.0, tf32=82.0, fp32=10.3, source="NVIDIA A30 datasheet"),
    DevicePeak(names=("NVIDIA A10",), bf16=125.0, fp16=125.0, tf32=62.5, fp32=31.2, source="NVIDIA A10 datasheet"),
    DevicePeak(
        names=("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"),
        bf16=None,
        fp16=125.0,
        tf32=None,
        fp32=15.7,
        source="NVIDIA V100 datasheet, SXM2",
    ),
    DevicePeak(names=("Tesla T4",), bf16=None, fp16=65.0, tf32=None, fp32=8.1, source="NVIDIA T4 datasheet"),
)
"""Every device whose peak is known."""

_BY_NAME = {name: peak for peak in DEVICE_PEAKS for name in peak.names}


def peak_flops_per_s(device_name: str, precision: Precision) -> float | None:
    """Peak dense FLOP/s of one device; None if the device, or that precision on it, is not known.

    Args:
        device_name: As ``torch.cuda.get_device_name`` says it.
        precision: Type of the matrix products.
    """
    peak = _BY_NAME.get(device_name)
    if peak is None:
        return None
    teraflops = {"bf16": peak.bf16, "fp16": peak.fp16, "tf32": peak.tf32, "fp32": peak.fp32}[precision]
    return None if teraflops is None else teraflops * 1e12
