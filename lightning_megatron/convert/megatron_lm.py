"""Legacy checkpoints of Megatron-LM (a pickle for each rank) as sources, of any version, layout and release.

Known are a folder with ``latest_checkpointed_iteration.txt``, one of its iterations (``iter_0000500``, ``release``),
the folder of one rank, its file, and zip files with any of these inside, as NVIDIA publishes them.

Names are flat here: the keys of the nested dictionaries below ``model`` (or ``model0``, ``model1``), joined with dots.
They are written as Megatron-LM of 2023 (checkpoint version 3.0) wrote them, and read as any release did: NVIDIA's first
ones, those with Transformer Engine's fused modules, and Megatron-Core's own, which ``--ckpt-format torch`` puts into
the same files. The rows of a rank's queries, keys and values stand in an order that depends on the version:

| checkpoint version | rows of a shard | written by |
|---|---|---|
| 0 | [3, heads, width] | Megatron-LM v1, NVIDIA's published models |
| 1.0 | [heads, width, 3] | Megatron-LM of some months of 2020 |
| 2.0, 3.0 | [heads, 3, width] | since; with query groups [groups, heads of a group + 2, width] |

The last one is Megatron-Core's. Of cross-attention's keys and values the same holds with 2 instead of 3.
"""

from __future__ import annotations

import functools
import logging
import lzma
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_megatron.convert.hugging_face_files import companion_files
from lightning_megatron.convert.megatron_arguments import (
    HUGGING_FACE_CONFIG,
    Shapes,
    arguments_of,
    bert_task,
    own_config,
    told_config,
)
from lightning_megatron.convert.registry import config_object, family_of, rules_of
from lightning_megatron.convert.rules import LAYER, VOCABULARY
from lightning_megatron.convert.shards import Key, Shard, Source, check_same, fill_from_whole
from lightning_megatron.engine.pickles import read_pickle
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import Architecture, ModelConfig, variant_of

OF_MEGATRON_LM = "checkpoint of Megatron-LM"
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
"""What a rank's file is called; the second one with the distributed optimizer of 2022."""
HEAD_COPY = "word_embeddings_for_head.weight"
"""The last pipeline stage's copy of tied embeddings; the same numbers as the first stage's."""
EMBEDDING, _OUTPUT, _OUTPUT_BIAS = (Key(name) for name in VOCABULARY)
_MOST_NAMED = 5

_log = logging.getLogger(__name__)


# ---- names ----------------------------------------------------------------------------------------------------------

Axis = Literal[0, 1] | None
_Module = tuple[str, tuple[str, ...], Axis]
"""What stands before ``weight`` and ``bias`` in Megatron-Core's name and in the legacy ones, of which the first is
written; and the axis of the weight that tensor parallelism splits (the bias is split if it is 0; None: neither is)."""

_OF_A_LAYER: tuple[_Module, ...] = (
    (
        "self_attention.linear_qkv.layer_norm_",
        ("input_layernorm.", "input_norm.", "self_attention.layernorm_qkv.layer_norm_"),
        None,
    ),
    (
        "self_attention.linear_qkv.",
        ("self_attention.query_key_value.", "attention.query_key_value.", "self_attention.layernorm_qkv."),
        0,
    ),
    ("self_attention.linear_proj.", ("self_attention.dense.", "attention.dense.", "self_attention.proj."), 1),
    ("self_attention.q_layernorm.", ("self_attention.q_layernorm.",), None),
    ("self_attention.k_layernorm.", ("self_attention.k_layernorm.",), None),
    ("mlp.linear_fc1.", ("mlp.dense_h_to_4h.", "layernorm_mlp.fc1_"), 0),
    ("mlp.linear_fc2.", ("mlp.dense_4h_to_h.", "layernorm_mlp.fc2_"), 1),
)
_MLP_NORM: _Module = (
    "mlp.linear_fc1.layer_norm_",
    ("post_attention_layernorm.", "post_attention_norm.", "layernorm_mlp.layer_norm_", "pre_mlp_layernorm."),
    None,
)
_OF_A_CROSS_ATTENTION: tuple[_Module, ...] = (
    ("pre_cross_attn_layernorm.", ("post_attention_layernorm.", "post_attention_norm."), None),
    ("cross_attention.linear_q.", ("inter_attention.query.",), 0),
    ("cross_attention.linear_kv.", ("inter_attention.key_value.",), 0),
    ("cross_attention.linear_proj.", ("inter_attention.dense.",), 1),
    (
        "mlp.linear_fc1.layer_norm_",
        ("post_inter_attention_layernorm.", "post_inter_attention_norm.", "pre_mlp_layernorm."),
        None,
    ),
)
"""Of a layer that reads an encoder's output: its MLP's norm has another name, and the usual one is that before the
cross-attention."""
_FINAL_NORM: _Module = ("final_layernorm.", ("final_layernorm.", "final_norm."), None)
_OUTSIDE: tuple[_Module, ...] = (
    ("embedding.word_embeddings.", ("language_model.embedding.word_embeddings.",), 0),
    *(
        (f"{name}.", (f"language_model.{name}.",), None)
        for name in (
            *("embedding.position_embeddings", "embedding.tokentype_embeddings", "embedding.norm", "pooler.dense"),
            # T5's tables of relative positions; Megatron-LM has them under Megatron-Core's names only.
            *("encoder_relative_pos_emb.relative_attention_bias", "decoder_relative_pos_emb.relative_attention_bias"),
        )
    ),
    ("lm_head.dense.", ("lm_head.dense.",), None),
    ("lm_head.layer_norm.", ("lm_head.layernorm.", "lm_head.norm."), None),
    ("binary_head.", ("binary_head.",), None),
    ("classification_head.dense.", ("classification_head.",), None),
    ("token_head.dense.", ("token_head.",), None),
)
_TENSORS_OUTSIDE = {
    _OUTPUT.name: ("language_model.output_layer.weight",),
    _OUTPUT_BIAS.name: ("lm_head.bias", "lm_head.output_layer.bias"),
}
"""Of an output layer, whose weight and bias are in different places; split along axis 0, as the embedding is."""
_NO_WEIGHTS = re.compile(r"(^|\.)(_extra_state|inv_freq|masked_bias|position_ids|attention\.bias)$|\._extra_state")
"""Buffers that some release put among the weights."""
_NUMBER = re.compile(r"^(.*?\blayers)\.(\d+)\.(.*)$")


def _modules(architecture: Architecture) -> Iterator[tuple[_Module, str, tuple[str, ...]]]:
    """Every module, with what Megatron-Core's and each legacy name begin with."""
    for module in _OUTSIDE:
        yield module, "", ("",)
    stacks: Mapping[str, tuple[str, ...]] = {"encoder": ("encoder", "transformer"), "decoder": ("decoder",)}
    if architecture != "t5":
        stacks = {"decoder" if architecture == "gpt" else "encoder": stacks["encoder"]}
    for stack, names in stacks.items():
        has_cross_attention = architecture == "t5" and stack == "decoder"
        begins = tuple(f"language_model.{name}." for name in names)
        yield _FINAL_NORM, f"{stack}.", begins
        for module in (*_OF_A_LAYER, *(_OF_A_CROSS_ATTENTION if has_cross_attention else (_MLP_NORM,))):
            yield module, f"{stack}.layers.", tuple(f"{begin}layers." for begin in begins)


@functools.cache
def _read_as(architecture: Architecture) -> Mapping[str, str]:
    """Megatron-Core's name of every name that some release wrote, Megatron-Core's own included."""
    names = {
        f"{begin}{each}{kind}": f"{stack}{core}{kind}"
        for (core, legacy, _), stack, begins in _modules(architecture)
        for kind in ("weight", "bias")
        for begin in (*begins, stack)
        for each in (*legacy, core)
    }
    for name, others in _TENSORS_OUTSIDE.items():
        names |= dict.fromkeys((name, *others), name)
    return names


@functools.cache
def written_names(architecture: Architecture) -> Mapping[str, str]:
    """The flat name under which each tensor is written, layers without their number."""
    names = {
        f"{stack}{core}{kind}": f"{begins[0]}{legacy[0]}{kind}"
        for (core, legacy, _), stack, begins in _modules(architecture)
        for kind in ("weight", "bias")
    }
    return names | {name: others[0] for name, others in _TENSORS_OUTSIDE.items()}


def split_axis(name: str) -> Axis:
    """Along which axis tensor parallelism splits a tensor with Megatron-Core's name (without a layer's number)."""
    return _axes()[name]


@functools.cache
def _axes() -> Mapping[str, Axis]:
    axes: dict[str, Axis] = dict.fromkeys(_TENSORS_OUTSIDE, 0)
    for architecture in ("gpt", "bert", "t5"):
        for (core, _, axis), stack, _ in _modules(architecture):
            axes |= {f"{stack}{core}weight": axis, f"{stack}{core}bias": 0 if axis == 0 else None}
    return axes


def _key_of(legacy: str, architecture: Architecture) -> Key | None:
    """What Megatron-Core calls the tensor ``legacy``; its layer is counted from 0 in the file. None if unknown."""
    if legacy == HEAD_COPY:
        return EMBEDDING
    numbered = _NUMBER.match(legacy)
    name = _read_as(architecture).get(f"{numbered[1]}.{numbered[3]}" if numbered else legacy)
    return None if name is None else Key(name, int(numbered[2]) if numbered else None)


# ---- files ----------------------------------------------------------------------------------------------------------

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_RANK_OF_MORE = re.compile(r"mp_rank_\d{2,}(_\d{3,}){2,}")
_CHUNK = re.compile(r"model(\d*)")
_OF_DAMAGED_ZIP_FILES = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)
"""What reading them raises."""

_Rank = tuple[int, int]
"""Tensor- and pipeline-parallel."""


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What the file of one rank holds."""

    arguments: Mapping[str, Any]
    """Megatron-LM's command line; empty in the oldest checkpoints."""
    version: float
    """Of the checkpoint; it says how the rows of queries, keys and values are ordered."""
    chunks: tuple[Mapping[str, torch.Tensor], ...]
    """Weights of each model chunk, under flat names and in their order in the file."""
    others: Mapping[str, Any]
    """What else is there by name: ``iteration``, ``optimizer``, ``opt_param_scheduler``, ..."""

    @property
    def iteration(self) -> int:
        """Optimizer steps done when it was written; 0 if it does not say."""
        said = (self.others.get("iteration"), self.arguments.get("iteration"))
        return next((each for each in said if type(each) is int and each > 0), 0)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The files of one checkpoint."""

    path: Path
    """The folder, or the file if there is only one."""
    tp: int
    pp: int
    states: Mapping[_Rank, RankState]

    def name(self, tensor: int, stage: int) -> str:
        """The folder of a rank."""
        return rank_folder(tensor, stage, self.pp)


def rank_folder(tensor: int, stage: int, pp: int) -> str:
    """Name of the folder of a rank."""
    return f"mp_rank_{tensor:02d}" if pp == 1 else f"mp_rank_{tensor:02d}_{stage:03d}"


def is_legacy(path: Path) -> bool:
    """Whether ``path`` looks like a legacy checkpoint, in any of the known forms."""
    if path.is_file():
        return path.suffix == ".pt" or (path.suffix == ".zip" and bool(_members(path)))  # one file has any name
    return bool(_files_of_ranks(path)) or any((path / name).is_file() for name in MODEL_FILES)


def read_ranks(path: Path) -> Ranks:
    """The files of the checkpoint in a folder or file; their tensors are mapped, not read.

    Raises:
        CheckpointError: If there is none, or a rank is missing, damaged or unsafe.
    """
    if path.is_file():
        return _in_archive(path) if _members(path) else _whole(path, {(0, 0): path})
    if own := [path / name for name in MODEL_FILES if (path / name).is_file()]:
        others = _files_of_ranks(path.absolute().parent) if _RANK.fullmatch(path.absolute().name) else {}
        if len(others) > 1:
            raise CheckpointError(
                f"{path} is one of {len(others)} ranks; give the folder of all of them, {path.absolute().parent}"
            )
        return _whole(path, {(0, 0): own[0]})
    files = _files_of_ranks(path)
    if not files:
        raise CheckpointError(
            f"{path} is no checkpoint of Megatron-LM: it has no folders mp_rank_TT[_PPP] with {MODEL_FILES[0]}"
        )
    more = sorted(each.name for each in path.iterdir() if _RANK_OF_MORE.fullmatch(each.name))
    if more and any((path / more[0] / name).is_file() for name in MODEL_FILES):
        raise CheckpointError(f"{path} has expert-parallel ranks ({more[0]}), which are not read; no family has them")
    return _whole(path, files)


def _files_of_ranks(folder: Path) -> dict[_Rank, Path]:
    """The model file of each rank; folders without one are of a distributed optimizer."""
    found = {}
    for each in folder.glob("mp_rank_*"):
        name = _RANK.fullmatch(each.name)
        file = next((each / model for model in MODEL_FILES if (each / model).is_file()), None)
        if name is not None and file is not None:
            found[int(name[1]), int(name[2] or 0)] = file
    return found


def _whole(path: Path, files: Mapping[_Rank, Path]) -> Ranks:
    """All ranks, unless one is missing or they are of different checkpoints."""
    tp, pp = (1 + max(rank[axis] for rank in files) for axis in (0, 1))
    if len(files) < tp * pp:  # before they are named: a number can be anything
        absent = next((t, p) for t in range(tp) for p in range(pp) if (t, p) not in files)
        raise CheckpointError(
            f"{path} lacks the file of {rank_folder(*absent, pp)}: there are {len(files)} of tp={tp} x pp={pp}; copy "
            "the whole checkpoint"
        )
    return Ranks(path=path, tp=tp, pp=pp, states={rank: _read_rank(file) for rank, file in sorted(files.items())})


def _members(path: Path) -> list[tuple[_Rank, zipfile.ZipInfo]]:
    """The files of ranks in a zip file: ``anything/mp_rank_TT[_PPP]/model_optim_rng.pt``, or without folders."""
    found: list[tuple[_Rank, zipfile.ZipInfo]] = []
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                *folders, name = info.filename.replace("\\", "/").split("/")
                rank = _RANK.fullmatch(folders[-1]) if folders else None
                if name in MODEL_FILES and (rank is not None or not folders):
                    found.append(((int(rank[1]), int(rank[2] or 0)) if rank else (0, 0), info))
    except _OF_DAMAGED_ZIP_FILES:
        return []
    return found


def _in_archive(path: Path) -> Ranks:
    """Members are unpacked into temporary files, which stay mapped; names in the zip name no file."""
    members = _members(path)
    names = sorted(info.filename for _, info in members)
    if len({name.rpartition("mp_rank_")[0] for name in names}) > 1 or len(dict(members)) < len(members):
        raise CheckpointError(
            f"zip file {path} has several checkpoints ({', '.join(names[:_MOST_NAMED])}); unpack it, and give the "
            "folder of one"
        )
    with tempfile.TemporaryDirectory(prefix="lightning_megatron_") as folder:
        files: dict[_Rank, Path] = {}
        try:
            with zipfile.ZipFile(path) as archive:
                for rank, info in members:
                    files[rank] = Path(folder) / f"{len(files)}.pt"
                    if info.file_size > (free := shutil.disk_usage(folder).free):
                        raise OSError(f"{info.file_size:,} bytes do not fit into {folder}, where {free:,} are free")
                    with archive.open(info) as source, files[rank].open("wb") as target:
                        shutil.copyfileobj(source, target, 1 << 24)
        except _OF_DAMAGED_ZIP_FILES as error:
            raise CheckpointError(f"zip file {path} cannot be unpacked ({error}); fetch it again") from None
        return _whole(path, files)


def _read_rank(file: Path) -> RankState:
    """What one file holds.

    Raises:
        CheckpointError: If it is damaged or could run code, or is no checkpoint of Megatron-LM.
    """

    def foreign(reason: str) -> CheckpointError:
        return CheckpointError(f"{file} is no checkpoint of Megatron-LM: {reason}; give another file")

    state = read_pickle(file)
    if not isinstance(state, Mapping):
        raise foreign(f"it holds a {type(state).__name__}")
    models = {int(name[1] or 0): value for key, value in state.items() if (name := _CHUNK.fullmatch(str(key)))}
    if not models or sorted(models) != list(range(len(models))):
        named = ", ".join(repr(str(name)[:40]) for name in list(state)[:_MOST_NAMED]) or "nothing"
        raise foreign(f"it has no 'model' (or not all of its chunks), but {named}")
    chunks = []
    for number in range(len(models)):
        if not isinstance(models[number], Mapping):
            raise foreign(f"'model' is a {type(models[number]).__name__}")
        chunks.append(dict(_flat(models[number])))
        if not chunks[-1]:
            raise foreign("'model' has no tensors")
    version = state.get("checkpoint_version", 0)
    if isinstance(version, bool) or not isinstance(version, (int, float)):
        raise foreign(f"checkpoint_version is a {type(version).__name__}")
    others = {str(name): value for name, value in state.items() if name != "args" and not _CHUNK.fullmatch(str(name))}
    return RankState(arguments=arguments_of(state), version=float(version), chunks=tuple(chunks), others=others)


def _flat(nested: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif isinstance(value, torch.Tensor) and not _NO_WEIGHTS.search(f"{before}{key}"):
            yield f"{before}{key}", value


# ---- from ranks to whole tensors ------------------------------------------------------------------------------------

Shards = tuple[torch.Tensor, ...]
"""Of one tensor, those of all tensor-parallel ranks."""


@dataclass(kw_only=True)
class Stacked:
    """All tensors of a model, found in the files of its ranks."""

    tensors: dict[Key, Shards] = field(default_factory=dict)
    """The first copy of each."""
    names: dict[Key, str] = field(default_factory=dict)
    """Of each in the file, its layer counted over all stages."""
    copies: list[tuple[Key, Shards]] = field(default_factory=list)
    """What later stages have again."""
    num_layers: dict[str, int] = field(default_factory=dict)
    """Of each stack, ``encoder`` and ``decoder``."""


def architecture_of(ranks: Ranks) -> Architecture:
    """Decoder, encoder or both, by the names of tensors; GPT and BERT differ only around their layers."""
    states = [state for (tensor, _), state in ranks.states.items() if tensor == 0]
    names = {name for state in states for chunk in state.chunks for name in chunk}
    if any(".inter_attention." in name or ".cross_attention." in name for name in names):
        return "t5"
    of_bert = ("lm_head.", "binary_head.", "pooler.", "language_model.pooler.", "classification_head.", "encoder.")
    return "bert" if any(name.startswith(of_bert) or ".tokentype_embeddings." in name for name in names) else "gpt"


def stack(ranks: Ranks, architecture: Architecture) -> Stacked:
    """Find all tensors of the model.

    Chunk v of stage p comes after chunk v of stage p - 1, and after chunk v - 1 of the last stage. How many layers each
    has is what its file says, so that they may differ.

    Raises:
        CheckpointError: If ranks do not fit together, a layer is missing, or a tensor is unknown.
    """
    stacked, first = Stacked(), ranks.states[0, 0]
    for rank, state in ranks.states.items():
        if len(state.chunks) != len(first.chunks) or state.version != first.version:
            raise CheckpointError(
                f"{ranks.path} is a mixture: {ranks.name(*rank)} has {len(state.chunks)} model chunks of version "
                f"{state.version:g}, {ranks.name(0, 0)} {len(first.chunks)} of {first.version:g}; copy it again"
            )
    for chunk in range(len(first.chunks)):
        for stage in range(ranks.pp):
            _add(stacked, ranks, _beside_each_other(ranks, chunk, stage), architecture)
    return stacked


def _beside_each_other(ranks: Ranks, chunk: int, stage: int) -> dict[str, Shards]:
    """The shards of all tensor-parallel ranks."""
    first = ranks.states[0, stage].chunks[chunk]
    for tensor in range(1, ranks.tp):
        other = ranks.states[tensor, stage].chunks[chunk]
        difference = sorted(set(first) ^ set(other)) or sorted(
            name for name in first if (first[name].shape, first[name].dtype) != (other[name].shape, other[name].dtype)
        )
        if difference:
            raise CheckpointError(
                f"{ranks.path} is a mixture: {ranks.name(0, stage)} and {ranks.name(tensor, stage)} differ in "
                f"{', '.join(difference[:_MOST_NAMED])}; copy it again"
            )
    return {name: tuple(ranks.states[t, stage].chunks[chunk][name] for t in range(ranks.tp)) for name in first}


def _add(stacked: Stacked, ranks: Ranks, named: Mapping[str, Shards], architecture: Architecture) -> None:
    """The tensors of one chunk; its layers come after those that ``stacked`` has."""
    keys = {name: key for name in named if (key := _key_of(name, architecture)) is not None}
    if unknown := [name for name in named if name not in keys]:
        raise CheckpointError(
            f"{ranks.path} has tensors that no known model has: {', '.join(unknown[:_MOST_NAMED])}"
            f"{', ...' if len(unknown) > _MOST_NAMED else ''}; it is of a variant of Megatron-LM that is not read"
        )
    before = dict(stacked.num_layers)
    layers: dict[str, set[int]] = {}
    for name, key in keys.items():
        whole_name = name
        if key.layer is not None:
            of = key.name.split(".")[0]
            layers.setdefault(of, set()).add(key.layer)
            layer = key.layer + before.get(of, 0)
            whole_name = name.replace(f".layers.{key.layer}.", f".layers.{layer}.", 1)
            key = key._replace(layer=layer)
        if key in stacked.tensors or name == HEAD_COPY:
            stacked.copies.append((key, named[name]))
        else:
            stacked.tensors[key], stacked.names[key] = named[name], whole_name
    for of, numbers in layers.items():
        if numbers != set(range(len(numbers))):
            raise CheckpointError(
                f"{ranks.path} has the layers {sorted(numbers)} in one model chunk, which must be counted from 0"
            )
        stacked.num_layers[of] = before.get(of, 0) + len(numbers)


def whole_shape(key: Key, shards: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Of the tensor ``key`` that these shards make, with padding."""
    shape, axis = list(shards[0].shape), split_axis(key.name)
    if axis is not None and axis < len(shape):  # else it is of another model, which is said later
        shape[axis] *= len(shards)
    return tuple(shape)


def merged(key: Key, shards: Shards, model: ModelConfig, version: float) -> torch.Tensor:
    """The whole tensor, its rows in Megatron-Core's order."""
    axis = split_axis(key.name)
    if axis is None:
        return shards[0]
    kinds = 3 if ".linear_qkv." in key.name else 2 if ".linear_kv." in key.name else 0
    if kinds and version < 2.0:
        heads, width, columns = model.num_attention_heads // len(shards), model.kv_channels, shards[0].shape[1:]
        sizes, axes = ((heads, width, kinds), (1, 2)) if version == 1.0 else ((kinds, heads, width), (0, 1))
        shards = tuple(each.view(*sizes, *columns).transpose(*axes) for each in shards)
        return torch.cat([each.reshape(-1, *columns) for each in shards])
    if model.gated_linear_unit and ".linear_fc1." in key.name:
        # Each shard has its part of the gates, then its part of the other branch.
        branches = [each.chunk(2) for each in shards]
        return torch.cat([branch[number] for number in (0, 1) for branch in branches])
    return shards[0] if len(shards) == 1 else torch.cat(shards, dim=axis)


# ---- the source -----------------------------------------------------------------------------------------------------

_HEADS = ("lm_head.", "pooler.", "binary_head.", "classification_head.", "token_head.", _OUTPUT_BIAS.name)
"""Of a BERT; which of them a model has depends on its task."""


def open_megatron_lm(path: Path, config: Path | None = None) -> MegatronLMSource:
    """Look at a legacy checkpoint.

    Args:
        path: Its folder or file.
        config: A Hugging Face ``config.json``, or a folder with one; None: as the checkpoint's arguments say.

    Raises:
        CheckpointError: If it is damaged, incomplete or unsafe.
        ConfigError: If the config cannot be honoured.
    """
    ranks = read_ranks(path)
    first = ranks.states[0, 0]
    for name, there in (
        ("model_parallel_size", ranks.tp),
        ("tensor_model_parallel_size", ranks.tp),
        ("pipeline_model_parallel_size", ranks.pp),
    ):
        wanted = first.arguments.get(name)
        if type(wanted) is int and wanted > there:
            raise CheckpointError(
                f"{path} was written with {name}={wanted} and has the files of {there}; give the folder of all ranks, "
                "with those that are missing"
            )
    hf_config = config_object(config) if config is not None else own_config(first.arguments)
    architecture = architecture_of(ranks)
    if hf_config is not None:
        architecture = family_of(hf_config.model_type).model_config(hf_config).architecture
    stacked = stack(ranks, architecture)
    shapes = Shapes(of={key: whole_shape(key, shards) for key, shards in stacked.tensors.items()}, tp=ranks.tp)
    if hf_config is None:
        hf_config = told_config(path, first.arguments, shapes)
    family = family_of(hf_config.model_type)
    model = family.model_config(hf_config)
    outside = [Key(rule.megatron) for rule in rules_of(model) if LAYER not in rule.hugging_face[0]]
    if model.architecture == "bert" and not all(key in shapes.of for key in outside):
        model = family.model_config(hf_config, bert_task(shapes))
    if model.architecture == "t5" and _OUTPUT in shapes.of:
        model = replace(model, share_embeddings_and_output_weights=False)  # its config cannot say it: families/t5.py
    if config is None and HUGGING_FACE_CONFIG in first.arguments:
        model = variant_of(model, first.arguments)
    is_of_core = not any(name.startswith("language_model.") for name in first.chunks[0])
    version = 3.0 if is_of_core else first.version
    _check_version(version, model, ranks.tp)
    return MegatronLMSource(ranks.path, model, hf_config, first.iteration, stacked=stacked, version=version)


def _check_version(version: float, model: ModelConfig, tp: int) -> None:
    """Raise if it is not known how the rows of ``model`` are ordered on ``tp`` ranks."""
    if version not in (0, 1, 2, 3):
        raise CheckpointError(f"checkpoint_version={version:g} is unknown; known are 0, 1, 2, 3")
    if version < 2.0 and model.num_query_groups != model.num_attention_heads:
        raise CheckpointError(
            f"checkpoint_version={version:g} has no query groups, and the model has; correct its description"
        )
    if version < 2.0 and model.num_attention_heads % tp != 0:
        raise CheckpointError(
            f"num_attention_heads: expected a multiple of the checkpoint's tp={tp}, got {model.num_attention_heads}; "
            "give the config.json that belongs to it with --config"
        )


class MegatronLMSource(Source):
    """The weights of a legacy checkpoint.

    Args:
        path: The folder or file.
        model: Its description, with the head that is there.
        hf_config: The Hugging Face config object of ``model``.
        iteration: Steps done when it was written.
        stacked: Its tensors.
        version: Which order the rows of queries, keys and values have.
    """

    kind = OF_MEGATRON_LM

    def __init__(
        self, path: Path, model: ModelConfig, hf_config: Any, iteration: int, *, stacked: Stacked, version: float
    ) -> None:
        folders = (path, path.parent) if path.is_dir() else ()
        companions = next((folder for folder in folders if companion_files(folder)), None)
        super().__init__(path, model, hf_config, iteration, companions)
        self._stacked = stacked
        self._version = version

    @property
    def dtype(self) -> torch.dtype:
        """Of the largest tensor."""
        return max((shards[0] for shards in self._stacked.tensors.values()), key=lambda shard: shard.nbytes).dtype

    def match(self, expected: Mapping[Key, tuple[int, ...]]) -> dict[Key, torch.dtype]:
        """See ``Source``; tensors that several stages have must be the same on all of them."""
        tensors, model = self._stacked.tensors, self.model
        superfluous = [key for key in tensors if key not in expected and self._may_be_left_out(key)]
        found = {
            key: (whole_shape(key, shards), shards[0].dtype)
            for key, shards in tensors.items()
            if key not in superfluous
        }
        if problems := check_same(found, expected):
            raise CheckpointError(
                f"{self.path} is not of this {model.family} model ({model.task}), {problems}. Give the config that "
                "belongs to it with --config, and all of its files"
            )
        if model.architecture == "bert" and superfluous:
            _log.warning("of another head in %s and left out: %s", self.path, ", ".join(map(str, superfluous)))
        copies = list(self._stacked.copies)
        if _OUTPUT in superfluous:
            copies.append((EMBEDDING, tensors[_OUTPUT]))
        for key, copy in copies:
            if key not in tensors:
                raise CheckpointError(f"{self.path} has a copy of {key} and not the tensor itself; copy it again")
            if not all(map(torch.equal, tensors[key], copy)):
                raise CheckpointError(
                    f"the stages of {self.path} disagree in {key}, of which both have a copy; it is damaged, or a "
                    "mixture of several checkpoints"
                )
        return {key: dtype for key, (_, dtype) in found.items()}

    def _may_be_left_out(self, key: Key) -> bool:
        """Whether the model has no use for a tensor that it has not."""
        if key == _OUTPUT:
            return self.model.share_embeddings_and_output_weights  # of the last stage: a copy, which is compared
        if self.model.architecture == "bert":
            return key.name.startswith(_HEADS)
        # Megatron-LM's T5 has it, Hugging Face's has not: zeros do nothing.
        is_t5 = self.model.architecture == "t5" and key == _OUTPUT_BIAS
        return is_t5 and not any(bool(shard.any()) for shard in self._stacked.tensors[key])

    def fill(self, shard: Shard) -> None:
        """See ``Source``."""
        key = shard.place.key
        fill_from_whole(shard, merged(key, self._stacked.tensors[key], self.model, self._version))
