"""Which token comes next? Pure functions from the logits of the whole vocabulary, [b, v] fp32, to one token per row.

Each removes tokens by giving them the logit -inf, or changes the odds of those that stay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_megatron.generate.options import GenerationOptions


def penalized(logits: Tensor, is_repeated: Tensor, penalty: float) -> Tensor:
    """Logits that make tokens which a row has already less likely.

    Source: Keskar et al. 2019, CTRL (arXiv 1909.05858), section 4.1; for negative logits as Hugging Face, which
    multiplies, or they would become likelier.

    Args:
        logits: [b, v].
        is_repeated: [b, v], bool.
        penalty: Above 1 it makes repetition rarer.
    """
    return torch.where(is_repeated, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def without(logits: Tensor, tokens: tuple[int, ...]) -> Tensor:
    """Logits that never choose ``tokens``."""
    inside = [token for token in tokens if 0 <= token < logits.shape[-1]]
    if not inside:
        return logits
    hidden = logits.clone()
    # Column by column: an index tensor would be copied to the device at every token.
    for token in inside:
        hidden[:, token] = -torch.inf
    return hidden


def top_k_only(logits: Tensor, k: int) -> Tensor:
    """Logits of the ``k`` likeliest tokens of each row, and of those that are as likely as the last of them."""
    least = logits.topk(min(k, logits.shape[-1]), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def top_p_only(logits: Tensor, p: float) -> Tensor:
    """Logits of the fewest tokens of each row that together have at least the probability ``p``; one stays always.

    Source: Holtzman et al. 2019, The Curious Case of Neural Text Degeneration (arXiv 1904.09751), section 3.1.
    """
    if p >= 1.0:
        return logits
    ascending, order = logits.sort(dim=-1)
    # A token may go if it and all that are less likely have at most 1 - p.
    is_removed = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - p
    is_removed[:, -1] = False
    return logits.masked_fill(torch.zeros_like(is_removed).scatter(-1, order, is_removed), -torch.inf)


def min_p_only(logits: Tensor, p: float) -> Tensor:
    """Logits of the tokens of each row that have at least ``p`` times the probability of the likeliest.

    Source: Nguyen et al. 2024, Turning Up the Heat: Min-p Sampling (arXiv 2407.01082), section 3.
    """
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(dim=-1, keepdim=True), -torch.inf)


def drawn(logits: Tensor, uniform: Tensor) -> Tensor:
    """One token per row, [b] int64, by inverting the cumulative distribution.

    One number per row decides, so the same numbers give the same tokens on every device and layout.

    Args:
        logits: [b, v].
        uniform: [b], float64, in [0, 1).
    """
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Strictly below the total, or rounding could choose a last token that has no probability.
    threshold = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # Where a model in trouble gives no numbers, what is found is behind the last token.
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def uniform_numbers(seed: int, steps: int, rows: int) -> Tensor:
    """What decides about every token of a call: [steps, rows], float64 in [0, 1), on the CPU, equal on all ranks."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.rand(steps, rows, generator=generator, dtype=torch.float64)


def shaped(logits: Tensor, options: GenerationOptions, step: int) -> Tensor:
    """Logits of the distribution that the new token number ``step`` is drawn from."""
    if options.temperature != 1.0:
        logits = logits / options.temperature
    if options.top_k > 0:
        logits = top_k_only(logits, options.top_k)
    if options.top_p > 0.0:
        logits = top_p_only(logits, options.top_p_at(step))
    if options.min_p > 0.0:
        logits = min_p_only(logits, options.min_p)
    return logits
