"""How does a Hugging Face dataset, or any map-style PyTorch dataset, become samples?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_megatron.data.samples.base import Rows


class DatasetSamples:
    """Items of a map-style dataset, stacked: ``datasets.Dataset``, ``torch.utils.data.Dataset``, a list of dicts.

    Items are dicts of tensors, arrays, lists or numbers; equal keys have equal shapes in all items, or ``collate``
    makes them equal. They are read on one rank of each copy of the model, so items may be drawn at random.

    Args:
        dataset: Has ``__len__`` and ``__getitem__``.
        collate: Makes one dict of tensors [rows, ...] from a list of items; stacks them if not given.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """The dataset's own if it has one, else of its length and its first and last item."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Items."""
        raise NotImplementedError

    def rows(self, indices: Sequence[int]) -> Rows:
        """The items at ``indices``, stacked.

        Raises:
            DataError: If items are no dicts, or cannot be stacked.
        """
        raise NotImplementedError
