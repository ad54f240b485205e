"""Samples of a Hugging Face dataset, or of any map-style PyTorch dataset.

Nothing is imported for it: what a dataset can do is seen from its methods.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_megatron.data.samples import Rows
from lightning_megatron.errors import ConfigError, DataError

_PAD = (
    "pad them to one length, or give a collate function that does, such as transformers'"
    " DataCollatorForLanguageModeling(tokenizer, mlm=False)"
)


class DatasetSamples:
    """Items of a map-style dataset, stacked: ``datasets.Dataset``, ``torch.utils.data.Dataset``, a list of dicts.

    Items are dicts of tensors, arrays, lists or numbers, of one shape a key, or ``collate`` makes a batch of what they
    are. They are read on one rank of each copy of the model, so items may be drawn at random.

    Args:
        dataset: Has ``__len__`` and ``__getitem__``, and at least one item.
        collate: Makes one dict of tensors [rows, ...] from a list of items; stacks them if not given.

    Raises:
        DataError: If ``dataset`` is empty, several splits, or not map-style.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        _check_map_style(dataset)
        self._dataset = dataset
        self._collate = collate
        # A Hugging Face dataset of lists gives arrays twenty times as fast.
        is_lists = collate is None and getattr(dataset, "format", None) and hasattr(dataset, "with_format")
        self._items = (
            dataset.with_format("numpy", columns=dataset.format["columns"])
            if is_lists and dataset.format["type"] is None
            else dataset
        )

    @cached_property
    def fingerprint(self) -> str:
        """The dataset's own if it has one; else of its length and, where they are not drawn at random, its ends."""
        own = getattr(self._dataset, "_fingerprint", None)
        if isinstance(own, str):
            return own
        ends = [_content(self._dataset[index]) for index in (0, 0, len(self) - 1, len(self) - 1)]
        contents = ends if ends[0] == ends[1] and ends[2] == ends[3] else []
        return hashlib.sha256(repr((len(self), contents)).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        """Items."""
        return len(self._dataset)

    def rows(self, indices: Sequence[int]) -> Rows:
        """The items at ``indices``, stacked.

        Raises:
            DataError: If items are no dicts, or cannot be stacked.
        """
        get_many = getattr(self._items, "__getitems__", None)
        items = get_many(list(indices)) if get_many is not None else [self._items[index] for index in indices]
        if self._collate is not None:
            return _checked(self._collate(items), len(indices))
        for index, item in zip(indices, items, strict=True):
            if not isinstance(item, Mapping):
                raise DataError(
                    f"item {index} of the dataset is a {type(item).__name__}; give dicts with the keys that the train"
                    " step takes (input_ids, labels, ...), or a collate function that makes one"
                )
            if item.keys() != items[0].keys():
                raise DataError(
                    f"items {indices[0]} and {index} of the dataset have different keys: {_listed(items[0])}, and"
                    f" {_listed(item)}; give all items the same keys, or a collate function that does"
                )
        return {key: _stacked(key, [item[key] for item in items], indices) for key in items[0]}


def load_dataset(folder: str) -> Any:
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


def _check_map_style(dataset: Any) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        raise DataError(
            f"a {kind} of {_listed(dataset)} is no single dataset; give one of them, such as"
            f" dataset[{next(iter(dataset), 'train')!r}]"
        )
    has_items = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if not has_items or not hasattr(dataset, "__len__"):
        raise DataError(
            f"a {kind} has no length or no items by number, which shuffling and resuming need; give a map-style"
            " dataset, or return a DataLoader of it from train_dataloader of a LightningDataModule"
        )
    if len(dataset) == 0:
        raise DataError(f"a {kind} without items has nothing to learn from; give one with at least one item")


def _stacked(key: str, values: list[Any], indices: Sequence[int]) -> Tensor:
    tensors: list[Tensor] = []
    for index, value in zip(indices, values, strict=True):
        tensor = _tensor(value)
        if tensor is None:
            raise DataError(
                f"item {index} of the dataset has a {type(value).__name__} under {key!r} that is no tensor of numbers;"
                " turn it into one, remove the key (remove_columns), or give a collate function"
            )
        if tensors and tensor.shape != tensors[0].shape:
            raise DataError(
                f"items {indices[0]} and {index} of the dataset have the shapes {list(tensors[0].shape)} and"
                f" {list(tensor.shape)} under {key!r}, and one batch needs one shape; {_PAD}"
            )
        tensors.append(tensor)
    return torch.stack(tensors)


def _tensor(value: Any) -> Tensor | None:
    """``value`` as a tensor on the host, None if it is none."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in "biuf":
            return None
        # torch computes little with the larger unsigned integers, and warns of arrays that it must not write to.
        is_large_unsigned = value.dtype.kind == "u" and value.dtype.itemsize > 1
        return torch.from_numpy(np.array(value, dtype=np.int64 if is_large_unsigned else value.dtype))
    try:
        return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _checked(batch: Any, num_rows: int) -> Rows:
    """What the user's function made, as a plain dict."""
    if not isinstance(batch, Mapping):
        raise DataError(f"collate gave a {type(batch).__name__}; return a dict of tensors with one row per item")
    for key, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != num_rows:
            found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            raise DataError(
                f"collate gave {key!r} of {found} for {num_rows} items; return tensors with one row per item"
            )
    return dict(batch)


def _content(item: Any) -> list[Any]:
    """What tells an item from others, the same in every process."""
    keyed = item.items() if isinstance(item, Mapping) else enumerate(item if isinstance(item, tuple) else (item,))
    content: list[Any] = []
    for key, value in keyed:
        tensor = _tensor(value)
        plain = value if isinstance(value, str) else type(value).__name__
        content.append((key, plain if tensor is None else (str(tensor.dtype), tensor.tolist())))
    return content


def _listed(mapping: Mapping[Any, Any]) -> str:
    return ", ".join(map(repr, mapping)) or "nothing"
