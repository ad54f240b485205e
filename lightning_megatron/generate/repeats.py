"""Which tokens would repeat what a row says already? Runs of tokens that must not come twice."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.generate.prompts import Prompts


class Repeats:
    """The prompts of rows whose texts shall have no run of ``size`` tokens twice, on the rank that chooses.

    As Hugging Face's ``no_repeat_ngram_size`` (transformers 5.23, generation/logits_process.py), but padding, which is
    no text, forms no runs.
    """

    def __init__(self, prompts: Prompts, size: int) -> None:
        """Keep the prompts.

        Args:
            prompts: On the device.
            size: Tokens of a run, the forbidden one included.
        """
        self._tokens = prompts.tokens
        self._lengths = prompts.lengths
        self._size = size

    def without(self, scores: Tensor, new_tokens: Tensor) -> Tensor:
        """Scores that never choose a token which would end a run for the second time.

        Args:
            scores: [b * n, v], n texts of each prompt one after the other.
            new_tokens: [b * n, step], what these texts have behind their prompts.
        """
        copies = len(new_tokens) // len(self._tokens)
        texts = torch.cat((self._tokens.repeat_interleave(copies, dim=0), new_tokens), dim=-1)
        padding = (self._tokens.shape[1] - self._lengths).repeat_interleave(copies)[:, None]
        width, size = texts.shape[1], self._size
        if width < size:
            return scores
        runs = texts.unfold(-1, size, 1)
        ending = texts[:, None, width - size + 1 :]
        starts = torch.arange(runs.shape[1], device=texts.device)
        # What is compared lies in the text as a whole, or has a token of padding.
        is_repeated = (runs[..., :-1] == ending).all(-1) & (starts >= padding) & (width - size + 1 >= padding)
        forbidden = torch.zeros(scores.shape, dtype=torch.int, device=scores.device)
        # Added, not set: of runs with the same last token some are repeated and some are not.
        forbidden.scatter_add_(-1, runs[..., -1], is_repeated.int())
        return scores.masked_fill(forbidden > 0, -torch.inf)
