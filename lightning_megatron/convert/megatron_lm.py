"""Legacy checkpoints of Megatron-LM (one pickle per rank): loads any version, layout and release; saves version 3.0.

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

Megatron-LM's pipeline split: all stages have the same number of layers, except that the first and last may differ
(``--decoder-first-pipeline-num-layers`` and ``--decoder-last-pipeline-num-layers``). With virtual stages, stage p holds
the chunks p, p + pp, p + 2 pp, ... An encoder-decoder is split between its stacks: stages before
``--pipeline-model-parallel-split-rank`` hold encoder layers.
"""

from __future__ import annotations

import functools
import itertools
import logging
import lzma
import re
import shutil
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch

from lightning_megatron.checkpoint.pickles import read_pickle
from lightning_megatron.convert.family import VOCABULARY
from lightning_megatron.convert.hugging_face import companion_files
from lightning_megatron.convert.megatron_arguments import (
    arguments_of,
    describe_model,
    megatron_arguments,
    metadata_of,
)
from lightning_megatron.convert.shards import (
    NO_WEIGHTS,
    Key,
    Region,
    Shard,
    Source,
    Stored,
    progress_bar,
    shards_of,
)
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import CheckpointError, ConfigError, require_divides
from lightning_megatron.models.config import Architecture, ModelConfig
from lightning_megatron.models.t5_layout import layer_ranges
from lightning_megatron.storage.publish import failures_as_errors

MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
"""Name of a rank's file; the second one with the distributed optimizer of 2022."""
HEAD_COPY = "word_embeddings_for_head.weight"
"""The last pipeline stage's copy of tied embeddings, with the same values as the first stage's."""
EMBEDDING, _OUTPUT, _OUTPUT_BIAS = (Key(name) for name in VOCABULARY)
_HEADS = (
    "lm_head.",
    "pooler.",
    "binary_head.",
    "classification_head.",
    "token_head.",
    _OUTPUT_BIAS.name,
)
"""Prefixes of tensors of BERT's heads; the task decides which of them a model has."""
_MAX_NAMES = 5
TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""Tracker file: contains the last saved iteration, or ``release``."""

_log = logging.getLogger(__name__)


# ---- names ----------------------------------------------------------------------------------------------------------

_LAYER_NAMES = {
    "final_layernorm.": "final_layernorm. final_norm.",
    "self_attention.linear_qkv.layer_norm_": "input_layernorm. input_norm. self_attention.layernorm_qkv.layer_norm_",
    "self_attention.linear_qkv.": (
        "self_attention.query_key_value. attention.query_key_value. self_attention.layernorm_qkv."
    ),
    "self_attention.linear_proj.": "self_attention.dense. attention.dense. self_attention.proj.",
    "mlp.linear_fc1.layer_norm_": (
        "post_attention_layernorm. post_attention_norm. pre_mlp_layernorm. layernorm_mlp.layer_norm_"
    ),
    "mlp.linear_fc1.": "mlp.dense_h_to_4h. layernorm_mlp.fc1_",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h. layernorm_mlp.fc2_",
}
"""Megatron-Core's name in a layer, before ``weight`` and ``bias``, to the legacy names; the first one is saved."""
_DECODER_NAMES = {
    **_LAYER_NAMES,
    "pre_cross_attn_layernorm.": "post_attention_layernorm.",
    "cross_attention.linear_q.": "inter_attention.query.",
    "cross_attention.linear_kv.": "inter_attention.key_value.",
    "cross_attention.linear_proj.": "inter_attention.dense.",
    "mlp.linear_fc1.layer_norm_": "post_inter_attention_layernorm.",
}
"""Names in a decoder with cross-attention, where the norm of the MLP has another legacy name."""
_OTHER_NAMES = {
    "lm_head.layer_norm.": "lm_head.layernorm. lm_head.norm.",
    "classification_head.dense.": "classification_head.",
    "token_head.dense.": "token_head.",
    "output_layer.": "lm_head. lm_head.output_layer.",  # only its bias
}
_STACKED = re.compile(r"(encoder|transformer|decoder)\.(layers\.)?(?:(\d{1,9})\.)?(.+)")


def _translate(name: str, stack: str | None, architecture: Architecture, *, writes: bool) -> str:
    """Translate a legacy tensor name to Megatron-Core's or, with ``writes``, Megatron-Core's to the legacy name."""
    modules = _OTHER_NAMES if stack is None else _LAYER_NAMES
    if (stack, architecture) == ("decoder", "t5"):
        modules = _DECODER_NAMES
    if writes:
        names = {core: legacy.split()[0] for core, legacy in modules.items()}
    else:
        names = {name: core for core, legacy in modules.items() for name in legacy.split()}
    module, kind = (
        re.split(r"(?=(?:weight|bias)$)", name) if name.endswith(("weight", "bias")) else (name, "")
    )
    return names.get(module, module) + kind


def _key_of(legacy: str, architecture: Architecture) -> Key:
    """Megatron-Core's key of the legacy tensor name; the layer index counts from 0 in the file."""
    if legacy == HEAD_COPY:
        return EMBEDDING
    name = legacy.removeprefix("language_model.")
    stacked = _STACKED.fullmatch(name)
    if stacked is None:
        return Key(_translate(name, None, architecture, writes=False))
    stack = {"gpt": "decoder", "bert": "encoder"}.get(architecture) or stacked[1].replace(
        "transformer", "encoder"
    )
    inside = _translate(stacked[4], stack, architecture, writes=False)
    return Key(f"{stack}.{stacked[2] or ''}{inside}", int(stacked[3]) if stacked[3] else None)


def legacy_name(key: Key, architecture: Architecture) -> str:
    """Flat legacy name to save a tensor under; the layer index counts from 0 in the file."""
    stacked = _STACKED.fullmatch(key.name)
    if stacked is None:
        is_head = (
            key != _OUTPUT and key.name.startswith(_HEADS) and not key.name.startswith("pooler.")
        )
        return (
            _translate(key.name, None, architecture, writes=True)
            if is_head
            else f"language_model.{key.name}"
        )
    stack = stacked[1] if architecture == "t5" else "encoder"
    layers = "" if key.layer is None else f"layers.{key.layer}."
    return f"language_model.{stack}.{layers}{_translate(stacked[4], stacked[1], architecture, writes=True)}"


def split_axis(name: str) -> int | None:
    """Axis along which tensor parallelism shards the tensor of this Megatron-Core name; None if it is replicated."""
    if name in VOCABULARY or re.search(r"\.linear_(?:qkv|q|kv|fc1)\.(?:weight|bias)$", name):
        return 0
    return 1 if name.endswith((".linear_proj.weight", ".linear_fc2.weight")) else None


# ---- files ----------------------------------------------------------------------------------------------------------

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_CHUNK = re.compile(r"model(\d{0,9})")
_MAX_EXPANSION = 20
"""Maximum ratio of unpacked to packed bytes of a zip file; weights hardly compress."""
_ZIP_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
"""Exceptions raised by reading damaged zip files."""

_Rank = tuple[int, int]
"""(tensor-parallel rank, pipeline-parallel rank)."""


class RankState(NamedTuple):
    """Content of the file of one rank; its tensors are memory-mapped, not read."""

    metadata: Mapping[str, Any]
    """Entries other than weights: ``args`` (not in the oldest files), ``checkpoint_version``, ``iteration``, ..."""
    version: float
    """Checkpoint version, which determines the row order of the fused QKV weight."""
    chunks: tuple[Mapping[str, torch.Tensor], ...]
    """Weights of each model chunk by flat name, in the order of the file."""


def rank_folder(tensor: int, stage: int, pp: int) -> str:
    """Name of a rank's directory."""
    return f"mp_rank_{tensor:02d}" if pp == 1 else f"mp_rank_{tensor:02d}_{stage:03d}"


def _rank_files(path: Path) -> dict[_Rank, Path]:
    """Model file of each rank in a directory, or the given file; directories without one hold optimizer state only."""
    if path.is_file():
        return {(0, 0): path}
    matches = {folder: _RANK.fullmatch(folder.name) for folder in sorted(path.glob("mp_rank_*"))}
    folders = {(int(m[1]), int(m[2] or 0)): folder for folder, m in matches.items() if m} or {
        (0, 0): path
    }
    files = {rank: [folder / name for name in MODEL_FILES] for rank, folder in folders.items()}
    return {
        rank: file for rank, names in files.items() for file in reversed(names) if file.is_file()
    }


def is_legacy(path: Path) -> bool:
    """Whether ``path`` looks like a legacy checkpoint; the content of a file is not checked."""
    return path.suffix in (".pt", ".zip") if path.is_file() else bool(_rank_files(path))


def _sizes(ranks: Collection[_Rank]) -> tuple[int, int]:
    """(tp, pp) of the checkpoint with these ranks."""
    return 1 + max(tensor for tensor, _ in ranks), 1 + max(stage for _, stage in ranks)


def read_ranks(path: Path) -> dict[_Rank, RankState]:
    """Open the files of all ranks of a checkpoint in a directory, file or zip archive.

    An archive is unpacked into temporary files, which stay mapped; paths in the archive are not used as paths on disk.

    Raises:
        CheckpointError: If there is no checkpoint, or a rank is missing, damaged or unsafe.
    """
    with tempfile.TemporaryDirectory(prefix="lightning_megatron_") as temporary:
        is_zip = path.is_file() and path.suffix == ".zip"
        if not (files := _rank_files(_unpack(path, Path(temporary)) if is_zip else path)):
            raise CheckpointError(
                f"{path} is no checkpoint of Megatron-LM: it has no directories mp_rank_TT[_PPP] with {MODEL_FILES[0]}"
            )
        tp, pp = _sizes(files)
        if (
            len(files) < tp * pp
        ):  # compared before any loop over ranks: a number in a name can be huge
            absent = next((t, p) for t in range(tp) for p in range(pp) if (t, p) not in files)
            raise CheckpointError(
                f"{path} lacks the file of {rank_folder(*absent, pp)}: there are {len(files)} of tp={tp} x pp={pp}; "
                "copy the whole checkpoint"
            )
        return {rank: _read_rank(file) for rank, file in files.items()}


def _unpack(archive: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(archive) as opened:
            num_bytes = sum(info.file_size for info in opened.infolist())
            if num_bytes > _MAX_EXPANSION * archive.stat().st_size:
                raise OSError(f"its members would take {num_bytes:,} bytes")
            for info in opened.infolist():
                name = PurePosixPath(info.filename)
                if name.name in MODEL_FILES:
                    rank = folder / (
                        name.parent.name if _RANK.fullmatch(name.parent.name) else "mp_rank_00"
                    )
                    rank.mkdir()
                    with opened.open(info) as source, (rank / MODEL_FILES[0]).open("wb") as target:
                        shutil.copyfileobj(source, target, 1 << 24)
    except FileExistsError:
        raise CheckpointError(
            f"zip file {archive} has several checkpoints; unpack it, and give one of them"
        ) from None
    except _ZIP_ERRORS as error:
        raise CheckpointError(
            f"zip file {archive} cannot be unpacked ({error}); fetch it again"
        ) from None
    return folder


def _read_rank(file: Path) -> RankState:
    """Open the file of one rank.

    Raises:
        CheckpointError: If the file is damaged, could run code, or is no checkpoint of Megatron-LM.
    """
    state = read_pickle(file)
    state = state if isinstance(state, Mapping) else {}
    models = {
        int(name[1] or 0): value
        for key, value in state.items()
        if (name := _CHUNK.fullmatch(str(key)))
    }
    chunks = tuple(dict(_flatten(models.get(index))) for index in range(len(models)))
    version = state.get("checkpoint_version", 0)
    if not chunks or not all(chunks) or type(version) not in (int, float):
        named = ", ".join(repr(str(name)[:40]) for name in list(state)[:_MAX_NAMES]) or "nothing"
        raise CheckpointError(
            f"{file}: expected a file of Megatron-LM ('model' or 'model0', 'model1', ... with tensors in it, and a "
            f"number as checkpoint_version), got {named}; give another file"
        )
    metadata = {
        str(name): value for name, value in state.items() if not _CHUNK.fullmatch(str(name))
    }
    return RankState(metadata, float(version), chunks)


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _flatten(child, f"{name}.{key}" if name else str(key))
    elif isinstance(value, torch.Tensor) and not NO_WEIGHTS.search(name):
        yield name, value


# ---- from ranks to full tensors -------------------------------------------------------------------------------------

Shards = tuple[torch.Tensor, ...]
"""Shards of one tensor, of all tensor-parallel ranks."""


def collect_tensors(
    path: Path, ranks: Mapping[_Rank, RankState]
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
    first, (tp, pp) = ranks[0, 0], _sizes(ranks)
    for (tensor, stage), state in ranks.items():
        fits_first = (len(state.chunks), state.version) == (len(first.chunks), first.version)
        if not fits_first or _shapes(state) != _shapes(ranks[0, stage]):
            raise CheckpointError(
                f"{path} is a mixture: {rank_folder(tensor, stage, pp)} has other tensors or another version than "
                f"{rank_folder(0, stage if fits_first else 0, pp)}; copy it again"
            )
    names = {name for state in ranks.values() for chunk in state.chunks for name in chunk}
    # GPT and BERT have the same layers and differ outside of them.
    bert_only = (
        "lm_head.",
        "binary_head.",
        "pooler.",
        "language_model.pooler.",
        "classification_head.",
        "encoder.",
    )
    is_bert = any(name.startswith(bert_only) or ".tokentype_embeddings." in name for name in names)
    is_t5 = any(".inter_attention." in name or ".cross_attention." in name for name in names)
    architecture: Architecture = "t5" if is_t5 else "bert" if is_bert else "gpt"
    collected: dict[Key, list[tuple[str, Shards]]] = {}
    num_layers: Counter[str] = Counter()
    for chunk, stage in itertools.product(range(len(first.chunks)), range(pp)):
        before = num_layers.copy()
        states = [ranks[tensor, stage].chunks[chunk] for tensor in range(tp)]
        for name in states[0]:
            shards = tuple(state[name] for state in states)
            key = _key_of(name, architecture)
            if key.layer is not None:
                stack = key.name.split(".")[0]
                layer = key.layer + before[stack]
                num_layers[stack] = max(num_layers[stack], layer + 1)
                name = name.replace(f".layers.{key.layer}.", f".layers.{layer}.", 1)
                key = key._replace(layer=layer)
            collected.setdefault(key, []).append((name, shards))
    return collected


def _shapes(state: RankState) -> list[dict[str, tuple[torch.Size, torch.dtype]]]:
    return [
        {name: (tensor.shape, tensor.dtype) for name, tensor in chunk.items()}
        for chunk in state.chunks
    ]


def _stored_tensor(key: Key, copies: list[tuple[str, Shards]]) -> Stored:
    """Full shape, padding included, and dtype of a tensor; ``location`` is the list of its copies."""
    shards = copies[0][1]
    shape, axis = list(shards[0].shape), split_axis(key.name)
    if axis is not None and axis < len(shape):  # else of another model, which raises later
        shape[axis] *= len(shards)
    return Stored(tuple(shape), shards[0].dtype, copies)


def merge(key: Key, shards: Shards, model: ModelConfig, version: float) -> torch.Tensor:
    """Concatenate the shards of a tensor, with rows in Megatron-Core's order."""
    axis = split_axis(key.name)
    if axis is None:
        return shards[0]
    if ".linear_qkv." in key.name and version < 2.0:
        heads, width, columns = (
            model.num_attention_heads // len(shards),
            model.kv_channels,
            shards[0].shape[1:],
        )
        sizes, axes = ((heads, width, 3), (1, 2)) if version == 1.0 else ((3, heads, width), (0, 1))
        shards = tuple(shard.view(*sizes, *columns).transpose(*axes) for shard in shards)
        return torch.cat([shard.reshape(-1, *columns) for shard in shards])
    if model.gated_linear_unit and ".linear_fc1." in key.name:
        # Each shard has its part of the gate projection, then its part of the up projection.
        branches = [shard.chunk(2) for shard in shards]
        return torch.cat([branch[index] for index in (0, 1) for branch in branches])
    return shards[0] if len(shards) == 1 else torch.cat(shards, dim=axis)


# ---- the source -----------------------------------------------------------------------------------------------------


class MegatronLMSource(Source):
    """Weights of a legacy checkpoint of Megatron-LM."""

    kind = "checkpoint of Megatron-LM"

    def __init__(self, path: Path) -> None:
        """Open and memory-map the files of all ranks; see ``Source``."""
        super().__init__(path)
        ranks = read_ranks(path)
        first, (self._tp, self._pp) = ranks[0, 0], _sizes(ranks)
        self._arguments, self._version = arguments_of(first.metadata), first.version
        if not any(name.startswith("language_model.") for name in first.chunks[0]):
            self._version = 3.0  # Megatron-Core's names: saved without version, rows as in 3.0
        self._found = {
            key: _stored_tensor(key, copies) for key, copies in collect_tensors(path, ranks).items()
        }
        self.stored = {tensor.location[0][0]: tensor for tensor in self._found.values()}
        iterations = (first.metadata.get("iteration"), self._arguments.get("iteration"))
        self.iteration = next(
            (value for value in iterations if type(value) is int and value > 0), 0
        )
        folders = (path, path.parent) if path.is_dir() else ()
        self.companions = next((folder for folder in folders if companion_files(folder)), None)
        layout = {
            "tp": self._tp,
            "pp": self._pp,
            **({"vpp": len(first.chunks)} if len(first.chunks) > 1 else {}),
        }
        state = first.metadata
        others = [name for name in state if name not in ("args", "iteration", "checkpoint_version")]
        self.metadata = {
            **metadata_of(state),
            "checkpoint_version": first.version,
            "layout": layout,
            "others": others,
        }

    def describe(self, config: Path | None) -> None:
        """See ``Source``."""
        for name, found in (
            ("tensor_model_parallel_size", self._tp),
            ("pipeline_model_parallel_size", self._pp),
        ):
            if type(size := self._arguments.get(name)) is int and size > found:
                raise CheckpointError(
                    f"{self.path} was written with {name}={size} and has the files of {found}; give the directory of "
                    "all ranks, with those that are missing"
                )
        shapes = {key: tensor.shape for key, tensor in self._found.items()}
        self.model, self.hf_config = describe_model(
            self._arguments, shapes, self._tp, config, self.path
        )
        heads, groups, version = (
            self.model.num_attention_heads,
            self.model.num_query_groups,
            self._version,
        )
        if version not in (0, 1, 2, 3):
            raise CheckpointError(
                f"checkpoint_version={version:g} is unknown; known are 0, 1, 2, 3"
            )
        if version < 2.0 and (groups != heads or heads % self._tp != 0):
            raise CheckpointError(
                f"num_attention_heads: expected a multiple of the checkpoint's tp={self._tp}, and of checkpoint_version"
                f"={version:g} as many keys, got {heads} and {groups}; give the config.json that "
                "belongs to it with --config"
            )

    def match(self, expected: Mapping[Key, tuple[int, ...]]) -> dict[Key, torch.dtype]:
        """See ``Source``; copies of a tensor on several pipeline stages must be equal."""
        optional: tuple[str, ...] = _HEADS if self.model.architecture == "bert" else ()
        if self.model.share_embeddings_and_output_weights:
            optional += (_OUTPUT.name,)  # the last stage's copy, compared below
        ignored = [
            key for key in self._found if key not in expected and key.name.startswith(optional)
        ]
        found = {key: tensor for key, tensor in self._found.items() if key not in ignored}
        self.check(found, expected)
        if self.model.architecture == "bert" and ignored:
            _log.warning(
                "of another head in %s and left out: %s", self.path, ", ".join(map(str, ignored))
            )
        for key, tensor in self._found.items():
            (_, first), *copies = tensor.location
            if key == EMBEDDING and _OUTPUT in ignored:
                copies += self._found[_OUTPUT].location
            if not all(all(map(torch.equal, first, copy)) for _, copy in copies):
                raise CheckpointError(
                    f"the pipeline stages of {self.path} have different copies of {key}; it is damaged, or a mixture "
                    "of several checkpoints"
                )
        return {key: tensor.dtype for key, tensor in found.items()}

    def read(self, region: Region) -> torch.Tensor:
        """See ``Source``."""
        return merge(region.key, self._found[region.key].location[0][1], self.model, self._version)[
            region.slices
        ]


# ---- saving ---------------------------------------------------------------------------------------------------------

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
    with progress_bar("saving weights", sum(shard.data.nbytes for shard in local)) as bar:
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


# ---- tensors --------------------------------------------------------------------------------------------------------


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


# ---- pipeline stages ------------------------------------------------------------------------------------------------


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
