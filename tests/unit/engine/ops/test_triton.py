"""Triton kernels compared with torch on a GPU, and in Triton's interpreter on the CPU, in a separate process.

All that the interpreter launches also compiles for a GPU.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import on_gpus
from tests.ranks import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

CHECKS = Path(__file__).parent / "triton_checks.py"
KERNELS = ROOT / "lightning_megatron" / "engine" / "ops" / "triton"


def _check(device: str, *options: str, **variables: str) -> None:
    """Run the checks in a process of their own: Triton reads TRITON_INTERPRET at import."""
    environment = {
        **os.environ,
        "KERNELS_DEVICE": device,
        "TRITON_INTERPRET": "1" if device == "cpu" else "0",
        **variables,
    }
    plugins = ("-p", "no:xdist", "-p", "no:cacheprovider", *options)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *plugins, str(CHECKS)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


@pytest.mark.parametrize(
    "device",
    ["cpu", on_gpus(1, "cuda")],
)
def test_kernels_equal_torch_forward_and_backward(device: str) -> None:
    _check(device)


@pytest.mark.exhaustive
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    launches = tmp_path / "launches"
    plugin = "tests.unit.engine.ops.triton_launches"
    _check("cpu", "-p", plugin, KERNELS_LAUNCHES=str(launches))
    result = subprocess.run(
        [sys.executable, "-m", plugin, str(launches)],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    compiled = set(result.stdout.split())
    for name in _launched_kernels():
        assert name in compiled, name


def _launched_kernels() -> list[str]:
    """All functions of the package that a ``kernel[grid](...)`` launches."""
    names = []
    for file in sorted(KERNELS.glob("*.py")):
        launched = re.findall(r"\b(_\w+)\[", file.read_text())
        kernels = re.findall(r"@triton\.jit\ndef (\w+)\(", file.read_text())
        module = f"lightning_megatron.engine.ops.triton.{file.stem}"
        names += [f"{module}.{name}" for name in kernels if name in launched]
    assert len(names) >= 20
    return names
