"""Which data does a benchmark train on? Random tokens from memory, so that reading them costs nothing."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset

_DISTINCT_ROWS = 256
_EPOCH_ROWS = 1 << 16


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Rows of uniformly random tokens, the same in every process and on every device; a few of them, repeated."""

    def __init__(self, vocab_size: int, seq_length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randint(0, vocab_size, (_DISTINCT_ROWS, seq_length), generator=generator)

    def __len__(self) -> int:
        return _EPOCH_ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index % _DISTINCT_ROWS]}


def loader(vocab_size: int, seq_length: int, rows: int) -> DataLoader[dict[str, torch.Tensor]]:
    """Batches of ``rows`` rows; Lightning gives each data-parallel rank rows of its own."""
    return DataLoader(RandomTokens(vocab_size, seq_length), batch_size=rows)
