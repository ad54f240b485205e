"""Changes that a user's code makes to 16-bit weights, such as clamping them in a callback.

The optimizer updates fp32 master weights and writes the weights from them, so a change of the weights alone would be
gone after the next update. Before each update, and before a checkpoint, changed weights are copied into the masters.
Torch counts changes of a tensor in place, but not those through ``parameter.data``: before the first update all weights
are compared, so these count, too; later ones are not seen. Whether a run makes such changes is checked once, after the
first update: then each weight is its rounded master, if it has been left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.engine import optimizer_state
from lightning_megatron.errors import ConfigError

_PIECE = 2**24
"""Elements that are compared at once: the temporary tensors of an embedding would take gigabytes."""


class WeightChanges:
    """What has changed in the weights of an optimizer since its last update."""

    def __init__(self, parts: Iterable[Any], wait_for_masters: Callable[[], None]) -> None:
        """Begin before the first update. Does not communicate.

        Args:
            parts: Megatron's optimizers.
            wait_for_masters: Waits for master weights on their way back to host memory.
        """
        states = optimizer_state.param_states(parts)
        self._held = [held for held in states if not held.is_own_master]
        self._wait_for_masters = wait_for_masters
        self._counts: list[int] | None = None
        """Torch's counts of changes at the last update; None if all weights are to be compared."""
        self._has_loaded = False
        """Whether masters are a checkpoint's, perhaps of another precision, whose rounding the weights then have."""
        self._num_updates = 0

    def have_loaded(self) -> None:
        """Take the weights as they are now for those of the masters, which have been loaded."""
        self._counts = self._current_counts()
        self._has_loaded = True

    def have_updated(self) -> None:
        """Take the weights as they are now for those of the masters, which have been updated."""
        self._counts = self._current_counts()
        self._num_updates += 1

    @torch.no_grad()
    def take_over(self) -> None:
        """Copy the elements of changed weights into their masters. Does not wait for the device nor communicate."""
        counts = self._current_counts()
        if counts == self._counts:
            return
        self._wait_for_masters()
        for index, held in enumerate(self._held):
            if self._counts is not None and self._counts[index] == counts[index]:
                continue
            for weights, masters in _pieces(held):
                present = masters.to(weights.device)
                is_same = present.to(weights.dtype) == weights
                masters.copy_(torch.where(is_same, present, weights.float()))
        self._counts = counts

    @property
    def is_check_due(self) -> bool:
        """Whether ``check`` can tell now, after the first update, and is to be called; the same on every rank."""
        return self._num_updates == 1 and not self._has_loaded

    @torch.no_grad()
    def check(self) -> None:
        """Raise if weights were changed through ``parameter.data`` after the first update. Waits for the device.

        Raises:
            ConfigError: If so.
        """
        self._wait_for_masters()
        counts = self._current_counts()
        for index, held in enumerate(self._held):
            if self._counts is None or self._counts[index] != counts[index]:
                continue
            for weights, masters in _pieces(held):
                if not _is_rounded(masters.to(weights.device), weights):
                    raise ConfigError(
                        "weights: expected changes in place, got one through parameter.data, which torch does not "
                        "count, and the next update would undo it; write with torch.no_grad(): parameter.copy_(...)"
                    )

    def _current_counts(self) -> list[int]:
        return [held.parameter._version for held in self._held]


def _is_rounded(masters: Tensor, weights: Tensor) -> bool:
    """Whether weights are their masters but for a rounding, in whichever way a kernel rounds."""
    info = torch.finfo(weights.dtype)
    return torch.allclose(
        weights.float(),
        masters,
        rtol=info.eps,
        atol=info.eps * info.smallest_normal,
        equal_nan=True,
    )


def _pieces(held: optimizer_state.ParamState) -> Iterator[tuple[Tensor, Tensor]]:
    """Consecutive elements of a parameter and of its master weight that this rank holds."""
    weights = held.parameter.detach().view(-1)[held.start : held.stop]
    return zip(weights.split(_PIECE), held.tensors["param"].split(_PIECE), strict=True)
