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
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_megatron.known_warnings import hide_known_warnings

if TYPE_CHECKING:
    from lightning_megatron.callbacks import LossCurve as LossCurve
    from lightning_megatron.callbacks import PerplexityReport as PerplexityReport
    from lightning_megatron.callbacks import ProgressLine as ProgressLine
    from lightning_megatron.callbacks import SampleText as SampleText
    from lightning_megatron.callbacks import ThroughputMonitor as ThroughputMonitor
    from lightning_megatron.checkpoint.load import LoadFrom as LoadFrom
    from lightning_megatron.convert.peft import LoRA as LoRA
    from lightning_megatron.data.masked import MaskingOptions as MaskingOptions
    from lightning_megatron.datamodules import DatasetDataModule as DatasetDataModule
    from lightning_megatron.datamodules import IndexedDataModule as IndexedDataModule
    from lightning_megatron.datamodules import InstructionDataModule as InstructionDataModule
    from lightning_megatron.datamodules import TextEvaluationDataModule as TextEvaluationDataModule
    from lightning_megatron.engine.collectives import (
        avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
    )
    from lightning_megatron.engine.collectives import (
        gather_across_data_parallel_groups as gather_across_data_parallel_groups,
    )
    from lightning_megatron.engine.heartbeat import Heartbeat as Heartbeat
    from lightning_megatron.engine.lr_schedule import LRSchedule as LRSchedule
    from lightning_megatron.engine.optimizer import OptimizerOptions as OptimizerOptions
    from lightning_megatron.engine.train_step import TrainStep as TrainStep
    from lightning_megatron.errors import CheckpointError as CheckpointError
    from lightning_megatron.errors import ConfigError as ConfigError
    from lightning_megatron.errors import DataError as DataError
    from lightning_megatron.generate.options import GenerationOptions as GenerationOptions
    from lightning_megatron.guards import ReplicaCheck as ReplicaCheck
    from lightning_megatron.guards import SpikeGuard as SpikeGuard
    from lightning_megatron.megatron_datamodule import MegatronDataModule as MegatronDataModule
    from lightning_megatron.module import MegatronModule as MegatronModule
    from lightning_megatron.precision import MegatronPrecision as MegatronPrecision
    from lightning_megatron.predictions import gather_predictions as gather_predictions
    from lightning_megatron.steps.bert import BertTrainStep as BertTrainStep
    from lightning_megatron.steps.gpt import GPTTrainStep as GPTTrainStep
    from lightning_megatron.steps.gpt import LastWordTrainStep as LastWordTrainStep
    from lightning_megatron.steps.t5 import T5TrainStep as T5TrainStep
    from lightning_megatron.strategy import MegatronStrategy as MegatronStrategy

__version__ = "0.1.0"

_HOMES = {
    name: f"lightning_megatron.{module}"
    for module, names in {
        "callbacks": "LossCurve PerplexityReport ProgressLine SampleText ThroughputMonitor",
        "checkpoint.load": "LoadFrom",
        "convert.peft": "LoRA",
        "data.masked": "MaskingOptions",
        "datamodules": "DatasetDataModule IndexedDataModule InstructionDataModule TextEvaluationDataModule",
        "engine.collectives": "avg_losses_across_data_parallel_group gather_across_data_parallel_groups",
        "engine.heartbeat": "Heartbeat",
        "engine.lr_schedule": "LRSchedule",
        "engine.optimizer": "OptimizerOptions",
        "engine.train_step": "TrainStep",
        "errors": "CheckpointError ConfigError DataError",
        "generate.options": "GenerationOptions",
        "guards": "ReplicaCheck SpikeGuard",
        "megatron_datamodule": "MegatronDataModule",
        "module": "MegatronModule",
        "precision": "MegatronPrecision",
        "predictions": "gather_predictions",
        "steps.bert": "BertTrainStep",
        "steps.gpt": "GPTTrainStep LastWordTrainStep",
        "steps.t5": "T5TrainStep",
        "strategy": "MegatronStrategy",
    }.items()
    for name in names.split()
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


register_strategies()
hide_known_warnings()
