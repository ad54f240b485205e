"""How is a function of Megatron-Core or torch replaced for a while, and put back?

Each replacement is a row of data that names the upstream file, the function and the reason, so that the list of all
patches can be read, printed by ``doctor`` and tested: a test fails when the engine no longer needs one.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One attribute of one upstream object that is replaced while the patch is active."""

    module: str
    """Importable module, e.g. ``megatron.core.optimizer``."""
    attribute: str
    """Dotted path below the module, e.g. ``Adam`` or ``DistributedOptimizer._set_main_param_and_optimizer_states``."""
    replacement: Callable[[Any], Any]
    """Gets the original (None if absent) and returns what stands in for it."""
    engine: str
    """Version that was read, e.g. ``megatron-core 0.16.1``."""
    reason: str
    """Why the engine needs it, in a sentence."""


def _owner_and_name(patch: Patch) -> tuple[Any, str]:
    owner: Any = importlib.import_module(patch.module)
    *path, name = patch.attribute.split(".")
    for step in path:
        owner = getattr(owner, step)
    return owner, name


@contextlib.contextmanager
def active(patches: Iterable[Patch]) -> Iterator[None]:
    """Apply ``patches`` in order and restore every original, in reverse, however the block ends."""
    with contextlib.ExitStack() as undo:
        for patch in patches:
            owner, name = _owner_and_name(patch)
            # vars() instead of getattr(): a staticmethod or an inherited attribute must come back as it was.
            original = vars(owner).get(name, _MISSING)
            setattr(owner, name, patch.replacement(getattr(owner, name, None)))
            undo.callback(_restore, owner, name, original)
        yield


def _restore(owner: Any, name: str, original: Any) -> None:
    if original is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, original)
