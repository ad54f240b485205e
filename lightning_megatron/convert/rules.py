"""Correspondence of one Megatron tensor and Hugging Face's: which tensors, and which row becomes which.

A rule is data that works in both directions, for weights and for gradients, and for any slice: a rank reads only the
rows that it holds. Two namings disagree on a concatenation along the first axis, an order of rows, or a transposition.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LAYER = "{layer}"
"""Stands for the layer's number (from 0) in Hugging Face's names."""
POSITIONS = "embedding.position_embeddings.weight"
"""The table of learned positions."""
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""Megatron's tensors with a row for each token, and with rows that pad the vocabulary."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """One tensor (of every layer, if its name says so) in both namings."""

    megatron: str
    """Key in Megatron's sharded checkpoints without the layer's number: ``decoder.layers.mlp.linear_fc1.weight``."""
    hugging_face: tuple[str, ...]
    """Names, with ``LAYER`` where the number stands; concatenated along the first axis they are Megatron's tensor."""
    rows: tuple[int, ...] = ()
    """Rows of each of several tensors; empty for one, which has all."""
    order: torch.Tensor | None = None
    """[rows], int64: which row of the concatenation is Megatron's i-th row; None if they are the same."""
    transposed: bool = False
    """Whether Hugging Face keeps the matrix transposed (GPT-2's Conv1D)."""

    def names(self, layer: int | None) -> tuple[str, ...]:
        """The Hugging Face names in one layer."""
        return tuple(name.replace(LAYER, str(layer)) for name in self.hugging_face)

    def shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Shapes of the Hugging Face tensors that make a Megatron tensor of ``shape``."""
        rows = self.rows or (shape[0],)
        assert len(rows) == len(self.hugging_face), self.megatron
        assert sum(rows) == shape[0], f"{self.megatron} has {shape[0]} rows, its rule {sum(rows)}"
        shapes = [(length, *shape[1:]) for length in rows]
        return tuple(each[::-1] if self.transposed else each for each in shapes)


def qkv_order(num_attention_heads: int, num_query_groups: int, kv_channels: int) -> torch.Tensor:
    """From all queries, all keys, all values to Megatron's order: each group's queries, then its key, then its value.

    Returns:
        [(heads + 2 * groups) * kv_channels], int64, for ``Rule.order``.
    """
    per_group = num_attention_heads // num_query_groups
    queries = torch.arange(num_attention_heads).view(num_query_groups, per_group)
    keys = num_attention_heads + torch.arange(num_query_groups)[:, None]
    values = keys + num_query_groups
    heads = torch.cat([queries, keys, values], dim=1).flatten()
    return (heads[:, None] * kv_channels + torch.arange(kv_channels)).flatten()


def kv_order(num_attention_heads: int, kv_channels: int) -> torch.Tensor:
    """From all keys, all values to Megatron's order in cross-attention: each head's key, then its value.

    Returns:
        [2 * heads * kv_channels], int64, for ``Rule.order``.
    """
    keys = torch.arange(num_attention_heads)
    heads = torch.stack([keys, keys + num_attention_heads], dim=1).flatten()
    return (heads[:, None] * kv_channels + torch.arange(kv_channels)).flatten()
