"""Hugging Face's libraries offline: datasets and metrics come from this disk, and no address is opened."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from unittest import mock

_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
"""Read when the libraries are imported, also by processes that are started meanwhile."""
_SETTINGS = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_HUB_OFFLINE"),
    ("datasets.config", "HF_DATASETS_OFFLINE"),
    ("evaluate.config", "HF_EVALUATE_OFFLINE"),
)
"""What libraries that are imported already have read from them."""


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Context manager: the hub, datasets and evaluate use their caches only; restored on exit."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, dict.fromkeys(_VARIABLES, "1")))
        for module, name in _SETTINGS:
            if hasattr(sys.modules.get(module), name):
                stack.enter_context(mock.patch(f"{module}.{name}", True))
        yield
