"""In which order do several passes over samples go? Each pass takes every sample once, in an order of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.samples.base import Rows, Samples


class ShuffledPasses:
    """``num_samples`` samples out of repeated passes over ``samples``, each pass in a permutation of its own.

    Args:
        samples: One pass.
        seed: Of the permutations.
        num_samples: Samples in all; None for one pass.
    """

    def __init__(self, samples: Samples, seed: int, num_samples: int | None) -> None:
        self._samples = samples
        self._seed = seed
        self._num_samples = len(samples) if num_samples is None else num_samples
        self._orders: dict[int, NDArray[np.int64]] = {}

    @property
    def fingerprint(self) -> str:
        """Does not depend on ``num_samples``: a longer run begins with the same samples."""
        return f"{self._samples.fingerprint}-{self._seed}"

    def __len__(self) -> int:
        """Samples of all passes."""
        return self._num_samples

    def rows(self, indices: Sequence[int]) -> Rows:
        """The samples at ``indices``, stacked.

        Raises:
            DataError: If what the samples are made of is damaged.
        """
        places = [divmod(index, len(self._samples)) for index in indices]
        return self._samples.rows([int(self._order(number)[place]) for number, place in places])

    def _order(self, number: int) -> NDArray[np.int64]:
        if number not in self._orders:
            if len(self._orders) > 1:  # a batch lies in one pass or two
                del self._orders[min(self._orders)]
            self._orders[number] = np.random.default_rng((self._seed, number)).permutation(len(self._samples))
        return self._orders[number]
