"""The command ``doctor``: versions, devices, what implements each op of the engine, and optional packages.

Slow imports are inside the functions.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import lightning_megatron
from lightning_megatron.cli.inspect import columns
from lightning_megatron.errors import ConfigError

if TYPE_CHECKING:
    from lightning_megatron.engine.ops.report import DeviceType

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
_STATE_BYTES = 12
"""Of a parameter: an fp32 master weight and two moments."""
_OPTIONAL = (
    # (package, module, what it gives, extra)
    ("pyarrow", "pyarrow", "for preprocess", "data"),
    ("zstandard", "zstandard", "for preprocess", "data"),
    ("sentencex", "sentencex", "for preprocess", "data"),
    ("orjson", "orjson", "for preprocess", "data"),
    ("lm_eval", "lm_eval", "evaluate, HarnessEvaluation", "eval"),
    ("wandb", "wandb", "Lightning's WandbLogger", "wandb"),
    ("universal-pathlib", "upath", "checkpoints in object stores", "remote"),
)


def doctor() -> None:
    """Show versions, devices, what implements each op of the engine, and optional packages."""
    print(report_installation())


def check_accelerator(accelerator: object) -> None:
    """Check that torch finds a GPU if ``Trainer(accelerator=...)`` requires one.

    Raises:
        ConfigError: If it finds none.
    """
    import torch

    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"accelerator={accelerator}: expected a GPU that torch can use, got none; give accelerator=cpu, or see "
            "lightning-megatron doctor"
        )


def report_installation() -> str:
    """Report versions, devices, what implements each op of the engine, and optional packages, as text tables."""
    import torch

    from lightning_megatron.engine.ops.report import ops_report

    device_type: DeviceType = "cuda" if torch.cuda.is_available() else "cpu"
    tables = [
        _table("Versions", ("what", "version"), _versions()),
        _table("Devices", ("device", "what"), _devices()),
        _table(
            f"Engine ops when a strategy runs on {device_type}",
            ("op", "implementation", "why"),
            ops_report(device_type),
        ),
        "docs/without_transformer_engine.md compares these with Transformer Engine's and Apex's.",
        _table("Optional", ("package", "state", "gives", "install"), _optional_packages()),
    ]
    return "\n\n".join(tables)


def _versions() -> Iterable[tuple[str, str]]:
    import torch

    yield "python", platform.python_version()
    yield "lightning-megatron", lightning_megatron.__version__
    for package in _REQUIRED:
        yield package, importlib.metadata.version(package)
    yield "CUDA of torch", torch.version.cuda or "none (CPU build)"
    nccl = "not used"
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield "NCCL", nccl
    cudnn = torch.backends.cudnn.version()
    yield "cuDNN", str(cudnn or "not used")


def _devices() -> Iterable[tuple[str, str]]:
    import torch

    from lightning_megatron.planning.host import host_memory

    yield "cpu", f"{torch.get_num_threads()} threads; ranks communicate through gloo"
    host = host_memory()
    billions = host.free / _STATE_BYTES / 1e9
    yield (
        "host memory",
        f"{host}: MegatronStrategy(offload_optimizer=True) keeps AdamW's state of {billions:.1f} billion parameters",
    )
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        yield f"cuda:{index}", f"{gpu.name}, {memory}, compute capability {gpu.major}.{gpu.minor}"


def _optional_packages() -> Iterable[tuple[str, str, str, str]]:
    from lightning_megatron.engine.ops.flash_attention_4 import has_flash_attention_4

    state = _NOT_INSTALLED
    if has_flash_attention_4():
        state = "usable"
    elif find_spec("flash_attn"):  # an older one, or on another GPU
        state = "installed, but not usable"
    gives = "ALiBi, windows and causal heads of 128 on Hopper"
    yield "flash-attn-4", state, gives, "pip install 'lightning-megatron[flash]'"
    for package, module, gives, extra in _OPTIONAL:
        state = "usable" if find_spec(module) else _NOT_INSTALLED
        yield package, state, gives, f"pip install 'lightning-megatron[{extra}]'"


def _table(
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
) -> str:
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, ["-" * width for width in widths])
    return "\n".join((title, "", *columns(table)))
