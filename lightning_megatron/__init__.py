"""The public names, each loaded when it is first used, and the names of strategies for ``Trainer(strategy=...)``.

``import lightning_megatron`` loads neither torch nor Lightning, so that command-line help and configuration tools
answer at once. The names stand in ``__init__.pyi`` alone, as in lazy_loader (SPEC 1 of Scientific Python).
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

from lightning_megatron.startup import hide_known_warnings, register_strategies

__version__ = "0.1.0"

_HOMES = {
    alias.name: str(node.module)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""Public name -> the module that defines it."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


register_strategies()
hide_known_warnings()
