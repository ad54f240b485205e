"""Save a live model as a Hugging Face model directory: rank 0 gathers and writes."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatron.convert.companions import copy_companions
from lightning_megatron.convert.progress import weights_progress
from lightning_megatron.convert.registry import config_for_task, family_of
from lightning_megatron.convert.shards import Key
from lightning_megatron.convert.source import Stored
from lightning_megatron.convert.weight_files import (
    CONFIG_FILE,
    INDEX_FILE,
    SHARD_FILE,
    WEIGHTS_FILE,
    write_weight_file,
)
from lightning_megatron.convert.weight_gatherer import WeightGatherer
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.storage.failures import failures_as_errors
from lightning_megatron.storage.publish import PARTIAL, staged

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def size_in_bytes(size: str | int, name: str = "max_shard_size") -> int:
    """Number of bytes of ``200MB``, ``5GB``, ``1.5GiB`` or a number; ``name`` is the option, for the error.

    Raises:
        ConfigError: If ``size`` is not a positive size.
    """
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(size))
    if isinstance(size, bool) or parts is None:
        number = 0.0
        unit = ""
    else:
        number = float(parts[1])
        unit = parts[2].upper()
    if number <= 0 or unit not in _UNITS:
        raise ConfigError(
            f"{name}={size!r} is not a size; use e.g. '200MB', '5GB', or a number of bytes"
        )
    return max(1, int(number * _UNITS[unit]))


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
        ConfigError: If ``max_shard_size`` is not a size, or no Hugging Face class has the model's head.
        CheckpointError: On every rank, if a file cannot be written; the directory's old weights are then intact.
    """
    # Both imports take seconds.
    from huggingface_hub import split_state_dict_into_shards_factory

    from lightning_megatron.engine.collectives import raise_on_all_ranks

    largest = size_in_bytes(max_shard_size)
    family_of(model.family).class_of(model.task)
    gatherer = WeightGatherer(chunks, model, lambda key: key not in without)
    contents = gatherer.contents()
    split = split_state_dict_into_shards_factory(
        contents,
        get_storage_size=lambda tensor: tensor.num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=largest,
    )
    config = _saved_config(hf_config, model, contents, is_headless=bool(without))
    index = None
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    is_first = dist.get_rank() == 0
    path = Path(directory).absolute()
    with (
        weights_progress("saving weights", split.metadata["total_size"]) as bar,
        staged_directory(path) as folder,
    ):
        with raise_on_all_ranks():
            if is_first:
                _write_small_files(folder, config, index, companions)
        pending: dict[str, dict[str, torch.Tensor]] = {}
        remaining = Counter(split.tensor_to_filename.values())
        for name, tensor in gatherer.tensors():
            file = split.tensor_to_filename[name]
            remaining[file] -= 1
            if tensor is not None:
                pending.setdefault(file, {})[name] = tensor
            if remaining[file] == 0:
                with raise_on_all_ranks():
                    if is_first:
                        write_weight_file(folder, file, pending.pop(file))
            bar.update(contents[name].num_bytes)


def _saved_config(
    hf_config: Any,
    model: ModelConfig,
    contents: Mapping[str, Stored],
    *,
    is_headless: bool,
) -> Any:
    """Copy of ``hf_config`` to save with these tensors: with the saved class, and the dtype of most values."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in contents.values():
        sizes[tensor.dtype] += math.prod(tensor.shape)
    config = config_for_task(hf_config, model)
    architectures = getattr(hf_config, "architectures", None) or [""]
    if is_headless and str(architectures[0]).endswith("Model"):
        config.architectures = hf_config.architectures
    for name in ("auto_map", "transformers_weights"):  # name files that are not copied
        config.__dict__.pop(name, None)
    ((dtype, _),) = sizes.most_common(1)
    config.dtype = str(dtype).removeprefix("torch.")
    return config


@contextlib.contextmanager
def staged_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory for rank 0 to write, whose files move to ``path`` on exit. Collective over the world.

    A new directory is renamed to ``path``. In an existing one, the file that ``from_pretrained`` looks for first (the
    single weight file, or the index) is removed first and written last: a reader finds the old model, the new or none.

    Raises:
        CheckpointError: On every rank, if the directory cannot be written.
    """
    # The engine's import takes seconds.
    from lightning_megatron.engine.collectives import raise_on_all_ranks

    last: tuple[str, ...] = ()
    if path.is_dir():
        parent = path
        name = "model"
        folder = parent / f".{name}{PARTIAL}"
        last = (WEIGHTS_FILE, INDEX_FILE)
    else:
        # The parent may be a model of its own, whose files stay.
        parent = path.parent
        name = path.name
        folder = parent / f".{name}{PARTIAL}" / name

    @contextlib.contextmanager
    def staging() -> Iterator[None]:
        if path.is_file():
            raise CheckpointError(
                f"{path} is a file; give the name of a directory to save the model in"
            )
        with staged(parent, name, last=last, error=CheckpointError):
            folder.mkdir(exist_ok=True)
            yield
            new = {file.name for file in folder.iterdir()}
        for file in path.glob("*.safetensors"):
            if SHARD_FILE.fullmatch(file.name) and file.name not in new:
                file.unlink()

    with contextlib.ExitStack() as stack:
        with raise_on_all_ranks():
            if dist.get_rank() == 0:
                stack.enter_context(staging())
        yield folder
        with raise_on_all_ranks():
            stack.close()


def _write_small_files(
    folder: Path,
    config: Any,
    index: Mapping[str, Any] | None,
    companions: Iterable[Path],
) -> None:
    """Write everything but the weights, first: a failure is found before they are gathered."""
    with failures_as_errors(f"model directory {folder} is not written"):
        config.to_json_file(folder / CONFIG_FILE)
        if index is not None:
            text = json.dumps(index, indent=2, sort_keys=True)
            (folder / INDEX_FILE).write_text(f"{text}\n")
        copy_companions(companions, folder)
