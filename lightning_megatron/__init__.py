"""What does a user import? Every public name, each loaded when it is first used.

``import lightning_megatron`` loads neither torch nor Lightning, so that command-line help and configuration tools
answer at once; it only sees to it that ``Trainer(strategy="megatron_tp2_pp2")`` works from then on, and that the
libraries below do not warn on every rank of what nobody can change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_megatron.known_warnings import hide_known_warnings
from lightning_megatron.registration import register_strategies

if TYPE_CHECKING:
    from lightning_megatron.callbacks import LossCurve, PerplexityReport, ProgressLine, SampleText, ThroughputMonitor
    from lightning_megatron.data.masked import MaskingOptions
    from lightning_megatron.datamodules.base import MegatronDataModule
    from lightning_megatron.datamodules.sources import (
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
    from lightning_megatron.errors import CheckpointError, ConfigError, DataError
    from lightning_megatron.generate.options import GenerationOptions
    from lightning_megatron.load_from import LoadFrom
    from lightning_megatron.module import MegatronModule
    from lightning_megatron.precision import MegatronPrecision
    from lightning_megatron.predictions import gather_predictions
    from lightning_megatron.steps.base import TrainStep
    from lightning_megatron.steps.bert import BertTrainStep
    from lightning_megatron.steps.gpt import GPTTrainStep
    from lightning_megatron.steps.last_word import LastWordTrainStep
    from lightning_megatron.steps.t5 import T5TrainStep
    from lightning_megatron.strategy import MegatronStrategy

__version__ = "0.1.0"

_HOMES = {
    "BertTrainStep": "lightning_megatron.steps.bert",
    "CheckpointError": "lightning_megatron.errors",
    "ConfigError": "lightning_megatron.errors",
    "DataError": "lightning_megatron.errors",
    "DatasetDataModule": "lightning_megatron.datamodules.sources",
    "GPTTrainStep": "lightning_megatron.steps.gpt",
    "GenerationOptions": "lightning_megatron.generate.options",
    "IndexedDataModule": "lightning_megatron.datamodules.sources",
    "InstructionDataModule": "lightning_megatron.datamodules.sources",
    "LRSchedule": "lightning_megatron.engine.lr_schedule",
    "LastWordTrainStep": "lightning_megatron.steps.last_word",
    "LoadFrom": "lightning_megatron.load_from",
    "LossCurve": "lightning_megatron.callbacks",
    "MaskingOptions": "lightning_megatron.data.masked",
    "MegatronDataModule": "lightning_megatron.datamodules.base",
    "MegatronModule": "lightning_megatron.module",
    "MegatronPrecision": "lightning_megatron.precision",
    "MegatronStrategy": "lightning_megatron.strategy",
    "OptimizerOptions": "lightning_megatron.engine.optimizer",
    "PerplexityReport": "lightning_megatron.callbacks",
    "ProgressLine": "lightning_megatron.callbacks",
    "SampleText": "lightning_megatron.callbacks",
    "T5TrainStep": "lightning_megatron.steps.t5",
    "TextEvaluationDataModule": "lightning_megatron.datamodules.sources",
    "ThroughputMonitor": "lightning_megatron.callbacks",
    "TrainStep": "lightning_megatron.steps.base",
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


register_strategies()
hide_known_warnings()
