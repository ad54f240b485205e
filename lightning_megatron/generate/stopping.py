"""When is a row finished? At a token that ends it, at a run of tokens that does, or at one that completes a text."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.data.corpus.stop_strings import StopStrings
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.prompts import Prompts


class Stops:
    """The ends that ``options`` names, on one device; every rank that sees the same tokens finds the same ends."""

    def __init__(self, options: GenerationOptions, prompts: Prompts, strings: StopStrings | None = None) -> None:
        """Copy the tokens to the device once.

        Args:
            options: With the model's own tokens filled in.
            prompts: On the device.
            strings: Those of the options.
        """
        device = prompts.tokens.device
        self._sequences = [
            torch.tensor(sequence, device=device)
            for sequence in (*((token,) for token in options.eos_token_ids), *options.stop_sequences)
        ]
        self._min_new_tokens = options.min_new_tokens
        self._strings = strings
        if strings is not None:
            # A text may begin in the prompt; padding says nothing.
            endings = prompts.tokens.masked_fill(prompts.is_token == 0, strings.no_token)
            self._endings = endings[:, -strings.num_tokens :]

    def __bool__(self) -> bool:
        """Whether a row can end before it is full."""
        return bool(self._sequences) or self._strings is not None

    def at(self, new_tokens: Tensor) -> Tensor:
        """Which rows end with their last token: [b * n], bool.

        Args:
            new_tokens: [b * n, step], n texts of each prompt, without it.
        """
        rows, length = new_tokens.shape
        ends = torch.zeros(rows, dtype=torch.bool, device=new_tokens.device)
        if length >= self._min_new_tokens:
            for sequence in self._sequences:
                if len(sequence) <= length:
                    ends |= (new_tokens[:, length - len(sequence) :] == sequence).all(dim=-1)
        if self._strings is not None:
            endings = self._endings.repeat_interleave(rows // len(self._endings), dim=0)
            ends |= self._strings.at(torch.cat((endings, new_tokens[:, -self._strings.num_tokens :]), dim=-1))
        return ends
