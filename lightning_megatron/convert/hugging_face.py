"""Load Hugging Face model directories into a live model, and save them from it.

Each rank reads its own rows; rank 0 gathers and writes. Weight files are memory-mapped. Mapped pages count as memory of
the process until the file is closed, so that a rank would come to hold its shard twice: a file is therefore reopened
after some megabytes. (Reopening it for each tensor parses the header too often: reading 361 MB took 0.17 s instead of
0.12.)
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

from lightning_megatron.checkpoint.pickles import read_pickle
from lightning_megatron.convert.family import VOCABULARY, Family
from lightning_megatron.convert.registry import (
    config_for_task,
    config_object,
    family_of,
    read_json,
    rules_of,
)
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
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.models.adapter_names import is_adapter
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.storage.hub import TOKENIZER_FILES, WEIGHT_FILES
from lightning_megatron.storage.publish import PARTIAL, failures_as_errors, staged, sync

_log = logging.getLogger(__name__)

# ---- files ----------------------------------------------------------------------------------------------------------

(WEIGHTS_FILE, INDEX_FILE), _PICKLED_FILES = WEIGHT_FILES
CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
ENTRY_FILES = (WEIGHTS_FILE, INDEX_FILE, *_PICKLED_FILES)
"""Files that ``from_pretrained`` looks for first."""
SHARD_FILE = re.compile(r"(?:model|pytorch_model)-\d{5}-of-\d{5}\.(?:safetensors|bin)")
_MAX_MAPPED_BYTES = 16 << 20
"""Bytes to read from a mapped file before it is reopened."""


class WeightFiles:
    """Lazily read tensors of one model directory.

    Args:
        tensors: Tensors by name; ``location`` is the safetensors file, or the tensor itself from a mapped pickle.
    """

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        self.tensors = tensors
        self._opened: tuple[Path, Any] | None = None
        self._mapped = 0

    def read(self, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        """Read a slice of a tensor; may be a view of the mapped file, so copy before keeping it.

        Raises:
            CheckpointError: If the file cannot be read or is truncated.
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
        """Whether two tensors have the same shape and values."""
        return torch.equal(self.read(one, (slice(None),)), self.read(other, (slice(None),)))


def has_weights(directory: Path) -> bool:
    """Whether the directory has weight files that transformers would load."""
    return any((directory / name).is_file() for name in ENTRY_FILES)


def directory_of(file: Path) -> Path | None:
    """Model directory of a weight file or index; None if ``file`` is neither."""
    is_part = file.name in ENTRY_FILES or SHARD_FILE.fullmatch(file.name) is not None
    return file.parent if is_part and file.is_file() and has_weights(file.parent) else None


def open_weights(directory: str | Path) -> WeightFiles:
    """Open the weight files of ``directory`` by their headers, safetensors before pickles, as transformers does.

    Raises:
        CheckpointError: If there are none, or one is missing, damaged, truncated or holds other objects than tensors.
    """
    directory = Path(directory)
    for (single, index), read in zip(WEIGHT_FILES, (read_safetensors, _read_pickled), strict=True):
        is_single = (directory / single).is_file()
        if is_single or (directory / index).is_file():
            files = [directory / single] if is_single else _indexed_files(directory / index)
            return WeightFiles(
                {name: tensor for file in files for name, tensor in read(file).items()}
            )
    raise CheckpointError(
        f"model directory {directory}: expected one of {', '.join(ENTRY_FILES)} there, got none; save weights with "
        "save_pretrained, or train from random weights with pretrained=False"
    )


def _indexed_files(index: Path) -> list[Path]:
    """Files named by an index; raises unless all exist and are in the directory of the index."""
    try:
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        outside = [
            f"{name!r} is in {file!r}"
            for name, file in names.items()
            if not re.fullmatch(r"\w[\w.-]*", file)
        ]
        if outside or not names:
            raise ValueError(
                f"{outside[0]}, which is outside its directory" if outside else "it names none"
            )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index} is not an index of weight files ({error!r}); fetch it again"
        ) from None
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
        raise CheckpointError(
            f"weights file {file} is truncated or damaged ({error}); fetch it again"
        ) from None


def read_safetensors(file: Path) -> dict[str, Stored]:
    """Read the header of a safetensors file.

    Raises:
        CheckpointError: If the file cannot be read, is damaged, or has a dtype that torch does not know.
    """
    from safetensors import safe_open
    from safetensors.torch import _TYPES

    with _damage_as_errors(file), safe_open(file, framework="pt") as opened:
        headers = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        if unknown := next(
            (name for name, each in headers.items() if each.get_dtype() not in _TYPES), None
        ):
            raise CheckpointError(
                f"weights file {file} has {unknown!r} as {headers[unknown].get_dtype()}; unpack it"
            )
        return {
            name: Stored(tuple(each.get_shape()), _TYPES[each.get_dtype()], file)
            for name, each in headers.items()
        }


def _read_pickled(file: Path) -> dict[str, Stored]:
    state = read_pickle(file)
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items()
    ):
        raise CheckpointError(
            f"weights file {file} is not a dict of tensors; save model.state_dict()"
        )
    return {
        name: Stored(tuple(tensor.shape), tensor.dtype, tensor) for name, tensor in state.items()
    }


# ---- companions -----------------------------------------------------------------------------------------------------


def generation_config(folder: Path | None) -> list[Path]:
    """Path of the generation config in ``folder``, as a list; empty if there is none."""
    return _matching_files(folder, (GENERATION_CONFIG_FILE,))


def tokenizer_files(folder: Path | None) -> list[Path]:
    """Tokenizer files in ``folder``, including a directory of chat templates; empty if there are none."""
    return _matching_files(folder, TOKENIZER_FILES)


def companion_files(companions: Path | None, tokenizer: Path | None = None) -> list[Path]:
    """Generation config and tokenizer files to copy beside converted weights.

    Args:
        companions: ``Source.companions``.
        tokenizer: Directory of another tokenizer; None: the one in ``companions``.
    """
    return generation_config(companions) + tokenizer_files(tokenizer or companions)


def _matching_files(folder: Path | None, globs: Collection[str]) -> list[Path]:
    paths = [] if folder is None else sorted(folder.iterdir())
    return [path for path in paths if any(fnmatchcase(path.name, glob) for glob in globs)]


def copy_companions(files: Iterable[Path], folder: Path) -> None:
    """Copy files, and the files directly in directories, into ``folder``, which is created if there are any.

    Symbolic links to directories are skipped: their target may contain ``folder``.
    """
    for path in files:
        inside = sorted(path.iterdir()) if path.is_dir() and not path.is_symlink() else [path]
        for file in filter(Path.is_file, inside):
            target = folder / file.relative_to(path.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


# ---- loading --------------------------------------------------------------------------------------------------------

_HEADS = (
    *("lm_head", "cls", "classifier", "score", "qa_outputs"),
    *("classification_head", "multiple_choice_head", "v_head"),
)
"""First components of the names of heads in transformers' models."""
_BODY = ("embedding", "encoder", "decoder")
"""Prefixes of Megatron's keys of all tensors but those of a head or a pooler."""


class HuggingFaceSource(Source):
    """Weights of a Hugging Face model directory."""

    kind = "Hugging Face model directory"
    has_adapters = False  # adapters are in directories of their own

    def __init__(self, path: Path) -> None:
        """Open the weight files; see ``open_weights``.

        Raises:
            CheckpointError: If they are missing or damaged.
        """
        super().__init__(path)
        self._files = open_weights(path)
        self.stored = self._files.tensors
        self.metadata = {"config": read_json(path) if (path / CONFIG_FILE).is_file() else {}}
        self.companions = path

    def describe(self, config: Path | None) -> None:
        """See ``Source``; reads no weights, except T5's embedding and output layer to find out if they are tied."""
        if config is None and not (self.path / CONFIG_FILE).is_file():
            raise CheckpointError(
                f"model directory {self.path} has no {CONFIG_FILE}, so that its model is unknown; fetch it, or give "
                "one with --config"
            )
        self.hf_config = config_object(config or self.path)
        described = family_of(self.hf_config.model_type).model_config(self.hf_config)
        self.model = resolve_tied_output(described, self._files)

    def match(self, expected: Mapping[Key, tuple[int, ...]]) -> dict[Key, torch.dtype]:
        """See ``Source``; prefixes, ignored keys and ties are those of transformers. Rank 0 compares tied tensors."""
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
        for name, source in (
            hf_class._tied_weights_keys or {}
        ).items():  # tensor -> tensor that it is tied to
            name = _file_name(name, family)
            if name in actual and name not in keys and source in keys:
                in_file = actual.pop(name)
                if actual.setdefault(source, in_file) != in_file:
                    ties.append((in_file, actual[source]))
        self._stored_name = {name: actual[name] for name in keys if name in actual}
        is_headless = bool(family.names.base) and not any(
            name.startswith(family.names.base) for name in stored
        )
        new = (
            self._new_head_tensors(keys)
            if is_headless or self.model.architecture == "bert"
            else set()
        )
        unexpected, ignored = {}, []
        for name in actual.keys() - keys.keys():
            in_file = actual[name]
            if NO_WEIGHTS.search(in_file) or any(re.search(pattern, name) for pattern in ignorable):
                continue
            if name.split(".")[0] in _HEADS or ".pooler." in name:
                ignored.append(in_file)
            else:
                unexpected[in_file] = stored[in_file]
        found = {name: stored[in_file] for name, in_file in self._stored_name.items()}
        self.check(found | unexpected, {name: shapes[name] for name in shapes if name not in new})
        if dist.get_rank() == 0:
            unequal = [
                f"{a!r} differs from {b!r}" for a, b in ties if not self._files.are_equal(a, b)
            ]
            fix = ", to which the config ties it; set tie_word_embeddings=false in config.json if it should not be tied"
            self.raise_mismatches([difference + fix for difference in unequal])
            if ignored:
                _log.warning(
                    "of another head in %s and left out: %s", self.path, ", ".join(sorted(ignored))
                )
        for name, tensor in found.items():
            # Tensors of different dtypes that form one of Megatron's are promoted to a common one.
            self._dtypes[keys[name]] = torch.promote_types(
                self._dtypes.get(keys[name], tensor.dtype), tensor.dtype
            )
        return self._dtypes

    def _new_head_tensors(self, keys: Mapping[str, Key]) -> set[str]:
        """Missing tensors of head modules of which the files have no tensor at all; these are newly initialized."""

        def head_of(name: str) -> str:
            return ".".join(
                name.split(".")[:-1][:2]
            )  # cls.predictions of cls.predictions.transform.dense.weight

        stored = {head_of(name) for name in self._stored_name}
        missing = keys.keys() - self._stored_name.keys()
        return {
            name
            for name in missing
            if not keys[name].name.startswith(_BODY) and head_of(name) not in stored
        }

    def read(self, region: Region) -> torch.Tensor:
        """See ``Source``."""
        rule, start, stop = (
            self._rules[region.key.name],
            region.offset[0],
            region.offset[0] + region.size[0],
        )
        # For each row of the region: its row in the concatenation of Hugging Face tensors.
        source = torch.arange(start, stop) if rule.order is None else rule.order[start:stop]
        values = torch.empty(region.size, dtype=self._dtypes[region.key])
        for name, rows in zip(
            rule.names(*region.key[1:]), rule.rows or (region.shape[0],), strict=True
        ):
            target_rows = ((source >= 0) & (source < rows)).nonzero().flatten()
            if len(target_rows) and not name:
                values[_as_slice(target_rows)] = 0
            elif len(target_rows):
                source_rows, columns = source[target_rows], region.slices[1:]
                first = int(source_rows.min())
                span, within = (
                    slice(first, int(source_rows.max()) + 1),
                    _as_slice(source_rows - first),
                )
                box = (columns[0], span) if rule.transposed else (span, *columns)
                block = self._files.read(self._stored_name[name], box)
                values[_as_slice(target_rows)] = (block.t() if rule.transposed else block)[within]
            source = source - rows
        return values


def _stored_names(
    stored: Collection[str], expected: Collection[str], family: Family
) -> dict[str, str]:
    """Map names in the full model (headless prefix added) to names in the files."""
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
    """``rows`` as a slice if they are consecutive, so that indexing returns a view."""
    first, last = int(rows[0]), int(rows[-1])
    is_range = last - first == len(rows) - 1 and bool((rows[1:] - rows[:-1] == 1).all())
    return slice(first, last + 1) if is_range else rows


def resolve_tied_output(model: ModelConfig, files: WeightFiles) -> ModelConfig:
    """Untie the output layer of a T5 ``model`` if the files have both tensors and they differ, as transformers does."""
    untied = replace(model, share_embeddings_and_output_weights=False)
    names = [rule.hugging_face[0] for rule in rules_of(untied) if rule.megatron in VOCABULARY]
    has_both = model.architecture == "t5" and all(name in files.tensors for name in names)
    return untied if has_both and not files.are_equal(*names) else model


def load_hugging_face(
    chunks: Iterable[Any], model: ModelConfig, path: str | Path
) -> frozenset[str]:
    """Load the weights of a Hugging Face model directory into this rank's model chunks. Collective over the world.

    Vocabulary padding becomes zero. A head that the files lack entirely (e.g. a classifier to train on a pretrained
    model) keeps its initial weights, with a warning that names them; tensors of other heads are ignored.

    Args:
        chunks: This rank's model chunks.
        model: Config that the chunks were built from.
        path: Model directory; see ``open_weights``.

    Returns:
        Megatron's names of the tensors that the files lack.

    Raises:
        CheckpointError: On every rank, before any weight changes, if the files are missing or damaged, or are not of
            this model; lists tensors that are missing, unexpected, or of another shape or an unsupported dtype.
    """
    from lightning_megatron.engine.collectives import (
        call_on_all_ranks,
    )  # the engine's import takes seconds

    source = call_on_all_ranks(lambda: HuggingFaceSource(Path(path)))
    source.model = model
    loader = WeightLoader(chunks, source)
    loader.fill()
    head = [key for key in loader.missing if not is_adapter(key.name)]
    if head and dist.get_rank() == 0:
        names = ", ".join(hugging_face_names(head, model))
        _log.warning("not in %s and newly initialised: %s", path, names)
    return frozenset(key.name for key in loader.missing)


def hugging_face_names(keys: Collection[Key], model: ModelConfig) -> list[str]:
    """Hugging Face names of these tensors, in the order of the family's rules."""
    return [
        name
        for rule in rules_of(model)
        for key in keys
        if key.name == rule.megatron
        for name in rule.names(*key[1:])
    ]


def files_of_tensors(
    directory: Path, names: Collection[str], model: ModelConfig
) -> dict[str, tuple[str, bool]]:
    """By their names in the files, the tensors ``names`` of a model directory: their file, and if they are finite.

    Args:
        directory: Model directory; see ``open_weights``.
        names: Names of tensors in the full model; those that the files lack are left out.
        model: Config of the model.

    Raises:
        CheckpointError: If the files are missing or damaged.
    """
    files = open_weights(directory)
    stored_names = _stored_names(files.tensors, names, family_of(model.family))
    found: dict[str, tuple[str, bool]] = {}
    for name in names:
        if name not in stored_names:
            continue
        in_file = stored_names[name]
        location = files.tensors[in_file].location
        is_finite = bool(files.read(in_file, (slice(None),)).isfinite().all())
        found[in_file] = (
            str(location) if isinstance(location, Path) else str(directory),
            is_finite,
        )
    return found


# ---- saving ---------------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def size_in_bytes(size: str | int, name: str = "max_shard_size") -> int:
    """Number of bytes of ``200MB``, ``5GB``, ``1.5GiB`` or a number; ``name`` is the option, for the error.

    Raises:
        ConfigError: If ``size`` is not a positive size.
    """
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    if (
        isinstance(size, bool)
        or not parts
        or parts[2].upper() not in _UNITS
        or float(parts[1]) <= 0
    ):
        raise ConfigError(
            f"{name}={size!r} is not a size; use e.g. '200MB', '5GB', or a number of bytes"
        )
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
    """Save a directory that ``AutoModelFor*.from_pretrained`` loads. Collective over the world; rank 0 writes.

    Rank 0 holds the tensors of one file in memory at a time.

    Args:
        chunks: This rank's model chunks.
        model: Config that the chunks were built from.
        hf_config: Hugging Face config object of ``model``.
        directory: Target, created if it does not exist; files with other names are kept.
        max_shard_size: Largest weight file, e.g. ``"200MB"`` or bytes; a larger tensor gets a file of its own.
        companions: Files to copy beside the weights.
        without: Tensors of a head to leave out.

    Raises:
        ConfigError: If ``max_shard_size`` is not a size.
        CheckpointError: On every rank, if a file cannot be written; the directory's old weights are then intact.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    from lightning_megatron.engine.collectives import call_on_all_ranks

    largest, pattern = size_in_bytes(max_shard_size), "model{suffix}.safetensors"
    gatherer = WeightGatherer(chunks, model, lambda key: key not in without)
    contents = gatherer.contents()
    split = split_state_dict_into_shards_factory(
        contents,
        get_storage_size=lambda tensor: tensor.num_bytes,
        filename_pattern=pattern,
        max_shard_size=largest,
    )
    config = _saved_config(hf_config, model, contents, is_headless=bool(without))
    is_first, path = dist.get_rank() == 0, Path(directory).absolute()
    with (
        progress_bar("saving weights", split.metadata["total_size"]) as bar,
        staged_directory(path) as folder,
    ):
        index = (
            {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            if split.is_sharded
            else None
        )
        call_on_all_ranks(
            lambda: _write_small_files(folder, config, index, companions) if is_first else None
        )
        pending: dict[str, dict[str, torch.Tensor]] = {}
        remaining = Counter(split.tensor_to_filename.values())
        for name, tensor in gatherer.tensors():
            file = split.tensor_to_filename[name]
            remaining[file] -= 1
            if tensor is not None:
                pending.setdefault(file, {})[name] = tensor
            if remaining[file] == 0:
                write = partial(write_weight_file, folder, file, pending.pop(file, {}))
                call_on_all_ranks(write if is_first else lambda: None)
            bar.update(contents[name].num_bytes)


def _saved_config(
    hf_config: Any, model: ModelConfig, contents: Mapping[str, Stored], *, is_headless: bool
) -> Any:
    """Copy of ``hf_config`` to save with these tensors: with the saved class, and the dtype of most values."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in contents.values():
        sizes[tensor.dtype] += math.prod(tensor.shape)
    config = config_for_task(hf_config, model)
    if is_headless and str((getattr(hf_config, "architectures", None) or [""])[0]).endswith(
        "Model"
    ):
        config.architectures = hf_config.architectures
    for name in ("auto_map", "transformers_weights"):  # name files that are not copied
        config.__dict__.pop(name, None)
    config.dtype = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
    return config


@contextlib.contextmanager
def staged_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory for rank 0 to write, whose files move to ``path`` on exit. Collective over the world.

    A new directory is renamed to ``path``. In an existing one, the file that ``from_pretrained`` looks for first (the
    single weight file, or the index) is removed first and written last: a reader finds the old model, the new or none.

    Raises:
        CheckpointError: On every rank, if the directory cannot be written.
    """
    from lightning_megatron.engine.collectives import call_on_all_ranks

    is_new = not path.is_dir()
    parent, name = (path.parent, path.name) if is_new else (path, "model")
    folder = parent / f".{name}{PARTIAL}" / (path.name if is_new else "")

    @contextlib.contextmanager
    def staging() -> Iterator[None]:
        if path.is_file():
            raise CheckpointError(
                f"{path} is a file; give the name of a directory to save the model in"
            )
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


def _write_small_files(
    folder: Path, config: Any, index: Mapping[str, Any] | None, companions: Iterable[Path]
) -> None:
    """Write everything but the weights, first: a failure is found before they are gathered."""
    with failures_as_errors(f"model directory {folder} is not written"):
        config.to_json_file(folder / CONFIG_FILE)
        if index is not None:
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        copy_companions(companions, folder)


def write_weight_file(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write and sync one weight file.

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
