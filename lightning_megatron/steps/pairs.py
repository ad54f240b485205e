"""Pairs of sequences, a chosen and a rejected answer, as rows of one batch; the base of train steps on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_megatron.engine.objective import Batch
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps import base, batch_checks
from lightning_megatron.steps.base import MaskedLossStep

ANSWERS = ("chosen", "rejected")
"""Both answers of a pair, in the order of prepared batches; prefixes of the batch's keys."""
TOKENS = tuple(f"{answer}_input_ids" for answer in ANSWERS)
"""Keys of their tokens."""
MASKS = tuple(f"{answer}_attention_mask" for answer in ANSWERS)
"""Keys of their masks."""


class PairStep(MaskedLossStep):
    """Train step of a GPT whose rows are pairs: two sequences each, in one forward pass."""

    architecture = "gpt"
    sequences_per_row = len(ANSWERS)

    @override
    def seq_length(self, batch: Batch) -> int:
        """Return the number of tokens per sequence."""
        return batch["tokens"].shape[-1]


def check_weights(batch: Batch) -> Tensor | None:
    """Check ``sample_mask``, the weights of the pairs, and return it; None without one.

    Raises:
        DataError: If there is not one weight per pair.
    """
    sample_mask = batch.get("sample_mask")
    if sample_mask is not None:
        rows = len(batch[TOKENS[0]])
        batch_checks.check_shape("sample_mask", sample_mask, "one weight per pair", (rows,))
        batch_checks.check_weights("sample_mask", sample_mask)
    return sample_mask


def check_sequences(batch: Batch, answer: int, model: ModelConfig) -> tuple[int, int]:
    """Check the tokens and the mask of one of the ``ANSWERS``; returns their shape.

    Raises:
        DataError: With the key, the value, the rule and the fix.
    """
    name = TOKENS[answer]
    mask_name = MASKS[answer]
    tokens = batch[name]
    batch_checks.check_tokens(name, tokens, model)
    shape = (len(batch[TOKENS[0]]), tokens.shape[1])
    batch_checks.check_shape(name, tokens, "one row per pair", shape)
    if mask_name in batch:
        mask = batch[mask_name]
        batch_checks.check_shape(mask_name, mask, "one value per token", shape)
        is_valid = (mask == 0) | (mask == 1)
        batch_checks.check_values(mask_name, mask, is_valid, "0 for padding or 1")
    return shape


def prepared_sequences(batch: Batch) -> Batch:
    """``tokens`` and ``attention_mask`` [b, 2, s] int64, the chosen sequence first, and ``loss_mask`` [b], weights.

    Without masks, and if all sequences have one length, there is no ``attention_mask``.
    """
    tokens = [batch[name].long() for name in TOKENS]
    pairs = torch.ones(len(tokens[0]), device=tokens[0].device)
    prepared = {
        "tokens": stack_pairs(tokens),
        "loss_mask": base.target_weights(pairs, batch),
    }
    has_masks = any(name in batch for name in MASKS)
    if has_masks or tokens[0].shape != tokens[1].shape:
        masks = [
            batch.get(name, torch.ones_like(ids)).long()
            for name, ids in zip(MASKS, tokens, strict=True)
        ]
        prepared["attention_mask"] = stack_pairs(masks)
    return prepared


def model_inputs(batch: Batch) -> tuple[Tensor, None, Tensor | None]:
    """Tokens [2 b, s], no positions, and mask [2 b, s] or None, of a prepared batch."""
    mask = batch.get("attention_mask")
    return batch["tokens"].flatten(0, 1), None, None if mask is None else mask.flatten(0, 1)


def stack_pairs(sequences: Sequence[Tensor], padding: int = 0) -> Tensor:
    """Stack the sequences of each pair, [b, 2, s], with ``padding`` on the right of shorter ones."""
    longest = max(rows.shape[1] for rows in sequences)
    padded = [F.pad(rows, (0, longest - rows.shape[1]), value=padding) for rows in sequences]
    return torch.stack(padded, dim=1)
