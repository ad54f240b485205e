"""How does ``Trainer(strategy="megatron_tp2_pp2")`` find our strategy, whichever package is imported first?

Lightning looks strategy names up in a registry that it fills while it is imported; it has no entry point for others. If
Lightning is loaded already, the names are registered at once. If not, loading it here would cost seconds for a user who
only wants ``--help``, so a hook waits for Lightning's import, registers then, and is gone.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_megatron.strategy import MegatronStrategy

_REGISTRY_MODULE = "lightning.pytorch.strategies"
SIZES = (1, 2, 4, 8)
"""The tp and pp for which there are names; any other layout is written ``MegatronStrategy(tp=..., pp=...)``."""


def strategy_names() -> dict[str, dict[str, int]]:
    """Each name and the layout that it stands for: ``megatron``, ``megatron_tp2``, ``megatron_pp2``, and both sizes."""
    names = {"megatron": {"tp": 1, "pp": 1}}
    for size in SIZES:
        names |= {f"megatron_tp{size}": {"tp": size, "pp": 1}, f"megatron_pp{size}": {"tp": 1, "pp": size}}
    return names | {f"megatron_tp{tp}_pp{pp}": {"tp": tp, "pp": pp} for tp in SIZES for pp in SIZES}


def register_strategies() -> None:
    """Make the names known to Lightning, now or as soon as it is imported."""
    if _REGISTRY_MODULE in sys.modules:
        _register_in(sys.modules[_REGISTRY_MODULE])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register_in(strategies: ModuleType) -> None:
    registry = strategies.StrategyRegistry
    for name, layout in strategy_names().items():
        if name not in registry:  # this package may have been reloaded
            description = "Megatron-Core with tensor parallel size {tp} and pipeline parallel size {pp}"
            registry.register(name, _build, description=description.format(**layout), **layout)


def _build(tp: int, pp: int) -> MegatronStrategy:
    """What the registry calls in place of a class, so that the engine is loaded only when a Trainer asks for it."""
    from lightning_megatron.strategy import MegatronStrategy

    return MegatronStrategy(tp=tp, pp=pp)


class _AfterImport(MetaPathFinder):
    """Notices the import of Lightning's registry and has the names registered right after it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Say nothing about any module but one; for that, what the other finders say, with a loader around theirs."""
        if fullname != _REGISTRY_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    """Loads a module as the original loader does and registers afterwards."""

    def __init__(self, original: Loader) -> None:
        self._original = original

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Do as the original loader."""
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, give it its own loader back, and register."""
        # Given back first: inspect and importlib.resources ask a module's loader for its source and files.
        module.__loader__ = self._original
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        self._original.exec_module(module)
        _register_in(module)
