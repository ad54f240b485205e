"""How do tokens become logits on a pipeline? Each stage runs its layers on what the stage before it has sent.

Rows are cut into as many groups as there are stages, so that the stages work at the same time: while the second one
has the first group, the first one has the second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.slots.attention import SDPAttention
from lightning_megatron.engine.slots.kv_cache import KeyValueCache
from lightning_megatron.generate.encoder_decoder import SourceCache


@dataclass(frozen=True, kw_only=True)
class NextTokens:
    """What the model reads in one pass, behind what its caches hold."""

    tokens: Tensor
    """[b, s], int64."""
    positions: Tensor | None
    """[b, s], int64; None for 0, 1, 2, ..."""
    mask: Tensor | None
    """[b, cached + s], int64, 0 for padding; None for no padding."""
    longest: int
    """Tokens of the longest row of all copies, these included."""
    source: Tensor | None = None
    """What an encoder reads, [b, s_enc] int64; [b, 0] once the caches hold it. None for models without one."""
    source_mask: Tensor | None = None
    """[b, s_enc], int64, 0 for padding of the source, also when it is read already; None for no padding."""

    def rows(self, first: int, stop: int) -> NextTokens:
        """Some of the rows."""
        tensors: dict[str, Any] = {name: x[first:stop] for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)

    @property
    def width(self) -> int:
        """Tokens per row, of the encoder, too."""
        return self.tokens.shape[1] + (0 if self.source is None else self.source.shape[1])


class Stages:
    """This rank's part of one batch's passes through the model; all ranks of a copy must call alike."""

    def __init__(self, models: Sequence[Any], topology: Topology, rows: int, capacity: int | None = None) -> None:
        """Prepare empty caches.

        Args:
            models: This rank's plain model chunks.
            topology: This rank's place.
            rows: Prompts.
            capacity: How many tokens a row may have in the cache; None keeps nothing.
        """
        self._models = list(models)
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
        self._layers: list[list[SDPAttention]] = [[] for _ in self._models]
        if capacity is not None:
            # Not those of an encoder, which reads once.
            layers = [model.decoder.modules() for model in self._models]
            self._layers = [[m for m in of_chunk if isinstance(m, SDPAttention)] for of_chunk in layers]
        self._caches = [
            [[_cache_of(layer, capacity or 0) for layer in of_chunk] for of_chunk in self._layers] for _ in self._groups
        ]

    def logits(self, batch: NextTokens, *, every_position: bool = False) -> Tensor | None:
        """What follows the last token of each row: [b, padded vocabulary] fp32 on the last stage, None elsewhere.

        Args:
            batch: What the model reads.
            every_position: What follows every token instead, [b, s, padded vocabulary].
        """
        found: list[Tensor] = []
        under_way: list[tuple[Any, Tensor]] = []
        for index, model in enumerate(self._models):
            is_first = self._topology.is_first_stage and index == 0
            is_last = self._topology.is_last_stage and index == len(self._models) - 1
            for (first, stop), caches in zip(self._bounds, self._caches, strict=True):
                rows = batch.rows(first, stop)
                hidden = None if is_first else self._received(rows, model.config)
                last_only = contextlib.nullcontext() if every_position else _last_position_only(model)
                with _attending_to(self._layers[index], caches[index]), last_only:
                    output = _output(model, hidden, rows)
                if is_last:
                    found.append(output.float() if every_position else output[:, -1].float())
                else:
                    sent = output.contiguous()
                    under_way.append((dist.isend(sent, self._neighbour(1), group=self._topology.pp_group), sent))
        for message, _ in under_way:
            message.wait()
        return torch.cat(found) if found else None

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
        before = self._bounds
        self._rows_per_prompt = rows_per_prompt
        for (old, _), (first, stop), of_chunks in zip(before, self._bounds, self._caches, strict=True):
            for cache in (cache for caches in of_chunks for cache in caches):
                cache.select(rows[first:stop] - old)

    def _received(self, rows: NextTokens, config: Any) -> Tensor:
        """Hidden states of the stage before: [s, b, h]."""
        shape = (rows.width, len(rows.tokens), config.hidden_size)
        hidden = torch.empty(shape, dtype=config.pipeline_dtype, device=rows.tokens.device)
        dist.recv(hidden, self._neighbour(-1), group=self._topology.pp_group)
        return hidden

    def _neighbour(self, distance: int) -> int:
        """Global rank of a stage behind (or before) this one; behind the last is the first, with its next chunk."""
        ranks = dist.get_process_group_ranks(self._topology.pp_group)
        return ranks[(self._topology.pp_rank + distance) % len(ranks)]


def _cache_of(layer: SDPAttention, capacity: int) -> KeyValueCache:
    return SourceCache() if layer.is_cross else KeyValueCache(capacity)


def _output(model: Any, hidden: Tensor | None, rows: NextTokens) -> Tensor:
    model.set_input_tensor(hidden)
    if rows.source is not None:
        decoded: Tensor = model(rows.source, rows.tokens, rows.source_mask, rows.mask, runtime_gather_output=True)
        return decoded
    model.rotary_length = rows.longest
    try:
        output: Tensor = model(rows.tokens, rows.positions, rows.mask, runtime_gather_output=True)
    finally:
        model.set_input_tensor(None)
        model.rotary_length = None
    return output


@contextlib.contextmanager
def _attending_to(layers: list[SDPAttention], caches: list[KeyValueCache]) -> Iterator[None]:
    """Layers that see what is in the caches, and add to it."""
    for layer, cache in zip(layers, caches, strict=True):
        layer.kv_cache = cache
    try:
        yield
    finally:
        for layer in layers:
            layer.kv_cache = None


@contextlib.contextmanager
def _last_position_only(model: Any) -> Iterator[None]:
    """The output layer, if this chunk has it, computes the logits of the last position alone."""
    if not model.post_process:
        yield
        return
    hook = model.output_layer.register_forward_pre_hook(lambda layer, inputs: (inputs[0][-1:], *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()
