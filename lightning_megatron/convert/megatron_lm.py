"""Legacy checkpoints of Megatron-LM (one pickle per rank), of any version, layout and release.

Paths: a directory with ``latest_checkpointed_iteration.txt``, one of its iterations (``iter_0000500``, ``release``),
the directory of one rank, its file, and zip files with any of these inside, as NVIDIA publishes them.

Tensor names are flat here: the keys of the nested dictionaries below ``model`` (or ``model0``, ``model1``), joined with
dots. They are saved as by Megatron-LM of 2023 (checkpoint version 3.0), and loaded from any release: NVIDIA's first
ones, those with Transformer Engine's fused modules, and Megatron-Core's names, which ``--ckpt-format torch`` saves in
the same files. The order of the rows of a rank's fused QKV weight depends on the version:

| checkpoint version | rows of a shard | written by |
|---|---|---|
| 0 | [3, heads, width] | Megatron-LM v1, NVIDIA's published models |
| 1.0 | [heads, width, 3] | Megatron-LM during some months of 2020 |
| 2.0, 3.0 | [heads, 3, width] | later releases; with query groups [groups, heads of a group + 2, width] |

The last order is Megatron-Core's. An encoder-decoder is always a version 3.0 checkpoint that ``convert`` made from a
T5: no Hugging Face model computes Megatron-LM's own, which has learned positions and scaled scores.

Files saved for tp=2 and pp=2 (with pp=1 directories are named ``mp_rank_TT``)::

    latest_checkpointed_iteration.txt       "release", from which Megatron-LM loads weights only
    release/
        mp_rank_00_000/model_optim_rng.pt   args, checkpoint_version, iteration, model or model0, ...
        mp_rank_00_001/...
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.convert.companions import companion_files
from lightning_megatron.convert.hybrid_layers import is_hybrid, with_paired_layers
from lightning_megatron.convert.inferred_model import describe_model
from lightning_megatron.convert.megatron_arguments import arguments_of, metadata_of
from lightning_megatron.convert.megatron_lm_files import (
    Rank,
    RankState,
    layout_of_ranks,
    rank_folder,
    read_ranks,
)
from lightning_megatron.convert.megatron_lm_names import (
    EMBEDDING,
    HEADS,
    OUTPUT,
    legacy_key,
    split_axis,
)
from lightning_megatron.convert.shards import Key, Region
from lightning_megatron.convert.source import Description, Source, Stored
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import Architecture, ModelConfig

_log = logging.getLogger(__name__)

Shards = tuple[Tensor, ...]
"""Shards of one tensor, of all tensor-parallel ranks."""


def collect_tensors(
    path: Path, ranks: Mapping[Rank, RankState]
) -> dict[Key, list[tuple[str, Shards]]]:
    """Collect the shards of each tensor from all ranks.

    In layer order, chunk v of stage p follows chunk v of stage p - 1, and chunk v - 1 of the last stage. The number of
    layers per chunk is that of its file, and may differ.

    Returns:
        For each key its legacy names, with the global layer index, and shards: of the first stage that has the tensor,
        then of the copies on later stages.

    Raises:
        CheckpointError: If the files of the ranks do not match.
    """
    _check_same_tensors(path, ranks)
    tp, pp = layout_of_ranks(ranks)
    architecture = _architecture_of(ranks)
    collected: dict[Key, list[tuple[str, Shards]]] = {}
    num_layers: Counter[str] = Counter()
    num_chunks = len(ranks[0, 0].chunks)
    for chunk, stage in itertools.product(range(num_chunks), range(pp)):
        before = num_layers.copy()
        states = [ranks[tensor, stage].chunks[chunk] for tensor in range(tp)]
        for name in states[0]:
            shards = tuple(state[name] for state in states)
            key = legacy_key(name, architecture)
            if key.layer is not None:
                stack = key.name.split(".")[0]
                layer = key.layer + before[stack]
                num_layers[stack] = max(num_layers[stack], layer + 1)
                name = name.replace(f".layers.{key.layer}.", f".layers.{layer}.", 1)
                key = key._replace(layer=layer)
            collected.setdefault(key, []).append((name, shards))
    return collected


def _check_same_tensors(path: Path, ranks: Mapping[Rank, RankState]) -> None:
    """Check that all files are of one version and iteration, and those of the ranks of a stage have the same tensors.

    Raises:
        CheckpointError: If they do not.
    """
    first = ranks[0, 0]
    _, pp = layout_of_ranks(ranks)
    for (tensor, stage), state in ranks.items():
        has_as_many = len(state.chunks) == len(first.chunks)
        iterations = {_iteration(state), _iteration(first)} - {None}
        is_of_run = state.version == first.version and len(iterations) < 2
        fits_first = has_as_many and is_of_run
        if fits_first and _shapes(state) == _shapes(ranks[0, stage]):
            continue
        other = rank_folder(0, stage if fits_first else 0, pp)
        raise CheckpointError(
            f"{path} is a mixture: {rank_folder(tensor, stage, pp)} has other tensors, another version or iteration "
            f"than {other}; copy it again"
        )


def _iteration(state: RankState) -> int | None:
    """Iteration at which the file was written; None if it does not say."""
    iteration = state.metadata.get("iteration")
    return iteration if type(iteration) is int else None


_BERT_ONLY = (
    "lm_head.",
    "binary_head.",
    "pooler.",
    "language_model.pooler.",
    "classification_head.",
    "encoder.",
)
"""Prefixes of names that only BERT has: GPT and BERT have the same layers and differ outside of them."""


def _architecture_of(ranks: Mapping[Rank, RankState]) -> Architecture:
    is_bert = False
    for state in ranks.values():
        for chunk in state.chunks:
            for name in chunk:
                if ".inter_attention." in name or ".cross_attention." in name:
                    return "t5"
                is_bert |= name.startswith(_BERT_ONLY) or ".tokentype_embeddings." in name
    if is_bert:
        return "bert"
    return "gpt"


def _shapes(state: RankState) -> list[dict[str, tuple[torch.Size, torch.dtype]]]:
    return [
        {name: (tensor.shape, tensor.dtype) for name, tensor in chunk.items()}
        for chunk in state.chunks
    ]


def _stored_tensor(key: Key, copies: list[tuple[str, Shards]]) -> Stored:
    """Full shape, padding included, and dtype of a tensor; ``location`` is the list of its copies."""
    _, shards = copies[0]
    shape = list(shards[0].shape)
    axis = split_axis(key.name)
    if axis is not None and axis < len(shape):  # else of another model, which raises later
        shape[axis] *= len(shards)
    return Stored(tuple(shape), shards[0].dtype, copies)


def merge(
    key: Key,
    shards: Shards,
    model: ModelConfig,
    version: float,
) -> Tensor:
    """Concatenate the shards of a tensor, with rows in Megatron-Core's order."""
    axis = split_axis(key.name)
    if axis is None:
        return shards[0]
    if ".linear_qkv." in key.name and version < 2.0:
        heads = model.num_attention_heads // len(shards)
        grouped = [_grouped_by_head(shard, heads, model, version) for shard in shards]
        return torch.cat(grouped)
    if model.gated_linear_unit and ".linear_fc1." in key.name:
        # Each shard has its part of the gate projection, then its part of the up projection.
        branches = [shard.chunk(2) for shard in shards]
        gates = [gate for gate, _ in branches]
        ups = [up for _, up in branches]
        return torch.cat([*gates, *ups])
    if len(shards) == 1:
        return shards[0]
    return torch.cat(shards, dim=axis)


def _grouped_by_head(shard: Tensor, heads: int, model: ModelConfig, version: float) -> Tensor:
    """Rows of a fused QKV weight of an old version, in Megatron-Core's order."""
    width = model.kv_channels
    columns = shard.shape[1:]
    if version == 1.0:
        ordered = shard.view(heads, width, 3, *columns).transpose(1, 2)
    else:
        ordered = shard.view(3, heads, width, *columns).transpose(0, 1)
    return ordered.reshape(-1, *columns)


class MegatronLMSource(Source):
    """Weights of a legacy checkpoint of Megatron-LM."""

    kind = "checkpoint of Megatron-LM"

    def __init__(self, path: Path) -> None:
        """Open and memory-map the files of all ranks; see ``Source``."""
        super().__init__(path)
        ranks = read_ranks(path)
        first = ranks[0, 0]
        self._tp, self._pp = layout_of_ranks(ranks)
        self._arguments = arguments_of(first.metadata)
        self._version = first.version
        if not any(name.startswith("language_model.") for name in first.chunks[0]):
            self._version = 3.0  # Megatron-Core's names: saved without version, rows as in 3.0
        collected = collect_tensors(path, ranks)
        names = [name for copies in collected.values() for name, _ in copies]
        if is_hybrid(names):
            collected = with_paired_layers(collected, path)
        self._found: dict[Key, Stored] = {}
        stored: dict[str, Stored] = {}
        for key, copies in collected.items():
            name, _ = copies[0]
            self._found[key] = stored[name] = _stored_tensor(key, copies)
        self.stored = stored
        for value in (first.metadata.get("iteration"), self._arguments.get("iteration")):
            if type(value) is int and value > 0:
                self.iteration = value
                break
        if path.is_dir():
            for folder in (path.parent, path):
                if companion_files(folder):
                    self.companions = folder
        self.metadata = self._describe_file(first)

    def _describe_file(self, state: RankState) -> dict[str, Any]:
        """Plain data for ``inspect`` from the state of the first rank."""
        layout = {"tp": self._tp, "pp": self._pp}
        if len(state.chunks) > 1:
            layout["vpp"] = len(state.chunks)
        known = {"args", "iteration", "checkpoint_version"}
        return {
            **metadata_of(state.metadata),
            "checkpoint_version": state.version,
            "layout": layout,
            "others": [name for name in state.metadata if name not in known],
        }

    def describe(self, config: Path | None) -> Description:
        """See ``Source``."""
        self._check_size("tensor_model_parallel_size", self._tp)
        self._check_size("pipeline_model_parallel_size", self._pp)
        shapes = {key: tensor.shape for key, tensor in self._found.items()}
        description = describe_model(self._arguments, shapes, self._tp, config, self.path)
        version = self._version
        if version not in (0, 1, 2, 3):
            raise CheckpointError(
                f"checkpoint_version={version:g} is unknown; known are 0, 1, 2, 3"
            )
        heads = description.model.num_attention_heads
        groups = description.model.num_query_groups
        if version < 2.0 and (groups != heads or heads % self._tp != 0):
            raise CheckpointError(
                f"num_attention_heads: expected a multiple of the checkpoint's tp={self._tp}, and of checkpoint_version"
                f"={version:g} as many keys, got {heads} and {groups}; give the config.json that "
                "belongs to it with --config"
            )
        return description

    def _check_size(self, name: str, found: int) -> None:
        size = self._arguments.get(name)
        if type(size) is int and size > found:
            raise CheckpointError(
                f"{self.path} was written with {name}={size} and has the files of {found}; give the directory of "
                "all ranks, with those that are missing"
            )

    def match(
        self, model: ModelConfig, expected: Mapping[Key, tuple[int, ...]]
    ) -> dict[Key, torch.dtype]:
        """See ``Source``; copies of a tensor on several pipeline stages must be equal."""
        self._model = model
        optional: tuple[str, ...] = ()
        if model.architecture == "bert":
            optional = HEADS
        if model.share_embeddings_and_output_weights:
            optional += (OUTPUT.name,)  # the last stage's copy, compared below
        ignored = [
            key for key in self._found if key not in expected and key.name.startswith(optional)
        ]
        found = {key: tensor for key, tensor in self._found.items() if key not in ignored}
        self.check(model, found, expected)
        if model.architecture == "bert" and ignored:
            names = ", ".join(map(str, ignored))
            _log.warning("of another head in %s and left out: %s", self.path, names)
        for key, tensor in self._found.items():
            (_, first), *copies = tensor.location
            if key == EMBEDDING and OUTPUT in ignored:
                copies += self._found[OUTPUT].location
            for _, copy in copies:
                if not all(map(torch.equal, first, copy)):
                    raise CheckpointError(
                        f"the pipeline stages of {self.path} have different copies of {key}; it is damaged, or a "
                        "mixture of several checkpoints"
                    )
        return {key: tensor.dtype for key, tensor in found.items()}

    def read(self, region: Region) -> Tensor:
        """See ``Source``."""
        _, shards = self._found[region.key].location[0]
        tensor = merge(region.key, shards, self._model, self._version)
        return tensor[region.slices]
