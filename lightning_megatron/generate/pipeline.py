"""Pipelined forward passes for generation and logits: token ids in, logits out, KV caches kept in between.

Each stage runs its layers on the hidden states that the previous stage has sent. Rows are split into as many groups as
there are stages, so that the stages work at the same time: while the second stage processes the first group, the first
stage processes the second group.

In an encoder-decoder the first pass sends what training sends, the states of both stacks; the cross-attention keeps its
keys and values, and from then on stages send the decoder's newest token only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.ops.key_value_cache import slots_for
from lightning_megatron.generate.chunk import CachedChunk, Task, pass_tasks
from lightning_megatron.generate.layout import ModelInputs
from lightning_megatron.generate.static_steps import StaticSteps


class Stages:
    """This rank's part of the forward passes over one batch; all ranks of a replica must make the same calls."""

    def __init__(
        self,
        models: Sequence[Any],
        topology: Topology,
        batch: ModelInputs,
        new_tokens: int | None = None,
        *,
        static: bool = False,
    ) -> None:
        """Create empty caches.

        Args:
            models: This rank's unwrapped chunks, in ``inference_mode``.
            topology: Layout and position of this rank.
            batch: Inputs of the first pass.
            new_tokens: Maximum number of new tokens per row; None for no caches.
            static: Whether all passes after the first one, of one token per row, have the same shapes.
        """
        self._topology = topology
        self._batch = batch
        self._mask = batch.mask
        self._is_static = static
        ranks = sorted(dist.get_process_group_ranks(topology.mp_group))
        # The last stage's first: tp ranks could sample differently, as sums on a GPU are not exactly reproducible.
        self._choosing_rank = ranks[-topology.parallel.tp * topology.parallel.cp]
        self.chooses_tokens = dist.get_rank() == self._choosing_rank
        """Whether this rank chooses the tokens for all ranks of ``topology.mp_group``."""
        rows, self._num_read = batch.tokens.shape
        # With virtual stages the batch is one group: sends in both directions at once could deadlock.
        count = 1
        if not topology.parallel.vpp:
            count = min(topology.parallel.pp, rows)
        bounds = [rows * group // count for group in range(count + 1)]
        self._groups = [slice(*pair) for pair in itertools.pairwise(bounds)]
        self._slots = 0
        if new_tokens is not None:
            self._slots = slots_for(self._num_read + new_tokens - 1)
            if batch.mask is not None:
                new = batch.mask.new_ones(rows, new_tokens)
                self._mask = torch.cat((batch.mask, new), dim=-1)
        source = 0
        if batch.source is not None:
            source = batch.source.shape[1]
        self._chunks = [CachedChunk(model, count, self._slots, source) for model in models]
        self._steps: StaticSteps | None = None

    def prefill(self, *, every_position: bool = False) -> Tensor | None:
        """Run the first pass: logits after each row, [b, padded vocabulary] fp32, on the last stage; None elsewhere.

        Args:
            every_position: Return the logits after every token instead, [b, s, padded vocabulary].
        """
        return self._pass(
            pass_tasks(self._chunks, self._groups, self._batch, every_position=every_position)
        )

    def score(self) -> Tensor | None:
        """Run one pass: scores of the rows' targets, [b, t, 2] fp32, on the last stage; None elsewhere."""
        return self.prefill(every_position=True)

    def decode(self, tokens: Tensor) -> Tensor | None:
        """Append one token to each row, [b], and return the logits after it as ``prefill`` does."""
        batch = self._batch
        slot = self._num_read
        assert batch.positions is not None
        self._num_read += 1
        mask = self._mask
        if mask is not None:
            mask = mask[:, : self._num_read]
        source = batch.source
        if source is not None:
            # The encoder runs once.
            source = tokens.new_empty(len(tokens), 0)
        self._batch = batch = replace(
            batch,
            tokens=tokens[:, None],
            positions=batch.positions[:, -1:] + 1,
            mask=mask,
            longest=batch.longest + 1,
            source=source,
        )
        if not self._is_static:
            return self._pass(pass_tasks(self._chunks, self._groups, batch))
        if self._steps is None:
            self._steps = StaticSteps(
                self._chunks,
                self._groups,
                batch,
                slot,
                self._slots,
            )
        return self._pass(self._steps.tasks(batch, slot))

    def _pass(self, tasks: Iterable[Task]) -> Tensor | None:
        logits: list[Tensor] = []
        pending: list[tuple[Any, Tensor]] = []
        for task in tasks:
            if task.buffer is not None:
                dist.recv(
                    task.buffer,
                    self._neighbour(-1),
                    group=self._topology.pp_group,
                )
            output = task.work()
            if task.is_last:
                logits.append(output)
            else:
                send = dist.isend(
                    output,
                    self._neighbour(1),
                    group=self._topology.pp_group,
                )
                pending.append((send, output))
        for send, _ in pending:
            send.wait()
        if not logits:
            return None
        # A copy, since the next static step overwrites the output of this one.
        return torch.cat(logits)

    def broadcast(self, message: Tensor) -> Tensor:
        """Broadcast the choosing rank's tensor over this replica; the other ranks pass one of the same shape."""
        if dist.get_world_size(self._topology.mp_group) > 1:
            message = message.contiguous()
            dist.broadcast(message, self._choosing_rank, group=self._topology.mp_group)
        return message

    def select_rows(self, rows: Tensor) -> None:
        """Replace row i by row ``rows[i]``, also in every cache; ``decode`` then appends tokens to the new rows.

        Args:
            rows: [b], a multiple of the prompts; rows of a prompt come from rows of the same prompt.
        """
        old = self._groups[-1].stop
        new = len(rows)
        for index, group in enumerate(self._groups):
            start = group.start * new // old
            stop = group.stop * new // old
            self._groups[index] = slice(start, stop)
            selected = rows[start:stop] - group.start
            for chunk in self._chunks:
                for layer, cache in zip(chunk.layers, chunk.caches[index], strict=True):
                    # Row i and row rows[i] have the same source, so cross-attention keeps its cache.
                    if old != new or not layer.is_cross:
                        cache.select(selected)
        batch = self._batch
        assert batch.positions is not None
        source_mask = batch.source_mask
        if source_mask is not None:
            source_mask = source_mask[rows]
        self._batch = replace(batch, positions=batch.positions[rows], source_mask=source_mask)
        if self._mask is not None:
            self._mask = self._mask[rows]

    def _neighbour(self, distance: int) -> int:
        """Global rank of the stage ``distance`` after this one; the first follows the last, with its next chunk."""
        ranks = dist.get_process_group_ranks(self._topology.pp_group)
        return ranks[(self._topology.pp_rank + distance) % len(ranks)]
