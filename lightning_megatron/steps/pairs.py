"""Pairs of sequences, a chosen and a rejected answer, as rows of one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ANSWERS = ("chosen", "rejected")
"""Both answers of a pair, in the order of prepared batches; prefixes of the batch's keys."""


def stack_pairs(sequences: Sequence[Tensor], padding: int = 0) -> Tensor:
    """Stack the sequences of each pair, [b, 2, s], with ``padding`` on the right of shorter ones."""
    longest = max(rows.shape[1] for rows in sequences)
    padded = [F.pad(rows, (0, longest - rows.shape[1]), value=padding) for rows in sequences]
    return torch.stack(padded, dim=1)
