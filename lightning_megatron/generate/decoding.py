"""How does a text grow? The prompts once, then token by token, until every row is finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.engine.groups import Topology
from lightning_megatron.generate import sampling
from lightning_megatron.generate.prompts import Prompts
from lightning_megatron.generate.reading import Reading
from lightning_megatron.generate.rules import Odds, Rules
from lightning_megatron.generate.stages import Stages

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
    log_probabilities: Tensor
    """[b, max_new_tokens], fp32: what the model gives to each new token, before temperature and the like; 0 behind the
    end of a row."""
    scores: Tensor
    """[b], fp32: by what a search has ranked the rows; else their sums of log-probabilities."""


def decode(
    models: Sequence[Any],
    topology: Topology,
    prompts: Prompts,
    rules: Rules,
    uniform: Tensor,
    on_tokens: Callable[[Tensor], None] | None = None,
) -> Continuations:
    """Continue the rows of one copy of the model; all its ranks must call alike, and get the same.

    Args:
        models: This rank's plain chunks, in ``quiet.generating``.
        topology: This rank's place.
        prompts: The rows, on the device.
        rules: What decides about the tokens.
        uniform: What decides about each token if rules sample: [max_new_tokens, b].
        on_tokens: Gets the new token of each row as soon as it is chosen, [b]; ``ENDED`` for finished rows.
    """
    rows, width = prompts.tokens.shape
    device = prompts.tokens.device
    options, most = rules.options, rules.options.num_new_tokens
    stages = Stages(models, topology, rows, width + most - 1, static=bool(options.static_cache))
    reading = Reading(stages, prompts, most)
    chooser = _Chooser(prompts, rules, uniform.to(device)) if stages.chooses else None
    stops = rules.stops(prompts)
    written = torch.full((rows, most), options.filling, dtype=torch.long, device=device)
    lengths = torch.full((rows,), most, dtype=torch.long, device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    logits = reading.prompts()
    for step in range(most):
        chosen = torch.empty_like(lengths) if chooser is None else chooser.choose(logits, written[:, :step])
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
            logits = reading.token(chosen.clamp(0, rules.vocab_size - 1))
    found = stages.told(torch.zeros(rows, most, device=device) if chooser is None else chooser.log_probabilities)
    found = found.masked_fill(torch.arange(most, device=device) >= lengths[:, None], 0.0)
    return Continuations(tokens=written, lengths=lengths, log_probabilities=found, scores=found.sum(-1))


class _Chooser:
    """Chooses tokens, on the one rank that does."""

    def __init__(self, prompts: Prompts, rules: Rules, uniform: Tensor) -> None:
        self._options = rules.options
        self._vocab_size = rules.vocab_size
        self._uniform = uniform
        self._odds = Odds(prompts, rules)
        shape = (len(prompts.tokens), rules.options.num_new_tokens)
        self.log_probabilities = torch.zeros(shape, device=prompts.tokens.device)
        """[b, max_new_tokens], fp32: of the tokens chosen so far, before anything made them likelier or rarer."""

    def choose(self, logits: Tensor | None, written: Tensor) -> Tensor:
        """The next token of each row, [b], behind those ``written`` so far, [b, step]."""
        assert logits is not None
        step, given = written.shape[1], logits[:, : self._vocab_size]
        changed = self._odds.changed(given, written)
        if self._options.samples:
            chosen = sampling.drawn(sampling.shaped(changed, self._options, step), self._uniform[step])
        else:
            chosen = changed.argmax(-1)
        self._odds.grow(chosen)
        self.log_probabilities[:, step] = given.gather(-1, chosen[:, None])[:, 0] - given.logsumexp(-1)
        return chosen
