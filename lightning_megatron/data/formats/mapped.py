"""How are sequences of a dataset read at random? Both files are mapped into memory, as parts of which tokens are cut.

Pages are shared by all processes of a machine and read when they are touched. Nothing is unmapped while an array still
refers to it: the engine's reader closes its maps when it is collected, and arrays that outlive it end the process
(megatron-core 0.16.1, datasets/indexed_dataset.py:_IndexReader.__del__).
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.formats.mmap import HEADER_BYTES, read_header
from lightning_megatron.errors import DataError


class MappedDataset:
    """A dataset that is mapped when it is first needed, by each process for itself."""

    def __init__(self, prefix: str) -> None:
        """Remember where it is.

        Args:
            prefix: Dataset, without suffix.
        """
        self.prefix = prefix

    def __getstate__(self) -> dict[str, Any]:
        """Maps of files do not travel to other processes."""
        return {"prefix": self.prefix}

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence: [N]."""
        return self._arrays[0]

    @property
    def positions(self) -> NDArray[np.int64]:
        """Where each sequence begins, in bytes: [N]."""
        return self._arrays[1]

    @property
    def document_bounds(self) -> NDArray[np.int64]:
        """The first sequence of each document and, last, N."""
        return self._arrays[2]

    @property
    def tokens(self) -> NDArray[Any]:
        """All tokens."""
        return self._arrays[3]

    def sequences(self, begin: int, end: int) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """The tokens of consecutive sequences, at least one, and the length of each.

        Raises:
            DataError: If the index points outside of the tokens.
        """
        all_lengths, positions, _, tokens = self._arrays
        lengths = all_lengths[begin:end]
        first, odd = divmod(int(positions[begin]), tokens.itemsize)
        total = int(lengths.sum(dtype=np.int64))
        if int(positions[end - 1]) != (first + total - int(lengths[-1])) * tokens.itemsize and end - begin > 1:
            # No writer leaves gaps, but the format allows them.
            return np.concatenate([self.sequences(place, place + 1)[0] for place in range(begin, end)]), lengths
        found = tokens[first : first + total]
        if odd or first < 0 or len(found) != total:
            raise DataError(f"{self.prefix}.idx points outside of .bin or between tokens; run preprocess again")
        return found, lengths

    @cached_property
    def _arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], NDArray[Any]]:
        header = read_header(self.prefix)
        idx = _mapped(f"{self.prefix}.idx", np.dtype(np.uint8))
        positions = HEADER_BYTES + 4 * header.num_sequences
        bounds = positions + 8 * header.num_sequences
        return (
            idx[HEADER_BYTES:positions].view("<i4"),
            idx[positions:bounds].view("<i8"),
            idx[bounds : bounds + 8 * header.num_document_bounds].view("<i8"),
            _mapped(f"{self.prefix}.bin", header.dtype),
        )


def _mapped(path: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    if os.path.getsize(path) == 0:
        return np.empty(0, dtype)
    # A plain array over the map: taking a slice of a memmap costs several times more.
    return np.memmap(path, dtype, mode="r").view(np.ndarray)
