"""Pipeline layout of an encoder-decoder: layers per model chunk of one joint stack. Pure functions.

The encoder's layers followed by the decoder's form one stack, which can be split anywhere: a chunk may hold layers of
both, and the encoder need not end at a stage boundary.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence

from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig

ENCODER_COST = 2
DECODER_COST = 3
"""Relative costs of T5 layers: with cross-attention a decoder layer is about 1.5 times as large."""

OVERRIDE = "pipeline_model_parallel_layout"
"""Field of Megatron's ``TransformerConfig`` that sets the layout; Megatron-Core supports no encoder layers in it."""


def layer_ranges(num_encoder_layers: int, layout: Sequence[int]) -> list[tuple[range, range]]:
    """Encoder layers and decoder layers of each chunk of ``layout``, in pipeline order, each stack numbered from 0."""
    split = num_encoder_layers
    bounds = itertools.accumulate(layout, initial=0)
    ranges = []
    for start, end in itertools.pairwise(bounds):
        encoder = range(min(start, split), min(end, split))
        decoder = range(max(start, split) - split, max(end, split) - split)
        ranges.append((encoder, decoder))
    return ranges


def t5_layout(
    model: ModelConfig,
    parallel: ParallelConfig,
    override: object = None,
) -> tuple[int, ...]:
    """Number of layers of the joint stack in each chunk, as set by ``override`` or balanced.

    Raises:
        ConfigError: If ``override`` does not fit the model and ``parallel``.
    """
    encoder = model.num_layers
    decoder = model.num_decoder_layers
    num_chunks = parallel.pp * parallel.num_model_chunks
    if override is None:
        return balanced_layout(encoder, decoder, num_chunks)
    layout = parse_layout(override)
    if len(layout) != num_chunks or sum(layout) != encoder + decoder:
        raise ConfigError(
            f"{OVERRIDE}={list(layout)}: expected a number for each of the {num_chunks} chunks (pp x vpp), in the "
            f"order of the pipeline, {encoder} layers of the encoder + {decoder} of the decoder in all, got "
            f"{len(layout)} numbers and {sum(layout)} layers; correct them"
        )
    if min(layout) < 0 or 0 in layout[1:-1]:
        raise ConfigError(
            f"{OVERRIDE}={list(layout)} leaves a chunk without weights; only the first, which holds the embedding, and "
            "the last, which holds the output layer, may be without layers"
        )
    return layout


@functools.cache
def balanced_layout(
    num_encoder_layers: int, num_decoder_layers: int, num_chunks: int
) -> tuple[int, ...]:
    """Layers per chunk that minimize the cost of the slowest chunk, then the sum of squared costs.

    Args:
        num_encoder_layers: Encoder layers.
        num_decoder_layers: Decoder layers.
        num_chunks: Number of chunks; at most the number of layers, so that none is empty.
    """
    costs = [ENCODER_COST] * num_encoder_layers + [DECODER_COST] * num_decoder_layers
    total = list(itertools.accumulate(costs, initial=0))
    # best[n] after k rounds, the first n layers in k chunks: cost of the slowest, sum of squares, layers per chunk.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for _ in range(num_chunks):
        best = {
            end: min(
                (
                    max(slowest, cost),
                    squares + cost * cost,
                    (*cut, end - start),
                )
                for start, (slowest, squares, cut) in best.items()
                if start <= end
                for cost in [total[end] - total[start]]
            )
            for end in range(len(costs) + 1)
        }
    return best[len(costs)][2]


def parse_layout(layout: object) -> tuple[int, ...]:
    """Parse a user's number of layers per chunk.

    Args:
        layout: Integers, ``[2, 5]``, or Megatron's notation, ``Et*2|t*5L``, in which ``t`` is a layer of either stack.

    Raises:
        ConfigError: If it is neither.
    """
    try:
        if isinstance(layout, str):
            # Imported here: commands that plan need no Megatron-Core, which takes seconds to import.
            from megatron.core.transformer.pipeline_parallel_layer_layout import (
                PipelineParallelLayerLayout,
            )

            chunks = PipelineParallelLayerLayout.parse_str_to_list(layout)
            return tuple(sum(layer.name == "decoder" for layer in chunk) for chunk in chunks)
        return tuple(map(operator.index, layout))  # type: ignore[call-overload]  # else a TypeError
    except (AssertionError, TypeError) as error:
        raise ConfigError(
            f"{OVERRIDE}={layout!r} does not say how many layers each chunk holds ({error}); give numbers, e.g. [2, 5],"
            " or Megatron's notation, e.g. 'Et*2|t*5L'"
        ) from None
