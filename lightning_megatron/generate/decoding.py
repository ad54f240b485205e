"""How does a text grow? The prompts once, then token by token, until every row is finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.engine.groups import Topology
from lightning_megatron.generate import sampling
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.prompts import Prompts
from lightning_megatron.generate.stages import NextTokens, Stages
from lightning_megatron.generate.stopping import Stops

STEPS_BETWEEN_LOOKS = 8
"""After how many tokens the host asks the device whether all rows are finished; asking makes it wait."""


@dataclass(frozen=True, kw_only=True)
class Continuations:
    """What was added to each row."""

    tokens: Tensor
    """[b, max_new_tokens], int64; behind the end of a row the padding token."""
    lengths: Tensor
    """[b], int64: tokens of each row, the one that ended it included."""


def decode(
    models: Sequence[Any],
    topology: Topology,
    prompts: Prompts,
    options: GenerationOptions,
    vocab_size: int,
    uniform: Tensor,
) -> Continuations:
    """Continue the rows of one copy of the model; all its ranks must call alike, and get the same.

    Args:
        models: This rank's plain chunks, in ``quiet.generating``.
        topology: This rank's place.
        prompts: The rows, on the device.
        options: With the model's own tokens filled in.
        vocab_size: Without padding.
        uniform: What decides about each token if options sample: [max_new_tokens, b].
    """
    rows, width = prompts.tokens.shape
    device = prompts.tokens.device
    most = options.max_new_tokens
    stages = Stages(models, topology, rows, width + most - 1)
    chooser = _Chooser(topology, prompts, options, vocab_size, uniform.to(device))
    stops = Stops(options, device)
    written = torch.full((rows, most), options.filling, dtype=torch.long, device=device)
    lengths = torch.full((rows,), most, dtype=torch.long, device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    mask = torch.ones((rows, width + most), dtype=torch.long, device=device)
    mask[:, :width] = prompts.is_token
    tokens, positions = prompts.tokens, prompts.positions
    for step in range(most):
        seen = mask[:, : width + step] if prompts.is_padded else None
        next_tokens = NextTokens(tokens=tokens, positions=positions, mask=seen, longest=prompts.longest + step)
        logits = stages.logits(next_tokens)
        chosen = chooser.choose(logits, step).masked_fill(finished, options.filling)
        written[:, step] = chosen
        if stops:
            ends = stops.at(written[:, : step + 1]) & ~finished
            lengths.masked_fill_(ends, step + 1)
            finished |= ends
            if (step + 1) % STEPS_BETWEEN_LOOKS == 0 and bool(finished.all()):
                break
        # What fills finished rows need not be a token of the vocabulary.
        tokens, positions = chosen.clamp(0, vocab_size - 1)[:, None], positions[:, -1:] + 1
    return Continuations(tokens=written, lengths=lengths)


class _Chooser:
    """Chooses tokens on one rank of the last stage, and tells the others of the same copy."""

    def __init__(
        self, topology: Topology, prompts: Prompts, options: GenerationOptions, vocab_size: int, uniform: Tensor
    ) -> None:
        self._group = topology.mp_group
        self._options = options
        self._vocab_size = vocab_size
        self._uniform = uniform
        ranks = sorted(dist.get_process_group_ranks(topology.mp_group))
        self._is_alone = len(ranks) == 1
        # Of the last stage the first: tp ranks could draw differently, as sums on a GPU are not exactly reproducible.
        self._source = ranks[-topology.parallel.tp]
        self._is_source = topology.is_last_stage and topology.tp_rank == 0
        self._like = prompts.tokens.new_empty(prompts.tokens.shape[0])
        self._repeated: Tensor | None = None
        if self._is_source and options.repetition_penalty != 1.0:
            repeated = torch.zeros(len(self._like), vocab_size, dtype=torch.bool, device=self._like.device)
            # Added, not set: padding may be a token that the row has.
            counts = repeated.int().scatter_add_(-1, prompts.tokens, prompts.is_token.int())
            self._repeated = counts > 0

    def choose(self, logits: Tensor | None, step: int) -> Tensor:
        """The next token of each row, [b], the same on all ranks."""
        chosen = self._like
        if self._is_source:
            assert logits is not None
            chosen = self._chosen(logits[:, : self._vocab_size], step)
            if self._repeated is not None:
                self._repeated.scatter_(-1, chosen[:, None], True)
        if not self._is_alone:
            chosen = chosen.contiguous()
            dist.broadcast(chosen, self._source, group=self._group)
        return chosen.clone()

    def _chosen(self, logits: Tensor, step: int) -> Tensor:
        options = self._options
        if self._repeated is not None:
            logits = sampling.penalized(logits, self._repeated, options.repetition_penalty)
        if step < options.min_new_tokens:
            logits = sampling.without(logits, options.eos_token_ids)
        if not options.samples:
            return logits.argmax(-1)
        return sampling.drawn(sampling.shaped(logits, options, step), self._uniform[step])
