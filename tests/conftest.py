"""Leak guard, corpus fixture and ``gpu`` marker of all tests. No heavy imports: pure functions must test fast."""

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
# Inductor's pool of compile processes would outlive a worker of pytest-xdist and keep its pipe open: the run hangs.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # A worker of pytest-xdist is `python -c`, where multi-process runs are refused.
    sys.argv[0] = __file__

# Prefixes of variables that libraries set on import, or pytest itself; not leaks of a test.
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
    return {
        key: value for key, value in os.environ.items() if not key.startswith(_SET_BY_LIBRARIES)
    }


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Fail a test that leaks environment variables, patches, a default dtype or process groups, and clean up."""
    before = _environment()
    torch_state = Baseline()
    # Lightning's seed_everything() exports PL_*: tolerated, but the next test must not inherit it.
    with patch.dict(os.environ):
        yield
        after = _environment()
    changed = sorted(
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    )
    leaks = [
        f"os.environ[{key!r}] = {after.get(key)!r}, was {before.get(key)!r}" for key in changed
    ]
    leaks += torch_state.leaks() + process_group_leaks()
    torch_state.restore()
    assert not leaks, "the test leaked: " + "; ".join(leaks)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a small indexed dataset; its tokenizer is in the sibling directory ``tok``."""
    from tests.cli.corpus import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus"))


def _num_cuda_devices() -> int:
    """Number of CUDA devices; looks for a device file first, since importing torch costs seconds."""
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu(count)`` on machines with fewer CUDA devices; count defaults to 1."""
    markers = {item: marker for item in items if (marker := item.get_closest_marker("gpu"))}
    num_devices = _num_cuda_devices() if markers else 0
    for item, marker in markers.items():
        count = marker.kwargs.get("count", marker.args[0] if marker.args else 1)
        if num_devices < count:
            item.add_marker(
                pytest.mark.skip(
                    reason=f"needs {count} CUDA devices, {num_devices} on this machine"
                )
            )
