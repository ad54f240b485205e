"""Greedy decoding and sampling: each row on its own."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.generate.logits_processors import fill_padding, logits_processors
from lightning_megatron.generate.request import Request
from lightning_megatron.generate.stop_criteria import StopCriteria

ENDED = -1
"""Token id passed to ``on_tokens`` for finished rows."""


class Sampler:
    """Greedy decoding and sampling on the choosing rank."""

    def __init__(self, request: Request, uniform: Tensor) -> None:
        """Start with the prompts.

        Args:
            request: The prompts, on the device, and how tokens are chosen.
            uniform: As for ``decode``, on the device.
        """
        prompts = request.prompts
        self._vocab_size = request.vocab_size
        self._pad_token_id = request.pad_token_id
        rows, self._width = prompts.tokens.shape
        self._uniform: Tensor | None = None
        if request.samples:
            self._uniform = uniform
        self._processors = logits_processors(request)
        self._stops: StopCriteria | None = None
        if request.can_end:
            self._stops = StopCriteria(request)
        new = prompts.tokens.new_zeros(rows, request.max_new_tokens)
        # Includes tokens chosen after the end of a row.
        self._sequences = torch.cat(
            (fill_padding(prompts), new),
            dim=-1,
        )
        # Under the model, before logits processors.
        self._log_probabilities = torch.zeros(new.shape, device=new.device)
        self._parents = torch.arange(rows, device=new.device)
        self._lengths = torch.full_like(self._parents, request.max_new_tokens)
        self._finished = torch.zeros_like(self._parents, dtype=torch.bool)

    def advance(self, logits: Tensor, step: int) -> Tensor:
        """Append a token to each row.

        Args:
            logits: [n, padded vocabulary], for all n = b * num_beams rows.
            step: Index of the new token, from 0.

        Returns:
            [2 * n + 1], int64: which of the former rows each row continues, its new token (``ENDED`` if it was finished
            before), and 1 if nothing will change any more.
        """
        raw = logits[:, : self._vocab_size]
        scores = raw
        position = self._width + step
        for processor in self._processors:
            scores = processor(self._sequences[:, :position], scores)
        if self._uniform is None:
            tokens = scores.argmax(-1)
        else:
            tokens = sample_tokens(scores, self._uniform[step])
        self._sequences[:, position] = tokens
        chosen = raw.gather(-1, tokens[:, None])
        self._log_probabilities[:, step] = chosen[:, 0] - raw.logsumexp(-1)
        reported = tokens.masked_fill(self._finished, ENDED)
        if self._stops is not None:
            new_tokens = self._sequences[:, self._width : position + 1]
            ends = self._stops.are_met(new_tokens) & ~self._finished
            self._lengths.masked_fill_(ends, step + 1)
            self._finished |= ends
        all_finished = self._finished.all()[None].long()
        return torch.cat((self._parents, reported, all_finished))

    def best(self) -> tuple[Tensor, Tensor]:
        """The sequences and their log-probabilities, as ``decode`` returns them."""
        new = self._sequences[:, self._width :]
        lengths = self._lengths[:, None]
        steps = torch.arange(new.shape[1], device=new.device)
        is_after_end = steps >= lengths
        new = new.masked_fill(is_after_end, self._pad_token_id)
        values = self._log_probabilities.masked_fill(is_after_end, 0.0)
        sums = values.sum(-1, keepdim=True)
        return torch.cat((new, lengths), dim=-1), torch.cat((values, sums), dim=-1)


def sample_tokens(logits: Tensor, uniform: Tensor) -> Tensor:
    """Sample one token per row, [b] int64, by inverting the cumulative distribution.

    Each row uses one random number, so the same numbers give the same tokens on every device and layout.

    Args:
        logits: [b, v].
        uniform: [b], float64, in [0, 1).
    """
    probabilities = logits.double().softmax(dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Strictly below the total, or rounding could choose a last token of probability 0.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(uniform[:, None] * total, below_total)
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    # If the logits are NaN, the index found is beyond the last token.
    return tokens.clamp(max=logits.shape[-1] - 1)


def uniform_numbers(seed: int, steps: int, rows: int) -> Tensor:
    """Random numbers for all tokens of a call: [steps, rows], float64 in [0, 1), on the CPU, equal on all ranks."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.rand(steps, rows, generator=generator, dtype=torch.float64)
