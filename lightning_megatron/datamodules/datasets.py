"""How does the Trainer get the items of a Hugging Face dataset, or of any map-style PyTorch dataset?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from lightning_megatron.data.datasets import DatasetSamples
from lightning_megatron.data.loader import Shuffling
from lightning_megatron.data.samples import SplitName
from lightning_megatron.datamodules.base import MegatronDataModule, Run, require_whole_step
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.models.config import ModelConfig


class DatasetDataModule(MegatronDataModule):
    """Items of map-style datasets, by the same loaders as indexed datasets: read once per copy of the model, resumed.

    An item is a dict with the keys that the objective takes (``input_ids``, ``labels``, ...), of the same lengths in
    all items, or ``collate`` makes them so. Items are read on one rank of each copy of the model, so they may be drawn
    at random.

    Args:
        train: A ``datasets.Dataset``, a ``torch.utils.data.Dataset``, a list of dicts, or the folder to which
            ``datasets.Dataset.save_to_disk`` wrote one.
        valid: The same for validation.
        test: The same for test and prediction.
        micro_batch_size: Samples in one microbatch of one data-parallel rank.
        collate: Makes one dict of tensors [rows, ...] from a list of items; stacks them if not given.
        shuffle: Take the training items in another order in each pass.
        num_workers: Processes that read ahead, on each rank that reads at all.
        seed: Of the order of samples.
        rampup_batch_size: First global batch, increment, and samples until the batch has its full size.
    """

    def __init__(
        self,
        train: Any = None,
        valid: Any = None,
        test: Any = None,
        micro_batch_size: int = 4,
        collate: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        num_workers: int = 0,
        seed: int = 1234,
        rampup_batch_size: list[int] | None = None,
    ) -> None:
        super().__init__(
            micro_batch_size=micro_batch_size, num_workers=num_workers, seed=seed, rampup_batch_size=rampup_batch_size
        )
        given: dict[SplitName, Any] = {"train": train, "valid": valid, "test": test}
        self._datasets = {name: dataset for name, dataset in given.items() if dataset is not None}
        if not self._datasets:
            raise ConfigError("train=None, valid=None and test=None leave nothing to read; give at least one dataset")
        self._collate = collate
        self._shuffling: Shuffling = "every pass" if shuffle else "never"

    @property
    def shuffling(self) -> Shuffling:  # type: ignore[override]
        """As ``shuffle`` says."""
        return self._shuffling

    @override
    def has_split(self, name: SplitName) -> bool:
        return name in self._datasets

    @override
    def lengths(self, model: ModelConfig | None) -> dict[str, int]:
        return {}

    @override
    def check(self, run: Run) -> None:
        for name in self._datasets:
            num_samples = len(self.open(name, None))
            if name == "train":
                require_whole_step(run, num_samples)

    @override
    def open(self, name: SplitName, num_samples: int | None) -> DatasetSamples:
        dataset = self._datasets[name]
        if isinstance(dataset, str):
            dataset = self._datasets[name] = _loaded(dataset)
        return DatasetSamples(dataset, self._collate)


def _loaded(folder: str) -> Any:
    """What ``datasets.Dataset.save_to_disk`` wrote.

    Raises:
        ConfigError: If the library is not installed.
        DataError: If there is no dataset.
    """
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise ConfigError(
            f"{folder} is read with the library datasets, which is not installed; run: pip install datasets"
        ) from error
    try:
        return load_from_disk(folder)
    except IndexError as error:  # the library's own, where there is not one row
        raise DataError(f"{folder} holds a dataset without items; save one with at least one item") from error
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} holds no dataset that save_to_disk wrote ({str(error).splitlines()[0]}); give its folder"
        ) from error
