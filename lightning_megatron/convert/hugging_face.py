"""Hugging Face model directories: loaded into a live model, each rank its own rows, and saved from it by rank 0.

Weight files are mapped. Mapped pages count as memory of the process until the file is closed, and a rank would come to
hold its shard twice: so a file is opened anew after some megabytes were read. (For each tensor it would be parsed too
often: reading 361 MB took 0.17 s instead of 0.12.)
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatron.convert.family import VOCABULARY, Family
from lightning_megatron.convert.registry import config_for_task, config_object, family_of, read_json, rules_of
from lightning_megatron.convert.shards import (
    NO_WEIGHTS,
    Key,
    Region,
    Source,
    Stored,
    WeightGatherer,
    WeightLoader,
    progress_bar,
)
from lightning_megatron.engine.adapter_names import is_adapter
from lightning_megatron.engine.pickles import read_pickle
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.files import PARTIAL, failures_as_errors, staged, sync
from lightning_megatron.hub import TOKENIZER_FILES, WEIGHT_FILES
from lightning_megatron.models.config import ModelConfig

_log = logging.getLogger(__name__)

# ---- files ----------------------------------------------------------------------------------------------------------

(WEIGHTS_FILE, INDEX_FILE), _PICKLED_FILES = WEIGHT_FILES
CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
ENTRY_FILES = (WEIGHTS_FILE, INDEX_FILE, *_PICKLED_FILES)
"""What ``from_pretrained`` looks for first."""
SHARD_FILE = re.compile(r"(?:model|pytorch_model)-\d{5}-of-\d{5}\.(?:safetensors|bin)")
_MAX_MAPPED_BYTES = 16 << 20


class WeightFiles:
    """The tensors of one model directory; their numbers are not read before they are asked for.

    Args:
        tensors: Each with its file as its place, or with the tensor itself if it is one of a mapped pickle.
    """

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self.tensors = tensors
        self._opened: tuple[Path, Any] | None = None
        self._mapped = 0

    def read(self, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        """A part of a tensor, not to be kept: it may be the file's own memory.

        Raises:
            CheckpointError: If the file cannot be read, or ends too early.
        """
        stored = self.tensors[name]
        if isinstance(stored.location, torch.Tensor):
            return stored.location[box]
        from safetensors import safe_open

        with _damage_as_errors(file := stored.location):
            if self._opened is None or self._opened[0] != file or self._mapped > _MAX_MAPPED_BYTES:
                self._opened, self._mapped = (file, safe_open(file, framework="pt")), 0
            self._mapped += stored.num_bytes
            part: torch.Tensor = self._opened[1].get_slice(name)[box]
            return part

    def are_equal(self, one: str, other: str) -> bool:
        """Whether two tensors are the same."""
        return torch.equal(self.read(one, (slice(None),)), self.read(other, (slice(None),)))


def has_weights(directory: Path) -> bool:
    """Whether there are weight files where transformers looks for them."""
    return any((directory / name).is_file() for name in ENTRY_FILES)


def directory_of(file: Path) -> Path | None:
    """The model directory that a weight file or its index is a part of; None if ``file`` is none."""
    is_part = file.name in ENTRY_FILES or SHARD_FILE.fullmatch(file.name) is not None
    return file.parent if is_part and file.is_file() and has_weights(file.parent) else None


def open_weights(directory: str | Path) -> WeightFiles:
    """Look at the weight files of ``directory``, safetensors before pickled ones, as transformers does.

    Raises:
        CheckpointError: If there are none, one is missing, damaged or truncated, or holds more than tensors.
    """
    directory = Path(directory)
    for (single, index), read in zip(WEIGHT_FILES, (read_safetensors, _read_pickled), strict=True):
        is_one = (directory / single).is_file()
        if is_one or (directory / index).is_file():
            files = [directory / single] if is_one else _indexed_files(directory / index)
            return WeightFiles({name: each for file in files for name, each in read(file).items()})
    raise CheckpointError(
        f"model directory {directory}: expected one of {', '.join(ENTRY_FILES)} there, got none; save weights with "
        "save_pretrained, or train from random weights with pretrained=False"
    )


def _indexed_files(index: Path) -> list[Path]:
    """The files that an index names, all of which must be there, and none outside its folder."""
    try:
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        outside = [f"{name!r} is in {file!r}" for name, file in names.items() if not re.fullmatch(r"\w[\w.-]*", file)]
        if outside or not names:
            raise ValueError(f"{outside[0]}, which is outside its folder" if outside else "it names none")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of weight files ({error!r}); fetch it again") from None
    files = [index.parent / file for file in sorted(set(names.values()))]
    if missing := ", ".join(file.name for file in files if not file.is_file()):
        raise CheckpointError(f"{index} names files that are missing: {missing}; fetch them again")
    return files


@contextlib.contextmanager
def _damage_as_errors(file: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"weights file {file} is truncated or damaged ({error}); fetch it again") from None


def read_safetensors(file: Path) -> dict[str, Stored]:
    """The tensors of one file, by its header.

    Raises:
        CheckpointError: If it cannot be read, or is damaged.
    """
    from safetensors import safe_open
    from safetensors.torch import _TYPES

    with _damage_as_errors(file), safe_open(file, framework="pt") as opened:
        headers = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        if other := next((name for name, each in headers.items() if each.get_dtype() not in _TYPES), None):
            raise CheckpointError(f"weights file {file} has {other!r} as {headers[other].get_dtype()}; unpack it")
        return {name: Stored(tuple(each.get_shape()), _TYPES[each.get_dtype()], file) for name, each in headers.items()}


def _read_pickled(file: Path) -> dict[str, Stored]:
    held = read_pickle(file)
    if not isinstance(held, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in held.items()
    ):
        raise CheckpointError(f"weights file {file} is not a dict of tensors; save model.state_dict()")
    return {name: Stored(tuple(tensor.shape), tensor.dtype, tensor) for name, tensor in held.items()}


# ---- companions -----------------------------------------------------------------------------------------------------


def generation_config(folder: Path | None) -> list[Path]:
    """The generation config in ``folder``, if it has one."""
    return _matching_files(folder, (GENERATION_CONFIG_FILE,))


def tokenizer_files(folder: Path | None) -> list[Path]:
    """The tokenizer's files in ``folder``, a folder of chat templates among them; none if it has no tokenizer."""
    return _matching_files(folder, TOKENIZER_FILES)


def companion_files(companions: Path | None, tokenizer: Path | None = None) -> list[Path]:
    """What to copy beside converted weights.

    Args:
        companions: ``Source.companions``.
        tokenizer: A tokenizer's folder, instead of that among the companions.
    """
    return generation_config(companions) + tokenizer_files(tokenizer or companions)


def _matching_files(folder: Path | None, globs: Collection[str]) -> list[Path]:
    names = [] if folder is None else sorted(folder.iterdir())
    return [each for each in names if any(fnmatchcase(each.name, glob) for glob in globs)]


def copy_companions(files: Iterable[Path], folder: Path) -> None:
    """Copy them into ``folder``, which is made if there are any; of a folder the files right in it.

    Folders that links lead to are left out: one may contain ``folder``.
    """
    for path in files:
        inside = sorted(path.iterdir()) if path.is_dir() and not path.is_symlink() else [path]
        for file in (each for each in inside if each.is_file()):
            target = folder / file.relative_to(path.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


# ---- loading --------------------------------------------------------------------------------------------------------

_HEADS = (
    *("lm_head", "cls", "classifier", "score", "qa_outputs"),
    *("classification_head", "multiple_choice_head", "v_head"),
)
"""Where transformers keeps heads, beside the headless model."""
_BODY = ("embedding", "encoder", "decoder")
"""What Megatron's keys begin with unless the tensor belongs to a head or a pooler."""


class HuggingFaceSource(Source):
    """The weights of a model directory."""

    kind = "Hugging Face model directory"
    has_adapters = False  # which have files of their own

    def __init__(self, path: Path) -> None:
        """Look at its files; see ``open_weights``.

        Raises:
            CheckpointError: If they are missing or damaged.
        """
        super().__init__(path)
        self._files = open_weights(path)
        self.stored = self._files.tensors
        self.metadata = {"config": read_json(path) if (path / CONFIG_FILE).is_file() else {}}
        self.companions = path

    def describe(self, config: Path | None) -> None:
        """See ``Source``; no weight is read, except T5's output layer, which its config cannot tell."""
        if config is None and not (self.path / CONFIG_FILE).is_file():
            raise CheckpointError(
                f"model directory {self.path} has no {CONFIG_FILE}, so that its model is unknown; fetch it, or give "
                "one with --config"
            )
        self.hf_config = config_object(config or self.path)
        described = family_of(self.hf_config.model_type).model_config(self.hf_config)
        self.model = resolve_tied_output(described, self._files)

    def match(self, expected: Mapping[Key, tuple[int, ...]]) -> dict[Key, torch.dtype]:
        """See ``Source``; as transformers finds them. The first rank compares what is tied."""
        import transformers

        stored, family = self.stored, family_of(self.model.family)
        self._rules = {rule.megatron: rule for rule in rules_of(self.model)}
        self._dtypes: dict[Key, torch.dtype] = {}
        keys: dict[str, Key] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for key, shape in expected.items():
            tensors = self._rules[key.name].tensors(shape, key.layer, key.expert)
            keys |= dict.fromkeys(tensors, key)
            shapes |= tensors
        hf_class = getattr(transformers, family.architectures[self.model.task])
        ignorable = hf_class._keys_to_ignore_on_load_unexpected or ()
        actual, ties = _stored_names(stored, keys, family), []
        for name, source in (hf_class._tied_weights_keys or {}).items():  # each tensor, and what it is a copy of
            name = _file_name(name, family)
            if name in actual and name not in keys and source in keys:
                in_file = actual.pop(name)
                if actual.setdefault(source, in_file) != in_file:
                    ties.append((in_file, actual[source]))
        self._stored_name = {name: actual[name] for name in keys if name in actual}
        is_headless = bool(family.names.base) and not any(name.startswith(family.names.base) for name in stored)
        new = self._new_head_tensors(keys) if is_headless or self.model.architecture == "bert" else set()
        others, ignored = {}, []
        for name in actual.keys() - keys.keys():
            in_file = actual[name]
            if NO_WEIGHTS.search(in_file) or any(re.search(each, name) for each in ignorable):
                continue
            if name.split(".")[0] in _HEADS or ".pooler." in name:
                ignored.append(in_file)
            else:
                others[in_file] = stored[in_file]
        found_here = {name: stored[in_file] for name, in_file in self._stored_name.items()}
        self.check(found_here | others, {name: shapes[name] for name in shapes if name not in new})
        if dist.get_rank() == 0:
            unequal = [f"{copy!r} differs from {of!r}" for copy, of in ties if not self._files.are_equal(copy, of)]
            why = ", to which the config ties it; set tie_word_embeddings=false in config.json if it should not be tied"
            self.raise_mismatches([each + why for each in unequal])
            if ignored:
                _log.warning("of another head in %s and left out: %s", self.path, ", ".join(sorted(ignored)))
        for name, each in found_here.items():
            # If the tensors that make one of Megatron's differ: the one that holds them all.
            self._dtypes[keys[name]] = torch.promote_types(self._dtypes.get(keys[name], each.dtype), each.dtype)
        return self._dtypes

    def _new_head_tensors(self, keys: Mapping[str, Key]) -> set[str]:
        """Tensors of heads that the files lack altogether: of none of their modules is a part there."""

        def head_of(name: str) -> str:
            return ".".join(name.split(".")[:-1][:2])  # cls.predictions of cls.predictions.transform.dense.weight

        there = {head_of(name) for name in self._stored_name}
        missing = keys.keys() - self._stored_name.keys()
        return {name for name in missing if not keys[name].name.startswith(_BODY) and head_of(name) not in there}

    def read(self, region: Region) -> torch.Tensor:
        """See ``Source``."""
        rule, start, stop = self._rules[region.key.name], region.offset[0], region.offset[0] + region.size[0]
        source = torch.arange(start, stop) if rule.order is None else rule.order[start:stop]
        whole = torch.empty(region.size, dtype=self._dtypes[region.key])
        for name, rows in zip(rule.names(*region.key[1:]), rule.rows or (region.shape[0],), strict=True):
            ours = ((source >= 0) & (source < rows)).nonzero().flatten()
            if len(ours) and not name:
                whole[_as_slice(ours)] = 0
            elif len(ours):
                theirs, columns = source[ours], region.slices[1:]
                first = int(theirs.min())
                span, within = slice(first, int(theirs.max()) + 1), _as_slice(theirs - first)
                box = (columns[0], span) if rule.transposed else (span, *columns)
                block = self._files.read(self._stored_name[name], box)
                whole[_as_slice(ours)] = (block.t() if rule.transposed else block)[within]
            source = source - rows
        return whole


def _stored_names(stored: Collection[str], expected: Collection[str], family: Family) -> dict[str, str]:
    """Names as the model with its head has them -> names in the files."""
    names: dict[str, str] = {}
    for actual in stored:
        name = _file_name(actual, family)
        if name not in expected and family.names.base + name in expected:
            name = family.names.base + name
        names[name] = actual
    return names


def _file_name(name: str, family: Family) -> str:
    return f"{family.names.output}.weight" if name == "lm_head.weight" else name


def _as_slice(rows: torch.Tensor) -> slice | torch.Tensor:
    """``rows`` as a slice if they follow each other, so that nothing is copied to take them."""
    first, last = int(rows[0]), int(rows[-1])
    is_range = last - first == len(rows) - 1 and bool((rows[1:] - rows[:-1] == 1).all())
    return slice(first, last + 1) if is_range else rows


def resolve_tied_output(model: ModelConfig, files: WeightFiles) -> ModelConfig:
    """``model`` with an output layer of its own, if only the files tell that it has one."""
    untied = replace(model, share_embeddings_and_output_weights=False)
    names = [rule.hugging_face[0] for rule in rules_of(untied) if rule.megatron in VOCABULARY]
    is_told = model.architecture == "t5" and all(name in files.tensors for name in names)
    return untied if is_told and not files.are_equal(*names) else model


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
        CheckpointError: If the files are missing or damaged, or are not those of this model; what is missing,
            superfluous, or of another shape or kind is named. On all ranks alike, before anything is changed.
    """
    from lightning_megatron.engine.collectives import call_on_all_ranks  # the engine's import takes seconds

    source = call_on_all_ranks(lambda: HuggingFaceSource(Path(path)))
    source.model = model
    loading = WeightLoader(chunks, source)
    loading.fill()
    missing = loading.missing
    head = [key for key in missing if not is_adapter(key.name)]
    if head and dist.get_rank() == 0:
        names = ", ".join(hugging_face_names(head, model))
        _log.warning("not in %s and newly initialised: %s", path, names)
    return frozenset(key.name for key in missing)


def hugging_face_names(keys: Collection[Key], model: ModelConfig) -> list[str]:
    """What Hugging Face calls these tensors, in the order of the family's rules."""
    return [
        name for rule in rules_of(model) for key in keys if key.name == rule.megatron for name in rule.names(*key[1:])
    ]


# ---- saving ---------------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def size_in_bytes(size: str | int, name: str = "max_shard_size") -> int:
    """Bytes of ``200MB``, ``5GB``, ``1.5GiB`` or a number; ``name`` is the option, for the error.

    Raises:
        ConfigError: If it is not a positive size.
    """
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    if isinstance(size, bool) or not parts or parts[2].upper() not in _UNITS or float(parts[1]) <= 0:
        raise ConfigError(f"{name}={size!r} is not a size; use e.g. '200MB', '5GB', or a number of bytes")
    return max(1, int(float(parts[1]) * _UNITS[parts[2].upper()]))


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

    from lightning_megatron.engine.collectives import call_on_all_ranks

    largest = size_in_bytes(max_shard_size)
    gathering = WeightGatherer(chunks, model, lambda key: key not in without)
    contents = gathering.contents()
    split = split_state_dict_into_shards_factory(
        contents,
        get_storage_size=lambda tensor: tensor.num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=largest,
    )
    config = _saved_config(hf_config, model, contents, is_headless=bool(without))
    is_first, path = dist.get_rank() == 0, Path(directory).absolute()
    with progress_bar("saving weights", split.metadata["total_size"]) as bar, staged_directory(path) as folder:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename} if split.is_sharded else None
        call_on_all_ranks(lambda: _write_small_files(folder, config, index, companions) if is_first else None)
        held: dict[str, dict[str, torch.Tensor]] = {}
        left = Counter(split.tensor_to_filename.values())
        for name, tensor in gathering.tensors():
            file = split.tensor_to_filename[name]
            left[file] -= 1
            if tensor is not None:
                held.setdefault(file, {})[name] = tensor
            if left[file] == 0:
                write = partial(write_weight_file, folder, file, held.pop(file, {}))
                call_on_all_ranks(write if is_first else lambda: None)
            bar.update(contents[name].num_bytes)


def _saved_config(hf_config: Any, model: ModelConfig, contents: Mapping[str, Stored], *, is_headless: bool) -> Any:
    """``hf_config`` of a model with these tensors: its class, and the dtype of most of the numbers."""
    sizes: Counter[torch.dtype] = Counter()
    for each in contents.values():
        sizes[each.dtype] += math.prod(each.shape)
    config = config_for_task(hf_config, model)
    if is_headless and str((getattr(hf_config, "architectures", None) or [""])[0]).endswith("Model"):
        config.architectures = hf_config.architectures
    for name in ("auto_map", "transformers_weights"):  # names of files, which do not travel along
        config.__dict__.pop(name, None)
    config.dtype = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
    return config


@contextlib.contextmanager
def staged_directory(path: Path) -> Iterator[Path]:
    """A folder in which rank 0 may write, and whose content ``path`` has in the end. Every rank must enter and leave.

    A new directory gets its name at the end. In one that exists, what ``from_pretrained`` looks for first (the single
    file, or the index) leaves first and arrives last: it is the old model, the new one, or none.

    Raises:
        CheckpointError: If it cannot be written, on all ranks alike.
    """
    from lightning_megatron.engine.collectives import call_on_all_ranks

    is_new = not path.is_dir()
    parent, name = (path.parent, path.name) if is_new else (path, "model")
    folder = parent / f".{name}{PARTIAL}" / (path.name if is_new else "")

    @contextlib.contextmanager
    def staging() -> Iterator[None]:
        if path.is_file():
            raise CheckpointError(f"{path} is a file; give the name of a directory to save the model in")
        with staged(parent, name, last=(WEIGHTS_FILE, INDEX_FILE), error=CheckpointError):
            folder.mkdir(exist_ok=True)
            yield
            new = {file.name for file in folder.iterdir()}
        for file in path.glob("*.safetensors"):
            if SHARD_FILE.fullmatch(file.name) and file.name not in new:
                file.unlink()

    with contextlib.ExitStack() as stack:
        is_first = dist.get_rank() == 0
        call_on_all_ranks(lambda: stack.enter_context(staging()) if is_first else None)
        yield folder
        call_on_all_ranks(stack.close)


def _write_small_files(folder: Path, config: Any, index: Mapping[str, Any] | None, companions: Iterable[Path]) -> None:
    """Everything but the weights: what cannot be written is better known before they are gathered."""
    with failures_as_errors(f"model directory {folder} is not written"):
        config.to_json_file(folder / CONFIG_FILE)
        if index is not None:
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        copy_companions(companions, folder)


def write_weight_file(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """One weight file, forced to the disk.

    Raises:
        CheckpointError: If it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with failures_as_errors(f"weights file {folder / name} is not written"):
        try:
            save_file(dict(tensors), folder / name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        sync(folder / name)
