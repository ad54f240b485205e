"""Triton kernels beside their formulas: on a GPU, and in Triton's interpreter on the CPU, in a process of its own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

CHECKS = Path(__file__).parent / "triton_checks.py"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kernels_are_their_formulas_both_ways(device: str) -> None:
    # Triton decides when it is imported whether it interprets.
    environment = {**os.environ, "KERNELS_DEVICE": device, "TRITON_INTERPRET": "1" if device == "cpu" else "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", str(CHECKS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
