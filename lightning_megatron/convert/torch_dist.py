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
from torch import Tensor
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
    TABLE,
    check_backends,
    check_complete,
    load_meta,
)
from lightning_megatron.checkpoint.pickles import read_pickle
from lightning_megatron.checkpoint.table import read_table, table_reader
from lightning_megatron.convert.companions import companion_files
from lightning_megatron.convert.hybrid_layers import is_hybrid, with_paired_layers
from lightning_megatron.convert.inferred_model import describe_model
from lightning_megatron.convert.megatron_arguments import arguments_of, metadata_of
from lightning_megatron.convert.registry import (
    config_object,
    differences,
    family_of,
    stored_config,
    with_labels,
)
from lightning_megatron.convert.shards import EXPERTS, Key, Region, parse_key
from lightning_megatron.convert.source import NO_WEIGHTS, Description, Source, Stored
from lightning_megatron.engine.entries import EMA
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import CLASSIFICATION, ModelConfig, variant_of
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
                content = io.BytesIO(file.read(entry.length))
            (common,) = read_pickle(content, name=f"{path}: common_state")
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
        table = read_table(path)
        sizes = file_sizes(path)
        try:
            entries = table.storage_data.values()
            ends = [(entry.relative_path, entry.offset + entry.length) for entry in entries]
            truncated = [(name, end) for name, end in ends if sizes.get(name, -1) < end]
            lengths = sum(entry.length for entry in entries)
            stored = {}
            for name, entry in table.state_dict_metadata.items():
                # Others are bytes: objects that are not sharded.
                if isinstance(entry, TensorStorageMetadata):
                    shape = tuple(map(operator.index, entry.size))
                    stored[str(name)] = Stored(shape, entry.properties.dtype, entry)
            self.stored = stored
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
        shapes = [tensor.shape for tensor in stored.values()]
        if sum(math.prod(max(1, size) for size in shape) for shape in shapes) > lengths:
            raise CheckpointError(
                f"checkpoint {path} has tensors larger than its {lengths:,} bytes; use another"
            )
        for folder in (path / COMPANIONS, path):
            if folder.is_dir() and companion_files(folder):
                self.companions = folder
                break
        self._is_hybrid = is_hybrid(_WRAPPERS.sub("", name) for name in stored)
        self._found: dict[Key, Stored] = {}
        self._averages: dict[str, str] = {}
        """Entries to read instead of those of weights, where they have values."""
        self._reader = table_reader(path, table)

    def find(self, known: Collection[str] = ()) -> dict[Key, Stored]:
        """Find the model's tensors, each located by its entry and its index along the leading axes of that.

        Megatron-Core stacks the layers of a model: ``decoder.layers.mlp.linear_fc1.weight`` is [layers, rows, columns],
        and the experts of a layer: ``decoder.layers.mlp.experts.experts.linear_fc1.weight`` has a second such axis. It
        may also write one entry per layer (``decoder.layers.3.mlp...``), and in models without fused norms these have
        names of their own. Those of a ``HybridModel`` are paired: hybrid_layers.py.

        Args:
            known: Tensor names in the rules of the model's family; empty if the model is not known yet.
        """
        found: dict[Key, Stored] = {}
        for entry, stored in self.weights.items():
            if NO_WEIGHTS.search(entry):
                continue
            name, layer, _ = parse_key(_WRAPPERS.sub("", entry))
            if name not in known:
                for unfused, fused in _UNFUSED_NORMS:
                    name = name.replace(unfused, fused)
            is_stacked = ".layers." in name and layer is None
            axes = int(is_stacked) + int(EXPERTS in name)
            shape = stored.shape[axes:]
            for index in itertools.product(*map(range, stored.shape[:axes])):
                indices = index if layer is None else (layer, *index)
                dtype = self.stored[self._averages.get(entry, entry)].dtype
                key = Key(name, *indices)
                if key in found:
                    raise CheckpointError(
                        f"checkpoint {self.path} has two tensors that are {key}, the second one in {entry}; use another"
                    )
                found[key] = Stored(shape, dtype, (entry, index))
        if self._is_hybrid:
            found = with_paired_layers(found, self.path)
        self._found = found
        return found

    def match(
        self, model: ModelConfig, expected: Mapping[Key, tuple[int, ...]]
    ) -> dict[Key, torch.dtype]:
        """See ``Source``."""
        found = self.find({key.name for key in expected})
        self.check(model, found, expected)
        return {key: tensor.dtype for key, tensor in found.items()}

    def read(self, region: Region) -> Tensor:
        """See ``Source``."""
        dtype = self._found[region.key].dtype
        name, index = self._found[region.key].location
        one_each = (1,) * len(index)
        box = ChunkStorageMetadata(
            offsets=torch.Size((*index, *region.offset)),
            sizes=torch.Size((*one_each, *region.size)),
        )
        try:
            name, items = self._items(name, box)
            target = torch.empty(box.sizes, dtype=self.stored[name].dtype)
            num_values = sum(math.prod(item.lengths) for item in items)
            if num_values != target.numel():
                raise ValueError("some of its values are in no file")
            self._reader.read_data(LoadPlan(items), _Planner(target)).wait()
        except Exception as error:  # damaged bytes can raise anything
            reason = " ".join(str(error).split())[:100]
            raise CheckpointError(
                f"checkpoint {self.path} is damaged: {name} cannot be read ({type(error).__name__}: {reason}); use "
                "another"
            ) from None
        return target[(0,) * len(index)].to(dtype)

    def _items(self, name: str, box: ChunkStorageMetadata) -> tuple[str, list[Any]]:
        """The entry to read for a weight, and its items with values in ``box``."""
        average = self._averages.get(name)
        if average is not None:
            items = create_read_items_for_chunk_list(average, self.stored[average].location, [box])
            if items:
                return average, items
            # This layer of a stack was frozen: only others have an average.
        return name, create_read_items_for_chunk_list(name, self.stored[name].location, [box])


class StrategySource(DistributedSource):
    """A ``*.ckpt`` of ``MegatronStrategy``."""

    kind = "checkpoint of MegatronStrategy"

    def __init__(self, path: Path, *, ema: bool = False) -> None:
        """Also read the metadata that the run saved; see ``DistributedSource``.

        Args:
            path: The checkpoint.
            ema: Whether to read the average that EMA kept; weights that were frozen have none, and are read themselves.

        Raises:
            CheckpointError: If there is no average, too.
        """
        check_complete(path)
        if (path / CHECKSUMS).is_file():  # older checkpoints have none
            verify_checksums(path, only=(TABLE, META))
        super().__init__(path)
        meta = load_meta(path)
        self._meta = meta
        if ema:
            self._averages = self._find_averages()
        lightning = meta["lightning"]
        self.base = meta.get("base")
        self.has_base_weights = meta.get("part") != "adapters"
        self.iteration = int(lightning.get("global_step", 0))
        self.metadata = {
            "format_version": meta["format_version"],
            "model": _without_none(meta["model_description"]),
            "base": self.base,
            "layout": _without_none(meta["layout"]),
            "optimizer": meta["optimizer_format"],
            "global_step": lightning.get("global_step"),
            "epoch": lightning.get("epoch"),
            # Position of each data module: the state that it saved under its name.
            "data": {
                name: state["train"]
                for name, state in lightning.items()
                if isinstance(state, Mapping) and {"train", "train_order"} <= state.keys()
            },
            "lightning": lightning.get("pytorch-lightning_version"),
        }

    def _find_averages(self) -> dict[str, str]:
        """Entry of the average of each weight that has one."""
        averages = {name.removeprefix(EMA): name for name in self.stored if name.startswith(EMA)}
        if not averages:
            raise CheckpointError(
                f"checkpoint {self.path}: expected one of a run with the callback EMA, got one without an average; "
                "leave ema out"
            )
        return averages

    def describe(self, config: Path | None) -> Description:
        """See ``Source``; first verifies the checksums of all files, once."""
        verify_checksums(self.path)
        fields: Any = self._meta.get("hugging_face_config")
        stored = self._meta["model_description"]
        if config is None and not isinstance(fields, Mapping):
            raise CheckpointError(
                f"checkpoint {self.path} has no Hugging Face config of its model (none is saved with a model_provider)"
                "; if a Hugging Face model computes the same, give its config.json with --config"
            )
        if config is not None:
            hf_config = _with_stored_labels(config, stored)
        else:
            hf_config = stored_config(fields, f"checkpoint {self.path}")
        model = family_of(hf_config.model_type).model_config(hf_config, stored.get("task"))
        model = replace(model, **{name: stored[name] for name in _RUN_FIELDS if name in stored})
        model = variant_of(model, stored)
        described = model.to_dict()
        pairs = [
            f"{name}={stored[name]} (the config says {described[name]})"
            for name in differences(stored, described)
        ]
        if pairs:
            raise CheckpointError(
                f"checkpoint {self.path} is not of the model that its Hugging Face config describes: {', '.join(pairs)}"
                "; give the right one with --config (no config describes models trained with a model_provider)"
            )
        return Description(model, hf_config)


def _with_stored_labels(config: Path, stored: Mapping[str, Any]) -> Any:
    """Config object with the labels of a run, which are its options: ``config`` may be that of a language model."""
    task = stored.get("task")
    problem_type = None
    if task == "sequence_classification":
        problem_type = stored.get("problem_type")
    if task not in CLASSIFICATION:
        return config_object(config)
    return config_object(with_labels(config, task, stored.get("num_labels"), problem_type))


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


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
        if (path / COMMON).is_file():
            common = read_pickle(path / COMMON)
        else:
            common = _common_state(path)
        if not isinstance(common, Mapping):
            raise CheckpointError(f"checkpoint {path} has a damaged {COMMON}; use another")
        self._common = common
        self._arguments = arguments_of(common)
        if type(common.get("iteration")) is int:
            self.iteration = common["iteration"]
        self.metadata = metadata_of(common)

    def describe(self, config: Path | None) -> Description:
        """See ``Source``."""
        shapes = {key: tensor.shape for key, tensor in self.find().items()}
        tp = self._arguments.get("tensor_model_parallel_size")
        if type(tp) is not int:
            tp = 1
        return describe_model(self._arguments, shapes, tp, config, self.path)


class _Planner(DefaultLoadPlanner):
    """Load planner that reads every item into one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._target
