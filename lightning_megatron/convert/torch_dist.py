"""Sources for distributed checkpoints (torch_dist) of ``MegatronStrategy`` and of other programs with Megatron-Core.

Each rank reads only the regions of its shards, with torch's storage reader. Tensor names of other programs are mapped
to those of the rules: wrapper prefixes removed, layers stacked or numbered, norms fused or separate. Optimizer state is
ignored.
"""

from __future__ import annotations

import io
import itertools
import math
import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_megatron.checkpoint.meta import (
    COMMON,
    META,
    check_backends,
    check_complete,
    load_meta,
)
from lightning_megatron.checkpoint.pickles import read_pickle
from lightning_megatron.checkpoint.table import read_table, table_reader
from lightning_megatron.convert.companions import companion_files
from lightning_megatron.convert.inferred_model import describe_model
from lightning_megatron.convert.megatron_arguments import arguments_of, metadata_of
from lightning_megatron.convert.registry import config_object, differences, family_of, stored_config
from lightning_megatron.convert.shards import EXPERTS, Key, Region, parse_key
from lightning_megatron.convert.source import NO_WEIGHTS, Source, Stored
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import variant_of
from lightning_megatron.storage.checksums import CHECKSUMS, verify_checksums
from lightning_megatron.storage.paths import file_sizes

COMPANIONS = "hugging_face"
"""Directory in a ``*.ckpt`` with the tokenizer and generation config of the model."""

_RUN_FIELDS = (
    "make_vocab_size_divisible_by",
    "share_embeddings_and_output_weights",
    "lora",
    "lora_dropout",
)
"""Model fields that a run sets and its Hugging Face config lacks (T5's weight files decide about tied embeddings)."""
_WRAPPERS = re.compile(r"^(?:module\.|model\.)+")
_UNFUSED_NORMS = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)
"""Names of norms as separate modules, and in the fused layers that rules name."""


def _common_state(path: Path) -> Any:
    """Common state as megatron-core 0.17 and newer store it: in a shard file, as a list of one item."""
    for index, entry in read_table(path).storage_data.items():
        if index.fqn == "common_state/shard_0_1":
            with (path / entry.relative_path).open("rb") as file:
                file.seek(entry.offset)
                (common,) = read_pickle(
                    io.BytesIO(file.read(entry.length)), name=f"{path}: common_state"
                )
                return common
    return {}


_FORMAT_ERRORS = (ArithmeticError, LookupError, AttributeError, TypeError, ValueError)
"""Exceptions raised by a file whose content has an unexpected structure."""


class DistributedSource(Source):
    """Weights of a distributed checkpoint."""

    def __init__(self, path: Path) -> None:
        """Read the checkpoint's metadata, and check that the files it names exist.

        Raises:
            CheckpointError: If the metadata is damaged or could run code, or if files are missing or too short.
        """
        super().__init__(path)
        check_backends(path)
        table, sizes = read_table(path), file_sizes(path)
        try:
            ends = [
                (entry.relative_path, entry.offset + entry.length)
                for entry in table.storage_data.values()
            ]
            truncated = [(name, end) for name, end in ends if sizes.get(name, -1) < end]
            lengths = sum(entry.length for entry in table.storage_data.values())
            self.stored = {
                str(name): Stored(
                    tuple(map(operator.index, entry.size)), entry.properties.dtype, entry
                )
                for name, entry in table.state_dict_metadata.items()
                if isinstance(
                    entry, TensorStorageMetadata
                )  # else bytes: objects that are not sharded
            }
        except _FORMAT_ERRORS as error:
            raise CheckpointError(
                f"checkpoint {path} has damaged metadata ({error!r}); use another"
            ) from None
        if truncated:
            name, end = truncated[0]
            raise CheckpointError(
                f"checkpoint {path} is damaged: expected {end} bytes in {name}, got {sizes.get(name, 'no such file')}; "
                "use another"
            )
        # Every layer of a stack gets a key of its own; an empty axis must not hide a huge one.
        if (
            sum(math.prod(max(1, size) for size in tensor.shape) for tensor in self.stored.values())
            > lengths
        ):
            raise CheckpointError(
                f"checkpoint {path} has tensors larger than its {lengths:,} bytes; use another"
            )
        folders = (path / COMPANIONS, path)
        self.companions = next(
            (folder for folder in folders if folder.is_dir() and companion_files(folder)), None
        )
        self._found: dict[Key, Stored] = {}
        self._reader = table_reader(path, table)

    def find(self, known: Collection[str] = ()) -> dict[Key, Stored]:
        """Find the model's tensors, each located by its entry and its index along the leading axes of that.

        Megatron-Core stacks the layers of a model: ``decoder.layers.mlp.linear_fc1.weight`` is [layers, rows, columns],
        and the experts of a layer: ``decoder.layers.mlp.experts.experts.linear_fc1.weight`` has a second such axis. It
        may also write one entry per layer (``decoder.layers.3.mlp...``), and in models without fused norms these have
        names of their own.

        Args:
            known: Tensor names in the rules of the model's family; empty if the model is not known yet.
        """
        for entry, stored in self.weights.items():
            if NO_WEIGHTS.search(entry):
                continue
            key = parse_key(_WRAPPERS.sub("", entry))
            name, layer = key.name, () if key.layer is None else (key.layer,)
            for unfused, fused in () if name in known else _UNFUSED_NORMS:
                name = name.replace(unfused, fused)
            axes = (".layers." in name and not layer) + (EXPERTS in name)
            for index in itertools.product(*map(range, stored.shape[:axes])):
                self._found[Key(name, *layer, *index)] = Stored(
                    stored.shape[axes:], stored.dtype, (entry, index)
                )
        return self._found

    def match(self, expected: Mapping[Key, tuple[int, ...]]) -> dict[Key, torch.dtype]:
        """See ``Source``."""
        self._found.clear()
        found = self.find({key.name for key in expected})
        self.check(found, expected)
        return {key: tensor.dtype for key, tensor in found.items()}

    def read(self, region: Region) -> torch.Tensor:
        """See ``Source``."""
        name, index = self._found[region.key].location
        one = (1,) * len(index)
        box = ChunkStorageMetadata(
            offsets=torch.Size((*index, *region.offset)), sizes=torch.Size((*one, *region.size))
        )
        target = torch.empty(box.sizes, dtype=self.stored[name].dtype)
        try:
            items = create_read_items_for_chunk_list(name, self.stored[name].location, [box])
            if sum(math.prod(item.lengths) for item in items) != target.numel():
                raise ValueError("some of its values are in no file")
            self._reader.read_data(LoadPlan(items), _Planner(target)).wait()
        except Exception as error:  # damaged bytes can raise anything
            reason = " ".join(str(error).split())[:100]
            raise CheckpointError(
                f"checkpoint {self.path} is damaged: {name} cannot be read ({type(error).__name__}: {reason}); use "
                "another"
            ) from None
        return target[(0,) * len(index)]


class StrategySource(DistributedSource):
    """A ``*.ckpt`` of ``MegatronStrategy``."""

    kind = "checkpoint of MegatronStrategy"

    def __init__(self, path: Path) -> None:
        """Also read the metadata that the run saved; see ``DistributedSource``."""
        check_complete(path)
        super().__init__(path)
        self._meta = meta = load_meta(path)
        lightning = meta["lightning"]
        self.base, self.has_base_weights = meta.get("base"), meta.get("part") != "adapters"
        self.iteration = int(lightning.get("global_step", 0))
        modules = ((name, state) for name, state in lightning.items() if isinstance(state, Mapping))
        self.metadata = {
            "format_version": meta["format_version"],
            "model": {
                name: value
                for name, value in meta["model_description"].items()
                if value is not None
            },
            "base": self.base,
            "layout": {name: size for name, size in meta["layout"].items() if size is not None},
            "optimizer": meta["optimizer_format"],
            "global_step": lightning.get("global_step"),
            "epoch": lightning.get("epoch"),
            # Position of each data module: the state that it saved under its name.
            "data": {
                name: state["train"]
                for name, state in modules
                if {"train", "train_order"} <= state.keys()
            },
            "lightning": lightning.get("pytorch-lightning_version"),
        }

    def describe(self, config: Path | None) -> None:
        """See ``Source``; first verifies the checksums of all files, once."""
        verify_checksums(self.path)
        fields: Any = self._meta.get("hugging_face_config")
        stored = self._meta["model_description"]
        if config is None and not isinstance(fields, Mapping):
            raise CheckpointError(
                f"checkpoint {self.path} has no Hugging Face config of its model (none is saved with a model_provider)"
                "; if a Hugging Face model computes the same, give its config.json with --config"
            )
        self.hf_config = (
            config_object(config) if config else stored_config(fields, f"checkpoint {self.path}")
        )
        model = family_of(self.hf_config.model_type).model_config(
            self.hf_config, stored.get("task")
        )
        model = replace(model, **{name: stored[name] for name in _RUN_FIELDS if name in stored})
        self.model = variant_of(model, stored)
        if differing := differences(stored, described := self.model.to_dict()):
            pairs = ", ".join(
                f"{name}={stored[name]} (the config says {described[name]})" for name in differing
            )
            raise CheckpointError(
                f"checkpoint {self.path} is not of the model that its Hugging Face config describes: {pairs}; give the "
                "right one with --config (no config describes models trained with a model_provider)"
            )


class CoreSource(DistributedSource):
    """A distributed checkpoint of Megatron-Core (``torch_dist``) that another program wrote."""

    kind = "Megatron-Core distributed checkpoint (torch_dist)"

    def __init__(self, path: Path) -> None:
        """Also read the common state, which is not sharded; see ``DistributedSource``."""
        if (path / CHECKSUMS).is_file():
            raise CheckpointError(
                f"checkpoint {path} lacks its file {META}: it is damaged; use another"
            )
        super().__init__(path)
        common = read_pickle(path / COMMON) if (path / COMMON).is_file() else _common_state(path)
        if not isinstance(common, Mapping):
            raise CheckpointError(f"checkpoint {path} has a damaged {COMMON}; use another")
        self._arguments = arguments_of(common)
        self.iteration = common["iteration"] if type(common.get("iteration")) is int else 0
        self.metadata = metadata_of(common)

    def describe(self, config: Path | None) -> None:
        """See ``Source``."""
        shapes = {key: tensor.shape for key, tensor in self.find().items()}
        tp = size if type(size := self._arguments.get("tensor_model_parallel_size")) is int else 1
        self.model, self.hf_config = describe_model(self._arguments, shapes, tp, config, self.path)


class _Planner(DefaultLoadPlanner):
    """Load planner that reads every item into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target
