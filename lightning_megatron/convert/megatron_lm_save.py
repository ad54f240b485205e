"""Write a live model as a legacy Megatron-LM checkpoint of version 3.0: one pickle for each rank of any layout.

The tree, for tp=2 and pp=2 (with pp=1 a folder is called ``mp_rank_TT``)::

    latest_checkpointed_iteration.txt       "release", of which Megatron-LM takes nothing but weights
    release/
        mp_rank_00_000/model_optim_rng.pt   args, checkpoint_version, iteration, model or model0, ..., optimizer
        mp_rank_00_001/...

Megatron-LM's rules of pipelines: stages have equally many layers; where they cannot, the ends may be other than the
middle (``--decoder-first-pipeline-num-layers`` and ``--decoder-last-pipeline-num-layers``). With chunks, stage p holds
the chunks p, p + pp, p + 2 pp, ... An encoder-decoder is cut between the stacks: stages before
``--pipeline-model-parallel-split-rank`` hold encoder layers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.checkpoint.files import failures_as_errors
from lightning_megatron.convert.contents import TRACKER_FILE
from lightning_megatron.convert.family import VOCABULARY
from lightning_megatron.convert.hugging_face import copy_companions
from lightning_megatron.convert.megatron_arguments import megatron_arguments
from lightning_megatron.convert.megatron_lm import (
    EMBEDDING,
    HEAD_COPY,
    MODEL_FILES,
    rank_folder,
    split_axis,
    written_name,
)
from lightning_megatron.convert.shards import Key, Shard, Source, in_order, progress_bar, shards_of
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError, require_divides
from lightning_megatron.models.config import ModelConfig

_RELEASE = "release"
_VERSION = 3.0
_NO_OPTIMIZER: Mapping[str, Any] = {
    "step": 0,
    "param_groups": [
        {"lr": 0.0, "beta1": 0.0, "beta2": 0.0, "eps": 0.0, "weight_decay": 0.0, "correct_bias": False, "params": []}
    ],
}
"""Readers of old wanted an optimizer, and this is what transformers' script wrote."""

Chunk = Mapping[str, range]
"""Which layers of each stack (``encoder``, ``decoder``) a model chunk holds, counted in the whole stack."""


def save_megatron_lm(
    chunks: Iterable[Any],
    source: Source,
    model: ModelConfig,
    layout: ParallelConfig,
    folder: Path,
    rank: tuple[int, int] | None,
) -> None:
    """Write the files of all ranks from a whole model, or of one from its part of it; does not communicate.

    Args:
        chunks: Model chunks of this process.
        source: What they were loaded from.
        model: Its description, with the padding of its vocabulary that is written.
        layout: The sizes of tensor and pipeline parallelism that are written.
        folder: Where to; exists.
        rank: Tensor- and pipeline-parallel, of a model that is cut like this; None for a whole one.

    Raises:
        ConfigError: If the layers cannot be cut like this.
        CheckpointError: If a file cannot be written.
    """
    stages, more = cut(model, layout)
    shards: dict[Key, list[Shard]] = {}
    for shard in shards_of(chunks, model):
        shards.setdefault(shard.place.key, []).append(shard)
    sizes: dict[torch.dtype, int] = {}
    for shard in itertools.chain.from_iterable(shards.values()):
        sizes[shard.data.dtype] = sizes.get(shard.data.dtype, 0) + shard.data.nbytes
    dtype = max(sizes, key=lambda each: sizes[each])
    arguments = megatron_arguments(model, source.hf_config, layout, dtype, {"iteration": source.iteration, **more})
    every = itertools.product(range(layout.tp), range(layout.pp))
    with progress_bar("saving weights", sum(sizes.values())) as bar:
        for tensor, stage in every if rank is None else [rank]:
            state: dict[str, Any] = {
                "args": arguments,
                "checkpoint_version": _VERSION,
                "iteration": source.iteration,
                "optimizer": dict(_NO_OPTIMIZER),
            }
            for number, chunk in enumerate(stages[stage]):
                tensors: dict[str, Any] = {}
                for name, key in _held(shards, chunk, model):
                    part = _part(shards[key], model, layout.tp, tensor if rank is None else None)
                    _put(tensors, name, part)
                    bar.update(part.nbytes)
                state["model" if layout.vpp is None else f"model{number}"] = tensors
            file = folder / _RELEASE / rank_folder(tensor, stage, layout.pp) / MODEL_FILES[0]
            with failures_as_errors(f"{file} is not written"):
                file.parent.mkdir(parents=True, exist_ok=True)
                torch.save(state, file)


def save_tracker(folder: Path, companions: Iterable[Path]) -> None:
    """Write what stands beside the folders of ranks."""
    copy_companions(companions, folder)
    (folder / TRACKER_FILE).write_text(_RELEASE)


# ---- tensors --------------------------------------------------------------------------------------------------------


def _part(shards: Sequence[Shard], model: ModelConfig, tp: int, rank: int | None) -> torch.Tensor:
    """What a tensor-parallel rank holds of a tensor, in memory of its own; None if the shards are that."""
    key = shards[0].place.key
    axis = split_axis(key.name)
    # A gated layer has two shards: its gates and its other branch, and of each the rank has a part.
    parts = [shard.data for shard in sorted(shards, key=lambda shard: shard.place.offset)]
    if rank is None or axis is None:
        return torch.cat(parts)
    if key.name in VOCABULARY:
        whole = parts[0][: model.vocab_size]
        padding = whole.new_zeros((model.padded_vocab_size(tp) - len(whole), *whole.shape[1:]))
        parts = [torch.cat([whole, padding])]
    return torch.cat([part.chunk(tp, axis)[rank] for part in parts])


def _held(keys: Collection[Key], chunk: Chunk, model: ModelConfig) -> list[tuple[str, Key]]:
    """The tensors of a chunk under flat legacy names; layers in their order, before their stack's final norm.

    Whoever reads a checkpoint takes layers from the front of a dictionary.
    """
    counts = _stacks(model)
    is_first = any(layers.start == 0 for layers in chunk.values())  # also of a decoder that has an encoder before it
    is_last = next((layers.stop == counts[stack] for stack, layers in chunk.items() if stack == [*counts][-1]), False)

    def is_held(key: Key) -> bool:
        stack, _, inside = key.name.partition(".")
        if stack.removesuffix("_relative_pos_emb") in counts:
            layers = chunk.get(stack.removesuffix("_relative_pos_emb"))
            if layers is None or not inside.startswith("final_layernorm"):
                return layers is not None and (key.layer is None or key.layer in layers)
            return layers.stop == counts[stack]
        return is_first if stack == "embedding" else is_last

    held = sorted(filter(is_held, in_order(keys, model)), key=lambda key: ".final_layernorm." in key.name)
    names = []
    for key in held:
        first = 0 if key.layer is None else chunk[key.name.split(".")[0]].start
        local = key._replace(layer=None if key.layer is None else key.layer - first)
        names.append((written_name(local, model.architecture), key))
    is_tied = model.share_embeddings_and_output_weights and model.has_output_layer
    return [*names, (HEAD_COPY, EMBEDDING)] if is_tied and is_last and not is_first else names


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


# ---- layers of stages -----------------------------------------------------------------------------------------------


def _stacks(model: ModelConfig) -> dict[str, int]:
    """Layers of each stack, in the order of the pipeline."""
    if model.architecture == "t5":
        return {"encoder": model.num_layers, "decoder": model.num_decoder_layers}
    return {"encoder" if model.architecture == "bert" else "decoder": model.num_layers}


def cut(model: ModelConfig, layout: ParallelConfig) -> tuple[list[list[Chunk]], dict[str, int | None]]:
    """The chunks of each stage, and the arguments by which Megatron-LM cuts so.

    Raises:
        ConfigError: If Megatron-LM could not hold such chunks.
    """
    stacks, pp, num_chunks = _stacks(model), layout.pp, layout.pp * layout.num_model_chunks
    if layout.vpp is not None:
        if len(stacks) > 1:
            raise ConfigError(f"vpp={layout.vpp}: Megatron-LM does not interleave an encoder-decoder; leave vpp out")
        require_divides("pp x vpp", num_chunks, "num_layers", model.num_layers)
    arguments: dict[str, int | None] = dict.fromkeys(
        (
            "pipeline_model_parallel_split_rank",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
        )
    )
    if pp == 1:
        return [[{stack: range(count) for stack, count in stacks.items()}]], arguments
    parts = [num_chunks]
    if len(stacks) > 1:
        encoder, decoder = stacks.values()
        split = min(max(1, pp - decoder, round(pp * encoder / (encoder + decoder))), pp - 1, encoder)
        parts = [split, pp - split]
        arguments["pipeline_model_parallel_split_rank"] = split
    chunks: list[Chunk] = []
    for (stack, count), stages in zip(stacks.items(), parts, strict=True):
        sizes = _stage_sizes(count, stages)
        borders = itertools.accumulate(sizes, initial=0)
        chunks += [{stack: range(start, stop)} for start, stop in itertools.pairwise(borders)]
        if len(stacks) == 1 and len(set(sizes)) > 1:
            arguments["decoder_first_pipeline_num_layers"] = sizes[0]
            arguments["decoder_last_pipeline_num_layers"] = sizes[-1]
    return [chunks[stage::pp] for stage in range(pp)], arguments


def _stage_sizes(num_layers: int, stages: int) -> list[int]:
    """Layers of each: as many in each but the first and the last, which share what is left."""
    if stages == 1:
        return [num_layers]
    middle = min(round(num_layers / stages), (num_layers - 2) // max(1, stages - 2))
    ends = num_layers - middle * (stages - 2)
    return [ends - ends // 2, *[middle] * (stages - 2), ends // 2]
