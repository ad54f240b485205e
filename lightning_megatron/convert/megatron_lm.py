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

import logging
import lzma
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from lightning_megatron.convert.family import LAYER, VOCABULARY
from lightning_megatron.convert.hugging_face import companion_files
from lightning_megatron.convert.megatron_arguments import arguments_of, bert_task, described_by
from lightning_megatron.convert.registry import family_of, rules_of
from lightning_megatron.convert.shards import Key, Place, Source, Stored, mismatches
from lightning_megatron.engine.pickles import read_pickle
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import Architecture, ModelConfig

OF_MEGATRON_LM = "checkpoint of Megatron-LM"
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
"""What a rank's file is called; the second one with the distributed optimizer of 2022."""
HEAD_COPY = "word_embeddings_for_head.weight"
"""The last pipeline stage's copy of tied embeddings; the same numbers as the first stage's."""
EMBEDDING, _OUTPUT, _OUTPUT_BIAS = (Key(name) for name in VOCABULARY)
_HEADS = ("lm_head.", "pooler.", "binary_head.", "classification_head.", "token_head.", _OUTPUT_BIAS.name)
"""Of a BERT; which of them a model has depends on its task."""
_MOST_NAMED = 5

_log = logging.getLogger(__name__)


# ---- names ----------------------------------------------------------------------------------------------------------

_IN_A_STACK: Mapping[str, tuple[str, ...]] = {
    "final_layernorm.": ("final_layernorm.", "final_norm."),
    "self_attention.linear_qkv.layer_norm_": (
        *("input_layernorm.", "input_norm."),
        "self_attention.layernorm_qkv.layer_norm_",
    ),
    "self_attention.linear_qkv.": (
        *("self_attention.query_key_value.", "attention.query_key_value."),
        "self_attention.layernorm_qkv.",
    ),
    "self_attention.linear_proj.": ("self_attention.dense.", "attention.dense.", "self_attention.proj."),
    "mlp.linear_fc1.layer_norm_": (
        *("post_attention_layernorm.", "post_attention_norm.", "pre_mlp_layernorm."),
        "layernorm_mlp.layer_norm_",
    ),
    "mlp.linear_fc1.": ("mlp.dense_h_to_4h.", "layernorm_mlp.fc1_"),
    "mlp.linear_fc2.": ("mlp.dense_4h_to_h.", "layernorm_mlp.fc2_"),
}
"""What stands before ``weight`` and ``bias`` in Megatron-Core's name and in the legacy ones; the first is written."""
_WITH_CROSS_ATTENTION: Mapping[str, tuple[str, ...]] = {
    **_IN_A_STACK,
    "pre_cross_attn_layernorm.": ("post_attention_layernorm.", "post_attention_norm."),
    "cross_attention.linear_q.": ("inter_attention.query.",),
    "cross_attention.linear_kv.": ("inter_attention.key_value.",),
    "cross_attention.linear_proj.": ("inter_attention.dense.",),
    "mlp.linear_fc1.layer_norm_": (
        *("post_inter_attention_layernorm.", "post_inter_attention_norm."),
        "pre_mlp_layernorm.",
    ),
}
"""Of a decoder that reads an encoder's output: its MLP's norm has another name."""
_OUTSIDE: Mapping[str, tuple[str, ...]] = {
    "lm_head.layer_norm.": ("lm_head.layernorm.", "lm_head.norm."),
    "classification_head.dense.": ("classification_head.",),
    "token_head.dense.": ("token_head.",),
    "output_layer.": ("lm_head.", "lm_head.output_layer."),  # the bias only
}
_STACKED = re.compile(r"(encoder|transformer|decoder)\.(layers\.)?(?:(\d+)\.)?(.+)")
_MODULE = re.compile(r"(.*?)(weight|bias)")
_NO_WEIGHTS = re.compile(r"(^|\.)(_extra_state|inv_freq|masked_bias|position_ids|attention\.bias)$|\._extra_state")
"""Buffers that some release put among the weights."""


def _modules(stack: str, architecture: Architecture) -> Mapping[str, tuple[str, ...]]:
    return _WITH_CROSS_ATTENTION if (stack, architecture) == ("decoder", "t5") else _IN_A_STACK


def _key_of(legacy: str, architecture: Architecture) -> Key:
    """What Megatron-Core calls the tensor ``legacy``, if it has it; its layer is counted from 0 in the file."""

    def renamed(name: str, modules: Mapping[str, tuple[str, ...]]) -> str:
        module = _MODULE.fullmatch(name)
        core = next((core for core, names in modules.items() if module and module[1] in names), None)
        return f"{core}{module[2]}" if module and core else name

    if legacy == HEAD_COPY:
        return EMBEDDING
    name = legacy.removeprefix("language_model.")
    stacked = _STACKED.fullmatch(name)
    if stacked is None:
        return Key(renamed(name, _OUTSIDE))
    stack = {"gpt": "decoder", "bert": "encoder"}.get(architecture) or stacked[1].replace("transformer", "encoder")
    inside = renamed(stacked[4], _modules(stack, architecture))
    return Key(f"{stack}.{stacked[2] or ''}{inside}", int(stacked[3]) if stacked[3] else None)


def written_name(key: Key, architecture: Architecture) -> str:
    """The flat name under which a tensor is written; its layer is counted from 0 in the file."""

    def written(name: str, modules: Mapping[str, tuple[str, ...]]) -> str:
        module = _MODULE.fullmatch(name)
        assert module is not None, name
        return f"{modules.get(module[1], (module[1],))[0]}{module[2]}"

    stacked = _STACKED.fullmatch(key.name)
    if stacked is None:
        if key != _OUTPUT and key.name.startswith(_HEADS) and not key.name.startswith("pooler."):
            return written(key.name, _OUTSIDE)
        return f"language_model.{key.name}"
    stack = stacked[1] if architecture == "t5" else "encoder"
    layers = "" if key.layer is None else f"layers.{key.layer}."
    return f"language_model.{stack}.{layers}{written(stacked[4], _modules(stacked[1], architecture))}"


def split_axis(name: str) -> int | None:
    """Along which axis tensor parallelism splits a tensor with Megatron-Core's name; None if it does not."""
    if name in VOCABULARY or re.search(r"\.linear_(?:qkv|q|kv|fc1)\.(?:weight|bias)$", name):
        return 0
    return 1 if name.endswith((".linear_proj.weight", ".linear_fc2.weight")) else None


# ---- files ----------------------------------------------------------------------------------------------------------

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
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


def rank_folder(tensor: int, stage: int, pp: int) -> str:
    """Name of the folder of a rank."""
    return f"mp_rank_{tensor:02d}" if pp == 1 else f"mp_rank_{tensor:02d}_{stage:03d}"


def is_legacy(path: Path) -> bool:
    """Whether ``path`` looks like a legacy checkpoint, in any of the known forms."""
    if path.is_file():
        return path.suffix == ".pt" or (path.suffix == ".zip" and bool(_members(path)))  # one file has any name
    return bool(_files_of_ranks(path)) or _model_file(path) is not None


def read_ranks(path: Path) -> Ranks:
    """The files of the checkpoint in a folder or file; their tensors are mapped, not read.

    Raises:
        CheckpointError: If there is none, or a rank is missing, damaged or unsafe.
    """
    if path.is_file():
        return _in_archive(path) if _members(path) else _whole(path, {(0, 0): path})
    own = _model_file(path)
    return _whole(path, _files_of_ranks(path) if own is None else {(0, 0): own})


def _model_file(folder: Path) -> Path | None:
    return next((folder / name for name in MODEL_FILES if (folder / name).is_file()), None)


def _files_of_ranks(folder: Path) -> dict[_Rank, Path]:
    """The model file of each rank; folders without one are of a distributed optimizer."""
    ranks = {each: _RANK.fullmatch(each.name) for each in folder.glob("mp_rank_*")}
    files = {(int(name[1]), int(name[2] or 0)): _model_file(each) for each, name in ranks.items() if name}
    return {rank: file for rank, file in files.items() if file is not None}


def _whole(path: Path, files: Mapping[_Rank, Path]) -> Ranks:
    """All ranks, unless one is missing."""
    if not files:
        raise CheckpointError(
            f"{path} is no checkpoint of Megatron-LM: it has no folders mp_rank_TT[_PPP] with {MODEL_FILES[0]}"
        )
    tp, pp = (1 + max(rank[axis] for rank in files) for axis in (0, 1))
    if len(files) < tp * pp:  # before they are named: a number can be anything
        absent = next((t, p) for t in range(tp) for p in range(pp) if (t, p) not in files)
        raise CheckpointError(
            f"{path} lacks the file of {rank_folder(*absent, pp)}: there are {len(files)} of tp={tp} x pp={pp}; copy "
            "the whole checkpoint"
        )
    return Ranks(path=path, tp=tp, pp=pp, states={rank: _read_rank(file) for rank, file in sorted(files.items())})


def _members(path: Path) -> list[tuple[str, zipfile.ZipInfo]]:
    """The files of ranks in a zip file, ``anything/mp_rank_TT[_PPP]/model_optim_rng.pt``, with the ranks' folders."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = [info for info in archive.infolist() if PurePosixPath(info.filename).name in MODEL_FILES]
    except _OF_DAMAGED_ZIP_FILES:
        return []
    folders = [PurePosixPath(info.filename).parent.name for info in found]
    return [(name if _RANK.fullmatch(name) else "mp_rank_00", info) for name, info in zip(folders, found, strict=True)]


def _in_archive(path: Path) -> Ranks:
    """Members are unpacked into temporary files, which stay mapped; names in the zip name no file."""
    with tempfile.TemporaryDirectory(prefix="lightning_megatron_") as temporary:
        try:
            with zipfile.ZipFile(path) as archive:
                for name, info in _members(path):
                    folder = Path(temporary, name)
                    if folder.exists():
                        raise CheckpointError(
                            f"zip file {path} has several checkpoints; unpack it, and give the folder of one"
                        )
                    folder.mkdir()
                    if info.file_size > (free := shutil.disk_usage(folder).free):
                        raise OSError(f"{info.file_size:,} bytes do not fit into {folder}, where {free:,} are free")
                    with archive.open(info) as source, (folder / MODEL_FILES[0]).open("wb") as target:
                        shutil.copyfileobj(source, target, 1 << 24)
        except CheckpointError:
            raise
        except _OF_DAMAGED_ZIP_FILES as error:
            raise CheckpointError(f"zip file {path} cannot be unpacked ({error}); fetch it again") from None
        return _whole(path, _files_of_ranks(Path(temporary)))


def _read_rank(file: Path) -> RankState:
    """What one file holds.

    Raises:
        CheckpointError: If it is damaged or could run code, or is no checkpoint of Megatron-LM.
    """
    state = read_pickle(file)
    state = state if isinstance(state, Mapping) else {}
    models = {int(name[1] or 0): value for key, value in state.items() if (name := _CHUNK.fullmatch(str(key)))}
    nested = [models.get(number) for number in range(len(models))]
    chunks = tuple(dict(_flat(each)) for each in nested if isinstance(each, Mapping))
    version = state.get("checkpoint_version", 0)
    if not chunks or not all(chunks) or len(chunks) < len(models) or type(version) not in (int, float):
        named = ", ".join(repr(str(name)[:40]) for name in list(state)[:_MOST_NAMED]) or "nothing"
        raise CheckpointError(
            f"{file}: expected a file of Megatron-LM ('model' or 'model0', 'model1', ... with tensors in it, and a "
            f"number as checkpoint_version), got {named}; give another file"
        )
    others = {str(name): value for name, value in state.items() if name != "args" and not _CHUNK.fullmatch(str(name))}
    return RankState(arguments=arguments_of(state), version=float(version), chunks=chunks, others=others)


def _flat(nested: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif isinstance(value, torch.Tensor) and not _NO_WEIGHTS.search(f"{before}{key}"):
            yield f"{before}{key}", value


# ---- from ranks to whole tensors ------------------------------------------------------------------------------------

Shards = tuple[torch.Tensor, ...]
"""Of one tensor, those of all tensor-parallel ranks."""


Stacked = dict[Key, list[tuple[str, Shards]]]
"""All tensors of a model, found in the files of its ranks: each with its name there, whose layer is counted over all
stages, and after it the copies that later stages have."""


def stored_in(stacked: Stacked) -> dict[Key, Stored]:
    """The whole tensors, with padding."""
    found = {}
    for key, ((_, shards), *_) in stacked.items():
        shape, axis = list(shards[0].shape), split_axis(key.name)
        if axis is not None and axis < len(shape):  # else it is of another model, which is said later
            shape[axis] *= len(shards)
        found[key] = Stored(tuple(shape), shards[0].dtype)
    return found


def architecture_of(ranks: Ranks) -> Architecture:
    """Decoder, encoder or both, by the names of tensors; GPT and BERT differ only around their layers."""
    states = [state for (tensor, _), state in ranks.states.items() if tensor == 0]
    names = {name for state in states for chunk in state.chunks for name in chunk}
    if any(".inter_attention." in name or ".cross_attention." in name for name in names):
        return "t5"
    of_bert = ("lm_head.", "binary_head.", "pooler.", "language_model.pooler.", "classification_head.", "encoder.")
    return "bert" if any(name.startswith(of_bert) or ".tokentype_embeddings." in name for name in names) else "gpt"


def stack(ranks: Ranks) -> Stacked:
    """Find all tensors of the model.

    Chunk v of stage p comes after chunk v of stage p - 1, and after chunk v - 1 of the last stage. How many layers each
    has is what its file says, so that they may differ.

    Raises:
        CheckpointError: If ranks do not fit together.
    """
    first, architecture = ranks.states[0, 0], architecture_of(ranks)
    for rank, state in ranks.states.items():
        if len(state.chunks) != len(first.chunks) or state.version != first.version:
            raise CheckpointError(
                f"{ranks.path} is a mixture: {rank_folder(*rank, ranks.pp)} has {len(state.chunks)} model chunks of "
                f"version {state.version:g}, mp_rank_00 {len(first.chunks)} of {first.version:g}; copy it again"
            )
    stacked: Stacked = {}
    num_layers: dict[str, int] = {}
    for chunk in range(len(first.chunks)):
        for stage in range(ranks.pp):
            before = dict(num_layers)
            for name, shards in _beside_each_other(ranks, chunk, stage).items():
                key = _key_of(name, architecture)
                if key.layer is not None:
                    of = key.name.split(".")[0]
                    layer = key.layer + before.get(of, 0)
                    num_layers[of] = max(num_layers.get(of, 0), layer + 1)
                    name = name.replace(f".layers.{key.layer}.", f".layers.{layer}.", 1)
                    key = key._replace(layer=layer)
                stacked.setdefault(key, []).append((name, shards))
    return stacked


def _beside_each_other(ranks: Ranks, chunk: int, stage: int) -> dict[str, Shards]:
    """The shards of all tensor-parallel ranks."""
    first, *others = (ranks.states[tensor, stage].chunks[chunk] for tensor in range(ranks.tp))
    for tensor, other in enumerate(others, 1):
        difference = sorted(set(first) ^ set(other)) or sorted(
            name for name in first if (first[name].shape, first[name].dtype) != (other[name].shape, other[name].dtype)
        )
        if difference:
            raise CheckpointError(
                f"{ranks.path} is a mixture: {rank_folder(0, stage, ranks.pp)} and "
                f"{rank_folder(tensor, stage, ranks.pp)} differ in {', '.join(difference[:_MOST_NAMED])}; copy it again"
            )
    return {name: (shard, *(other[name] for other in others)) for name, shard in first.items()}


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
    stacked = stack(ranks)
    shapes = {key: each.shape for key, each in stored_in(stacked).items()}
    model, hf_config = described_by(first.arguments, shapes, ranks.tp, config, path)
    outside = [Key(rule.megatron) for rule in rules_of(model) if LAYER not in rule.hugging_face[0]]
    if model.architecture == "bert" and not all(key in shapes for key in outside):
        model = family_of(model.family).model_config(hf_config, bert_task([key.name for key in shapes]))
    if model.architecture == "t5" and _OUTPUT in shapes:
        model = replace(model, share_embeddings_and_output_weights=False)  # its config cannot say it: families/t5.py
    is_of_core = not any(name.startswith("language_model.") for name in first.chunks[0])
    version, heads = 3.0 if is_of_core else first.version, model.num_attention_heads
    if version not in (0, 1, 2, 3):
        raise CheckpointError(f"checkpoint_version={version:g} is unknown; known are 0, 1, 2, 3")
    if version < 2.0 and (model.num_query_groups != heads or heads % ranks.tp != 0):
        raise CheckpointError(
            f"num_attention_heads: expected a multiple of the checkpoint's tp={ranks.tp}, and of checkpoint_version="
            f"{version:g} as many keys, got {heads} and {model.num_query_groups}; give the config.json that belongs to "
            "it with --config"
        )
    folders = (path, path.parent) if path.is_dir() else ()
    return MegatronLMSource(
        path=path,
        model=model,
        hf_config=hf_config,
        iteration=first.iteration,
        companions=next((folder for folder in folders if companion_files(folder)), None),
        stacked=stacked,
        version=version,
    )


@dataclass(kw_only=True, eq=False)
class MegatronLMSource(Source):
    """The weights of a legacy checkpoint."""

    kind: str = OF_MEGATRON_LM
    stacked: Stacked
    """Its tensors."""
    version: float
    """Which order the rows of queries, keys and values have."""

    @property
    def stored(self) -> Mapping[str, Stored]:
        """See ``Source``."""
        return {self.stacked[key][0][0]: each for key, each in stored_in(self.stacked).items()}

    def match(self, expected: Mapping[Key, tuple[int, ...]]) -> dict[Key, torch.dtype]:
        """See ``Source``; tensors that several stages have must be the same on all of them."""
        superfluous = [key for key in self.stacked if key not in expected and self._may_be_left_out(key)]
        found = {key: each for key, each in stored_in(self.stacked).items() if key not in superfluous}
        self.refuse(mismatches(found, expected))
        if self.model.architecture == "bert" and superfluous:
            _log.warning("of another head in %s and left out: %s", self.path, ", ".join(map(str, superfluous)))
        for key, ((_, first), *copies) in self.stacked.items():
            if key == EMBEDDING and _OUTPUT in superfluous:
                copies = [*copies, *self.stacked[_OUTPUT]]
            if not all(all(map(torch.equal, first, copy)) for _, copy in copies):
                raise CheckpointError(
                    f"the stages of {self.path} disagree in {key}, of which both have a copy; it is damaged, or a "
                    "mixture of several checkpoints"
                )
        return {key: each.dtype for key, each in found.items()}

    def _may_be_left_out(self, key: Key) -> bool:
        """Whether the model has no use for a tensor that it has not."""
        if key == _OUTPUT:
            return self.model.share_embeddings_and_output_weights  # of the last stage: a copy, which is compared
        if self.model.architecture == "bert":
            return key.name.startswith(_HEADS)
        # Megatron-LM's T5 has it, Hugging Face's has not: zeros do nothing.
        is_t5 = self.model.architecture == "t5" and key == _OUTPUT_BIAS
        return is_t5 and not any(bool(shard.any()) for shard in self.stacked[key][0][1])

    def parts(self, place: Place) -> Iterator[tuple[Any, torch.Tensor]]:
        """See ``Source``."""
        shards = self.stacked[place.key][0][1]
        yield slice(None), merged(place.key, shards, self.model, self.version)[place.slices]
