"""Logits processors, sampling and stopping criteria of one call: transformers' own, and what they lack.

Nothing here makes the host wait for the device, and every rank that sees the same tokens finds the same.
"""

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

from lightning_megatron.generate.inputs import NextTokens
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.texts import StopStrings


class NoRepeatNGrams(LogitsProcessor):
    """Rules out tokens that would end a run of ``size`` tokens for the second time in a row.

    As transformers' ``NoRepeatNGramLogitsProcessor``, which loops over lists on the host; but padding, which is no
    text, forms no runs.
    """

    def __init__(self, size: int, padding: Tensor) -> None:
        """Set what a run is.

        Args:
            size: Tokens of a run, the forbidden one included.
            padding: [rows], how many columns of padding each row begins with.
        """
        self._size = size
        self._padding = padding[:, None]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [rows, v] of what may follow the texts [rows, length]."""
        width, size = input_ids.shape[1], self._size
        if width < size:
            return scores
        runs = input_ids.unfold(-1, size, 1)
        ending = input_ids[:, None, width - size + 1 :]
        starts = torch.arange(runs.shape[1], device=input_ids.device)
        # What is compared lies in the text as a whole, or has a token of padding.
        is_text = (starts >= self._padding) & (width - size + 1 >= self._padding)
        is_repeated = (runs[..., :-1] == ending).all(-1) & is_text
        forbidden = torch.zeros(scores.shape, dtype=torch.int, device=scores.device)
        # Added, not set: of runs with the same last token some are repeated and some are not.
        forbidden.scatter_add_(-1, runs[..., -1], is_repeated.int())
        return scores.masked_fill(forbidden > 0, -torch.inf)


class DecayingTopP(LogitsProcessor):
    """Top-p whose p shrinks with each new token down to a bound, as in Megatron-LM's text generation."""

    def __init__(self, options: GenerationOptions, width: int) -> None:
        """Begin with the whole ``top_p`` behind prompts of ``width`` tokens."""
        self._options = options
        self._width = width

    def top_p(self, step: int) -> float:
        """For the new token number ``step``, from 0."""
        options = self._options
        return max(options.top_p * options.top_p_decay**step, options.top_p_bound)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [rows, v] of what may follow the texts [rows, length]."""
        kept: Tensor = TopPLogitsWarper(self.top_p(input_ids.shape[1] - self._width))(input_ids, scores)
        return kept


def token_processors(options: GenerationOptions, prompts: NextTokens, copies: int = 1) -> list[LogitsProcessor]:
    """What makes tokens likelier, rarer or impossible by the text so far, in Hugging Face's order.

    Args:
        options: Settled, with the model's own tokens filled in.
        prompts: On the device.
        copies: Texts that grow from each prompt, one after the other.
    """
    processors: list[LogitsProcessor] = []
    if options.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(float(options.repetition_penalty)))
    if options.no_repeat_ngram_size > 0:
        padding = prompts.tokens.shape[1] - prompts.is_token.sum(-1)
        processors.append(NoRepeatNGrams(options.no_repeat_ngram_size, padding.repeat_interleave(copies)))
    if options.min_new_tokens > 0 and options.eos_token_ids:
        width, device = prompts.tokens.shape[1], prompts.tokens.device
        ends = torch.tensor(options.eos_token_ids, device=device)
        processors.append(MinNewTokensLengthLogitsProcessor(width, options.min_new_tokens, ends))
    return processors


def distribution_processors(options: GenerationOptions, width: int) -> list[LogitsProcessor]:
    """What shapes the distribution that tokens are drawn from, in Hugging Face's order.

    Args:
        options: Settled.
        width: Columns of the prompts.
    """
    processors: list[LogitsProcessor] = []
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


def readable(prompts: NextTokens) -> Tensor:
    """The prompts as processors read them, [b, s]: padding repeats the last token, so that it says nothing new."""
    return torch.where(prompts.is_token == 1, prompts.tokens, prompts.tokens[:, -1:])


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


class Stops:
    """Finds rows that end: with a token that ends them, with a run of tokens that does, or with a stop string."""

    def __init__(self, options: GenerationOptions, prompts: NextTokens, strings: StopStrings | None = None) -> None:
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
        self.can_end = bool(self._sequences) or strings is not None
        """Whether a row can end before it is full."""
        self._min_new_tokens = options.min_new_tokens
        self._strings = strings
        if strings is not None:
            # A text may begin in the prompt; padding says nothing.
            endings = prompts.tokens.masked_fill(prompts.is_token == 0, strings.no_token)
            self._endings = endings[:, -strings.num_tokens :]

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
            texts = torch.cat((endings, new_tokens[:, -self._strings.num_tokens :]), dim=-1)
            ends |= self._strings.at(texts, None)
        return ends
