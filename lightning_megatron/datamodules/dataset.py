"""``DatasetDataModule``: any map-style dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from typing_extensions import override

from lightning_megatron.data.broadcast import check_batch
from lightning_megatron.data.contents import hash_of_rows, with_contents
from lightning_megatron.data.samples import Rows
from lightning_megatron.data.splits import SplitName
from lightning_megatron.datamodules.base import MegatronDataModule
from lightning_megatron.errors import ConfigError, DataError, type_of
from lightning_megatron.foreign_names import checks_options


@checks_options
class DatasetDataModule(MegatronDataModule):
    """Map-style datasets with the loaders of indexed datasets: read once per replica, and resumable.

    An item is a dict with the keys that the objective takes (``input_ids``, ``labels``, ...), of the same lengths in
    all items unless ``collate`` makes them so. One rank of each data-parallel replica reads the items, so they may be
    random.

    Args:
        train: A ``datasets.Dataset``, a ``torch.utils.data.Dataset``, a list of dicts, or a directory written by
            ``datasets.Dataset.save_to_disk``.
        valid: The same for validation.
        test: The same for test and prediction.
        micro_batch_size: Samples in one microbatch of one data-parallel rank.
        collate: Function that makes one dict of tensors [rows, ...] from a list of items; None stacks them.
        shuffle: Shuffle the training items, differently in each pass.
        num_workers: Worker processes that prefetch, on each rank that reads data.
        seed: Seed of the sample order.
        rampup_batch_size: First global batch size, increment, and samples until the full size is reached.
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
            micro_batch_size=micro_batch_size,
            num_workers=num_workers,
            seed=seed,
            rampup_batch_size=rampup_batch_size,
        )
        datasets: dict[SplitName, Any] = {
            "train": train,
            "valid": valid,
            "test": test,
        }
        for name, dataset in datasets.items():
            if dataset is not None:
                self._sources[name] = dataset
        if not self._sources:
            raise ConfigError(
                "train=None, valid=None and test=None leave nothing to read; give at least one dataset"
            )
        self._collate = collate
        if not shuffle:
            self.shuffling = "never"

    @override
    def open(self, name: SplitName, num_samples: int | None) -> DatasetSamples:
        dataset = self._sources[name]
        if isinstance(dataset, str):
            dataset = self._sources[name] = _load_dataset(dataset)
        return DatasetSamples(dataset, self._collate)


class DatasetSamples:
    """Stacked items of a map-style dataset: ``datasets.Dataset``, ``torch.utils.data.Dataset``, a list of dicts.

    Items are dicts of tensors, arrays, lists or numbers, with one shape per key, or whatever ``collate`` takes.
    Datasets are duck-typed.

    Args:
        dataset: Has ``__len__`` and ``__getitem__``, and at least one item.
        collate: Function that makes one dict of tensors [rows, ...] from a list of items; None stacks them.

    Raises:
        DataError: If ``dataset`` is empty, a dict of splits, or not map-style.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        is_map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if not is_map_style or isinstance(dataset, Mapping | IterableDataset) or len(dataset) == 0:
            raise DataError(
                f"{type_of(dataset)} must be one map-style dataset (items by index) of at least one item; for"
                " several splits pass dataset['train'], for a stream return a DataLoader from train_dataloader"
            )
        self._dataset = dataset
        self._collate = collate
        self._items = dataset
        if collate is None and hasattr(dataset, "with_format"):
            kind: Any = getattr(dataset, "format", None)
            if kind and kind["type"] is None:
                # A Hugging Face dataset returns arrays twenty times as fast as lists.
                self._items = dataset.with_format("numpy", columns=kind["columns"])

    @property
    def fingerprint(self) -> str:
        """The dataset's own fingerprint, if it has one (Hugging Face's do); else its length, and a few known rows."""
        own = getattr(self._dataset, "_fingerprint", None)
        if isinstance(own, str):
            return own
        return with_contents(f"{len(self)} items", hash_of_rows(self._dataset))

    def __len__(self) -> int:
        """Number of items."""
        return len(self._dataset)

    def rows(self, indices: Sequence[int]) -> Rows:
        """Stack the items at ``indices``.

        Raises:
            DataError: If items are not dicts, or cannot be stacked.
        """
        get_many = getattr(self._items, "__getitems__", None)
        if get_many is not None:
            items = get_many(list(indices))
        else:
            items = [self._items[index] for index in indices]
        if self._collate is not None:
            batch = check_batch(self._collate(items))
            rows = len(next(iter(batch.values())))
            if rows != len(indices):
                raise DataError(
                    f"collate gave {rows} rows for {len(indices)} items; return one row per item"
                )
            return batch
        for index, item in zip(indices, items, strict=True):
            if not isinstance(item, Mapping) or item.keys() != items[0].keys():
                has = "no keys"
                if isinstance(item, Mapping):
                    has = ", ".join(map(repr, item))
                raise DataError(
                    f"item {index} of the dataset is {type_of(item)} with {has}; give dicts that all have the"
                    " keys that the train step takes (input_ids, labels, ...), or a collate function that makes one"
                )
        return {key: _stack(key, [item[key] for item in items], indices) for key in items[0]}


def _load_dataset(folder: str) -> Any:
    try:
        # Imported here: the library is optional.
        from datasets import load_from_disk
    except ImportError as error:
        raise ConfigError(
            f"{folder} is read by the library datasets; pip install datasets"
        ) from error
    try:
        return load_from_disk(folder)
    # The library raises IndexError if there are no rows.
    except (OSError, ValueError, IndexError) as error:
        raise DataError(
            f"{folder} holds no dataset of save_to_disk ({str(error).splitlines()[0]})"
        ) from error


def _stack(
    key: str,
    values: list[Any],
    indices: Sequence[int],
) -> Tensor:
    try:
        return torch.stack([_as_tensor(value) for value in values])
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"items {', '.join(map(str, indices))} cannot be stacked under {key!r} ({error}); remove the key"
            " (remove_columns), pad them to one length, or give a collate function that does"
        ) from None


def _as_tensor(value: Any) -> Tensor:
    """Convert ``value`` to a CPU tensor; torch raises if it is not numeric."""
    if isinstance(value, Tensor):
        tensor = value.cpu()
    else:
        tensor = torch.tensor(value)
    # torch has few operations for the larger unsigned integers.
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        tensor = tensor.long()
    return tensor
