"""What does one chunk of a model do with rows? It reads them behind what its caches hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_megatron.engine.fillers.attention import SDPAttention
from lightning_megatron.engine.slots.kv_cache import KeyValueCache
from lightning_megatron.generate.encoders import output_of_bert
from lightning_megatron.models.bert import BertChunk


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
    token_types: Tensor | None = None
    """[b, s], int64, of a BERT; None for 0 everywhere."""

    def rows(self, first: int, stop: int) -> NextTokens:
        """Some of the rows."""
        tensors: dict[str, Any] = {name: x[first:stop] for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)

    @property
    def width(self) -> int:
        """Tokens per row, of the encoder, too."""
        return self.tokens.shape[1] + (0 if self.source is None else self.source.shape[1])


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of the model on this rank, and what its layers keep of each group of rows."""

    model: Any
    """Plain."""
    is_first: bool
    """Whether it reads tokens, not what another chunk sends."""
    is_last: bool
    """Whether it has the output layer."""
    layers: list[SDPAttention]
    """Those that keep keys and values."""
    caches: list[list[KeyValueCache]]
    """Of each group those of the layers."""

    def hidden_like(self, tokens: Tensor, width: int) -> Tensor | None:
        """Memory for what the chunk before sends, [width, b, h]; None for the first.

        Args:
            tokens: [b, s].
            width: How many tokens it sends per row.
        """
        if self.is_first:
            return None
        config = self.model.config
        shape = (width, len(tokens), config.hidden_size)
        return torch.empty(shape, dtype=config.pipeline_dtype, device=tokens.device)


class Passes(Protocol):
    """One pass of all chunks and groups, in the order in which ``Stages`` asks."""

    def hidden(self, chunk: int, group: int) -> Tensor | None:
        """Where what the chunk before sends shall be received, before ``output`` is asked for; None for the first."""
        ...

    def output(self, chunk: int, group: int) -> Tensor:
        """Hidden states [s, b, h] to be sent or, of the last chunk, logits in fp32; valid until the next pass."""
        ...


class EagerPass:
    """Any number of tokens per row, kernel by kernel."""

    def __init__(
        self, chunks: Sequence[Chunk], groups: Sequence[tuple[int, int]], batch: NextTokens, every_position: bool
    ) -> None:
        """Prepare.

        Args:
            chunks: Of this rank.
            groups: First and last + 1 row of each.
            batch: What is read.
            every_position: Whether logits of all positions are asked for, [b, s, v], or [b, v] of the last one.
        """
        self._chunks = chunks
        self._rows = [batch.rows(first, stop) for first, stop in groups]
        self._every_position = every_position
        self._hidden: Tensor | None = None

    def hidden(self, chunk: int, group: int) -> Tensor | None:
        """As ``Passes.hidden``."""
        rows = self._rows[group]
        self._hidden = self._chunks[chunk].hidden_like(rows.tokens, rows.width)
        return self._hidden

    def output(self, chunk: int, group: int) -> Tensor:
        """As ``Passes.output``."""
        own = self._chunks[chunk]
        hidden, self._hidden = self._hidden, None
        last_only = contextlib.nullcontext() if self._every_position else last_position_only(own.model)
        with attending_to(own.layers, own.caches[group]), last_only:
            output = output_of(own.model, hidden, self._rows[group])
        if not own.is_last:
            return output.contiguous()
        return output.float() if self._every_position else output[:, -1].float()


def output_of(model: Any, hidden: Tensor | None, rows: NextTokens) -> Tensor:
    """Hidden states [s, b, h] or, of the last chunk, the logits of the whole vocabulary, [b, s, padded vocabulary].

    Args:
        model: A plain chunk.
        hidden: What the chunk before it has sent, [s, b, h]; None for the first.
        rows: What is read.
    """
    model.set_input_tensor(hidden)
    if rows.source is not None:
        decoded: Tensor = model(rows.source, rows.tokens, rows.source_mask, rows.mask, runtime_gather_output=True)
        return decoded
    if isinstance(model, BertChunk):
        return output_of_bert(model, rows.tokens, rows.positions, rows.mask, rows.token_types)
    model.rotary_length = rows.longest
    try:
        output: Tensor = model(rows.tokens, rows.positions, rows.mask, runtime_gather_output=True)
    finally:
        model.set_input_tensor(None)
        model.rotary_length = None
    return output


@contextlib.contextmanager
def attending_to(layers: Sequence[SDPAttention], caches: Sequence[KeyValueCache]) -> Iterator[None]:
    """Layers that see what is in the caches, and add to it."""
    for layer, cache in zip(layers, caches, strict=True):
        layer.kv_cache = cache
    try:
        yield
    finally:
        for layer in layers:
            layer.kv_cache = None


@contextlib.contextmanager
def last_position_only(model: Any) -> Iterator[None]:
    """The output layer, if this chunk has it, computes the logits of the last position alone."""
    if not model.post_process:
        yield
        return
    hook = model.output_layer.register_forward_pre_hook(lambda layer, inputs: (inputs[0][-1:], *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()
