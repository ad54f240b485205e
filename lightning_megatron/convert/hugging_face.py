"""Hugging Face model directories: loaded into a live model, each rank its own rows, and saved from it by rank 0."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_megatron.checkpoint.files import failures_as_errors
from lightning_megatron.convert.family import Family
from lightning_megatron.convert.hugging_face_files import (
    CONFIG_FILE,
    INDEX_FILE,
    SHARD_FILE,
    WEIGHTS_FILE,
    StoredTensor,
    WeightFiles,
    copy_companions,
    open_weights,
)
from lightning_megatron.convert.registry import config_object, family_of, model_config, rules_of
from lightning_megatron.convert.rules import LAYER, Rule
from lightning_megatron.convert.shards import (
    FLOATS,
    Filling,
    Gathering,
    Key,
    Loading,
    Place,
    Shard,
    Source,
    padding,
    progress_bar,
)
from lightning_megatron.engine.collectives import on_all_ranks_alike
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.files import staged, sync
from lightning_megatron.models.config import ModelConfig

if TYPE_CHECKING:
    from huggingface_hub import StateDictSplit

_Contents = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of tensors by name."""

_log = logging.getLogger(__name__)


# ---- matching -------------------------------------------------------------------------------------------------------

_HEADS = (
    *("lm_head", "cls", "classifier", "score", "qa_outputs"),
    *("classification_head", "multiple_choice_head", "v_head"),
)
"""Where transformers keeps heads, beside the headless model."""
_BODY = ("embedding", "encoder", "decoder")
"""What Megatron's keys begin with unless the tensor belongs to a head or a pooler."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One tensor that the model has, under its Hugging Face name."""

    shape: tuple[int, ...]
    key: Key
    """Of Megatron's tensor that it is a part of."""

    @property
    def is_of_head(self) -> bool:
        """Whether it belongs to a head or a pooler, which a fine-tuned model may start anew."""
        return not self.key.name.startswith(_BODY)


@dataclass(kw_only=True)
class Match:
    """Which tensor of the files is which of the model's."""

    stored_name: dict[str, str] = field(default_factory=dict)
    """For each tensor of the model its name in the files; new ones are left out."""
    new: list[str] = field(default_factory=list)
    """Tensors of heads that the files lack altogether."""
    ignored: list[str] = field(default_factory=list)
    """Tensors of the files that belong to other heads."""
    copies: dict[str, str] = field(default_factory=dict)
    """Names in the files of tied tensors, and of what they must be equal to."""
    problems: list[str] = field(default_factory=list)
    """What is wrong, each with the name."""


def match(
    expected: Mapping[str, Expected], stored: Mapping[str, StoredTensor], family: Family, model: ModelConfig
) -> Match:
    """Find every tensor of ``model`` in the files, as transformers would, and everything that is wrong with them."""
    import transformers

    hf_class = getattr(transformers, family.architectures[model.task])
    tied = getattr(hf_class, "_tied_weights_keys", None)
    tied = dict(tied) if isinstance(tied, Mapping) else {}  # each copy's name -> what it is a copy of
    found, tensors = Match(), _renamed(stored, expected, family)
    for name in expected:
        candidates = [name, *(copy for copy, source in tied.items() if source == name and copy not in expected)]
        if (actual := next((tensors[each] for each in candidates if each in tensors), None)) is not None:
            found.stored_name[name] = actual
    is_headless = bool(family.base_prefix) and not any(name.startswith(family.base_prefix) for name in stored)
    _sort_missing(found, expected, may_be_new=is_headless or model.architecture == "bert")
    used = set(found.stored_name.values())
    extra = {name: actual for name, actual in tensors.items() if actual not in used}
    no_weights = getattr(hf_class, "_keys_to_ignore_on_load_unexpected", None) or ()
    others = {
        name
        for task in family.architectures
        for rule in family.rules(replace(model, task=task))
        for name in rule.hugging_face
        if LAYER not in name
    }
    for name, actual in extra.items():
        is_buffer = any(fnmatchcase(name, glob) or fnmatchcase(actual, glob) for glob in family.buffers)
        is_of_body = bool(family.base_prefix) and name.startswith(family.base_prefix)
        if is_buffer or any(re.search(pattern, name) for pattern in no_weights):
            continue
        if tied.get(name) in found.stored_name:
            found.copies[actual] = found.stored_name[tied[name]]
        elif name in others or (not is_of_body and name.split(".")[0] in _HEADS):
            found.ignored.append(actual)
        else:
            found.problems.append(f"{actual!r} is not part of the model")
    _compare(found, expected, stored)
    return found


def _renamed(stored: Collection[str], expected: Collection[str], family: Family) -> dict[str, str]:
    """Names as the model with its head has them -> names in the files."""
    names: dict[str, str] = {}
    for actual in stored:
        # As transformers does (conversion_mapping.py, "legacy"): TensorFlow's words in files of 2019.
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", actual)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        if name not in expected and family.base_prefix + name in expected:
            name = family.base_prefix + name
        names[name] = actual
    return names


def _sort_missing(found: Match, expected: Mapping[str, Expected], *, may_be_new: bool) -> None:
    """A head that the files lack altogether is new, unless it is the language model's own and they have its body."""

    def head_of(name: str) -> str:
        """Its module: ``cls.predictions`` of ``cls.predictions.transform.dense.weight``."""
        return ".".join(name.split(".")[:-1][:2])

    heads_there = {head_of(name) for name in found.stored_name}
    for name in expected.keys() - found.stored_name.keys():
        if may_be_new and expected[name].is_of_head and head_of(name) not in heads_there:
            found.new.append(name)
        else:
            found.problems.append(f"{name!r} is missing")
    places = {name: place for place, name in enumerate(expected)}
    found.new.sort(key=places.__getitem__)
    found.problems.sort(key=lambda problem: places[problem.split("'")[1]])


def _compare(found: Match, expected: Mapping[str, Expected], stored: Mapping[str, StoredTensor]) -> None:
    for name, actual in found.stored_name.items():
        tensor, shape = stored[actual], expected[name].shape
        if tensor.shape != shape:
            found.problems.append(f"{actual!r} has the shape {list(tensor.shape)} in the file, not {list(shape)}")
        if tensor.dtype not in FLOATS:
            kind = tensor.dtype_name.removeprefix("torch.")
            found.problems.append(f"{actual!r} is {kind}, not float32, float16 or bfloat16")
    for actual, source in found.copies.items():
        if stored[actual].shape != stored[source].shape:
            found.problems.append(
                f"{actual!r} has the shape {list(stored[actual].shape)}, and {source!r}, to which it is tied, "
                f"{list(stored[source].shape)}"
            )


# ---- loading --------------------------------------------------------------------------------------------------------


class HuggingFaceSource(Source):
    """The weights of a model directory.

    Args:
        files: Of the directory.
        model: Its description.
        hf_config: The Hugging Face config object of ``model``.
    """

    kind = "Hugging Face model directory"

    def __init__(self, files: WeightFiles, model: ModelConfig, hf_config: Any) -> None:
        super().__init__(files.directory, model, hf_config, companions=files.directory)
        self._files = files
        self._rules = {rule.megatron: rule for rule in rules_of(model)}
        self._stored_name: dict[str, str] = {}

    @property
    def dtype(self) -> torch.dtype:
        """Of the largest tensor."""
        return max(self._files.tensors.values(), key=lambda tensor: tensor.num_bytes).dtype or torch.float32

    def match(self, expected: Mapping[Key, tuple[int, ...]]) -> dict[Key, torch.dtype]:
        """See ``Source``; each rank compares its share of what is tied, and rank 0 says what is left out."""
        files, model = self._files, self.model
        theirs = {
            name: Expected(shape=part, key=key)
            for key, shape in expected.items()
            for name, part in zip(
                self._rules[key.name].names(key.layer), self._rules[key.name].shapes(shape), strict=True
            )
        }
        found = match(theirs, files.tensors, family_of(model.family), model)
        rank, size = dist.get_rank(), dist.get_world_size()
        problems = found.problems or [
            f"{copy!r} differs from {source!r}, to which the config ties it (if it should not be tied, set "
            "tie_word_embeddings=false in config.json)"
            for copy, source in found.copies.items()
            if not files.are_equal(copy, source, rank, size)
        ]
        if problems:
            counted = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
            raise CheckpointError(
                f"the weights in {files.directory} are not those of this {model.family} model ({model.task}), "
                f"{counted}: {'; '.join(problems)}. Use the weights that belong to this config, all of their files, "
                "unquantized"
            )
        self._stored_name = found.stored_name
        if found.ignored and rank == 0:
            _log.warning("of another head in %s and left out: %s", files.directory, ", ".join(found.ignored))
        dtypes: dict[Key, torch.dtype] = {}
        for name, actual in found.stored_name.items():
            key, dtype = theirs[name].key, files.tensors[actual].dtype
            assert dtype is not None  # else there was a problem
            # If the tensors that make one of Megatron's differ: the one that holds them all.
            dtypes[key] = torch.promote_types(dtypes.get(key, dtype), dtype)
        new = {theirs[name].key for name in found.new}
        return {key: dtype for key, dtype in dtypes.items() if key not in new}

    def fill(self, shard: Shard) -> None:
        """See ``Source``."""
        place = shard.place
        rule, filling = self._rules[place.key.name], Filling(str(place.key), shard.data)
        filling.put(padding(place), 0)
        names = rule.names(place.key.layer)
        for number, ours, theirs in pieces(rule, place):
            first, last = int(theirs.min()), int(theirs.max()) + 1
            rows, columns = _as_slice(theirs - first), _columns(place)
            with self._files.tensor(self._stored_name[names[number]]) as tensor:
                if rule.transposed:
                    block = tensor[columns[0], first:last][:, rows].contiguous().t().contiguous()
                else:
                    block = tensor[(slice(first, last), *columns)][rows]
                filling.put(_as_slice(ours), block)
                del block
        filling.whole()


def pieces(rule: Rule, place: Place) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Where the rows of a shard come from; rows that pad the vocabulary come from nowhere.

    Yields:
        Number of one of the rule's tensors; [n], int64: rows of the shard; [n], int64: their rows in that tensor, or
        their columns if it is transposed.
    """
    start, stop = place.offset[0], min(place.offset[0] + place.size[0], place.shape[0])
    if stop <= start:
        return
    source = torch.arange(start, stop) if rule.order is None else rule.order[start:stop]
    first = 0
    for number, length in enumerate(rule.rows or (place.shape[0],)):
        ours = ((source >= first) & (source < first + length)).nonzero().flatten()
        if len(ours):
            yield number, ours, source[ours] - first
        first += length


def _columns(place: Place) -> tuple[slice, ...]:
    """The columns of the whole tensor that the shard has."""
    return tuple(slice(start, start + size) for start, size in zip(place.offset[1:], place.size[1:], strict=True))


def _as_slice(rows: torch.Tensor) -> slice | torch.Tensor:
    """``rows`` as a slice if they follow each other, so that nothing is copied to take them."""
    first, last = int(rows[0]), int(rows[-1])
    is_range = last - first == len(rows) - 1 and bool((rows[1:] - rows[:-1] == 1).all())
    return slice(first, last + 1) if is_range else rows


def open_hugging_face(path: Path, config: Path | None = None) -> HuggingFaceSource:
    """Look at a model directory; no weight is read, except T5's output layer, which its config cannot tell.

    Args:
        path: The directory; see ``open_weights``.
        config: A ``config.json`` (or its folder) for a directory without one.

    Raises:
        ConfigError: If the config cannot be honoured, or ``config`` would do nothing.
        CheckpointError: If the files are missing or damaged.
    """
    has_config = (path / CONFIG_FILE).is_file()
    if config is not None and has_config:
        raise ConfigError(f"config={config} would do nothing: {path} has a {CONFIG_FILE}; leave it out")
    files = open_weights(path)
    if config is None and not has_config:
        raise CheckpointError(
            f"model directory {path} has no {CONFIG_FILE}, so that its model is unknown; fetch it, or give one with "
            "--config"
        )
    described = path if config is None else config
    return HuggingFaceSource(files, with_weights(model_config(described), files), config_object(described))


def with_weights(model: ModelConfig, files: WeightFiles) -> ModelConfig:
    """``model`` corrected by what only the weight files tell."""
    correct = family_of(model.family).describe_weights
    return model if correct is None else correct(model, files)


def load_hugging_face(chunks: Iterable[Any], model: ModelConfig, path: str | Path) -> frozenset[str]:
    """Fill this rank's model chunks with the weights of a Hugging Face model directory. Every rank must call.

    Rows that pad the vocabulary become zero. A head that the files lack altogether (a classifier that is to be trained
    on a pretrained model) keeps the weights it has, with a warning that names it; tensors of other heads are left out.

    Args:
        chunks: This rank's model chunks.
        model: The description that they were built from.
        path: The directory; see ``open_weights``.

    Returns:
        Megatron's keys of the tensors that the files do not have.

    Raises:
        CheckpointError: If the files are missing or damaged, or are not those of this model; every tensor that is
            missing, superfluous, or of another shape or kind is named. On all ranks alike, before anything is changed.
    """
    files = on_all_ranks_alike(lambda: open_weights(path))
    loading = Loading(chunks, HuggingFaceSource(files, model, None))
    loading.fill()
    missing = loading.missing
    if missing and dist.get_rank() == 0:
        names = ", ".join(hugging_face_names(missing, model))
        _log.warning("not in %s and newly initialised: %s", files.directory, names)
    return frozenset(key.name for key in missing)


def hugging_face_names(keys: Collection[Key], model: ModelConfig) -> list[str]:
    """What Hugging Face calls these tensors, in the order of the family's rules."""
    return [
        name for rule in rules_of(model) for key in keys if key.name == rule.megatron for name in rule.names(key.layer)
    ]


# ---- saving ---------------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def size_in_bytes(size: str | int) -> int:
    """Bytes of ``200MB``, ``5GB``, ``1.5GiB`` or a number.

    Raises:
        ConfigError: If it is not a positive size.
    """
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    if isinstance(size, bool) or not parts or parts[2].upper() not in _UNITS or float(parts[1]) <= 0:
        raise ConfigError(f"max_shard_size={size!r} is not a size; use e.g. '200MB', '5GB', or a number of bytes")
    return max(1, int(float(parts[1]) * _UNITS[parts[2].upper()]))


def hugging_face_tensors(chunks: Iterable[Any], model: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole model under its Hugging Face names, one tensor after the other, on rank 0. Every rank must iterate.

    Whatever the parameters' ``data`` holds is taken, so that gradients can be had in Hugging Face's form, too.

    Args:
        chunks: This rank's model chunks.
        model: The description that they were built from.

    Yields:
        On rank 0 each name with the tensor on the CPU, in the parameters' dtype, without rows that pad the vocabulary;
        nothing on other ranks.
    """
    for name, tensor in Gathering(chunks, model).tensors():
        if tensor is not None:
            yield name, tensor.clone()  # training may go on before it is looked at


def save_hugging_face(
    chunks: Iterable[Any],
    model: ModelConfig,
    hf_config: Any,
    directory: str | Path,
    max_shard_size: str | int = "5GB",
    companions: Iterable[Path] = (),
    without: frozenset[Key] = frozenset(),
) -> None:
    """Write a directory that ``AutoModelFor*.from_pretrained`` loads. Every rank must call; rank 0 writes.

    Rank 0 holds the tensors of one file at a time.

    Args:
        chunks: This rank's model chunks.
        model: The description that they were built from.
        hf_config: The Hugging Face config object that it was described by.
        directory: Where to, made if it does not exist; files of other names in it stay.
        max_shard_size: Largest weight file, e.g. ``"200MB"`` or bytes; a larger tensor has a file of its own.
        companions: Files to put beside the weights.
        without: Tensors of a head to leave out.

    Raises:
        ConfigError: If ``max_shard_size`` is not a size.
        CheckpointError: If something cannot be written, on all ranks alike; the directory's old weights are whole then.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    largest = size_in_bytes(max_shard_size)
    gathering = Gathering(chunks, model, without)
    contents = gathering.contents()
    split = split_state_dict_into_shards_factory(
        contents,
        get_storage_size=lambda tensor: math.prod(tensor[0]) * tensor[1].itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=largest,
    )
    config = _saved_config(hf_config, model, contents, is_headless=bool(without))
    is_first = dist.get_rank() == 0
    with contextlib.ExitStack() as staging, progress_bar("saving weights", split.metadata["total_size"]) as bar:
        path = Path(directory).absolute()
        folder = on_all_ranks_alike(lambda: staging.enter_context(_new_directory(path)) if is_first else path)
        small = partial(_write_small_files, folder, config, _index(split, contents), companions)
        on_all_ranks_alike(small if is_first else _nothing)
        held: dict[str, dict[str, torch.Tensor]] = {}
        left = Counter(split.tensor_to_filename.values())
        for name, tensor in gathering.tensors():
            file = split.tensor_to_filename[name]
            left[file] -= 1
            if tensor is not None:
                held.setdefault(file, {})[name] = tensor
            if left[file] == 0:
                on_all_ranks_alike(partial(_write_weights, folder, file, held.pop(file)) if is_first else _nothing)
            bar.update(math.prod(contents[name][0]) * contents[name][1].itemsize)
        on_all_ranks_alike(staging.close)


def _nothing() -> None:
    """What other ranks than the first one do."""


def _index(split: StateDictSplit, contents: _Contents) -> dict[str, Any] | None:
    """Which tensor is in which file; None if there is only one file."""
    parameters = sum(math.prod(shape) for shape, _ in contents.values())
    metadata = {**split.metadata, "total_parameters": parameters}
    return {"metadata": metadata, "weight_map": split.tensor_to_filename} if split.is_sharded else None


def _saved_config(hf_config: Any, model: ModelConfig, contents: _Contents, *, is_headless: bool) -> Any:
    """``hf_config`` of a model with these tensors: its class, and the dtype of most of the numbers."""
    sizes: dict[torch.dtype, int] = {}
    for shape, dtype in contents.values():
        sizes[dtype] = sizes.get(dtype, 0) + math.prod(shape)
    config = copy.deepcopy(hf_config)
    if not (is_headless and str((getattr(hf_config, "architectures", None) or [""])[0]).endswith("Model")):
        config.architectures = [family_of(model.family).architectures[model.task]]
    config.__dict__.pop("auto_map", None)  # it names files with code, which do not travel along
    config.dtype = str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")
    return config


@contextlib.contextmanager
def _new_directory(path: Path) -> Iterator[Path]:
    """A folder to write into, whose content ``path`` has in the end.

    A new directory gets its name at the end. In one that exists, what ``from_pretrained`` looks for first (the single
    file, or the index) leaves first and arrives last: it is the old model, the new one, or none.
    """
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; give the name of a directory to save the model in")
    if not path.is_dir():
        with staged(path.parent, path.name, error=CheckpointError) as folder:
            (folder / path.name).mkdir()
            yield folder / path.name
        return
    with staged(path, "model", last=(WEIGHTS_FILE, INDEX_FILE), error=CheckpointError) as folder:
        yield folder
        new = {file.name for file in folder.iterdir()}
    for file in path.glob("*.safetensors"):
        if SHARD_FILE.fullmatch(file.name) and file.name not in new:
            file.unlink()


def _write_small_files(folder: Path, config: Any, index: Mapping[str, Any] | None, companions: Iterable[Path]) -> None:
    """Everything but the weights: what cannot be written is better known before they are gathered."""
    with failures_as_errors(f"model directory {folder} is not written"):
        try:
            config.save_pretrained(folder)
        except OSError:
            raise
        except Exception as error:  # transformers validates with errors of its own
            reason = " ".join(str(error).split())
            raise CheckpointError(f"transformers does not save this model's config: {reason}; correct it") from error
        if index is not None:
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        copy_companions(companions, folder)


def _write_weights(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """One weight file, forced to the disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with failures_as_errors(f"weights file {folder / name} is not written"):
        try:
            save_file(dict(tensors), folder / name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        sync(folder / name)
