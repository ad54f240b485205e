"""The public names, each loaded when it is first used, and the names of strategies for ``Trainer(strategy=...)``.

``import lightning_megatron`` loads neither torch nor Lightning, so that command-line help and configuration tools
answer at once; it only sees to it that ``Trainer(strategy="megatron_tp2_pp2")`` works from then on, and that the
libraries below do not warn on every rank of what nobody can change.

Lightning looks strategy names up in a registry that it fills while it is imported; it has no entry point for others. If
Lightning is loaded already, the names are registered at once. If not, a hook waits for its import, registers then, and
is gone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_megatron.known_warnings import hide_known_warnings

if TYPE_CHECKING:
    from lightning_megatron.callbacks import LossCurve, PerplexityReport, ProgressLine, SampleText, ThroughputMonitor
    from lightning_megatron.checkpoint.load import LoadFrom
    from lightning_megatron.data.masked import MaskingOptions
    from lightning_megatron.datamodules import (
        DatasetDataModule,
        IndexedDataModule,
        InstructionDataModule,
        TextEvaluationDataModule,
    )
    from lightning_megatron.engine.collectives import (
        avg_losses_across_data_parallel_group,
        gather_across_data_parallel_groups,
    )
    from lightning_megatron.engine.lr_schedule import LRSchedule
    from lightning_megatron.engine.optimizer import OptimizerOptions
    from lightning_megatron.engine.train_step import TrainStep
    from lightning_megatron.errors import CheckpointError, ConfigError, DataError
    from lightning_megatron.generate.options import GenerationOptions
    from lightning_megatron.megatron_datamodule import MegatronDataModule
    from lightning_megatron.module import MegatronModule
    from lightning_megatron.precision import MegatronPrecision
    from lightning_megatron.predictions import gather_predictions
    from lightning_megatron.steps.bert import BertTrainStep
    from lightning_megatron.steps.gpt import GPTTrainStep, LastWordTrainStep
    from lightning_megatron.steps.t5 import T5TrainStep
    from lightning_megatron.strategy import MegatronStrategy

__version__ = "0.1.0"

_HOMES = {
    "BertTrainStep": "lightning_megatron.steps.bert",
    "CheckpointError": "lightning_megatron.errors",
    "ConfigError": "lightning_megatron.errors",
    "DataError": "lightning_megatron.errors",
    "DatasetDataModule": "lightning_megatron.datamodules",
    "GPTTrainStep": "lightning_megatron.steps.gpt",
    "GenerationOptions": "lightning_megatron.generate.options",
    "IndexedDataModule": "lightning_megatron.datamodules",
    "InstructionDataModule": "lightning_megatron.datamodules",
    "LRSchedule": "lightning_megatron.engine.lr_schedule",
    "LastWordTrainStep": "lightning_megatron.steps.gpt",
    "LoadFrom": "lightning_megatron.checkpoint.load",
    "LossCurve": "lightning_megatron.callbacks",
    "MaskingOptions": "lightning_megatron.data.masked",
    "MegatronDataModule": "lightning_megatron.megatron_datamodule",
    "MegatronModule": "lightning_megatron.module",
    "MegatronPrecision": "lightning_megatron.precision",
    "MegatronStrategy": "lightning_megatron.strategy",
    "OptimizerOptions": "lightning_megatron.engine.optimizer",
    "PerplexityReport": "lightning_megatron.callbacks",
    "ProgressLine": "lightning_megatron.callbacks",
    "SampleText": "lightning_megatron.callbacks",
    "T5TrainStep": "lightning_megatron.steps.t5",
    "TextEvaluationDataModule": "lightning_megatron.datamodules",
    "ThroughputMonitor": "lightning_megatron.callbacks",
    "TrainStep": "lightning_megatron.engine.train_step",
    "avg_losses_across_data_parallel_group": "lightning_megatron.engine.collectives",
    "gather_across_data_parallel_groups": "lightning_megatron.engine.collectives",
    "gather_predictions": "lightning_megatron.predictions",
}
"""Public name -> the module that defines it."""

__all__ = [
    "BertTrainStep",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DatasetDataModule",
    "GPTTrainStep",
    "GenerationOptions",
    "IndexedDataModule",
    "InstructionDataModule",
    "LRSchedule",
    "LastWordTrainStep",
    "LoadFrom",
    "LossCurve",
    "MaskingOptions",
    "MegatronDataModule",
    "MegatronModule",
    "MegatronPrecision",
    "MegatronStrategy",
    "OptimizerOptions",
    "PerplexityReport",
    "ProgressLine",
    "SampleText",
    "T5TrainStep",
    "TextEvaluationDataModule",
    "ThroughputMonitor",
    "TrainStep",
    "avg_losses_across_data_parallel_group",
    "gather_across_data_parallel_groups",
    "gather_predictions",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


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


register_strategies()
hide_known_warnings()
