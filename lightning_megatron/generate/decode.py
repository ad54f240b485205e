"""Token-by-token decoding, greedy or sampling: the prompts once, then a token of each row until all are finished.

Logits processors are transformers' own, and ours for what they lack. Neither they nor the criteria that end rows make
the host wait for the device, and every rank that sees the same tokens finds the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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

from lightning_megatron.engine.groups import Topology
from lightning_megatron.generate.inputs import NextTokens
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.pipeline import Stages
from lightning_megatron.generate.texts import StopStrings

STEPS_BETWEEN_LOOKS = 8
"""After how many tokens the host asks the device whether all rows are finished; asking makes it wait."""

ENDED = -1
"""What whoever watches the tokens gets for rows that are finished."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What decides about the tokens of one call, the same on all ranks."""

    options: GenerationOptions
    """Settled, and with the model's own tokens filled in."""
    vocab_size: int
    """Without padding."""
    strings: StopStrings | None = None
    """What finds the texts that end rows."""


@dataclass(frozen=True, kw_only=True)
class Continuations:
    """What was added to each row."""

    tokens: Tensor
    """[b, max_new_tokens], int64; behind the end of a row the padding token."""
    lengths: Tensor
    """[b], int64: tokens of each row, the one that ended it included."""
    log_probabilities: Tensor
    """[b, max_new_tokens], fp32: what the model gives to each new token, before temperature and the like; 0 behind the
    end of a row."""
    scores: Tensor
    """[b], fp32: by what a search has ranked the rows; else their sums of log-probabilities."""


def decode(
    models: Sequence[Any],
    topology: Topology,
    prompts: NextTokens,
    rules: Rules,
    uniform: Tensor,
    on_tokens: Callable[[Tensor], None] | None = None,
) -> Continuations:
    """Continue the rows of one copy of the model; all its ranks must call alike, and get the same.

    Args:
        models: This rank's plain chunks, in ``pipeline.inference_mode``.
        topology: This rank's place.
        prompts: The rows, on the device.
        rules: What decides about the tokens.
        uniform: What decides about each token if rules sample: [max_new_tokens, b].
        on_tokens: Gets the new token of each row as soon as it is chosen, [b]; ``ENDED`` for finished rows.
    """
    rows, device = len(prompts.tokens), prompts.tokens.device
    options, most, filling = rules.options, rules.options.num_new_tokens, rules.options.filling
    stages = Stages(models, topology, prompts, most, static=bool(options.static_cache))
    chooser = _Chooser(prompts, rules, uniform.to(device)) if stages.chooses else None
    stops = Stops(options, prompts, rules.strings)
    written = torch.full((rows, most), filling, dtype=torch.long, device=device)
    lengths = torch.full((rows,), most, dtype=torch.long, device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    logits = stages.first()
    for step in range(most):
        chosen = torch.empty_like(lengths) if chooser is None else chooser.choose(logits, step)
        chosen = stages.told(chosen).masked_fill(finished, filling)
        written[:, step] = chosen
        if on_tokens is not None:
            on_tokens(chosen.masked_fill(finished, ENDED))
        if stops.can_end:
            ends = stops.at(written[:, : step + 1]) & ~finished
            lengths.masked_fill_(ends, step + 1)
            finished |= ends
            if (step + 1) % STEPS_BETWEEN_LOOKS == 0 and bool(finished.all()):
                break
        if step + 1 < most:
            # What fills finished rows need not be a token of the vocabulary.
            logits = stages.next(chosen.clamp(0, rules.vocab_size - 1))
    found = stages.told(torch.zeros(rows, most, device=device) if chooser is None else chooser.log_probabilities)
    found = found.masked_fill(torch.arange(most, device=device) >= lengths[:, None], 0.0)
    return Continuations(tokens=written, lengths=lengths, log_probabilities=found, scores=found.sum(-1))


class _Chooser:
    """Chooses tokens, on the one rank that does."""

    def __init__(self, prompts: NextTokens, rules: Rules, uniform: Tensor) -> None:
        options = rules.options
        rows, self._width = prompts.tokens.shape
        self._vocab_size = rules.vocab_size
        self._uniform = uniform if options.samples else None
        self._processors = token_processors(options, prompts)
        if options.samples:
            self._processors += distribution_processors(options, self._width)
        new = prompts.tokens.new_zeros(rows, options.num_new_tokens)
        self._texts = torch.cat((readable(prompts), new), dim=-1)
        """[b, s + max_new_tokens]: what was chosen behind the end of a row, too."""
        self.log_probabilities = torch.zeros(new.shape, device=new.device)
        """[b, max_new_tokens], fp32: of the tokens chosen so far, before anything made them likelier or rarer."""

    def choose(self, logits: Tensor | None, step: int) -> Tensor:
        """The new token number ``step`` of each row, [b]."""
        assert logits is not None
        given = scores = logits[:, : self._vocab_size]
        place = self._width + step
        for processor in self._processors:
            scores = processor(self._texts[:, :place], scores)
        chosen = scores.argmax(-1) if self._uniform is None else drawn(scores, self._uniform[step])
        self._texts[:, place] = chosen
        self.log_probabilities[:, step] = given.gather(-1, chosen[:, None])[:, 0] - given.logsumexp(-1)
        return chosen


# ---- how tokens are chosen -------------------------------------------------------------------------------------------


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
