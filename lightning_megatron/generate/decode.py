"""Decoding: the prompts at once, then one token of each row at a time.

One rank of each replica chooses the tokens and broadcasts them. Neither logits processors nor stop criteria synchronize
host and device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.progress import progress
from lightning_megatron.generate.beam_search import BeamSearch
from lightning_megatron.generate.pipeline import Stages
from lightning_megatron.generate.request import Request
from lightning_megatron.generate.sampler import Sampler

STEPS_BETWEEN_EXIT_CHECKS = 8
"""Decoding steps between checks for early exit; each check synchronizes host and device."""


def decode(
    models: Sequence[Any],
    topology: Topology,
    request: Request,
    uniform: Tensor,
    on_tokens: Callable[[Tensor], None] | None = None,
    *,
    static: bool = False,
) -> tuple[Tensor, Tensor]:
    """Generate completions for the rows of one replica; all its ranks must make the same call, and get the same result.

    Args:
        models: This rank's unwrapped chunks, in ``inference_mode``.
        topology: Layout and position of this rank.
        request: The prompts, on the device, and how tokens are chosen.
        uniform: Random number for each token if tokens are sampled: [max_new_tokens, b].
        on_tokens: Called with the new token of each row as soon as it is chosen, [b]; ``ENDED`` for finished rows.
        static: As for ``Stages``.

    Returns:
        Two tensors, int64 and fp32, of shape [b * num_return_sequences, max_new_tokens + 1]. The first has the new
        tokens, padded after the end of a row, and in the last column the row's number of tokens. The second has their
        log-probabilities before temperature and other logits processors (0 after the end), and in the last column the
        row's score.
    """
    prompts = request.prompts
    max_new_tokens = request.max_new_tokens
    num_beams = request.options.num_beams
    searches = num_beams > 1
    num_prompts = len(prompts.tokens)
    rows = num_prompts * num_beams
    device = prompts.tokens.device
    can_end = searches or request.can_end
    stages = Stages(models, topology, prompts, max_new_tokens, static=static)
    chooser: Sampler | BeamSearch | None = None
    if stages.chooses_tokens:
        if searches:
            chooser = BeamSearch(request)
        else:
            chooser = Sampler(request, uniform.to(device))
    logits = stages.prefill()
    if searches:
        parents = torch.arange(num_prompts, device=device)
        parents = parents.repeat_interleave(num_beams)
        stages.select_rows(parents)
        if logits is not None:
            logits = logits[parents]
    for step in range(max_new_tokens):
        progress.tick()
        message = torch.empty(2 * rows + 1, dtype=torch.long, device=device)
        if chooser is not None:
            assert logits is not None
            message = chooser.advance(logits, step)
        message = stages.broadcast(message)
        parents = message[:rows]
        new_tokens = message[rows:-1]
        if on_tokens is not None:
            on_tokens(new_tokens.clone())
        check_exit = can_end and (step + 1) % STEPS_BETWEEN_EXIT_CHECKS == 0
        if step + 1 == max_new_tokens or (check_exit and bool(message[-1])):
            break
        if searches:
            stages.select_rows(parents)
        # Finished rows, whose id is ``ENDED``, are fed token 0.
        logits = stages.decode(new_tokens.clamp(min=0))
    if chooser is not None:
        tokens, values = chooser.best()
    else:
        num_rows = num_prompts
        if searches:
            num_rows *= request.options.num_return_sequences
        values = torch.empty(num_rows, max_new_tokens + 1, device=device)
        tokens = values.long()
    return stages.broadcast(tokens), stages.broadcast(values)
