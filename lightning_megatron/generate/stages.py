"""How do tokens become logits on a pipeline? Each stage runs its layers on what the stage before it has sent.

Rows are cut into as many groups as there are stages, so that the stages work at the same time: while the second one
has the first group, the first one has the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.engine.fillers.attention import SDPAttention
from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.slots.kv_cache import KeyValueCache
from lightning_megatron.engine.slots.static_cache import StaticCache, slots_for
from lightning_megatron.generate.encoder_decoder import SourceCache
from lightning_megatron.generate.passes import Chunk, EagerPass, NextTokens, Passes
from lightning_megatron.generate.static_steps import StaticSteps


class Stages:
    """This rank's part of one batch's passes through the model; all ranks of a copy must call alike."""

    def __init__(
        self,
        models: Sequence[Any],
        topology: Topology,
        rows: int,
        capacity: int | None = None,
        *,
        static: bool = False,
    ) -> None:
        """Prepare empty caches.

        Args:
            models: This rank's plain model chunks.
            topology: This rank's place.
            rows: Prompts.
            capacity: How many tokens a row may have in the cache; None keeps nothing.
            static: Whether passes of one token behind the first pass all have the same shapes (``static_steps``).
        """
        self._topology = topology
        ranks = sorted(dist.get_process_group_ranks(topology.mp_group))
        self._num_ranks = len(ranks)
        # Of the last stage the first: tp ranks could draw differently, as sums on a GPU are not exactly reproducible.
        self._source = ranks[-topology.parallel.tp]
        # Two messages under way in both directions could wait for each other: with chunks the batch is one group.
        count = 1 if topology.parallel.vpp else min(topology.parallel.pp, rows)
        bounds = [rows * i // count for i in range(count + 1)]
        self._groups = list(zip(bounds, bounds[1:], strict=False))
        self._rows_per_prompt = 1
        self._capacity = capacity
        self._is_static = static
        self._num_read = 0
        self._steps: StaticSteps | None = None
        self._chunks = [self._chunk(index, model, len(models)) for index, model in enumerate(models)]

    def _chunk(self, index: int, model: Any, count: int) -> Chunk:
        layers: list[SDPAttention] = []
        if self._capacity is not None:
            # Not those of an encoder, which reads once.
            layers = [module for module in model.decoder.modules() if isinstance(module, SDPAttention)]
        return Chunk(
            model=model,
            is_first=self._topology.is_first_stage and index == 0,
            is_last=self._topology.is_last_stage and index == count - 1,
            layers=layers,
            caches=[[self._cache_of(layer) for layer in layers] for _ in self._groups],
        )

    def _cache_of(self, layer: SDPAttention) -> KeyValueCache:
        if layer.is_cross:
            return SourceCache()
        return (StaticCache if self._is_static else KeyValueCache)(self._capacity or 0)

    def logits(self, batch: NextTokens, *, every_position: bool = False) -> Tensor | None:
        """What follows the last token of each row: [b, padded vocabulary] fp32 on the last stage, None elsewhere.

        Args:
            batch: What the model reads.
            every_position: What follows every token instead, [b, s, padded vocabulary].
        """
        found: list[Tensor] = []
        under_way: list[tuple[Any, Tensor]] = []
        passes = self._passes(batch, every_position)
        for index, chunk in enumerate(self._chunks):
            for group in range(len(self._groups)):
                hidden = passes.hidden(index, group)
                if hidden is not None:
                    dist.recv(hidden, self._neighbour(-1), group=self._topology.pp_group)
                output = passes.output(index, group)
                if chunk.is_last:
                    found.append(output)
                else:
                    sent = dist.isend(output, self._neighbour(1), group=self._topology.pp_group)
                    under_way.append((sent, output))
        for message, _ in under_way:
            message.wait()
        # A copy: what a step returns is written anew by the next one.
        return torch.cat(found) if found else None

    def _passes(self, batch: NextTokens, every_position: bool) -> Passes:
        place = self._num_read
        self._num_read += batch.tokens.shape[1]
        if not self._is_static or place == 0:
            return EagerPass(self._chunks, self._bounds, batch, every_position)
        if self._steps is None:
            self._steps = StaticSteps(self._chunks, self._bounds, batch, place, slots_for(self._capacity or 0))
        self._steps.advance(batch, place, self._all_agree)
        return self._steps

    def _all_agree(self, agrees: bool) -> bool:
        """Whether all ranks of this copy say yes."""
        if self._num_ranks == 1:
            return agrees
        device = next(self._chunks[0].model.parameters()).device
        vote = torch.tensor([int(agrees)], device=device)
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=self._topology.mp_group)
        return bool(vote)

    @property
    def chooses(self) -> bool:
        """Whether this rank chooses the tokens of this copy of the model."""
        return self._topology.is_last_stage and self._topology.tp_rank == 0

    def told(self, message: Tensor) -> Tensor:
        """What the rank that chooses passes here, on all ranks of this copy; theirs must have the same shape."""
        if self._num_ranks > 1:
            message = message.contiguous()
            dist.broadcast(message, self._source, group=self._topology.mp_group)
        return message

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        """First and last + 1 row of each group."""
        return [(first * self._rows_per_prompt, stop * self._rows_per_prompt) for first, stop in self._groups]

    def select(self, rows: Tensor, rows_per_prompt: int) -> None:
        """In every cache row i becomes what row ``rows[i]`` was.

        Args:
            rows: [prompts * rows_per_prompt]; those of a prompt come from rows of the same prompt.
            rows_per_prompt: How many each prompt has from now on.
        """
        assert self._steps is None or rows_per_prompt == self._rows_per_prompt, "steps have one number of rows"
        before = self._bounds
        self._rows_per_prompt = rows_per_prompt
        for chunk in self._chunks:
            for (old, _), (first, stop), caches in zip(before, self._bounds, chunk.caches, strict=True):
                for cache in caches:
                    cache.select(rows[first:stop] - old)

    def _neighbour(self, distance: int) -> int:
        """Global rank of a stage behind (or before) this one; behind the last is the first, with its next chunk."""
        ranks = dist.get_process_group_ranks(self._topology.pp_group)
        return ranks[(self._topology.pp_rank + distance) % len(ranks)]
