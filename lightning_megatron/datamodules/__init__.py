"""Lightning data modules, one a file, and their base.

They decide who reads and where a run goes on; readers and loaders of samples are in ``data``. Imports ``data``,
``steps`` and what is below them; ``module`` and ``cli`` import it.
"""

from lightning_megatron.datamodules.base import MegatronDataModule
from lightning_megatron.datamodules.dataset import DatasetDataModule
from lightning_megatron.datamodules.indexed import IndexedDataModule
from lightning_megatron.datamodules.instructions import InstructionDataModule
from lightning_megatron.datamodules.preferences import PreferenceDataModule
from lightning_megatron.datamodules.streaming_text import StreamingTextDataModule
from lightning_megatron.datamodules.text_evaluation import TextEvaluationDataModule

__all__ = [
    "DatasetDataModule",
    "IndexedDataModule",
    "InstructionDataModule",
    "MegatronDataModule",
    "PreferenceDataModule",
    "StreamingTextDataModule",
    "TextEvaluationDataModule",
]
