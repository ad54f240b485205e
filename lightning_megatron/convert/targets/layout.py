"""Which part of each tensor does each rank of a layout hold? Boxes of rows and columns, without building a model.

A distributed checkpoint loads at any layout, however it is cut. It is cut here as a run at the layout would have cut
it, so that such a run reads whole chunks, each rank those of few files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_megatron.convert.legacy.names import VOCABULARY, split_axis
from lightning_megatron.convert.options import ConvertOptions
from lightning_megatron.convert.shapes import num_layers
from lightning_megatron.convert.stored.base import Key
from lightning_megatron.models.config import ModelConfig

_GATED = ".mlp.linear_fc1."


@dataclass(frozen=True, kw_only=True)
class Box:
    """What one rank holds of a tensor; a gated layer's rank holds two boxes."""

    key: Key
    rank: int
    """Of the ranks of one copy of the model: those of a stage one after the other."""
    start: tuple[int, ...]
    """First index along each axis of the tensor."""
    size: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TargetLayout:
    """How a model is cut."""

    model: ModelConfig
    """With the padding of its vocabulary that is written."""
    tp: int
    pp: int
    vpp: int | None

    @classmethod
    def of(cls, model: ModelConfig, options: ConvertOptions) -> TargetLayout:
        """The layout that ``options`` ask for."""
        return cls(model=model, tp=options.tp, pp=options.pp, vpp=options.vpp)

    def padded_shape(self, key: Key, shape: tuple[int, ...]) -> tuple[int, ...]:
        """``shape`` with the rows that pad the vocabulary."""
        return (self.model.padded_vocab_size(self.tp), *shape[1:]) if key.name in VOCABULARY else shape

    def boxes(self, key: Key, shape: tuple[int, ...]) -> Iterator[Box]:
        """The boxes of a tensor of the padded shape ``shape``, which together are the tensor."""
        first = self._stage(key) * self.tp
        axis = split_axis(key.name)
        if axis is None:
            yield Box(key=key, rank=first, start=(0,) * len(shape), size=shape)
            return
        is_gated = self.model.gated_linear_unit and _GATED in key.name
        # The gates of all ranks, then their other branches.
        parts = 2 * self.tp if is_gated else self.tp
        length = shape[axis] // parts
        size = (*shape[:axis], length, *shape[axis + 1 :])
        for part in range(parts):
            start = tuple(part * length if each == axis else 0 for each in range(len(shape)))
            yield Box(key=key, rank=first + part % self.tp, start=start, size=size)

    def _stage(self, key: Key) -> int:
        """The pipeline stage that holds a tensor: with chunks, stage p holds the chunks p, p + pp, p + 2 pp, ..."""
        stack = key.name.split(".")[0]
        if key.layer is None:
            return 0 if stack == "embedding" else self.pp - 1
        model = self.model
        # T5's stacks are one after the other.
        layer = key.layer + (model.num_layers if model.architecture == "t5" and stack == "decoder" else 0)
        total = num_layers("encoder", model) + (model.num_decoder_layers if model.architecture == "t5" else 0)
        return layer * self.pp * (self.vpp or 1) // total % self.pp
