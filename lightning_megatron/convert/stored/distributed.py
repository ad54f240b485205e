"""How is a distributed checkpoint read, of ``MegatronStrategy`` or of any other program with Megatron-Core?

Its table of contents says which tensors there are; rows of the weights are read from the chunks that hold them.
Optimizer states are left alone.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lightning_megatron.checkpoint.files import (
    CHECKSUMS,
    COMMON,
    META,
    check_complete,
    check_only_data,
    load_plain,
    verify_checksums,
)
from lightning_megatron.convert.companions import companion_files
from lightning_megatron.convert.contents import OF_MEGATRON_CORE, OF_STRATEGY, check_of_megatron_core
from lightning_megatron.convert.legacy.names import VOCABULARY
from lightning_megatron.convert.pickled.unpickler import load_pickled
from lightning_megatron.convert.shapes import rules_by_name, tensor_shapes
from lightning_megatron.convert.stored.base import Key, Spec
from lightning_megatron.convert.stored.chunks import ChunkedFiles, open_chunks
from lightning_megatron.convert.stored.description import describe_arguments, describe_run
from lightning_megatron.convert.stored.distributed_names import entry_of, is_weightless
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.models.config import ModelConfig

COMPANIONS = "hugging_face"
"""Folder of a ``*.ckpt`` with the tokenizer and the generation config that belong to it."""

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a tensor is."""

    entry: str
    """Name in the table of contents."""
    layer: int | None
    """Its index along the first axis, if the entry stacks layers."""


def open_distributed(path: Path, config: Path | None) -> DistributedModel:
    """Look at a ``*.ckpt`` of ``MegatronStrategy`` or a Megatron-Core checkpoint (``torch_dist``).

    Files that have checksums are read once, to compare them.

    Args:
        path: The folder with ``.metadata``.
        config: A Hugging Face ``config.json``, or a folder with one, for checkpoints that do not say what they are of.

    Raises:
        CheckpointError: If it is damaged, unfinished, could run code, or is of another model than described; every
            tensor that is missing, foreign, or of another shape is named.
        ConfigError: If the config cannot be honoured.
    """
    if (path / META).is_file():
        meta = _checked_meta(path)
        try:
            model, hf_config = describe_run(path, meta, config)
            iteration = int(meta["lightning"].get("global_step", 0))
        except ConfigError:
            raise
        except (ArithmeticError, LookupError, AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint {path} was written by another strategy ({error!r} in {META})") from None
        return _opened(open_chunks(path), OF_STRATEGY, model, hf_config, iteration)
    check_of_megatron_core(path)
    common = load_pickled(path / COMMON) if (path / COMMON).is_file() else {}
    if not isinstance(common, Mapping):
        raise CheckpointError(f"checkpoint {path} has a damaged {COMMON}; use another")
    arguments = vars(common["args"]) if isinstance(common.get("args"), (Namespace, SimpleNamespace)) else None
    files = open_chunks(path)
    model, hf_config = describe_arguments(path, arguments, files, config)
    said = common.get("iteration")
    return _opened(files, OF_MEGATRON_CORE, model, hf_config, said if type(said) is int else 0)


def _checked_meta(path: Path) -> Mapping[str, Any]:
    """``meta.pt`` of a checkpoint of the strategy, after its bytes have proved to be those that were written."""
    # Not above: the engine's imports take seconds.
    from lightning_megatron.checkpoint.state import FORMAT_VERSION

    check_complete(path)
    verify_checksums(path)
    check_only_data(path)
    meta: Mapping[str, Any] = load_plain(path / META)
    if not isinstance(meta, Mapping) or meta.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {path} has another format version than {FORMAT_VERSION}, which this program reads; convert it "
            "with the version that wrote it"
        )
    if meta.get("has_checksums") and not (path / CHECKSUMS).is_file():
        raise CheckpointError(f"checkpoint {path} lacks its file {CHECKSUMS}: it is damaged; use another")
    return meta


def _opened(files: ChunkedFiles, kind: str, model: ModelConfig, hf_config: Any, iteration: int) -> DistributedModel:
    path = files.path
    places, problems = _places(files, model)
    if problems:
        counted = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise CheckpointError(
            f"checkpoint {path} is not of this {model.family} model ({model.task}), {counted}: {'; '.join(problems)}. "
            "Give the config that belongs to it with --config"
        )
    return DistributedModel(files, places, model=model, hf_config=hf_config, kind=kind, iteration=iteration)


# ---- what is there --------------------------------------------------------------------------------------------------


def _places(files: ChunkedFiles, model: ModelConfig) -> tuple[dict[Key, _Place], list[str]]:
    """Where each tensor of the model is, in the model's order; and everything that is wrong."""
    known = rules_by_name(model)
    shapes = tensor_shapes(model)
    found: dict[Key, _Place] = {}
    problems = []
    for name, tensor in files.tensors.items():
        if is_weightless(name):
            continue
        entry = entry_of(name, known)
        if entry is None:
            problems.append(f"{name!r} is not part of the model")
            continue
        layers = range(tensor.shape[0]) if entry.is_stacked and tensor.shape else [entry.layer]
        shape = tensor.shape[1:] if entry.is_stacked else tensor.shape
        for layer in layers:
            key = Key(entry.name, layer)
            problem = _difference(name, shape, tensor.dtype, layer, shapes.get(key))
            if problem is not None:
                problems.append(problem)
                break
            found[key] = _Place(entry=name, layer=layer if entry.is_stacked else None)
    wrong = {problem.split("'")[1] for problem in problems}
    problems += _missing(found, shapes, wrong)
    return {key: found[key] for key in shapes if key in found}, problems


def _difference(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, layer: int | None, wanted: tuple[int, ...] | None
) -> str | None:
    """What is wrong with a tensor of the shape ``shape``; only a vocabulary may be larger, by its padding."""
    if wanted is None:
        return f"{name!r} has a layer {layer}, which the model has not"
    padding = shape[0] - wanted[0] if shape and name.endswith(VOCABULARY) else 0
    if shape != (wanted[0] + max(0, padding), *wanted[1:]):
        return f"{name!r} has the shape {list(shape)}, not {list(wanted)}"
    if dtype not in _FLOATS:
        return f"{name!r} is {str(dtype).removeprefix('torch.')}, not float32, float16 or bfloat16"
    return None


def _missing(found: Mapping[Key, _Place], shapes: Mapping[Key, tuple[int, ...]], wrong: set[str]) -> list[str]:
    """Weights that are not there, layers of one name together; not those that are there and wrong."""
    layers: dict[str, list[int | None]] = {}
    for key in shapes:
        if key not in found and not any(name.endswith(key.name) for name in wrong):
            layers.setdefault(key.name, []).append(key.layer)
    problems = []
    for name, numbers in layers.items():
        is_everywhere = numbers == [key.layer for key in shapes if key.name == name]
        of_layers = "" if is_everywhere else f" in layers {', '.join(map(str, numbers))}"
        problems.append(f"{name!r} is missing{of_layers}")
    return problems


# ---- reading --------------------------------------------------------------------------------------------------------


class DistributedModel:
    """A ``StoredModel``; its ``path`` is that of ``files``."""

    def __init__(
        self,
        files: ChunkedFiles,
        places: Mapping[Key, _Place],
        *,
        model: ModelConfig,
        hf_config: Any,
        kind: str,
        iteration: int,
    ) -> None:
        self.path = files.path
        self.kind = kind
        self.model = model
        self.hf_config = hf_config
        self.iteration = iteration
        self._files = files
        self._places = places
        shapes = tensor_shapes(model)
        self.tensors: Mapping[Key, Spec] = {
            key: Spec(shape=shapes[key], dtype=files.tensors[place.entry].dtype) for key, place in places.items()
        }

    @property
    def companions(self) -> Path | None:
        """Folder with the tokenizer and the generation config, inside the checkpoint or beside it."""
        folders = (self.path / COMPANIONS, self.path)
        return next((folder for folder in folders if folder.is_dir() and companion_files(folder, None)), None)

    def read(self, key: Key, start: int, stop: int) -> torch.Tensor:
        """See ``StoredModel``."""
        place, columns = self._places[key], self.tensors[key].shape[1:]
        first, size = (start, *(0 for _ in columns)), (stop - start, *columns)
        if place.layer is None:
            return self._files.read(place.entry, first, size)
        return self._files.read(place.entry, (place.layer, *first), (1, *size))[0]
