"""How is a distributed checkpoint read, of ``MegatronStrategy`` or of any other program with Megatron-Core?

Its table of contents says which tensors there are; rows of them are read from the chunks that hold them. Optimizer
states are read where they have the shapes of the weights (``fully_reshardable``); other kinds mean something only to
the layout that wrote them.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import torch

from lightning_megatron.convert.companions import companion_files
from lightning_megatron.convert.contents import OF_MEGATRON_CORE, OF_STRATEGY, check_of_megatron_core
from lightning_megatron.convert.legacy.names import VOCABULARY
from lightning_megatron.convert.pickled.unpickler import load_pickled
from lightning_megatron.convert.shapes import rules_by_name, tensor_shapes
from lightning_megatron.convert.stored.base import Key, Spec, State, Training
from lightning_megatron.convert.stored.chunks import ChunkedFiles, open_chunks
from lightning_megatron.convert.stored.description import describe_arguments, describe_run
from lightning_megatron.convert.stored.distributed_names import entry_of, is_of_optimizer, is_weightless
from lightning_megatron.engine.checkpoint_checksums import CHECKSUMS, verify_checksums
from lightning_megatron.engine.checkpoint_safety import (
    COMMON,
    META,
    check_complete,
    check_only_data,
    load_plain,
)
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.models.config import ModelConfig

COMPANIONS = "hugging_face"
"""Folder of a ``*.ckpt`` with the tokenizer and the generation config that belong to it."""

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StrategyTraining(Training):
    """A run of ``MegatronStrategy``, with what only another one of its checkpoints can take over."""

    optimizer_format: Mapping[str, Any] | None
    """What kind of optimizer it is; None without one."""
    common: Mapping[str, Any]
    """The optimizer's state that is not sharded."""
    layout: Mapping[str, Any]
    """The sizes of tp, pp, vpp, cp and dp, to which the random states of the ranks belong."""


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
            training = _training_of_strategy(path, meta)
        except ConfigError:
            raise
        except (ArithmeticError, LookupError, AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint {path} was written by another strategy ({error!r} in {META})") from None
        return _opened(open_chunks(path), OF_STRATEGY, model, hf_config, training)
    check_of_megatron_core(path)
    common = load_pickled(path / COMMON) if (path / COMMON).is_file() else {}
    if not isinstance(common, Mapping):
        raise CheckpointError(f"checkpoint {path} has a damaged {COMMON}; use another")
    arguments = vars(common["args"]) if isinstance(common.get("args"), (Namespace, SimpleNamespace)) else None
    files = open_chunks(path)
    model, hf_config = describe_arguments(path, arguments, files, config)
    return _opened(files, OF_MEGATRON_CORE, model, hf_config, _training_of_megatron_core(common, arguments))


def _checked_meta(path: Path) -> Mapping[str, Any]:
    """``meta.pt`` of a checkpoint of the strategy, after its bytes have proved to be those that were written."""
    # Not above: the engine's imports take seconds.
    from lightning_megatron.engine.checkpoint_state import FORMAT_VERSION

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


def _opened(
    files: ChunkedFiles, kind: str, model: ModelConfig, hf_config: Any, training: Training | None
) -> DistributedModel:
    path = files.path
    places, problems = _places(files, model)
    if problems:
        counted = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise CheckpointError(
            f"checkpoint {path} is not of this {model.family} model ({model.task}), {counted}: {'; '.join(problems)}. "
            "Give the config that belongs to it with --config"
        )
    has_moments = any(key.state == "exp_avg" for key in places) or isinstance(training, StrategyTraining)
    if training is not None and training.has_optimizer and not (has_moments and _is_readable(files, places)):
        _log.warning(
            "the optimizer state of %s cannot be read without the layout that wrote it, or its run had frozen weights; "
            "only weights are converted",
            path,
        )
        training = replace(training, param_groups=())
    if training is None or not training.has_optimizer:
        places = {key: place for key, place in places.items() if key.state == "weight"}
    return DistributedModel(files, places, model=model, hf_config=hf_config, kind=kind, training=training)


# ---- what is there --------------------------------------------------------------------------------------------------


def _places(files: ChunkedFiles, model: ModelConfig) -> tuple[dict[Key, _Place], list[str]]:
    """Where each tensor of the model is, in the model's order and weights first; and everything that is wrong."""
    known = rules_by_name(model)
    shapes = tensor_shapes(model)
    found: dict[Key, _Place] = {}
    problems = []
    for name, tensor in files.tensors.items():
        if is_weightless(name):
            continue
        entry = entry_of(name, known)
        if entry is None:
            if not is_of_optimizer(name):
                problems.append(f"{name!r} is not part of the model")
            continue
        layers = range(tensor.shape[0]) if entry.is_stacked and tensor.shape else [entry.layer]
        shape = tensor.shape[1:] if entry.is_stacked else tensor.shape
        for layer in layers:
            key = Key(entry.name, layer, entry.state)
            wanted = shapes.get(key._replace(state="weight"))
            problem = _difference(name, shape, tensor.dtype, layer, wanted)
            if problem is not None:
                problems.append(problem)
                break
            found[key] = _Place(entry=name, layer=layer if entry.is_stacked else None)
    wrong = {problem.split("'")[1] for problem in problems}
    problems += _missing(found, shapes, wrong)
    ordered = {
        key: found[key]
        for state in get_args(State)
        for key in (each._replace(state=state) for each in shapes)
        if key in found
    }
    return ordered, problems


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


def _is_readable(files: ChunkedFiles, places: Mapping[Key, _Place]) -> bool:
    """Whether all of the optimizer's state is there, in the shapes of weights; SGD has fewer moments than Adam."""
    weights = [key for key in places if key.state == "weight"]
    known = {key.name for key in weights}
    kinds = [[key._replace(state=state) in places for key in weights] for state in get_args(State)]
    names = [name for name in files.tensors if is_of_optimizer(name)]
    is_complete = all(all(kind) or not any(kind) for kind in kinds)
    return is_complete and all(entry_of(name, known) and files.tensors[name].is_whole for name in names)


# ---- where its run was ----------------------------------------------------------------------------------------------


def _training_of_strategy(path: Path, meta: Mapping[str, Any]) -> StrategyTraining:
    lightning: Mapping[str, Any] = meta["lightning"]
    common: Mapping[str, Any] = load_plain(path / COMMON)
    schedulers = lightning.get("lr_schedulers") or [None]
    return StrategyTraining(
        iteration=int(lightning.get("global_step", 0)),
        consumed_samples=_consumed_samples(lightning),
        param_groups=_param_groups(common) if meta["has_optimizer"] else (),
        lr_scheduler=schedulers[0],
        lightning=lightning,
        optimizer_format=meta["optimizer_format"],
        common=common,
        layout=meta["layout"],
    )


def _training_of_megatron_core(common: Mapping[str, Any], arguments: Mapping[str, Any] | None) -> Training | None:
    """Where a run of Megatron-LM was; None if it does not say."""
    iteration = common.get("iteration")
    if type(iteration) is not int:
        return None
    samples = (arguments or {}).get("consumed_train_samples")
    scheduler = common.get("opt_param_scheduler")
    return Training(
        iteration=iteration,
        consumed_samples=samples if type(samples) is int else None,
        param_groups=_param_groups(common),
        lr_scheduler=scheduler if isinstance(scheduler, Mapping) else None,
    )


def _param_groups(common: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """They are one level deeper in the state of a distributed optimizer; none if there is no such state."""
    state: Any = common.get("optimizer")
    if isinstance(state, Mapping):
        state = state.get("optimizer", state)
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    return tuple(group for group in groups or () if isinstance(group, Mapping))


def _consumed_samples(lightning: Mapping[str, Any]) -> int | None:
    """As the data module counts them, over all epochs."""
    for state in lightning.values():
        if isinstance(state, Mapping) and "train" in state and "train_order" in state:
            position = state["train"]
            return int(position["consumed_samples"]) + int(position.get("earlier_samples", 0))
    return None


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
        training: Training | None,
    ) -> None:
        self.path = files.path
        self.kind = kind
        self.model = model
        self.hf_config = hf_config
        self.training = training
        self._files = files
        self._places = places
        shapes = tensor_shapes(model)
        self.tensors: Mapping[Key, Spec] = {
            key: Spec(shape=shapes[key._replace(state="weight")], dtype=files.tensors[place.entry].dtype)
            for key, place in places.items()
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
