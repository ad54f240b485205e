"""Random tokens from memory as training data, so that reading them costs nothing."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.cases import Case
from lightning_megatron.models.config import ModelConfig

_DISTINCT_ROWS = 256
_EPOCH_ROWS = 1 << 16
_MASKED_SHARE = 0.15
"""Of the tokens of a BERT's row (Devlin et al. 2018)."""


class RandomRows(Dataset[dict[str, torch.Tensor]]):
    """Rows of uniformly random tokens, the same in every process and on every device; a few of them, repeated."""

    def __init__(self, case: Case, model: ModelConfig) -> None:
        generator = torch.Generator().manual_seed(0)

        def tokens(length: int) -> torch.Tensor:
            return torch.randint(0, model.vocab_size, (_DISTINCT_ROWS, length), generator=generator)

        self._columns = {"input_ids": tokens(case.seq_length)}
        if model.architecture == "bert":
            hidden = torch.rand(_DISTINCT_ROWS, case.seq_length, generator=generator) >= _MASKED_SHARE
            self._columns["labels"] = tokens(case.seq_length).masked_fill(hidden, -100)
            self._columns["token_type_ids"] = torch.zeros(_DISTINCT_ROWS, case.seq_length, dtype=torch.long)
            self._columns["token_type_ids"][:, case.seq_length // 2 :] = 1
            self._columns["next_sentence_label"] = torch.randint(0, 2, (_DISTINCT_ROWS,), generator=generator)
        if model.architecture == "t5":
            self._columns["labels"] = tokens(case.decoder_seq_length)

    def __len__(self) -> int:
        return _EPOCH_ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index % _DISTINCT_ROWS] for name, column in self._columns.items()}


def loader(case: Case, model: ModelConfig, rows: int) -> DataLoader[dict[str, torch.Tensor]]:
    """Batches of ``rows`` rows; Lightning gives each data-parallel rank rows of its own."""
    return DataLoader(RandomRows(case, model), batch_size=rows)
