"""When is a row finished? At a token that ends it, or at a run of tokens that does."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.generate.options import GenerationOptions


class Stops:
    """The ends that ``options`` names, on one device; every rank that sees the same tokens finds the same ends."""

    def __init__(self, options: GenerationOptions, device: torch.device) -> None:
        """Copy the tokens to ``device`` once."""
        self._sequences = [
            torch.tensor(sequence, device=device)
            for sequence in (*((token,) for token in options.eos_token_ids), *options.stop_sequences)
        ]
        self._min_new_tokens = options.min_new_tokens

    def __bool__(self) -> bool:
        """Whether a row can end before it is full."""
        return bool(self._sequences)

    def at(self, new_tokens: Tensor) -> Tensor:
        """Which rows end with their last token: [b], bool.

        Args:
            new_tokens: [b, n], without the prompt.
        """
        rows, length = new_tokens.shape
        ends = torch.zeros(rows, dtype=torch.bool, device=new_tokens.device)
        if length < self._min_new_tokens:
            return ends
        for sequence in self._sequences:
            if len(sequence) <= length:
                ends |= (new_tokens[:, length - len(sequence) :] == sequence).all(dim=-1)
        return ends
