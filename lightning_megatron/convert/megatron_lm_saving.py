"""Save legacy checkpoints of Megatron-LM, of version 3.0.

Megatron-LM's pipeline split: all stages have the same number of layers, except that the first and last may differ
(``--decoder-first-pipeline-num-layers`` and ``--decoder-last-pipeline-num-layers``). With virtual stages, stage p holds
the chunks p, p + pp, p + 2 pp, ... An encoder-decoder is split between its stacks: stages before
``--pipeline-model-parallel-split-rank`` hold encoder layers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.convert.megatron_arguments import (
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
from lightning_megatron.convert.source import Source
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError, require_divides
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.t5_layout import layer_ranges
from lightning_megatron.storage.failures import failures_as_errors

_RELEASE = "release"
_VERSION = 3.0

Layers = Mapping[str, range]
"""Layers of each stack (``encoder``, ``decoder``) in a model chunk, by global index in the stack."""


def save_megatron_lm(
    chunks: Iterable[Any],
    source: Source,
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
    local = shards_of(chunks, model)
    shards: dict[Key, list[Shard]] = {}
    for shard in local:
        shards.setdefault(shard.region.key, []).append(shard)
    dtype = max(local, key=lambda shard: shard.data.nbytes).data.dtype
    arguments = megatron_arguments(
        model, source.hf_config, layout, dtype, {"iteration": source.iteration, **more}
    )
    ranks = itertools.product(range(layout.tp), range(layout.pp))
    with weights_progress("saving weights", sum(shard.data.nbytes for shard in local)) as bar:
        for tensor, stage in ranks if rank is None else [rank]:
            state: dict[str, Any] = {
                "args": arguments,
                "checkpoint_version": _VERSION,
                "iteration": source.iteration,
            }
            for chunk in range(stage, len(split), layout.pp):
                tensors: dict[str, Any] = {}
                for name, key in _in_chunk(shards, split, chunk, model):
                    values = _tp_shard(
                        shards[key], model, layout.tp, tensor if rank is None else None
                    )
                    # Megatron-LM nests dictionaries: ["language_model"]["encoder"]["layers.0.input_layernorm.weight"].
                    depth = (
                        3
                        if ".embedding." in name
                        else 2
                        if name.startswith("language_model.")
                        else 1
                    )
                    *outer, last = name.split(".", depth)
                    functools.reduce(
                        lambda nested, part: nested.setdefault(part, {}), outer, tensors
                    )[last] = values
                    bar.update(values.nbytes)
                state["model" if layout.vpp is None else f"model{chunk // layout.pp}"] = tensors
            file = folder / _RELEASE / rank_folder(tensor, stage, layout.pp) / MODEL_FILES[0]
            with failures_as_errors(f"{file} is not written"):
                file.parent.mkdir(parents=True, exist_ok=True)
                torch.save(state, file)
                (folder / TRACKER_FILE).write_text(_RELEASE)


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
        padding = rows.new_zeros((model.padded_vocab_size(tp) - len(rows), *rows.shape[1:]))
        parts = [torch.cat([rows, padding])]
    return torch.cat([part.chunk(tp, axis)[rank] for part in parts])


def _in_chunk(
    keys: Collection[Key], split: Sequence[Layers], chunk: int, model: ModelConfig
) -> list[tuple[str, Key]]:
    """Tensors of a model chunk with their flat legacy names, in layer order, before the final norm of their stack.

    Readers of such checkpoints take layers from the front of the dictionary.
    """
    own, is_last = split[chunk], chunk == len(split) - 1
    is_first = any(
        layers and layers.start == 0 for layers in own.values()
    )  # also of a decoder after an encoder

    def is_in_chunk(key: Key) -> bool:
        stack, _, inside = key.name.partition(".")
        layers = own.get(stack.removesuffix("_relative_pos_emb"))
        if layers is None:
            return is_first if stack == "embedding" else is_last
        if inside.startswith("final_layernorm"):
            return bool(layers) and layers.stop == split[-1][stack].stop
        return bool(layers) if key.layer is None else key.layer in layers

    names = []
    for key in sorted(filter(is_in_chunk, keys), key=lambda key: ".final_layernorm." in key.name):
        layer = None if key.layer is None else key.layer - own[key.name.split(".")[0]].start
        names.append((legacy_name(key._replace(layer=layer), model.architecture), key))
    is_tied = model.share_embeddings_and_output_weights and model.has_output_layer
    return [*names, (HEAD_COPY, EMBEDDING)] if is_tied and is_last and not is_first else names


def split_layers(
    model: ModelConfig, layout: ParallelConfig
) -> tuple[list[Layers], dict[str, int | None]]:
    """Layers of each model chunk in pipeline order, and the arguments with which Megatron-LM splits them like this.

    Raises:
        ConfigError: If Megatron-LM does not support such a split.
    """
    pp, num_chunks, is_t5 = (
        layout.pp,
        layout.pp * layout.num_model_chunks,
        model.architecture == "t5",
    )
    if layout.vpp is not None:
        if is_t5:
            raise ConfigError(
                f"vpp={layout.vpp}: Megatron-LM does not interleave an encoder-decoder; leave vpp out"
            )
        require_divides("pp x vpp", num_chunks, "num_layers", model.num_layers)
    layers, encoder = (
        model.num_layers + model.num_decoder_layers,
        model.num_layers * (model.architecture != "gpt"),
    )
    sizes, split = _stage_sizes(layers, num_chunks), None
    if is_t5 and pp > 1:
        split = min(
            max(1, pp - model.num_decoder_layers, round(pp * encoder / layers)), pp - 1, encoder
        )
        sizes = [*_stage_sizes(encoder, split), *_stage_sizes(layers - encoder, pp - split)]
    ends = (None, None) if is_t5 or len(set(sizes)) == 1 else (sizes[0], sizes[-1])
    names = (
        "pipeline_model_parallel_split_rank",
        *(f"decoder_{end}_pipeline_num_layers" for end in ("first", "last")),
    )
    chunks: list[Layers] = [
        {"encoder": first, "decoder": second} for first, second in layer_ranges(encoder, sizes)
    ]
    return chunks, dict(zip(names, (split, *ends), strict=True))


def _stage_sizes(num_layers: int, stages: int) -> list[int]:
    """Number of layers per stage: equal in all but the first and last stage, which share the remainder."""
    if stages == 1:
        return [num_layers]
    middle = min(round(num_layers / stages), (num_layers - 2) // max(1, stages - 2))
    ends = num_layers - middle * (stages - 2)
    return [ends - ends // 2, *[middle] * (stages - 2), ends // 2]
