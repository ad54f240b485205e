"""Types of GPUs: memory, bandwidths and peak FLOP/s, by datasheet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["bf16", "fp16", "tf32", "fp32"]
"""Precision of matrix products: ``fp32`` without tensor cores; ``tf32`` is fp32 storage with tensor cores."""


_H100 = (989.0, 989.0, 494.0, 67.0)
_H100_NVL = (835.0, 835.0, 417.0, 60.0)
_A100 = (312.0, 312.0, 156.0, 19.5)
_V100 = (None, 125.0, None, 15.7)

DEVICE_PEAKS: dict[str, tuple[float | None, float | None, float | None, float | None]] = {
    # Blackwell architecture technical brief, HGX B200; its tf32 and fp32 figures vary by edition.
    "NVIDIA B200": (2250.0, 2250.0, None, None),
    # Datasheets of H200 and H100, sparse figures halved.
    "NVIDIA H200": _H100,
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H800": _H100,
    "NVIDIA H200 NVL": _H100_NVL,
    "NVIDIA H100 NVL": _H100_NVL,
    "NVIDIA H100 PCIe": (756.0, 756.0, 378.0, 51.0),
    # Datasheet of the A100.
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA A800-SXM4-80GB": _A100,
    # Datasheet of each; the L4's sparse figures are halved.
    "NVIDIA L40S": (362.0, 362.0, 183.0, 91.6),
    "NVIDIA L40": (181.0, 181.0, 90.5, 90.5),
    "NVIDIA L4": (121.0, 121.0, 60.0, 30.3),
    "NVIDIA A40": (149.7, 149.7, 74.8, 37.4),
    "NVIDIA A30": (165.0, 165.0, 82.0, 10.3),
    "NVIDIA A10": (125.0, 125.0, 62.5, 31.2),
    "Tesla V100-SXM2-16GB": _V100,
    "Tesla V100-SXM2-32GB": _V100,
    "Tesla T4": (None, 65.0, None, 8.1),
}
"""Peak dense TFLOP/s (1e12) by ``torch.cuda.get_device_name``: bf16, fp16 and tf32 on tensor cores, and fp32.

Names must match exactly: a slice of a GPU (MIG), a variant with another power limit or a new GPU has no entry, and no
utilisation is reported rather than a wrong one.
"""


def peak_flops_per_s(device_name: str, precision: Precision) -> float | None:
    """Peak dense FLOP/s of one device; None if unknown for that device or precision.

    Args:
        device_name: As returned by ``torch.cuda.get_device_name``.
        precision: Precision of the matrix products.
    """
    if device_name not in DEVICE_PEAKS:
        return None
    column = ("bf16", "fp16", "tf32", "fp32").index(precision)
    teraflops = DEVICE_PEAKS[device_name][column]
    if teraflops is None:
        return None
    return teraflops * 1e12


GIB = 2**30


@dataclass(frozen=True)
class Device:
    """A type of GPU, with bandwidths by datasheet."""

    name: str
    """As returned by ``torch.cuda.get_device_name``."""
    memory: float
    """Bytes available to a process."""
    memory_bandwidth: float
    """Bytes/s of device memory."""
    link_bandwidth: float
    """Bytes/s per direction to other GPUs of the host."""
    network_bandwidth: float
    """Bytes/s per direction to other hosts; assumes one network adapter per GPU."""
    host_bandwidth: float
    """Bytes/s per direction to the memory of its host: 16 lanes of PCIe."""


DEVICES = {
    "b200": Device("NVIDIA B200", 178 * GIB, 8.0e12, 900e9, 50e9, 64e9),
    "h200": Device("NVIDIA H200", 139 * GIB, 4.8e12, 450e9, 50e9, 64e9),
    "h100": Device("NVIDIA H100 80GB HBM3", 79 * GIB, 3.35e12, 450e9, 50e9, 64e9),
    "a100": Device("NVIDIA A100-SXM4-80GB", 79 * GIB, 2.04e12, 300e9, 25e9, 32e9),
    "a100-40gb": Device("NVIDIA A100-SXM4-40GB", 39 * GIB, 1.56e12, 300e9, 25e9, 32e9),
}
"""Device by its name for ``plan --device``."""
RANKS_PER_HOST = 8
