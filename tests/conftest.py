"""Guards and switches for every test. Imports nothing heavy: tests of pure functions must stay fast."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.leaks import Baseline, process_group_leaks

# Tests must not depend on the network; set before any library reads it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Inductor's pool of compiling processes outlives a worker of pytest-xdist and keeps its pipe open: the run never ends.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    sys.argv[0] = __file__  # a worker of pytest-xdist is `python -c`, in which a run of several processes is refused

# Set by libraries while they are imported, or by pytest itself: not the doing of a test.
_SET_BY_LIBRARIES = (
    "PYTEST_",
    "PYTORCH_",
    "KMP_",
    "TORCH",
    "TRITON",
    "PL_",
    "NCCL_",
    "CUDA_MODULE_LOADING",
    "TF_",
    "LC_CTYPE",
)


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(_SET_BY_LIBRARIES)}


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Fail a test that leaves environment variables, patches, a dtype or process groups behind, and clean up."""
    environment, torch_state = _environment(), Baseline()
    # Lightning's seed_everything() exports PL_*: tolerated, but the next test must not inherit it.
    with patch.dict(os.environ):
        yield
        now = _environment()
    changed = sorted(key for key in environment.keys() | now.keys() if environment.get(key) != now.get(key))
    leaks = [f"os.environ[{key!r}] = {now.get(key)!r}, was {environment.get(key)!r}" for key in changed]
    leaks += torch_state.leaks() + process_group_leaks()
    torch_state.restore()
    assert not leaks, "the test left behind: " + "; ".join(leaks)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a small indexed dataset; its tokenizer is in the folder ``tok`` beside it."""
    from tests.cli.corpus import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus"))


def _num_cuda_devices() -> int:
    """Look for a device file first: importing torch to learn that there is no GPU costs seconds."""
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu(count)`` where fewer CUDA devices are; count is 1 if left out."""
    needed = {item: marker for item in items if (marker := item.get_closest_marker("gpu"))}
    present = _num_cuda_devices() if needed else 0
    for item, marker in needed.items():
        count = marker.kwargs.get("count", marker.args[0] if marker.args else 1)
        if present < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} CUDA devices, {present} on this machine"))
