"""Write a live model as a legacy Megatron-LM checkpoint of version 3.0: one pickle for each rank of any layout.

The tree, for tp=2 and pp=2 (with pp=1 a folder is called ``mp_rank_TT``)::

    latest_checkpointed_iteration.txt       "release", of which Megatron-LM takes nothing but weights
    release/
        mp_rank_00_000/model_optim_rng.pt   args, checkpoint_version, iteration, model or model0, ..., optimizer
        mp_rank_00_001/...

Megatron-LM's rules of pipelines: stages have equally many layers; where they cannot,
``--decoder-first-pipeline-num-layers`` and ``--decoder-last-pipeline-num-layers`` may make the ends other than the
middle, and we cut so that these two can say it wherever that is possible. With chunks, stage p holds the chunks p,
p + pp, p + 2 pp, ... An encoder-decoder is cut between the stacks: stages before
``--pipeline-model-parallel-split-rank`` hold encoder layers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.checkpoint.files import failures_as_errors
from lightning_megatron.convert.contents import TRACKER_FILE
from lightning_megatron.convert.hugging_face_files import copy_companions
from lightning_megatron.convert.megatron_arguments import megatron_arguments
from lightning_megatron.convert.megatron_lm import EMBEDDING, HEAD_COPY, rank_folder, split_axis, written_names
from lightning_megatron.convert.rules import VOCABULARY
from lightning_megatron.convert.shards import Filling, Key, Shard, Source, progress_bar, shards_of
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError, divisors
from lightning_megatron.models.config import ModelConfig

CHECKPOINT_VERSION = 3.0
"""Says that the rows of queries, keys and values stand as in Megatron-Core."""

_RELEASE = "release"
_NO_OPTIMIZER: Mapping[str, Any] = {
    "step": 0,
    "param_groups": [
        {"lr": 0.0, "beta1": 0.0, "beta2": 0.0, "eps": 0.0, "weight_decay": 0.0, "correct_bias": False, "params": []}
    ],
}
"""Readers of old wanted an optimizer, and this is what transformers' script wrote."""

_BUILT_FIRST_TO_LAST = (
    *("embedding.word_embeddings.", "embedding.position_embeddings.", "embedding.tokentype_embeddings."),
    *("embedding.", "encoder_relative_pos_emb.", "decoder_relative_pos_emb."),
    *("encoder.layers.", "encoder.", "decoder.layers.", "decoder.", "pooler.", "output_layer.weight"),
    *("output_layer.bias", "lm_head.", "binary_head.", "classification_head.", "token_head."),
)
"""What the names of Megatron-Core begin with, in the order in which Megatron-LM builds the modules."""
_BUILT_IN_A_LAYER = (
    *("self_attention.linear_qkv.layer_norm_", "self_attention.linear_qkv.", "self_attention.q_layernorm."),
    *("self_attention.k_layernorm.", "self_attention.linear_proj.", "pre_cross_attn_layernorm."),
    *("cross_attention.linear_q.", "cross_attention.linear_kv.", "cross_attention.linear_proj."),
    *("mlp.linear_fc1.layer_norm_", "mlp.linear_fc1.", "mlp.linear_fc2."),
)
"""The same within a layer; whoever reads a checkpoint takes layers from the front of a dictionary."""


def save_megatron_lm(
    chunks: Iterable[Any],
    source: Source,
    model: ModelConfig,
    layout: ParallelConfig,
    folder: Path,
    ranks: Iterable[tuple[int, int]],
) -> None:
    """Write the files of some ranks, each with the weights that it holds; does not communicate.

    Args:
        chunks: Model chunks of this process that have all these weights.
        source: What they were loaded from.
        model: Its description, with the padding of its vocabulary that is written.
        layout: The sizes of tensor and pipeline parallelism that are written.
        folder: Where to; exists.
        ranks: Tensor- and pipeline-parallel.

    Raises:
        ConfigError: If the layers cannot be cut like this.
        CheckpointError: If a file cannot be written.
    """
    cut = pipeline(model, layout.pp, layout.vpp)
    shards: dict[Key, list[Shard]] = {}
    for shard in shards_of(chunks, model):
        shards.setdefault(shard.place.key, []).append(shard)
    sizes: dict[torch.dtype, int] = {}
    for shard in itertools.chain.from_iterable(shards.values()):
        sizes[shard.data.dtype] = sizes.get(shard.data.dtype, 0) + shard.data.nbytes
    arguments = megatron_arguments(source, model, layout, cut, max(sizes, key=lambda dtype: sizes[dtype]))
    bar = progress_bar("saving weights", sum(sizes.values()))
    for tensor, stage in ranks:
        state: dict[str, Any] = {
            "args": arguments,
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": arguments.iteration,
            "optimizer": dict(_NO_OPTIMIZER),
        }
        for number, chunk in enumerate(cut.stages[stage]):
            tensors: dict[str, Any] = {}
            for name, key in _held(shards, chunk, model):
                part = _part_of_rank(shards[key], model, layout.tp, tensor)
                _put(tensors, name, part)
                bar.update(part.nbytes)
            state["model" if layout.vpp is None else f"model{number}"] = tensors
        file = folder / _RELEASE / rank_folder(tensor, stage, layout.pp) / "model_optim_rng.pt"
        with failures_as_errors(f"{file} is not written"):
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, file)
    bar.close()


def save_tracker(folder: Path, companions: Iterable[Path]) -> None:
    """Write what stands beside the folders of ranks."""
    copy_companions(companions, folder)
    (folder / TRACKER_FILE).write_text(_RELEASE)


# ---- tensors --------------------------------------------------------------------------------------------------------


def _held(shards: Iterable[Key], chunk: Chunk, model: ModelConfig) -> Iterator[tuple[str, Key]]:
    """The tensors of a chunk under flat legacy names, in the order in which Megatron-LM builds its modules."""
    firsts = {stack: layers.start for stack, layers in chunk.layers}
    names, held = written_names(model.architecture), []
    for key in sorted((key for key in shards if _is_held(key, chunk)), key=_build_order):
        local = Key(names[key.name], None if key.layer is None else key.layer - firsts[key.name.split(".")[0]])
        held.append((str(local), key))
    is_tied = model.share_embeddings_and_output_weights and model.has_output_layer
    if is_tied and chunk.is_last and not chunk.has_embedding:
        # Before a head, which is built after it.
        heads = ("lm_head.", "binary_head.")
        place = next((i for i, (name, _) in enumerate(held) if name.startswith(heads)), len(held))
        held.insert(place, (HEAD_COPY, EMBEDDING))
    yield from held


def _part_of_rank(shards: Sequence[Shard], model: ModelConfig, tp: int, rank: int) -> torch.Tensor:
    """What a tensor-parallel rank holds of a tensor, in memory of its own."""
    place = shards[0].place
    key, shape, axis = place.key, place.shape, split_axis(place.key.name)
    if key.name in VOCABULARY:
        shape = (model.padded_vocab_size(tp), *shape[1:])
    if axis is None:
        return _box(shards, (0,) * len(shape), shape)
    # Of a gated layer: its part of the gates, then its part of the other branch.
    is_gated = model.gated_linear_unit and ".mlp.linear_fc1." in key.name
    length = shape[axis] // (2 * tp if is_gated else tp)
    size = (*shape[:axis], length, *shape[axis + 1 :])
    boxes = [
        _box(shards, tuple(part * length if each == axis else 0 for each in range(len(shape))), size)
        for part in ((rank, tp + rank) if is_gated else (rank,))
    ]
    return boxes[0] if len(boxes) == 1 else torch.cat(boxes)


def _box(shards: Sequence[Shard], start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    """A box of the tensor that ``shards`` are of; zero in rows that pad the vocabulary."""
    place = shards[0].place
    filling = Filling(str(place.key), torch.empty(size, dtype=place.dtype))
    filling.put(slice(max(0, place.shape[0] - start[0]), None), 0)
    for shard in shards:
        here = shard.place
        first = [max(a, b) for a, b in zip(start, here.offset, strict=True)]
        ends = zip(start, size, here.offset, here.size, here.shape, strict=True)
        last = [min(a + n, b + m, whole) for a, n, b, m, whole in ends]
        if all(a < b for a, b in zip(first, last, strict=True)):
            ours, theirs = (
                tuple(slice(a - o, b - o) for a, b, o in zip(first, last, origin, strict=True))
                for origin in (start, here.offset)
            )
            filling.put(ours if len(ours) > 1 else ours[0], shard.data[theirs])
    return filling.whole()


_LAST_OF_NESTED = re.compile(
    r"^language_model\.(?:embedding\.\w+|\w+)\.|^(?:lm_head|binary_head|classification_head|token_head)\."
    r"|^word_embeddings_for_head\."
)


def _put(tensors: MutableMapping[str, Any], name: str, tensor: torch.Tensor) -> None:
    """Nested as Megatron-LM nests it: ["language_model"]["encoder"]["layers.0.input_layernorm.weight"]."""
    outer = _LAST_OF_NESTED.match(name)
    assert outer is not None, name
    for each in outer[0][:-1].split("."):
        tensors = tensors.setdefault(each, {})
    tensors[name[outer.end() :]] = tensor


def _is_held(key: Key, chunk: Chunk) -> bool:
    for stack, layers in chunk.layers:
        if key.layer is not None and key.name.startswith(f"{stack}.layers."):
            return key.layer in layers
        if key.name.startswith(f"{stack}_relative_pos_emb."):
            return True
    if key.layer is not None or "_relative_pos_emb." in key.name:
        return False
    if key.name.startswith("embedding."):
        return chunk.has_embedding
    if key.name.endswith(("final_layernorm.weight", "final_layernorm.bias")):
        return key.name.split(".")[0] in chunk.ends
    return chunk.is_last


def _build_order(key: Key) -> tuple[int, int, int, bool]:
    outer = next(i for i, begin in enumerate(_BUILT_FIRST_TO_LAST) if key.name.startswith(begin))
    inner = 0
    if key.layer is not None:
        inside = key.name.split(".layers.")[1]
        inner = next(i for i, begin in enumerate(_BUILT_IN_A_LAYER) if inside.startswith(begin))
    elif "lm_head.layer_norm" in key.name:
        inner = 1
    return outer, key.layer or 0, inner, key.name.endswith("bias")


# ---- layers of stages -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one model chunk holds; layers count from 0 in their whole stack."""

    layers: tuple[tuple[str, range], ...]
    """Each stack of layers (``encoder``, ``decoder``), in the order of the pipeline, with the layers that are here."""
    has_embedding: bool
    """Whether tokens enter here; also at the first stage of a decoder that has an encoder before it."""
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
        whole = Chunk(layers=both, has_embedding=True, is_last=True, ends=("encoder", "decoder"))
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
                    is_last=stack == "decoder" and chunk.is_last,
                    ends=chunk.ends,
                )
            )
    return Pipeline(stages=tuple((chunk,) for chunk in stages), split_rank=split)
