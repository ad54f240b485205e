"""Stop criteria: when a row ends."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.generate.request import Request


class StopCriteria:
    """Stop criteria: end-of-sequence tokens, stop sequences and stop strings."""

    def __init__(self, request: Request) -> None:
        """Copy the tokens to the device once.

        Args:
            request: The prompts, on the device, and how tokens are chosen.
        """
        strings = request.stop_strings
        prompts = request.prompts
        ends = [(token,) for token in request.eos_token_ids]
        self._sequences = [
            torch.tensor(sequence, device=prompts.tokens.device)
            for sequence in (*ends, *request.options.stop_sequences)
        ]
        self._min_new_tokens = request.min_new_tokens
        self._strings = strings
        if strings is not None:
            # A stop string may begin in the prompt; padding becomes the index that stands for no token.
            is_read = prompts.is_token != 0
            if not request.options.stop_strings_from_prompt:
                is_read = torch.zeros_like(is_read)
            prompt_ends = prompts.tokens.masked_fill(~is_read, len(strings.embedding_vec) - 1)
            self._prompt_ends = prompt_ends[:, -strings.maximum_token_len :]

    def are_met(self, new_tokens: Tensor) -> Tensor:
        """Whether each row ends with its last token: [b * n], bool.

        Args:
            new_tokens: [b * n, step], n sequences per prompt, without the prompt.
        """
        rows, length = new_tokens.shape
        ends = torch.zeros(rows, dtype=torch.bool, device=new_tokens.device)
        if length >= self._min_new_tokens:
            for sequence in self._sequences:
                begin = length - len(sequence)
                if begin >= 0:
                    is_same = new_tokens[:, begin:] == sequence
                    ends |= is_same.all(dim=-1)
        if self._strings is not None:
            copies = rows // len(self._prompt_ends)
            prompt_ends = self._prompt_ends.repeat_interleave(copies, dim=0)
            latest = new_tokens[:, -self._strings.maximum_token_len :]
            tails = torch.cat((prompt_ends, latest), dim=-1)
            ends |= self._strings(tails, None)
        return ends
