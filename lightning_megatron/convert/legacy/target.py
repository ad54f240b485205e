"""How is a model written as a legacy Megatron-LM checkpoint? One pickle a rank, with the tensors that the rank holds.

The tree, for tp=2 and pp=2 (with pp=1 a folder is called ``mp_rank_TT``)::

    latest_checkpointed_iteration.txt       "release", of which Megatron-LM takes nothing but weights
    release/
        mp_rank_00_000/model_optim_rng.pt   args, checkpoint_version, iteration, model or model0, ..., optimizer
        mp_rank_00_001/...

The rank's pickle is the shard: one is in memory at a time, and whole tensors are read some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.checkpoint.files import failures_as_errors
from lightning_megatron.convert.companions import companion_files, copy_companions
from lightning_megatron.convert.iterations import TRACKER_FILE
from lightning_megatron.convert.legacy.arguments_out import megatron_arguments
from lightning_megatron.convert.legacy.names import HEAD_COPY, legacy_name, nested_path, split_axis
from lightning_megatron.convert.legacy.stages import Chunk, pipeline
from lightning_megatron.convert.options import ConvertOptions
from lightning_megatron.convert.reading import read_box
from lightning_megatron.convert.stored.base import Key, StoredModel
from lightning_megatron.convert.targets.casting import cast, dtype_of
from lightning_megatron.convert.targets.layout import TargetLayout
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files import sync

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

_EMBEDDING = "embedding.word_embeddings.weight"
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


def write_legacy(source: StoredModel, options: ConvertOptions) -> None:
    """Write ``options.save_path``: the tracker file, and a folder with a file for each rank.

    Args:
        source: What to write.
        options: The layout, dtype and padding.

    Raises:
        ConfigError: If the layers cannot be cut like this; before anything is written. Whether tp divides the model has
            been checked (``conversion_checks.check_model``).
        CheckpointError: If the source is damaged, a number does not fit into the dtype, or the disk is full.
    """
    writer = _Writer(source, options)
    try:
        writer.write()
    except OSError as error:
        raise CheckpointError(
            f"{options.save_path} cannot be written ({error}); choose a folder that can be written, with enough space"
        ) from error


@dataclass(frozen=True, kw_only=True)
class _Held:
    """One tensor of a chunk."""

    name: str
    """Flat legacy name, with the number that the layer has in the chunk."""
    key: Key


class _Writer:
    """Writes rank after rank."""

    def __init__(self, source: StoredModel, options: ConvertOptions) -> None:
        model = source.model
        self._source, self._options = source, options
        self._specs = source.tensors
        self._cut = pipeline(model, options.pp, options.vpp)
        padding = options.make_vocab_size_divisible_by
        self._layout = TargetLayout.of(replace(model, make_vocab_size_divisible_by=padding), options)
        padded = self._layout.model.padded_vocab_size(options.tp)
        self._dtype = dtype_of(options.dtype)
        self._arguments = megatron_arguments(source, options, self._cut, padded, self._dtype or _most_common(source))

    def write(self) -> None:
        root, options = self._options.save_path, self._options
        root.mkdir(parents=True, exist_ok=True)
        copy_companions(companion_files(self._source.companions, options.tokenizer), root)
        for stage, chunks in enumerate(self._cut.stages):
            for rank in range(options.tp):
                self._write_rank(self._rank_folder(rank, stage), rank, chunks)
        (root / TRACKER_FILE).write_text(_RELEASE)

    def _rank_folder(self, rank: int, stage: int) -> Path:
        name = f"mp_rank_{rank:02d}" if self._options.pp == 1 else f"mp_rank_{rank:02d}_{stage:03d}"
        return self._options.save_path / _RELEASE / name

    def _write_rank(self, folder: Path, rank: int, chunks: tuple[Chunk, ...]) -> None:
        state: dict[str, Any] = {
            "args": self._arguments,
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": self._arguments.iteration,
            "optimizer": dict(_NO_OPTIMIZER),
        }
        for number, chunk in enumerate(chunks):
            tensors: dict[str, Any] = {}
            for held in self._held(chunk):
                _put(tensors, nested_path(held.name), self._read(held.key, rank))
            state["model" if self._options.vpp is None else f"model{number}"] = tensors
        _save(state, folder / "model_optim_rng.pt")

    # ---- tensors ----

    def _held(self, chunk: Chunk) -> Iterator[_Held]:
        """The tensors of a chunk, in the order in which Megatron-LM builds its modules."""
        model = self._source.model
        keys = [key for key in self._specs if _is_held(key, chunk)]
        firsts = {stack: layers.start for stack, layers in chunk.layers}
        held = []
        for key in sorted(keys, key=_build_order):
            local = key if key.layer is None else key._replace(layer=key.layer - firsts[key.name.split(".")[0]])
            held.append(_Held(name=legacy_name(local, model.architecture), key=key))
        is_tied = model.share_embeddings_and_output_weights and model.has_output_layer
        if is_tied and chunk.is_last and not chunk.has_embedding:
            # Before a head, which is built after it.
            heads = ("lm_head.", "binary_head.")
            place = next((i for i, each in enumerate(held) if each.name.startswith(heads)), len(held))
            held.insert(place, _Held(name=HEAD_COPY, key=Key(_EMBEDDING, None)))
        yield from held

    def _read(self, key: Key, rank: int) -> torch.Tensor:
        spec, parts = self._specs[key], []
        for box in self._layout.boxes(key, self._layout.padded_shape(key, spec.shape)):
            if split_axis(key.name) is None or box.rank % self._options.tp == rank:
                parts.append(torch.empty(box.size, dtype=spec.dtype))
                read_box(self._source, key, box.start, parts[-1])
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return cast(whole, self._dtype, key.name)


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


def _most_common(source: StoredModel) -> torch.dtype:
    sizes: dict[torch.dtype, int] = {}
    for spec in source.tensors.values():
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype])


def _put(tensors: MutableMapping[str, Any], path: tuple[str, ...], tensor: torch.Tensor) -> None:
    for name in path[:-1]:
        tensors = tensors.setdefault(name, {})
    tensors[path[-1]] = tensor


def _save(state: Mapping[str, Any], file: Path) -> None:
    with failures_as_errors(f"{file} is not written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(dict(state), file)
        sync(file)
