"""Save legacy checkpoints of Megatron-LM, of version 3.0.

Megatron-LM's pipeline split: all stages have the same number of layers, except that the first and last may differ
(``--decoder-first-pipeline-num-layers`` and ``--decoder-last-pipeline-num-layers``). With virtual stages, stage p holds
the chunks p, p + pp, p + 2 pp, ... An encoder-decoder is split between its stacks: stages before
``--pipeline-model-parallel-split-rank`` hold encoder layers.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.convert.megatron_arguments import (
    fields_without_argument,
    megatron_arguments,
)
from lightning_megatron.convert.megatron_lm_files import MODEL_FILES, TRACKER_FILE, rank_folder
from lightning_megatron.convert.megatron_lm_names import (
    EMBEDDING,
    HEAD_COPY,
    legacy_name,
    split_axis,
)
from lightning_megatron.convert.progress import weights_progress
from lightning_megatron.convert.rules import VOCABULARY
from lightning_megatron.convert.shards import Key, Shard, shards_of
from lightning_megatron.convert.source import ModelSource
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError, require_divides
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.t5_layout import layer_ranges
from lightning_megatron.storage.failures import failures_as_errors

_RELEASE = "release"
_VERSION = 3.0

_log = logging.getLogger(__name__)

Layers = Mapping[str, range]
"""Layers of each stack (``encoder``, ``decoder``) in a model chunk, by global index in the stack."""


def save_megatron_lm(
    chunks: Iterable[Any],
    source: ModelSource,
    model: ModelConfig,
    layout: ParallelConfig,
    folder: Path,
    rank: tuple[int, int] | None,
) -> None:
    """Save a legacy checkpoint: the files of all ranks from a full model, or one file from a rank's shards.

    Does not communicate.

    Args:
        chunks: Model chunks of this process.
        source: Source that they were loaded from.
        model: Config of the model, with the vocabulary padding to write.
        layout: Tensor- and pipeline-parallel sizes of the checkpoint.
        folder: Target directory, which exists.
        rank: (tensor-parallel rank, pipeline-parallel rank) of this process in ``layout``; None if it has the full
            model.

    Raises:
        ConfigError: If Megatron-LM cannot split the layers like this.
        CheckpointError: If a file cannot be written.
    """
    split, more = split_layers(model, layout)
    others = fields_without_argument(model)
    if others and rank in (None, (0, 0)):
        _log.warning(
            "Megatron-LM computes another model from these weights: it has no arguments for %s; this package reads "
            "them as they are",
            ", ".join(others),
        )
    shards: dict[Key, list[Shard]] = {}
    local = shards_of(chunks, model)
    for shard in local:
        shards.setdefault(shard.region.key, []).append(shard)
    dtype = max(local, key=lambda shard: shard.data.nbytes).data.dtype
    more = {"iteration": source.iteration, **more}
    arguments = megatron_arguments(model, source.hf_config, layout, dtype, more)
    ranks = list(itertools.product(range(layout.tp), range(layout.pp)))
    if rank is not None:
        ranks = [rank]
    with weights_progress("saving weights", sum(shard.data.nbytes for shard in local)) as bar:
        for tensor, stage in ranks:
            state: dict[str, Any] = {
                "args": arguments,
                "checkpoint_version": _VERSION,
                "iteration": source.iteration,
            }
            for chunk in range(stage, len(split), layout.pp):
                tensors: dict[str, Any] = {}
                for name, key in _in_chunk(shards, split, chunk, model):
                    own_rank = tensor if rank is None else None
                    values = _tp_shard(shards[key], model, layout.tp, own_rank)
                    _insert(tensors, name, values)
                    bar.update(values.nbytes)
                state["model" if layout.vpp is None else f"model{chunk // layout.pp}"] = tensors
            file = folder / _RELEASE / rank_folder(tensor, stage, layout.pp) / MODEL_FILES[0]
            with failures_as_errors(f"{file} is not written"):
                file.parent.mkdir(parents=True, exist_ok=True)
                torch.save(state, file)
                (folder / TRACKER_FILE).write_text(_RELEASE)


def _insert(
    tensors: dict[str, Any],
    name: str,
    values: torch.Tensor,
) -> None:
    """Insert a tensor of a flat name where Megatron-LM has it.

    It nests dictionaries: ``["language_model"]["encoder"]["layers.0.input_layernorm.weight"]``.
    """
    if ".embedding." in name:
        depth = 3
    elif name.startswith("language_model."):
        depth = 2
    else:
        depth = 1
    *outer, last = name.split(".", depth)
    for part in outer:
        tensors = tensors.setdefault(part, {})
    tensors[last] = values


def _tp_shard(
    shards: Sequence[Shard], model: ModelConfig, tp: int, rank: int | None
) -> torch.Tensor:
    """Shard of a tensor for tensor-parallel ``rank``, as a copy; if ``rank`` is None, ``shards`` are that shard."""
    key = shards[0].region.key
    axis = split_axis(key.name)
    # A gated layer has two shards, gate and up projection, and each rank has a part of both.
    parts = [shard.data for shard in shards]
    if rank is None or axis is None:
        return torch.cat(parts)
    if key.name in VOCABULARY:
        rows = parts[0][: model.vocab_size]
        num_padding = model.padded_vocab_size(tp) - len(rows)
        padding = rows.new_zeros((num_padding, *rows.shape[1:]))
        parts = [torch.cat([rows, padding])]
    return torch.cat([part.chunk(tp, axis)[rank] for part in parts])


def _in_chunk(
    keys: Collection[Key],
    split: Sequence[Layers],
    chunk: int,
    model: ModelConfig,
) -> list[tuple[str, Key]]:
    """Tensors of a model chunk with their flat legacy names, in layer order, before the final norm of their stack.

    Readers of such checkpoints take layers from the front of the dictionary.
    """
    own = split[chunk]
    is_last = chunk == len(split) - 1
    # Also of a decoder after an encoder.
    is_first = any(layers and layers.start == 0 for layers in own.values())

    def is_in_chunk(key: Key) -> bool:
        stack, _, inside = key.name.partition(".")
        layers = own.get(stack.removesuffix("_relative_pos_emb"))
        if layers is None:
            return is_first if stack == "embedding" else is_last
        if inside.startswith("final_layernorm"):
            return bool(layers) and layers.stop == split[-1][stack].stop
        if key.layer is None:
            return bool(layers)
        return key.layer in layers

    names = []
    in_chunk = filter(is_in_chunk, keys)
    for key in sorted(in_chunk, key=lambda key: ".final_layernorm." in key.name):
        local = key
        if key.layer is not None:
            stack = key.name.split(".")[0]
            local = key._replace(layer=key.layer - own[stack].start)
        names.append((legacy_name(local, model.architecture), key))
    is_tied = model.share_embeddings_and_output_weights and model.has_output_layer
    if is_tied and is_last and not is_first:
        names.append((HEAD_COPY, EMBEDDING))
    return names


def split_layers(
    model: ModelConfig, layout: ParallelConfig
) -> tuple[list[Layers], dict[str, int | None]]:
    """Layers of each model chunk in pipeline order, and the arguments with which Megatron-LM splits them like this.

    Raises:
        ConfigError: If Megatron-LM does not support such a split.
    """
    pp = layout.pp
    num_chunks = pp * layout.num_model_chunks
    is_t5 = model.architecture == "t5"
    if layout.vpp is not None:
        if is_t5:
            raise ConfigError(
                f"vpp={layout.vpp}: Megatron-LM does not interleave an encoder-decoder; leave vpp out"
            )
        require_divides("pp x vpp", num_chunks, "num_layers", model.num_layers)
    layers = model.num_layers + model.num_decoder_layers
    encoder = 0 if model.architecture == "gpt" else model.num_layers
    sizes = _stage_sizes(layers, num_chunks)
    split = None
    first = None
    last = None
    if is_t5 and pp > 1:
        in_proportion = round(pp * encoder / layers)
        least = max(1, pp - model.num_decoder_layers, in_proportion)
        split = min(least, pp - 1, encoder)
        sizes = _stage_sizes(encoder, split) + _stage_sizes(layers - encoder, pp - split)
    elif not is_t5 and len(set(sizes)) > 1:
        first = sizes[0]
        last = sizes[-1]
    chunks: list[Layers] = [
        {"encoder": of_encoder, "decoder": of_decoder}
        for of_encoder, of_decoder in layer_ranges(encoder, sizes)
    ]
    return chunks, {
        "pipeline_model_parallel_split_rank": split,
        "decoder_first_pipeline_num_layers": first,
        "decoder_last_pipeline_num_layers": last,
    }


def _stage_sizes(num_layers: int, stages: int) -> list[int]:
    """Number of layers per stage: equal in all but the first and last stage, which share the remainder."""
    if stages == 1:
        return [num_layers]
    between = stages - 2
    largest = (num_layers - 2) // max(1, between)
    middle = min(round(num_layers / stages), largest)
    ends = num_layers - middle * between
    return [ends - ends // 2, *[middle] * between, ends // 2]
