"""Detect the format of a checkpoint, and select one of several iterations.

No weight is read, no model is built and no code of a checkpoint is run. Known formats: directories of
``MegatronStrategy`` (``*.ckpt``), distributed checkpoints of Megatron-Core (``torch_dist``), legacy checkpoints of
Megatron-LM (both also below ``iter_0000N``), those of NeMo 2, Hugging Face model directories and ``peft`` adapters.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from lightning_megatron.checkpoint.meta import META, is_distributed
from lightning_megatron.convert.hugging_face import HuggingFaceSource
from lightning_megatron.convert.megatron_lm import MegatronLMSource
from lightning_megatron.convert.megatron_lm_files import TRACKER_FILE, is_legacy
from lightning_megatron.convert.nemo import WEIGHTS, NeMoSource, is_nemo
from lightning_megatron.convert.peft import (
    CONFIG,
    AdapterSource,
    describe_with_base,
)
from lightning_megatron.convert.peft import (
    WEIGHTS as ADAPTERS,
)
from lightning_megatron.convert.source import ModelSource, Source
from lightning_megatron.convert.torch_dist import CoreSource, StrategySource
from lightning_megatron.convert.weight_files import directory_of, has_weights
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.storage.hub import local_folder

_ITERATION = re.compile(r"iter_(\d{7,})")
_RELEASE = "release"
_MAX_TEXT = 40
_MAX_NAMES = 5


def iteration_folder(path: Path, iteration: int | None = None) -> Path:
    """Directory of one iteration below ``path``, or ``path`` itself if it holds no iterations.

    Args:
        path: Directory of a checkpoint or of several iterations, or a file.
        iteration: Iteration to select; None: the one that the tracker file names.

    Raises:
        CheckpointError: If there is no such iteration, or several and no tracker file.
        ConfigError: If ``iteration`` is given and ``path`` holds no iterations.
    """
    iterations = iterations_in(path)
    tracker = path / TRACKER_FILE
    if iteration is not None:
        wanted = f"iter_{iteration:07}"
        reason = f"iteration={iteration}"
        if not iterations:
            raise ConfigError(
                f"{reason} would do nothing: {path} has no directories {wanted}; leave it out"
            )
    elif tracker.is_file():
        wanted = tracker.read_text(errors="replace").strip()[:_MAX_TEXT]
        reason = f"{TRACKER_FILE} says {wanted!r}"
        if wanted.isascii() and wanted.isdecimal():
            wanted = f"iter_{int(wanted):07}"
    elif len(iterations) < 2:
        return path.joinpath(*iterations)
    else:
        wanted = "one iteration"
        reason = f"there is no {TRACKER_FILE}"
    if wanted not in iterations:
        found = join_names(iterations) or "none"
        raise CheckpointError(
            f"{path}: expected {wanted} ({reason}), got {found}; give the directory of one"
        )
    return path / wanted


def iterations_in(path: Path) -> list[str]:
    """Names of the directories of iterations in a directory of Megatron-LM's."""
    if not path.is_dir():
        return []
    names = [entry.name for entry in path.iterdir() if entry.is_dir()]
    return sorted(name for name in names if name == _RELEASE or _ITERATION.fullmatch(name))


def join_names(names: list[str]) -> str:
    """The first few names as a comma-separated list, for messages."""
    joined = ", ".join(names[:_MAX_NAMES])
    return f"{joined}, …" if len(names) > _MAX_NAMES else joined


def find_source(
    path: Path,
    iteration: int | None = None,
    *,
    ema: bool = False,
) -> Source | None:
    """Detect the format of the checkpoint at ``path`` and open its headers; None if the format is unknown.

    Args:
        path: A directory, or a file of one.
        iteration: See ``iteration_folder``.
        ema: Whether to read the average that EMA kept.

    Raises:
        CheckpointError: If the checkpoint is unfinished, damaged or unsafe.
        ConfigError: See ``iteration_folder``.
    """
    if path.is_file() and is_distributed(path.parent):
        path = path.parent
    else:
        path = directory_of(path) or path
    if path.name == WEIGHTS and is_nemo(path.parent):
        path = path.parent
    path = iteration_folder(path, iteration)
    if (path / META).is_file():
        return StrategySource(path, ema=ema)
    if ema:
        raise ConfigError(
            f"ema=True: expected a *.ckpt of a run with the callback EMA, got {path}; leave it out"
        )
    if is_nemo(path):
        return NeMoSource(path)
    if is_distributed(path):
        return CoreSource(path)
    if has_weights(path):
        return HuggingFaceSource(path)
    if (path / CONFIG).is_file() and (path / ADAPTERS).is_file():
        return AdapterSource(path)
    if is_legacy(path):
        return MegatronLMSource(path)
    return None


def open_source(
    path: Path,
    config: Path | None = None,
    iteration: int | None = None,
    base: Path | None = None,
    *,
    ema: bool = False,
) -> ModelSource:
    """Open a checkpoint of any format and describe its model.

    Args:
        path: A directory or file, or the name of a model on the hub.
        config: Hugging Face ``config.json`` (or a name on the hub) that describes the model; None: the checkpoint's.
        iteration: Iteration to select below a directory of several; None: the one that the tracker file names.
        base: Base model of adapters, as a path or a name on the hub; None: the one that they name, if it is a directory
            or in the hub's cache.
        ema: Whether to read the average that EMA kept, instead of the weights with which training goes on.

    Raises:
        CheckpointError: If there is no checkpoint, or it is damaged or unsafe.
        ConfigError: If an option would do nothing, or there is no such model on the hub.
    """
    path = local_folder(path, "model")
    if config is not None:
        config = local_folder(config, "config")
    if not path.exists():
        raise CheckpointError(
            f"load_path={path} does not exist; give a checkpoint or a Hugging Face model directory"
        )
    source = find_source(path, iteration, ema=ema)
    if source is None:
        found = "a file"
        if path.is_dir():
            names = sorted(entry.name for entry in path.iterdir())
            found = join_names(names) or "an empty directory"
        raise CheckpointError(
            f"load_path={path}: expected a Hugging Face model directory with weights, a *.ckpt of MegatronStrategy, a "
            "checkpoint of Megatron-Core (torch_dist) or of Megatron-LM (mp_rank_*/model_optim_rng.pt), NVIDIA's .zip "
            f"of one, one of NeMo 2 (weights/, context/), or an adapter ({ADAPTERS}), got {found}; give one of these"
        )
    if not source.has_base_weights:
        described = describe_with_base(source, config, base)
    elif base is not None:
        raise ConfigError(f"base={base} would do nothing: {path} has all weights; leave it out")
    else:
        described = ModelSource.of(source, config)
    _check_number_of_layers(described)
    return described


def _check_number_of_layers(source: ModelSource) -> None:
    """Raise if the files cannot hold as many layers as the config says: each is built before it is missed."""
    stored = 0
    for part in source.parts:
        stored += sum(math.prod(tensor.shape) for tensor in part.stored.values())
    model = source.model
    layers = model.num_layers + model.num_decoder_layers
    queries = model.num_attention_heads * model.kv_channels
    if layers * queries * model.hidden_size > stored:  # every layer has queries
        raise CheckpointError(
            f"{source.path}: expected weights of {layers} layers, as its config says, got {stored:,} elements; use the "
            "config that belongs to the weights"
        )
