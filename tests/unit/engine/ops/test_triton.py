"""Triton kernels compared with torch on a GPU, and in Triton's interpreter on the CPU, in a separate process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import on_gpus

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

CHECKS = Path(__file__).parent / "triton_checks.py"


@pytest.mark.parametrize(
    "device",
    ["cpu", on_gpus(1, "cuda")],
)
def test_kernels_equal_torch_forward_and_backward(device: str) -> None:
    # Triton reads TRITON_INTERPRET at import.
    environment = {
        **os.environ,
        "KERNELS_DEVICE": device,
        "TRITON_INTERPRET": "1" if device == "cpu" else "0",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        str(CHECKS),
    ]
    result = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
