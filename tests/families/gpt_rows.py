"""What do tests of GPT families ask their models? Batches with given positions, and configs that must be refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.families.parity import Rows, padded_sentences
from tests.parity.training import Layout

FOUR_RANKS = Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2)
INTERLEAVED = Layout(pp=2, vpp=2, num_microbatches=2)


def sentences_with_positions() -> Rows:
    """Rows whose ``position_ids`` are no shift of 0, 1, 2, ..., which rotary positions could not see."""
    positions = torch.tensor([0, 0, 3, 4, 4, 1, 2, 9, 8, 7, 15, 15, 14, 2, 1, 0])
    # With the mask of ones: without any mask Hugging Face takes positions that jump for the bounds of documents.
    rows = padded_sentences(lengths=(16, 16, 16, 16))
    return [{**row, "position_ids": positions.roll(i)} for i, row in enumerate(rows)]


def assert_refused(model_type: str, says: str, **fields: Any) -> None:
    """A config with ``fields`` is an error whose text matches ``says``."""
    from lightning_megatron.convert.registry import model_config
    from lightning_megatron.errors import ConfigError

    with pytest.raises(ConfigError, match=says):
        model_config({"model_type": model_type, **fields})
