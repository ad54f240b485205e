"""How does a text grow? The prompts once, then token by token, until every row is finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.engine.groups import Topology
from lightning_megatron.generate import sampling
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.prompts import Prompts
from lightning_megatron.generate.reading import Reading
from lightning_megatron.generate.stages import Stages
from lightning_megatron.generate.stopping import Stops

STEPS_BETWEEN_LOOKS = 8
"""After how many tokens the host asks the device whether all rows are finished; asking makes it wait."""

ENDED = -1
"""What whoever watches the tokens gets for rows that are finished."""


@dataclass(frozen=True, kw_only=True)
class Continuations:
    """What was added to each row."""

    tokens: Tensor
    """[b, max_new_tokens], int64; behind the end of a row the padding token."""
    lengths: Tensor
    """[b], int64: tokens of each row, the one that ended it included."""
    log_probabilities: Tensor | None
    """[b, max_new_tokens], fp32: what the model gives to each new token, before temperature and the like; 0 behind the
    end of a row. None after a search."""
    scores: Tensor
    """[b], fp32: by what a search has ranked the rows; else their sums of log-probabilities."""


def decode(
    models: Sequence[Any],
    topology: Topology,
    prompts: Prompts,
    options: GenerationOptions,
    vocab_size: int,
    uniform: Tensor,
    on_tokens: Callable[[Tensor], None] | None = None,
) -> Continuations:
    """Continue the rows of one copy of the model; all its ranks must call alike, and get the same.

    Args:
        models: This rank's plain chunks, in ``quiet.generating``.
        topology: This rank's place.
        prompts: The rows, on the device.
        options: With the model's own tokens filled in.
        vocab_size: Without padding.
        uniform: What decides about each token if options sample: [max_new_tokens, b].
        on_tokens: Gets the new token of each row as soon as it is chosen, [b]; ``ENDED`` for finished rows.
    """
    rows, width = prompts.tokens.shape
    device = prompts.tokens.device
    most = options.max_new_tokens
    stages = Stages(models, topology, rows, width + most - 1, static=options.static_cache)
    reading = Reading(stages, prompts, most)
    chooser = _Chooser(prompts, options, vocab_size, uniform.to(device)) if stages.chooses else None
    stops = Stops(options, device)
    written = torch.full((rows, most), options.filling, dtype=torch.long, device=device)
    lengths = torch.full((rows,), most, dtype=torch.long, device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    logits = reading.prompts()
    for step in range(most):
        chosen = torch.empty_like(lengths) if chooser is None else chooser.choose(logits, step)
        chosen = stages.told(chosen).masked_fill(finished, options.filling)
        written[:, step] = chosen
        if on_tokens is not None:
            on_tokens(chosen.masked_fill(finished, ENDED))
        if stops:
            ends = stops.at(written[:, : step + 1]) & ~finished
            lengths.masked_fill_(ends, step + 1)
            finished |= ends
            if (step + 1) % STEPS_BETWEEN_LOOKS == 0 and bool(finished.all()):
                break
        if step + 1 < most:
            # What fills finished rows need not be a token of the vocabulary.
            logits = reading.token(chosen.clamp(0, vocab_size - 1))
    found = stages.told(torch.zeros(rows, most, device=device) if chooser is None else chooser.log_probabilities)
    found = found.masked_fill(torch.arange(most, device=device) >= lengths[:, None], 0.0)
    return Continuations(tokens=written, lengths=lengths, log_probabilities=found, scores=found.sum(-1))


def repeated_tokens(prompts: Prompts, vocab_size: int) -> Tensor:
    """Which tokens each row has: [b, v], bool."""
    counts = torch.zeros(len(prompts.tokens), vocab_size, dtype=torch.int, device=prompts.tokens.device)
    # Added, not set: what stands for padding may be a token that the row has.
    return counts.scatter_add_(-1, prompts.tokens, prompts.is_token.int()) > 0


class _Chooser:
    """Chooses tokens, on the one rank that does."""

    def __init__(self, prompts: Prompts, options: GenerationOptions, vocab_size: int, uniform: Tensor) -> None:
        self._options = options
        self._vocab_size = vocab_size
        self._uniform = uniform
        self._repeated = repeated_tokens(prompts, vocab_size) if options.repetition_penalty != 1.0 else None
        shape = (len(prompts.tokens), options.max_new_tokens)
        self.log_probabilities = torch.zeros(shape, device=prompts.tokens.device)
        """[b, max_new_tokens], fp32: of the tokens chosen so far, before anything made them likelier or rarer."""

    def choose(self, logits: Tensor | None, step: int) -> Tensor:
        """The next token of each row, [b]."""
        assert logits is not None
        options, logits = self._options, logits[:, : self._vocab_size]
        given = logits
        if self._repeated is not None:
            logits = sampling.penalized(logits, self._repeated, options.repetition_penalty)
        if step < options.min_new_tokens:
            logits = sampling.without(logits, options.eos_token_ids)
        if options.samples:
            chosen = sampling.drawn(sampling.shaped(logits, options, step), self._uniform[step])
        else:
            chosen = logits.argmax(-1)
        if self._repeated is not None:
            self._repeated.scatter_(-1, chosen[:, None], True)
        self.log_probabilities[:, step] = given.gather(-1, chosen[:, None])[:, 0] - given.logsumexp(-1)
        return chosen
