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
        # Of whole rows, which most parts are, until a part of some comes.
        self._is_missing = torch.ones(target.shape[:1] + (1,) * (target.dim() - 1), dtype=torch.bool)

    def put(self, place: Any, values: torch.Tensor | int) -> None:
        """Write ``values`` to ``place``, anything that indexes a tensor; device and dtype become the target's."""
        indices = place if isinstance(place, tuple) else (place,)
        if isinstance(values, torch.Tensor) and any(isinstance(index, torch.Tensor) for index in indices):
            values = values.to(self._target.device, self._target.dtype)  # slices do so without a copy
        if isinstance(place, tuple) and self._is_missing.shape != self._target.shape:
            self._is_missing = self._is_missing.expand(self._target.shape).clone()
        self._target[place] = values
        self._is_missing[place] = False

    def whole(self) -> torch.Tensor:
        """The tensor.

        Raises:
            CheckpointError: If an element was never written.
        """
        missing = self._is_missing.any() and int(self._is_missing.expand(self._target.shape).count_nonzero())
        check_filled(self._name, self._target.numel() - int(missing), self._target.numel())
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
