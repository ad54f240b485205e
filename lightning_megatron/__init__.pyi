"""The public names and their modules, for type checkers and for ``__init__.py``, which parses this file."""

from lightning_megatron.callbacks.ema import EMA as EMA
from lightning_megatron.callbacks.harness_evaluation import HarnessEvaluation as HarnessEvaluation
from lightning_megatron.callbacks.loss_curve import LossCurve as LossCurve
from lightning_megatron.callbacks.perplexity import PerplexityReport as PerplexityReport
from lightning_megatron.callbacks.progress_line import ProgressLine as ProgressLine
from lightning_megatron.callbacks.replica_check import ReplicaCheck as ReplicaCheck
from lightning_megatron.callbacks.sample_text import SampleText as SampleText
from lightning_megatron.callbacks.spike_guard import SpikeGuard as SpikeGuard
from lightning_megatron.callbacks.throughput import ThroughputMonitor as ThroughputMonitor
from lightning_megatron.callbacks.top_logits import TopLogitsWriter as TopLogitsWriter
from lightning_megatron.checkpoint.load import LoadFrom as LoadFrom
from lightning_megatron.convert.decoder_rules import DecoderNames as DecoderNames
from lightning_megatron.convert.family import Family as Family
from lightning_megatron.convert.peft import LoRA as LoRA
from lightning_megatron.convert.registry import register_family as register_family
from lightning_megatron.data.masked import MaskingOptions as MaskingOptions
from lightning_megatron.data.top_logits import TopLogitsDataset as TopLogitsDataset
from lightning_megatron.datamodules.base import MegatronDataModule as MegatronDataModule
from lightning_megatron.datamodules.dataset import DatasetDataModule as DatasetDataModule
from lightning_megatron.datamodules.indexed import IndexedDataModule as IndexedDataModule
from lightning_megatron.datamodules.instructions import (
    InstructionDataModule as InstructionDataModule,
)
from lightning_megatron.datamodules.preferences import (
    PreferenceDataModule as PreferenceDataModule,
)
from lightning_megatron.datamodules.streaming_text import (
    StreamingTextDataModule as StreamingTextDataModule,
)
from lightning_megatron.datamodules.text_evaluation import (
    TextEvaluationDataModule as TextEvaluationDataModule,
)
from lightning_megatron.engine.collectives import (
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)
from lightning_megatron.engine.collectives import (
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
)
from lightning_megatron.engine.lr_schedule import LRSchedule as LRSchedule
from lightning_megatron.engine.optimizer_options import OptimizerOptions as OptimizerOptions
from lightning_megatron.errors import CheckpointError as CheckpointError
from lightning_megatron.errors import ConfigError as ConfigError
from lightning_megatron.errors import DataError as DataError
from lightning_megatron.generate.options import GenerationOptions as GenerationOptions
from lightning_megatron.harness import HarnessOptions as HarnessOptions
from lightning_megatron.harness.model import MegatronLM as MegatronLM
from lightning_megatron.module import MegatronModule as MegatronModule
from lightning_megatron.precision import MegatronPrecision as MegatronPrecision
from lightning_megatron.predictions import gather_predictions as gather_predictions
from lightning_megatron.run.heartbeat import Heartbeat as Heartbeat
from lightning_megatron.steps.base import TrainStep as TrainStep
from lightning_megatron.steps.bert import BertTrainStep as BertTrainStep
from lightning_megatron.steps.classification import (
    ClassificationTrainStep as ClassificationTrainStep,
)
from lightning_megatron.steps.distillation import DistillationTrainStep as DistillationTrainStep
from lightning_megatron.steps.dpo import DPOTrainStep as DPOTrainStep
from lightning_megatron.steps.gpt import GPTTrainStep as GPTTrainStep
from lightning_megatron.steps.gpt import LastWordTrainStep as LastWordTrainStep
from lightning_megatron.steps.reward import RewardTrainStep as RewardTrainStep
from lightning_megatron.steps.t5 import T5TrainStep as T5TrainStep
from lightning_megatron.strategy import MegatronStrategy as MegatronStrategy

__version__: str
__all__: list[str]
