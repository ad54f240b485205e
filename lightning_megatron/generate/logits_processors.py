"""Logits processors: transformers' own, and ours for what they lack."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lightning_megatron.generate.layout import ModelInputs
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.request import Request


class NoRepeatNGrams(LogitsProcessor):
    """Forbids tokens that would complete an n-gram of ``size`` tokens for the second time in a row's sequence.

    As transformers' ``NoRepeatNGramLogitsProcessor``, which loops over lists on the host; but padding forms no n-grams.
    """

    def __init__(self, size: int, padding: Tensor) -> None:
        """Set the size of n-grams and the padding.

        Args:
            size: Tokens of an n-gram, the forbidden one included.
            padding: [rows], columns of padding at the beginning of each row.
        """
        self._size = size
        self._padding = padding[:, None]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [rows, v] of the tokens that may follow the sequences [rows, length]."""
        size = self._size
        suffix_start = input_ids.shape[1] - size + 1
        if suffix_start < 1:
            return scores
        ngrams = input_ids.unfold(-1, size, 1)
        suffix = input_ids[:, None, suffix_start:]
        starts = torch.arange(ngrams.shape[1], device=input_ids.device)
        is_same = ngrams[..., :-1] == suffix
        # Neither the n-gram nor the suffix it is compared with may contain padding.
        has_no_padding = (starts >= self._padding) & (suffix_start >= self._padding)
        is_repeated = is_same.all(-1) & has_no_padding
        forbidden = torch.zeros(
            scores.shape,
            dtype=torch.int,
            device=scores.device,
        )
        # Added, not set: of n-grams with the same last token some are repeated and some are not.
        forbidden.scatter_add_(
            -1,
            ngrams[..., -1],
            is_repeated.int(),
        )
        return scores.masked_fill(forbidden > 0, -torch.inf)


class DecayingTopP(LogitsProcessor):
    """Top-p sampling whose p decays with each new token down to a bound, as in Megatron-LM's text generation."""

    def __init__(self, options: GenerationOptions, width: int) -> None:
        """Start with ``top_p`` after prompts of ``width`` tokens."""
        self._options = options
        self._width = width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [rows, v] of the tokens that may follow the sequences [rows, length]."""
        options = self._options
        step = input_ids.shape[1] - self._width
        top_p = max(options.top_p * options.top_p_decay**step, options.top_p_bound)
        kept: Tensor = TopPLogitsWarper(top_p)(input_ids, scores)
        return kept


def logits_processors(request: Request, copies: int = 1) -> list[LogitsProcessor]:
    """Logits processors in Hugging Face's order.

    First those that depend on the tokens so far; then, if tokens are sampled, those that shape their distribution.

    Args:
        request: The prompts, on the device, and how tokens are chosen.
        copies: Sequences per prompt, one after the other.
    """
    processors: list[LogitsProcessor] = []
    options = request.options
    prompts = request.prompts
    width = prompts.tokens.shape[1]
    if options.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(float(options.repetition_penalty)))
    if options.no_repeat_ngram_size > 0:
        padding = width - prompts.is_token.sum(-1)
        processors.append(
            NoRepeatNGrams(options.no_repeat_ngram_size, padding.repeat_interleave(copies))
        )
    if request.min_new_tokens > 0 and request.eos_token_ids:
        ends = torch.tensor(request.eos_token_ids, device=prompts.tokens.device)
        processors.append(MinNewTokensLengthLogitsProcessor(width, request.min_new_tokens, ends))
    if not request.samples:
        return processors
    if options.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(float(options.temperature)))
    if options.top_k > 0:
        processors.append(TopKLogitsWarper(options.top_k))
    if options.top_p_decay > 0.0:
        processors.append(DecayingTopP(options, width))
    elif 0.0 < options.top_p < 1.0:
        processors.append(TopPLogitsWarper(options.top_p))
    if options.min_p > 0.0:
        processors.append(MinPLogitsWarper(options.min_p))
    return processors


def fill_padding(prompts: ModelInputs) -> Tensor:
    """Prompts for logits processors, [b, s]: padding repeats the last token, so that it changes nothing."""
    return torch.where(
        prompts.is_token == 1,
        prompts.tokens,
        prompts.tokens[:, -1:],
    )
