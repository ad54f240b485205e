"""A pipeline stage's model chunk in generation: hidden states in, hidden states or logits out, KV caches in between."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

from lightning_megatron.engine.cpu import without_redirection
from lightning_megatron.engine.ops.attention import SDPAttention
from lightning_megatron.engine.ops.key_value_cache import KeyValueCache, TokenStep
from lightning_megatron.generate.cuda_graphs import Work
from lightning_megatron.generate.layout import ModelInputs
from lightning_megatron.generate.scores import ScoredPositions
from lightning_megatron.models.bert import BertChunk
from lightning_megatron.models.gated_delta_net import GatedDeltaNet
from lightning_megatron.models.gpt import Chunk, GPTChunk


class CachedChunk:
    """A model chunk on this rank, with the KV caches of its layers for each group of rows."""

    def __init__(
        self,
        model: Any,
        num_groups: int,
        slots: int,
        source: int,
    ) -> None:
        """Create empty caches.

        Args:
            model: The unwrapped chunk.
            num_groups: Number of groups of rows.
            slots: Maximum number of tokens per row; 0 for no caches.
            source: Number of tokens that an encoder reads.
        """
        self.model = model
        self.layers: list[SDPAttention | GatedDeltaNet] = []
        if slots > 0:
            # Not the layers of an encoder, which runs once.
            modules = model.decoder.modules()
            self.layers = [
                module for module in modules if isinstance(module, SDPAttention | GatedDeltaNet)
            ]
        self.caches: list[list[KeyValueCache]] = []
        """One cache per layer for each group."""
        for _ in range(num_groups):
            caches = [
                layer.cache_class(source if layer.is_cross else slots) for layer in self.layers
            ]
            self.caches.append(caches)

    def receive_buffer(self, rows: ModelInputs) -> Tensor | None:
        """Buffer for the previous chunk's output, [s, b, h]; None for the first chunk, which reads tokens."""
        if self.model.pre_process:
            return None
        config = self.model.config
        count, length = rows.tokens.shape
        if rows.source is not None:
            length += rows.source.shape[1]
        return torch.empty(
            (length, count, config.hidden_size),
            dtype=config.pipeline_dtype,
            device=rows.tokens.device,
        )

    def run(
        self,
        hidden: Tensor | None,
        rows: ModelInputs,
        group: int,
        *,
        every_position: bool = False,
        slot: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [s, b, h] to send or, from the last chunk, fp32 logits over the padded vocabulary.

        If the rows have targets, the last chunk returns their scores instead (``ScoredPositions.scores``).

        Args:
            hidden: Hidden states from the previous chunk, [s, b, h]; None for the first chunk.
            rows: Inputs; the tokens follow those in the caches.
            group: Index of the group of rows, which selects the caches.
            every_position: Whether to return logits of every position, [b, s, v], instead of the last one, [b, v].
            slot: For static steps, whose mask covers all slots: the token's cache slot, as for ``TokenStep``. None
                where the caches count.
        """
        model = self.model
        step = None
        if slot is not None and rows.mask is not None:
            step = TokenStep(slot, rows.mask)
            rows = replace(rows, mask=None)
        # Set for this pass alone: Megatron's Attention hands core attention nothing that its caller could pass.
        for layer, cache in zip(self.layers, self.caches[group], strict=True):
            layer.kv_cache = cache
            cache.step = step
        if hidden is not None:
            model.set_input_tensor(hidden)
        scored: ScoredPositions | None = None
        selection: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if model.post_process and rows.targets is not None:
            scored = ScoredPositions(rows.targets)
            selection = model.output_layer.register_forward_pre_hook(scored.select)
        elif model.post_process and not every_position and rows.tokens.shape[1] > 1:
            selection = model.output_layer.register_forward_pre_hook(_last_position)
        try:
            with selection, self._redirection(rows):
                output = self._forward(rows)
        finally:
            if hidden is not None:
                model.set_input_tensor(None)
            for layer in self.layers:
                layer.kv_cache = None
        if not model.post_process:
            return output.contiguous().detach()
        if scored is not None:
            return scored.scores(output, model.pg_collection.tp)
        if not every_position:
            output = output[:, -1]
        return output.float().detach()

    def _redirection(self, rows: ModelInputs) -> contextlib.AbstractContextManager[Any]:
        if isinstance(self.model, Chunk):
            return without_redirection(rows.tokens.device)
        # A user's model may name any device.
        return contextlib.nullcontext()

    def _forward(self, rows: ModelInputs) -> Tensor:
        model = self.model
        # Scores are computed from the shards of the vocabulary.
        gathers = rows.targets is None
        output: Tensor
        if rows.source is not None:
            output = model(
                rows.source,
                rows.tokens,
                rows.source_mask,
                rows.mask,
                runtime_gather_output=gathers,
            )
        elif isinstance(model, BertChunk):
            output = self._forward_bert(rows)
        elif isinstance(model, GPTChunk):
            output = model(
                rows.tokens,
                rows.positions,
                rows.mask,
                runtime_gather_output=gathers,
                longest=rows.longest,
            )
        else:
            # A user's model.
            output = model(rows.tokens, rows.positions, rows.mask, runtime_gather_output=gathers)
        return output

    def _forward_bert(self, rows: ModelInputs) -> Tensor:
        # In training padding attends to padding; here, as in Hugging Face, to tokens: its logits are returned, too.
        masked_keys = None
        if rows.mask is not None:
            masked_keys = (rows.mask == 0)[:, None, None, :]
        logits: Tensor | tuple[Tensor, ...]
        logits = self.model(rows.tokens, rows.positions, masked_keys, rows.token_types)
        if isinstance(logits, Tensor):
            return logits
        # A pretraining model also returns logits for the order of sentences, which are dropped.
        gathered: Tensor = gather_from_tensor_model_parallel_region(logits[0])
        return gathered


def _last_position(_: object, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook of the output layer: keep the last position of its input, [s, b, h]."""
    return (inputs[0][-1:], *inputs[1:])


@dataclass(frozen=True, kw_only=True)
class Task:
    """One chunk's work on one group of rows in a pass."""

    buffer: Tensor | None
    """Buffer for what the previous chunk sends, [s, b, h]; None for the first chunk."""
    work: Work
    is_last: bool
    """Whether the output is logits."""


def pass_tasks(
    chunks: Sequence[CachedChunk],
    groups: Sequence[slice],
    batch: ModelInputs,
    *,
    every_position: bool = False,
    slot: Tensor | None = None,
) -> Iterator[Task]:
    """Yield the tasks of a pass over ``batch``, in order; the last two arguments are those of ``CachedChunk.run``."""
    for chunk in chunks:
        for group, rows in enumerate(groups):
            inputs = batch.rows(rows)
            buffer = chunk.receive_buffer(inputs)
            work = functools.partial(
                chunk.run,
                buffer,
                inputs,
                group,
                every_position=every_position,
                slot=slot,
            )
            yield Task(buffer=buffer, work=work, is_last=chunk.model.post_process)
