"""Token-by-token decoding, greedy or sampling: the prompts once, then a token of each row until all are finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.engine.groups import Topology
from lightning_megatron.generate.inputs import NextTokens
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.pipeline import Stages
from lightning_megatron.generate.processors import Stops, distribution_processors, drawn, readable, token_processors
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
    options, most = rules.options, rules.options.num_new_tokens
    stages = Stages(models, topology, prompts, most, static=bool(options.static_cache))
    chooser = _Chooser(prompts, rules, uniform.to(device)) if stages.chooses else None
    stops = Stops(options, prompts, rules.strings)
    written = torch.full((rows, most), options.filling, dtype=torch.long, device=device)
    lengths = torch.full((rows,), most, dtype=torch.long, device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    logits = stages.first()
    for step in range(most):
        chosen = torch.empty_like(lengths) if chooser is None else chooser.choose(logits, step)
        chosen = stages.told(chosen).masked_fill(finished, options.filling)
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
