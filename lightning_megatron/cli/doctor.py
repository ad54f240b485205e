"""Is this machine ready, and what will the engine use on it?"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from lightning_megatron import features
from lightning_megatron.engine.slots.report import DeviceType, slot_report

_PACKAGES = (
    "lightning-megatron",
    "torch",
    "lightning",
    "megatron-core",
    "transformers",
    "tokenizers",
    "jsonargparse",
    "numpy",
)


@dataclass(frozen=True, kw_only=True)
class _Optional:
    """Something that training does without, but better with."""

    name: str
    module: str
    present: Callable[[], bool]
    purpose: str
    install: str

    def state(self) -> str:
        """Whether it is there, and whether it works: a half-installed CUDA extension is there only."""
        if self.present():
            return "usable"
        return "not installed" if importlib.util.find_spec(self.module) is None else "installed, but not usable"


_OPTIONAL = (
    _Optional(
        name="liger-kernel",
        module="liger_kernel",
        present=features.has_liger,
        purpose="fused SwiGLU on a GPU",
        install="pip install 'lightning-megatron[gpu]'",
    ),
    _Optional(
        name="Transformer Engine",
        module="transformer_engine",
        present=features.has_transformer_engine,
        purpose="fused optimizer and gradient norm",
        install="pip install --no-build-isolation 'transformer_engine[pytorch]' (needs the CUDA toolkit)",
    ),
    _Optional(
        name="NVIDIA Apex",
        module="apex",
        present=features.has_apex,
        purpose="fused optimizer and weight gradients",
        install="from NVIDIA's source; the package called apex on PyPI is another one (see CONTRIBUTING.md)",
    ),
)


def report_installation() -> str:
    """Versions, devices, what fills each slot of the engine, and what could be installed, as a text of tables."""
    device_type: DeviceType = "cuda" if torch.cuda.is_available() else "cpu"
    slots = [(line.slot, line.filler, line.reason) for line in slot_report(device_type)]
    optional = [(each.name, each.state(), each.purpose, each.install) for each in _OPTIONAL]
    return "\n\n".join(
        (
            _table("Versions", ("what", "version"), _versions()),
            _table("Devices", ("device", "what"), _devices()),
            _table(f"Engine slots when a strategy runs on {device_type}", ("slot", "filled by", "why"), slots),
            _table("Optional", ("package", "state", "gives", "install"), optional),
            _table("Extras", ("extra", "state", "install"), _extras()),
        )
    )


def _versions() -> list[tuple[str, str]]:
    found = [("python", platform.python_version()), *((package, _version(package)) for package in _PACKAGES)]
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return [
        *found,
        ("CUDA of torch", torch.version.cuda or "none (CPU build)"),
        ("NCCL", ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "not used"),
        ("cuDNN", str(cudnn) if cudnn is not None else "not used"),
    ]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _extras() -> Iterable[tuple[str, str, str]]:
    """What pip would install for each extra that is no developer's, and which of it is there."""
    if _version(_PACKAGES[0]) == "not installed":  # run from a source folder: nothing says what the extras are
        return
    lines = importlib.metadata.requires(_PACKAGES[0]) or []
    for extra in ("gpu", "data"):
        names = [re.split(r"[^\w.-]", line)[0] for line in lines if re.search(rf"extra == .{extra}\b", line)]
        state = ", ".join(f"{name} {_version(name)}" for name in names)
        yield extra, state, f"pip install '{_PACKAGES[0]}[{extra}]'"


def _devices() -> list[tuple[str, str]]:
    found = [("cpu", f"{torch.get_num_threads()} threads; ranks communicate through gloo")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gib = properties.total_memory / 2**30
        capability = f"{properties.major}.{properties.minor}"
        found.append((f"cuda:{index}", f"{properties.name}, {gib:.0f} GiB, compute capability {capability}"))
    return found


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Left-aligned columns under a title; the last column is not padded."""
    table = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join((title, "", lines[0], rule, *lines[1:]))
