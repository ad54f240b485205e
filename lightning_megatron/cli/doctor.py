"""The command ``doctor``: versions, devices, what implements each op of the engine, and optional packages."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

import torch

import lightning_megatron
from lightning_megatron.cli.inspect import columns
from lightning_megatron.engine.ops.report import DeviceType, ops_report
from lightning_megatron.engine.ops.swiglu import has_liger
from lightning_megatron.errors import ConfigError

_REQUIRED = (
    "torch",
    "lightning",
    "megatron-core",
    "transformers",
    "tokenizers",
    "jsonargparse",
    "numpy",
)
_NOT_INSTALLED = "not installed"
_FOR_PREPROCESS = ("pyarrow", "zstandard", "sentencex", "orjson")


def check_accelerator(accelerator: object) -> None:
    """Check that torch finds a GPU if ``Trainer(accelerator=...)`` requires one.

    Raises:
        ConfigError: If it finds none.
    """
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"accelerator={accelerator}: expected a GPU that torch can use, got none; give accelerator=cpu, or see "
            "lightning-megatron doctor"
        )


def report_installation() -> str:
    """Report versions, devices, what implements each op of the engine, and optional packages, as text tables."""
    device_type: DeviceType = "cuda" if torch.cuda.is_available() else "cpu"
    # The package may be installed without a working CUDA extension.
    liger = (
        "usable"
        if has_liger()
        else "installed, but not usable"
        if find_spec("liger_kernel")
        else _NOT_INSTALLED
    )
    optional = [
        ("liger-kernel", liger, "fused SwiGLU on a GPU", "pip install 'lightning-megatron[gpu]'")
    ]
    for name in _FOR_PREPROCESS:
        state = "usable" if find_spec(name) else _NOT_INSTALLED
        optional.append((name, state, "for preprocess", "pip install 'lightning-megatron[data]'"))
    return "\n\n".join(
        (
            _table("Versions", ("what", "version"), _versions()),
            _table("Devices", ("device", "what"), _devices()),
            _table(
                f"Engine ops when a strategy runs on {device_type}",
                ("op", "implementation", "why"),
                ops_report(device_type),
            ),
            _table("Optional", ("package", "state", "gives", "install"), optional),
        )
    )


def _versions() -> list[tuple[str, str]]:
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return [
        ("python", platform.python_version()),
        ("lightning-megatron", lightning_megatron.__version__),
        *((package, importlib.metadata.version(package)) for package in _REQUIRED),
        ("CUDA of torch", torch.version.cuda or "none (CPU build)"),
        (
            "NCCL",
            ".".join(map(str, torch.cuda.nccl.version()))
            if torch.cuda.is_available()
            else "not used",
        ),
        ("cuDNN", str(cudnn or "not used")),
    ]


def _devices() -> Iterable[tuple[str, str]]:
    yield "cpu", f"{torch.get_num_threads()} threads; ranks communicate through gloo"
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory, capability = (
            f"{gpu.total_memory / 2**30:.0f} GiB",
            f"compute capability {gpu.major}.{gpu.minor}",
        )
        yield f"cuda:{index}", f"{gpu.name}, {memory}, {capability}"


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    table = [tuple(header), *(tuple(row) for row in rows)]
    table.insert(1, tuple("-" * max(map(len, column)) for column in zip(*table, strict=True)))
    return "\n".join((title, "", *columns(table)))
