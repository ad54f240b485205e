"""How are millions of lengths distributed, exactly, in memory that does not grow with their number?

Only distinct lengths are kept, with how often each occurs. Of T tokens there cannot be sequences of more than sqrt(2 T)
distinct lengths: 5 million for ten trillion tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WIDE = 4
"""The largest value by the smallest, from which on a histogram is logarithmic."""


@dataclass(frozen=True, kw_only=True)
class Bin:
    """How many numbers lie in a range."""

    first: int
    """The smallest number of the range."""
    last: int
    """The largest."""
    count: int
    """Numbers in it."""


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Integers, and how often each occurs."""

    values: NDArray[np.int64]
    """Distinct integers, ascending: at least one."""
    counts: NDArray[np.int64]
    """How often each occurs."""

    @property
    def count(self) -> int:
        """How many integers there are."""
        return int(self.counts.sum())

    @property
    def sum(self) -> int:
        """All of them added up."""
        return int((self.values * self.counts).sum())

    @property
    def minimum(self) -> int:
        """The smallest."""
        return int(self.values[0])

    @property
    def maximum(self) -> int:
        """The largest."""
        return int(self.values[-1])

    @property
    def mean(self) -> float:
        """The arithmetic mean."""
        return self.sum / self.count

    def quantile(self, share: float) -> int:
        """The smallest value that at least ``share`` of all integers do not exceed."""
        reached = np.cumsum(self.counts)
        return int(self.values[np.searchsorted(reached, math.ceil(share * self.count))])

    def summary(self) -> dict[str, int | float]:
        """The usual figures by their usual names."""
        return {
            "min": self.minimum,
            "median": self.quantile(0.5),
            "mean": round(self.mean, 2),
            "p90": self.quantile(0.9),
            "p99": self.quantile(0.99),
            "max": self.maximum,
        }

    @property
    def is_wide(self) -> bool:
        """Whether the positive values spread so far that they are better compared by their logarithms."""
        return self.maximum >= _WIDE * self._smallest_positive

    @property
    def _smallest_positive(self) -> int:
        return int(self.values[self.values > 0][0]) if self.maximum else 1

    def bins(self, about: int) -> list[Bin]:
        """A histogram, empty bins among them; zero, which has no logarithm, has a bin of its own.

        If the values are spread wide, bins begin at the rounded powers of a root of two: of two itself if that gives
        ``about`` bins or more, else of the root that does, unless every integer has its own bin before. If not, all
        bins hold the same number of integers.
        """
        edges = [1]
        if self.maximum:
            make_edges = _log_edges if self.is_wide else _even_edges
            edges = make_edges(self._smallest_positive, self.maximum, about)
        if self.minimum == 0:
            edges = [0, *edges]
        before = np.searchsorted(self.values, edges)
        cumulated = np.concatenate([[0], np.cumsum(self.counts)])
        totals = np.diff(cumulated[before]).tolist()
        return [
            Bin(first=first, last=after - 1, count=total)
            for (first, after), total in zip(pairwise(edges), totals, strict=True)
        ]


def distribution(chunks: Iterable[NDArray[Any]]) -> Distribution:
    """The distribution of the non-negative integers in all chunks together."""
    values, counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for chunk in chunks:
        new_values, new_counts = np.unique(chunk, return_counts=True)
        all_counts = np.concatenate([counts, new_counts])
        values, places = np.unique(np.concatenate([values, new_values.astype(np.int64)]), return_inverse=True)
        counts = np.zeros(len(values), dtype=np.int64)
        np.add.at(counts, places, all_counts)
    return Distribution(values=values, counts=counts)


def _even_edges(low: int, high: int, at_most: int) -> list[int]:
    """First numbers of the bins that hold ``low`` to ``high``; last, what follows the last bin."""
    width = math.ceil((high - low + 1) / at_most)
    return list(range(low, high + width + 1, width))


def _log_edges(low: int, high: int, at_least: int) -> list[int]:
    """Likewise, for positive numbers and bins that grow with them."""
    wanted = min(at_least, high - low + 1)
    bins_per_octave = 1
    while True:
        first = math.floor(math.log2(low) * bins_per_octave)
        last = math.ceil(math.log2(high + 1) * bins_per_octave)
        exact = 2.0 ** (np.arange(first, last + 1) / bins_per_octave)
        edges = np.unique(np.rint(exact).astype(np.int64)).tolist()
        # Rounding may leave edges outside; the first bin holds low, the last one high.
        while len(edges) > 2 and edges[1] <= low:
            del edges[0]
        while len(edges) > 2 and edges[-2] > high:
            del edges[-1]
        if len(edges) > wanted or bins_per_octave > high:
            return [int(edge) for edge in edges]
        bins_per_octave *= 2
