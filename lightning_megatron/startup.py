"""What importing this package does to the libraries below: strategy names are registered, known warnings are hidden.

Lightning looks strategy names up in a registry that it fills while it is imported; it has no entry point for others. If
Lightning is loaded already, the names are registered at once. If not, a hook waits for its import, registers then, and
is gone. Hidden is what the libraries say on every rank of every run, and no user can act upon.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_megatron.strategy import MegatronStrategy

# ---- names of strategies ---------------------------------------------------------------------------------------------

_REGISTRY_MODULE = "lightning.pytorch.strategies"
STRATEGY_SIZES = (1, 2, 4, 8)
"""The tp and pp for which there are names; any other layout is written ``MegatronStrategy(tp=..., pp=...)``."""


def strategy_names() -> dict[str, dict[str, int]]:
    """Each name and the layout that it stands for: ``megatron``, ``megatron_tp2``, ``megatron_pp2``, and both sizes."""
    names = {"megatron": {"tp": 1, "pp": 1}}
    for size in STRATEGY_SIZES:
        names |= {f"megatron_tp{size}": {"tp": size, "pp": 1}, f"megatron_pp{size}": {"tp": 1, "pp": size}}
    return names | {f"megatron_tp{tp}_pp{pp}": {"tp": tp, "pp": pp} for tp in STRATEGY_SIZES for pp in STRATEGY_SIZES}


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
        """Say nothing about any module but one; for that, what the other finders say, with a step after its loading."""
        if fullname != _REGISTRY_MODULE:
            return None
        sys.meta_path.remove(self)
        if (spec := importlib.util.find_spec(fullname)) is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register_in(module)

        # The loader stays the original one: inspect and importlib.resources ask a module's for its source and files.
        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


# ---- warnings --------------------------------------------------------------------------------------------------------

_REPEATED_BY_EVERY_RANK = (
    # (message, module), both regular expressions, matched from their beginning; and why nobody needs to read it.
    # What the engine falls back to: the start-up line names what is used instead. What its checks of the config say is
    # about transformer_config_overrides, and stays.
    ("", r"megatron\.(?!core\.(transformer\.transformer_config|model_parallel_config)$)"),
    (r"`torch\.distributed\.\w+` is deprecated", ""),  # names that Megatron uses and torch 2.13 would rename
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", ""),  # the same between Lightning and torch
    ("Please use DTensor instead", ""),  # ShardedTensor, in which Megatron's checkpoints are written
    (r"It is recommended to use `self\.log\(", ""),  # sync_dist: our losses are the same on every rank already
    (r"Total length of `list` across ranks is zero", ""),  # a data module without this split, as its options say
    (r"predict returned None if it was on purpose", ""),  # ranks but one, and texts that were written at once
)
_RECORDS = {
    "lightning.pytorch.utilities.rank_zero": re.compile(
        "💡 Tip: For seamless cloud|The following callbacks returned in .* Trainer: (Rich)?ModelSummary$"
    ),
    "megatron.core.tensor_parallel.random": re.compile("CPU RNG state changed within GPU RNG context"),
    "megatron.core.transformer.transformer_layer": re.compile("Rewrapping ModuleSpec with module"),
}
"""Of lightning 2.6.6 at each start: it recommends litlogger and litmodels (two), and tells that its summary of a rank's
share is replaced by ours, of the whole model. Of Megatron on a CPU: there both states are those of one generator. Of
Megatron 0.19 for each layer: that an MLP is described as 0.16 wants it."""


def hide_known_warnings() -> None:
    """Drop them from now on. Filters of the user's own, and ``python -W``, keep precedence."""
    for message, module in _REPEATED_BY_EVERY_RANK:
        warnings.filterwarnings("ignore", message=message, module=module, append=True)
    for name in _RECORDS:
        logging.getLogger(name).addFilter(_is_worth_reading)


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return _RECORDS[record.name].match(str(record.msg)) is None
