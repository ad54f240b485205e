"""Public names, imported lazily, and what importing registers (``registration.py``).

``import lightning_megatron`` loads neither torch nor Lightning, so that command-line help and configuration tools
are fast. The names are listed only in ``__init__.pyi``, as with lazy_loader (SPEC 1 of Scientific Python).
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

from lightning_megatron.registration import (
    hide_known_warnings,
    register_strategies,
    serve_former_homes,
)

__version__ = "0.1.0"

_MODULES = {
    alias.name: str(node.module)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""Public name to the module that defines it."""

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value  # later accesses do not call __getattr__
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


register_strategies()
serve_former_homes(_MODULES)
hide_known_warnings()
