"""Distributed checkpoints (torch_dist), of ``MegatronStrategy`` and of other programs with Megatron-Core, as sources.

Each rank reads the boxes that are its shards by torch's reader. Names of other programs are understood however they
were wrapped, cut or fused. Optimizer states are left alone.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_megatron.checkpoint.files import (
    CHECKSUMS,
    COMMON,
    META,
    check_backends,
    check_complete,
    check_only_data,
    load_plain,
    read_table,
    verify_checksums,
)
from lightning_megatron.convert.hugging_face import companion_files
from lightning_megatron.convert.megatron_arguments import arguments_of, described_by
from lightning_megatron.convert.registry import config_object, family_of, stored_config
from lightning_megatron.convert.shards import EXPERTS, Key, Place, Source, Stored, mismatches
from lightning_megatron.engine.pickles import read_pickle
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.files import file_sizes
from lightning_megatron.models.config import ModelConfig, variant_of

OF_STRATEGY = "checkpoint of MegatronStrategy"
OF_MEGATRON_CORE = "Megatron-Core distributed checkpoint (torch_dist)"
"""Kinds of distributed checkpoints, as messages name them."""
COMPANIONS = "hugging_face"
"""Folder of a ``*.ckpt`` with the tokenizer and the generation config that belong to it."""

_SAID_BY_THE_RUN = (
    *("make_vocab_size_divisible_by", "share_embeddings_and_output_weights"),
    *("lora", "lora_dropout"),
)
"""What a run may have decided that its config does not say: T5's weight files tell whether its output layer is tied."""
_WRAPPERS = re.compile(r"^(?:module\.|model\.)+")
_NUMBERED = re.compile(r"^(.*?\blayers)\.(\d+)\.(.+)$")
_OPTIMIZER = re.compile(r"^(?:chained_\d+\.)?optimizer\.")
_UNFUSED = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)
"""What norms are called where they are modules of their own, and in the fused layers that rules name."""
_NO_WEIGHTS = re.compile(r"_extra_state|(^|\.)(rng_state|inv_freq)(\.|$|/)")
"""Entries without a weight: the scales of fp8, random states, and tables that are computed anew."""


def open_distributed(path: Path, config: Path | None) -> DistributedSource:
    """Look at a ``*.ckpt`` of ``MegatronStrategy`` or a Megatron-Core checkpoint (``torch_dist``).

    Files that have checksums are read once, to compare them.

    Args:
        path: The folder with ``.metadata``.
        config: A Hugging Face ``config.json``, or a folder with one, for checkpoints that do not say what they are of.

    Raises:
        CheckpointError: If it is damaged, unfinished, could run code, or does not say which model it is of.
        ConfigError: If the config cannot be honoured.
    """
    if (path / META).is_file():
        kind, meta = OF_STRATEGY, _checked_meta(path)
        origin: dict[str, Any] = {"base": meta.get("base"), "is_whole": meta.get("part") != "adapters"}
        try:
            model, hf_config = _describe_run(path, meta, config)
            iteration = int(meta["lightning"].get("global_step", 0))
        except ConfigError:
            raise
        except (ArithmeticError, LookupError, AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint {path} was written by another strategy ({error!r} in {META})") from None
        tensors = _weights(path)
    else:
        kind, common, tensors, origin = OF_MEGATRON_CORE, read_common(path), _weights(path), {}
        arguments = arguments_of(common)
        shapes = {key: shape for name, each in tensors.items() for key, _, shape in _keys_of(name, each, None)}
        tp = int(arguments.get("tensor_model_parallel_size") or 1)
        model, hf_config = described_by(arguments, shapes, tp, config, path)
        iteration = common["iteration"] if type(common.get("iteration")) is int else 0
    folders = (path / COMPANIONS, path)
    return DistributedSource(
        **origin,
        path=path,
        kind=kind,
        model=model,
        hf_config=hf_config,
        iteration=iteration,
        companions=next((each for each in folders if each.is_dir() and companion_files(each)), None),
        tensors=tensors,
    )


def read_common(path: Path) -> Mapping[str, Any]:
    """What Megatron-Core does not shard; empty if there is nothing.

    Raises:
        CheckpointError: If the checkpoint is one of ours that is damaged, of another format, or could run code.
    """
    if (path / CHECKSUMS).is_file():
        raise CheckpointError(f"checkpoint {path} lacks its file {META}: it is damaged; use another")
    check_backends(path)
    common = read_pickle(path / COMMON) if (path / COMMON).is_file() else _common_state(path)
    if not isinstance(common, Mapping):
        raise CheckpointError(f"checkpoint {path} has a damaged {COMMON}; use another")
    return common


def _common_state(path: Path) -> Any:
    """The same of megatron-core 0.17 on, which keeps it among the shards, as the only entry of a list."""
    for index, place in read_table(path).storage_data.items():
        if index.fqn == "common_state/shard_0_1":
            with (path / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                (common,) = read_pickle(io.BytesIO(file.read(place.length)), name=f"{path}: common_state")
                return common
    return {}


def _checked_meta(path: Path) -> Mapping[str, Any]:
    """``meta.pt`` of a checkpoint of the strategy, after its bytes have proved to be those that were written."""
    from lightning_megatron.checkpoint.state import FORMAT_VERSION  # the engine's import takes seconds

    check_complete(path)
    verify_checksums(path)
    check_only_data(path)
    meta: Mapping[str, Any] = load_plain(path / META)
    if not isinstance(meta, Mapping) or meta.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {path} has another format version than {FORMAT_VERSION}, which this program reads; convert it "
            "with the version that wrote it"
        )
    return meta


# ---- which model ----------------------------------------------------------------------------------------------------


def _describe_run(path: Path, meta: Mapping[str, Any], config: Path | None) -> tuple[ModelConfig, Any]:
    """The description of a run's model, that of a variant included, and a Hugging Face config object."""
    stored: Mapping[str, Any] = meta["model_description"]
    fields = meta.get("hugging_face_config")
    if config is not None:
        hf_config = config_object(config)
    elif isinstance(fields, Mapping) and "model_type" in fields:
        hf_config = stored_config(fields, f"checkpoint {path}")
    else:
        raise CheckpointError(
            f"checkpoint {path} does not hold its model's Hugging Face config, as those of a model_provider do not; if "
            "a Hugging Face model computes the same, give its config.json (or the folder with it) with --config"
        )
    model = family_of(hf_config.model_type).model_config(hf_config, stored.get("task"))
    model = replace(model, **{name: stored[name] for name in _SAID_BY_THE_RUN if name in stored})
    model = variant_of(model, stored)
    # As JSON tuples and lists of the same values are the same.
    described, stored = (json.loads(json.dumps(each)) for each in (model.to_dict(), dict(stored)))
    others = [name for name in stored if name in described and described[name] != stored[name]]
    if others:
        pairs = ", ".join(f"{name}={stored[name]} (the config says {described[name]})" for name in others)
        raise CheckpointError(
            f"checkpoint {path} is not of the model that its Hugging Face config describes: {pairs}; give the right "
            "one with --config (no config describes models trained with a model_provider)"
        )
    return model, hf_config


# ---- tensors --------------------------------------------------------------------------------------------------------


def stored_tensors(path: Path) -> dict[str, TensorStorageMetadata]:
    """The entries of tensors in the table of contents, after a look whether the files are there that it names.

    Raises:
        CheckpointError: If the table is damaged, could run code, or names files that are missing or too short.
    """
    table, sizes = read_table(path), file_sizes(path)
    try:
        for place in table.storage_data.values():
            name, end = place.relative_path, place.offset + place.length
            if name not in sizes:
                raise CheckpointError(f"checkpoint {path} lacks its file {name}: it is damaged; use another")
            if sizes[name] < end:
                raise CheckpointError(
                    f"checkpoint {path} is damaged: {name} has {sizes[name]} bytes and must have {end}; use another"
                )
        tensors = {
            str(name): stored
            for name, stored in table.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)  # else bytes: what no layout shards
        }
        if not all(type(size) is int for stored in tensors.values() for size in stored.size):
            raise ValueError("a shape that is no list of numbers")
    except CheckpointError:
        raise
    except (ArithmeticError, LookupError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} has a damaged table of contents ({error!r}); use another") from None
    return tensors


def _weights(path: Path) -> dict[str, TensorStorageMetadata]:
    entries = stored_tensors(path).items()
    return {name: each for name, each in entries if not (_OPTIMIZER.match(name) or _NO_WEIGHTS.search(name))}


def _keys_of(
    name: str, stored: TensorStorageMetadata, known: set[str] | None
) -> Iterator[tuple[Key, tuple[int, ...], tuple[int, ...]]]:
    """Which of the model's tensors an entry holds, with each one's index along the first axes and its shape.

    Megatron-Core stacks the layers of a model: ``decoder.layers.mlp.linear_fc1.weight`` is [layers, rows, columns], and
    the experts of a layer: ``decoder.layers.mlp.experts.experts.linear_fc1.weight`` has a second such axis. It
    may also write each layer by itself (``decoder.layers.3.mlp...``), and models without fused norms call these
    otherwise.

    Args:
        name: As the table of contents has it.
        stored: The entry.
        known: The names in the rules of the model's family; None if the model is not known yet.
    """
    name, shape = _WRAPPERS.sub("", name), tuple(stored.size)
    if numbered := _NUMBERED.match(name):
        name = f"{numbered[1]}.{numbered[3]}"
    for unfused, fused in _UNFUSED:
        if known is None or name not in known:
            name = name.replace(unfused, fused)
    axes = (".layers." in name and not numbered) + (EXPERTS in name)
    for index in itertools.product(*(range(size) for size in shape[:axes])):
        yield Key(name, *((int(numbered[2]),) if numbered else ()), *index), index, shape[axes:]


@dataclass(kw_only=True, eq=False)
class DistributedSource(Source):
    """The weights of a distributed checkpoint."""

    tensors: Mapping[str, TensorStorageMetadata]
    """The entries of weights."""
    base: str | None = None
    """Name or folder of the model that adapters were trained beside, if it is known."""
    is_whole: bool = True
    """Whether there is more than adapters."""

    def __post_init__(self) -> None:
        self._entry: dict[Key, tuple[str, tuple[int, ...]]] = {}
        self._reader = FileSystemReader(self.path)
        self._reader.set_up_storage_reader(read_table(self.path), is_coordinator=False)

    @property
    def stored(self) -> Mapping[str, Stored]:
        """See ``Source``."""
        return {name: Stored(tuple(each.size), each.properties.dtype) for name, each in self.tensors.items()}

    def match(self, expected: Mapping[Key, tuple[int, ...]]) -> dict[Key, torch.dtype]:
        """See ``Source``."""
        known, found = {key.name for key in expected}, {}
        for name, stored in self.tensors.items():
            for key, index, shape in _keys_of(name, stored, known):
                found[key] = Stored(shape, stored.properties.dtype)
                self._entry[key] = (name, index)
        self.refuse(mismatches(found, expected))
        return {key: each.dtype for key, each in found.items()}

    def read(self, place: Place) -> torch.Tensor:
        """See ``Source``."""
        name, index = self._entry[place.key]
        one = (1,) * len(index)
        box = ChunkStorageMetadata(offsets=torch.Size((*index, *place.offset)), sizes=torch.Size((*one, *place.size)))
        stored = self.tensors[name]
        target = torch.empty(box.sizes, dtype=stored.properties.dtype)
        try:
            items = create_read_items_for_chunk_list(name, stored, [box])
            if sum(math.prod(item.lengths) for item in items) != target.numel():
                raise ValueError("a part of it is in no file")
            self._reader.read_data(LoadPlan(items), _Planner(target)).wait()
        except Exception as error:  # whatever nonsense the bytes are
            reason = " ".join(str(error).split())[:100]
            raise CheckpointError(
                f"checkpoint {self.path} is damaged: {name} cannot be read ({type(error).__name__}: {reason}); use "
                "another"
            ) from None
        return target[(0,) * len(index)]


class _Planner(DefaultLoadPlanner):
    """Has everything read into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        place = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._target[tuple(slice(start, start + length) for start, length in place)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass
