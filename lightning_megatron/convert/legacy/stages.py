"""Which layers does each model chunk of each pipeline stage hold in a legacy checkpoint, and what stands around them?

Megatron-LM's rules: stages have equally many layers; where they cannot, ``--decoder-first-pipeline-num-layers`` and
``--decoder-last-pipeline-num-layers`` may make the ends other than the middle, and we cut so that these two can say it
wherever that is possible. With chunks, stage p holds the chunks p, p + pp, p + 2 pp, ... of the pipeline. An
encoder-decoder is cut between the stacks: stages before ``--pipeline-model-parallel-split-rank`` hold encoder layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_megatron.errors import ConfigError, divisors
from lightning_megatron.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one model chunk holds; layers count from 0 in their whole stack."""

    layers: tuple[tuple[str, range], ...]
    """Each stack of layers (``encoder``, ``decoder``), in the order of the pipeline, with the layers that are here."""
    has_embedding: bool
    """Whether tokens enter here; also at the first stage of a decoder that has an encoder before it."""
    is_first: bool
    """Whether this is the beginning of the pipeline."""
    is_last: bool
    """Whether output layers and heads are here."""
    ends: tuple[str, ...]
    """Stacks whose final norm stands here."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A model cut into stages."""

    stages: tuple[tuple[Chunk, ...], ...]
    """The chunks of each stage; one each without ``vpp``."""
    first_num_layers: int | None = None
    """``--decoder-first-pipeline-num-layers``, if the stages are unequal and it can be said."""
    last_num_layers: int | None = None
    """``--decoder-last-pipeline-num-layers``."""
    split_rank: int | None = None
    """``--pipeline-model-parallel-split-rank`` of an encoder-decoder with pp > 1."""


def pipeline(model: ModelConfig, pp: int, vpp: int | None) -> Pipeline:
    """Cut ``model`` into ``pp`` stages of ``vpp`` chunks.

    Raises:
        ConfigError: If there are more stages than layers, or chunks that Megatron-LM could not hold.
    """
    if vpp is not None:
        return _interleaved(model, pp, vpp)
    if model.architecture == "t5":
        return _encoder_decoder(model, pp)
    if pp > model.num_layers:
        raise ConfigError(
            f"pp={pp} is more than num_layers={model.num_layers}: a stage without layers would only wait; use at most "
            f"pp={model.num_layers}"
        )
    sizes = stage_sizes(model.num_layers, pp)
    chunks = _chunks(_stack(model), sizes)
    first, last = ends_of(sizes) or (None, None)
    return Pipeline(stages=tuple((chunk,) for chunk in chunks), first_num_layers=first, last_num_layers=last)


def stage_sizes(num_layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage: equal, or differing by one in such a way that the two ends say all, if there is one."""
    each, rest = divmod(num_layers, pp)
    longer = range(rest)
    candidates: list[Sequence[int]] = [longer]
    if rest == 2:
        candidates.append((0, pp - 1))
    if rest == pp - 2:
        candidates.append(range(1, pp - 1))
    for stages in candidates:
        sizes = tuple(each + (stage in stages) for stage in range(pp))
        if ends_of(sizes) is not None:
            return sizes
    return tuple(each + (stage in longer) for stage in range(pp))


def ends_of(sizes: Sequence[int]) -> tuple[int | None, int | None] | None:
    """What ``--decoder-first-`` and ``--decoder-last-pipeline-num-layers`` are for stages of these sizes.

    Returns:
        None where a stage equals those in the middle; None for both if the middle is unequal, and nothing says it.
    """
    if len(set(sizes)) == 1:
        return None, None
    if len(set(sizes[1:])) == 1:
        return sizes[0], None
    if len(set(sizes[:-1])) == 1:
        return None, sizes[-1]
    return (sizes[0], sizes[-1]) if len(set(sizes[1:-1])) == 1 else None


def _stack(model: ModelConfig) -> str:
    return "encoder" if model.architecture == "bert" else "decoder"


def _chunks(stack: str, sizes: Sequence[int]) -> list[Chunk]:
    """Of a model with one stack, in the order of the pipeline."""
    borders = list(itertools.accumulate(sizes, initial=0))
    return [
        Chunk(
            layers=((stack, range(start, stop)),),
            has_embedding=place == 0,
            is_first=place == 0,
            is_last=place == len(sizes) - 1,
            ends=(stack,) if place == len(sizes) - 1 else (),
        )
        for place, (start, stop) in enumerate(itertools.pairwise(borders))
    ]


def _interleaved(model: ModelConfig, pp: int, vpp: int) -> Pipeline:
    if model.architecture == "t5":
        raise ConfigError(
            f"vpp={vpp} is not possible in a legacy checkpoint of an encoder-decoder: Megatron-LM does not interleave "
            "them; leave vpp out"
        )
    if vpp < 2 or pp < 2:
        raise ConfigError(f"vpp={vpp} interleaves chunks of at least 2 stages, with pp={pp}; use vpp >= 2 and pp >= 2")
    if model.num_layers % (pp * vpp) != 0:
        raise ConfigError(
            f"pp={pp} x vpp={vpp} = {pp * vpp} does not divide num_layers={model.num_layers}; choose pp x vpp from "
            f"{', '.join(str(d) for d in divisors(model.num_layers))}"
        )
    chunks = _chunks(_stack(model), [model.num_layers // (pp * vpp)] * (pp * vpp))
    return Pipeline(stages=tuple(tuple(chunks[stage::pp]) for stage in range(pp)))


def _encoder_decoder(model: ModelConfig, pp: int) -> Pipeline:
    layers = (model.num_layers, model.num_decoder_layers)
    if pp == 1:
        both = (("encoder", range(layers[0])), ("decoder", range(layers[1])))
        whole = Chunk(layers=both, has_embedding=True, is_first=True, is_last=True, ends=("encoder", "decoder"))
        return Pipeline(stages=((whole,),))
    splits = [split for split in range(1, pp) if split <= layers[0] and pp - split <= layers[1]]
    if not splits:
        raise ConfigError(
            f"pp={pp} is more than the {sum(layers)} layers of this model (num_layers={layers[0]} in its encoder and "
            f"num_decoder_layers={layers[1]}): a stage without layers would only wait; use a smaller pp"
        )
    # The slowest stage as fast as possible: cross-attention makes a decoder layer half as large again.
    split = min(splits, key=lambda s: (max(-(-layers[0] // s) * 2, -(-layers[1] // (pp - s)) * 3), s))
    stages = []
    for stack, count, stages_of_it in (("encoder", layers[0], split), ("decoder", layers[1], pp - split)):
        for place, chunk in enumerate(_chunks(stack, stage_sizes(count, stages_of_it))):
            stages.append(
                Chunk(
                    layers=chunk.layers,
                    has_embedding=place == 0,
                    is_first=stack == "encoder" and place == 0,
                    is_last=stack == "decoder" and chunk.is_last,
                    ends=chunk.ends,
                )
            )
    return Pipeline(stages=tuple((chunk,) for chunk in stages), split_rank=split)
