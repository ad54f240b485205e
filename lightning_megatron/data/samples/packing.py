"""How do samples of different lengths share rows of one length? Bin packing, as pure functions of arrays.

A packing lists the samples of every row. Samples in rows of their own are the packing with one sample a row, so what
builds rows from a packing serves both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Which samples are in which row."""

    members: NDArray[np.int64]
    """[samples]: numbers of samples, row by row."""
    starts: NDArray[np.int64]
    """[rows + 1]: row ``r`` has ``members[starts[r]:starts[r + 1]]``."""

    @property
    def num_rows(self) -> int:
        """Rows."""
        return len(self.starts) - 1


def one_sample_a_row(num_samples: int) -> Packing:
    """Sample ``i`` alone in row ``i``."""
    return Packing(members=np.arange(num_samples), starts=np.arange(num_samples + 1))


def pack(lengths: NDArray[np.integer], capacity: int, seed: int) -> Packing:
    """As few rows as best-fit-decreasing finds, in an order drawn from ``seed``.

    Args:
        lengths: [samples], each from 1 to ``capacity``.
        capacity: Tokens of a row.
        seed: Of the order of rows, and of which of several equally long samples share a row.

    Raises:
        DataError: If a length is out of range.
    """
    raise NotImplementedError


def efficiency(packing: Packing, lengths: NDArray[np.integer], capacity: int) -> float:
    """Fraction of the rows' tokens that is no padding."""
    return float(lengths[packing.members].sum(dtype=np.int64) / (packing.num_rows * capacity))
