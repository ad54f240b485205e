"""Assemble a tensor from parts and refuse it while an element has not been written."""

from __future__ import annotations

from typing import Any

import torch

from lightning_megatron.errors import CheckpointError


class Filling:
    """A tensor that is written part by part. What its memory held before means nothing.

    Args:
        name: What it is, for the error.
        target: The memory, on any device.
    """

    def __init__(self, name: str, target: torch.Tensor) -> None:
        self._name = name
        self._target = target
        self._is_missing = torch.ones(target.shape, dtype=torch.bool)

    def put(self, place: Any, values: torch.Tensor | int) -> None:
        """Write ``values`` to ``place``, anything that indexes a tensor; device and dtype become the target's."""
        indices = place if isinstance(place, tuple) else (place,)
        if isinstance(values, torch.Tensor) and any(isinstance(index, torch.Tensor) for index in indices):
            values = values.to(self._target.device, self._target.dtype)  # slices do so without a copy
        self._target[place] = values
        self._is_missing[place] = False

    def whole(self) -> torch.Tensor:
        """The tensor.

        Raises:
            CheckpointError: If an element was never written.
        """
        check_filled(self._name, self._target.numel() - int(self._is_missing.count_nonzero()), self._target.numel())
        return self._target


def check_filled(name: str, found: int, expected: int) -> None:
    """Raise unless as many elements of a tensor were written as it has.

    Raises:
        CheckpointError: With both numbers.
    """
    if found != expected:
        raise CheckpointError(
            f"{name}: expected {expected} elements, got {found}; the checkpoint is damaged or of another model: use "
            "another copy, or the config that belongs to it"
        )
