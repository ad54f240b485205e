"""Layers of an encoder-decoder per pipeline chunk; pure arithmetic on one joint stack.

The layers of the encoder and then those of the decoder are one sequence, which is cut anywhere: a chunk may hold layers
of both, and the encoder need not end where a stage ends.
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
"""Cross-attention makes a decoder layer of T5 about 1.5 times as large as one of the encoder."""

OVERRIDE = "pipeline_model_parallel_layout"
"""Field of Megatron's ``TransformerConfig`` that says a cut by hand; the engine knows no encoder layers in it."""


def layers_per_chunk(num_encoder_layers: int, layout: Sequence[int]) -> list[tuple[range, range]]:
    """Which layers of the encoder and of the decoder each chunk of ``layout`` holds, in the order of the pipeline.

    The numbers count from 0 in the whole encoder, and in the whole decoder.
    """
    split, borders = num_encoder_layers, itertools.accumulate(layout, initial=0)
    return [
        (range(min(start, split), min(end, split)), range(max(start, split) - split, max(end, split) - split))
        for start, end in itertools.pairwise(borders)
    ]


def t5_layout(model: ModelConfig, parallel: ParallelConfig, by_hand: object = None) -> tuple[int, ...]:
    """Layers of the joint stack in each chunk.

    Raises:
        ConfigError: If what is given by hand does not fit.
    """
    encoder, decoder, num_chunks = model.num_layers, model.num_decoder_layers, parallel.pp * parallel.num_model_chunks
    if by_hand is None:
        return balanced_layout(encoder, decoder, num_chunks)
    layout = parse_layout(by_hand)
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
def balanced_layout(num_encoder_layers: int, num_decoder_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Layers per chunk such that the slowest chunk is as fast as possible, and the others are as equal as possible.

    Args:
        num_encoder_layers: Layers of the encoder.
        num_decoder_layers: Layers of the decoder.
        num_chunks: Into how many parts; no more than layers, so that none is empty.
    """
    costs = [ENCODER_COST] * num_encoder_layers + [DECODER_COST] * num_decoder_layers
    total = list(itertools.accumulate(costs, initial=0))
    # best[n]: the first n layers in as many chunks as rounds were made: slowest, sum of squares, layers per chunk.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for _ in range(num_chunks):
        best = {
            end: min(
                (max(slowest, cost), squares + cost * cost, (*cut, end - start))
                for start, (slowest, squares, cut) in best.items()
                if start <= end
                for cost in [total[end] - total[start]]
            )
            for end in range(len(costs) + 1)
        }
    return best[len(costs)][2]


def parse_layout(given: object) -> tuple[int, ...]:
    """Layers per chunk as a user writes them.

    Args:
        given: Numbers, ``[2, 5]``, or Megatron's notation, ``Et*2|t*5L``, in which ``t`` is a layer of either stack.

    Raises:
        ConfigError: If it is neither.
    """
    try:
        if isinstance(given, str):
            from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

            chunks = PipelineParallelLayerLayout.parse_str_to_list(given)
            return tuple(sum(layer.name == "decoder" for layer in chunk) for chunk in chunks)
        return tuple(map(operator.index, given))  # type: ignore[call-overload]  # else a TypeError
    except (AssertionError, TypeError) as error:
        raise ConfigError(
            f"{OVERRIDE}={given!r} does not say how many layers each chunk holds ({error}); give numbers, e.g. [2, 5], "
            "or Megatron's notation, e.g. 'Et*2|t*5L'"
        ) from None
