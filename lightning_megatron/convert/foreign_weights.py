"""Initial weights of a run from checkpoints of other programs: Megatron-LM's, and those written with Megatron-Core.

``MegatronStrategy(load_from=...)`` reads them without a conversion. Their tensors must be those of the run's model, and
where a checkpoint says which model it is of, that must be the run's, as for checkpoints of this package.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from lightning_megatron.checkpoint.find import list_checkpoints
from lightning_megatron.checkpoint.fits import (
    MAY_DIFFER,
    POSITION_FIELDS,
    VISIBLE_IN_WEIGHTS,
    check_same,
)
from lightning_megatron.checkpoint.load import LoadFrom, load_initial_weights
from lightning_megatron.checkpoint.meta import META
from lightning_megatron.checkpoint.state import RunState
from lightning_megatron.convert.formats import find_source, iterations_in
from lightning_megatron.convert.megatron_lm import MegatronLMSource
from lightning_megatron.convert.source import Source
from lightning_megatron.convert.torch_dist import CoreSource
from lightning_megatron.convert.weight_loader import WeightLoader
from lightning_megatron.engine.collectives import raise_on_all_ranks
from lightning_megatron.engine.wrap import finish_parameter_gathers
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.models.adapter_names import is_adapter
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.rank_zero import rank_zero_info
from lightning_megatron.storage.paths import as_path, is_remote
from lightning_megatron.storage.publish import recover

_FORMATS = (CoreSource, MegatronLMSource)
_VISIBLE = MAY_DIFFER | POSITION_FIELDS | VISIBLE_IN_WEIGHTS


def check_initial_weights(options: LoadFrom) -> None:
    """Check that there is a checkpoint of this package or of another program, before any process starts.

    Raises:
        CheckpointError: If it is missing, incomplete, damaged or of an unknown format.
        ConfigError: If an option does not apply to it.
    """
    if _open(options) is None:
        options.resolve()


def load_weights_of_any_program(
    run: RunState,
    model: ModelConfig | None,
    options: LoadFrom,
) -> Path:
    """Load the weights that ``options`` select into ``run``, inside the engine; every rank must call.

    Args:
        run: With the optimizer if there is one.
        model: Config of the run's model; None if it is the user's own.
        options: What to load.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: On all ranks, if the checkpoint is missing, damaged, or of another model.
        ConfigError: On all ranks, if an option does not apply to it.
    """
    with raise_on_all_ranks():
        source = _open(options)
        if source is not None:
            _check_model(source, run, model)
    if source is None:
        return load_initial_weights(run, options)
    assert model is not None, "_check_model"
    source.has_adapters = False  # those of the run are new
    finish_parameter_gathers(run.chunks)
    loader = WeightLoader(run.chunks, model, [source])
    missing = [str(key) for key in loader.missing if not is_adapter(key.name)]
    if missing:
        raise CheckpointError(
            f"{source.path} lacks {', '.join(sorted(missing))}, which the model has; give a complete checkpoint, or "
            "the config that belongs to it"
        )
    loader.fill()
    if run.optimizer is not None:
        run.optimizer.reload_masters()  # the optimizer's copies of the weights
    rank_zero_info(f"The run begins with the weights of {source.path} ({source.kind})")
    return source.path


def _open(options: LoadFrom) -> Source | None:
    """Open a checkpoint of another program; None if this package wrote the one that ``options`` select, or nobody."""
    path = as_path(os.path.expanduser(options.path))
    if is_remote(path):  # another program's are read from disks
        return None
    path = path.absolute()
    is_own = (recover(path) / META).is_file() or bool(list_checkpoints(path))
    if is_own or not path.exists():
        return None
    has_iterations = bool(iterations_in(path))
    source = find_source(path, options.step if has_iterations else None)
    if not isinstance(source, _FORMATS):
        return None
    if options.optimizer or not options.strict:
        given = "optimizer=True" if options.optimizer else "strict=False"
        raise ConfigError(
            f"load_from: {given} needs a checkpoint of MegatronStrategy, got {path} ({source.kind}), of which exactly "
            "the weights are read; leave it out"
        )
    if options.step not in (None, source.iteration):
        raise CheckpointError(
            f"load_from: expected step={options.step}, got {path} of iteration {source.iteration}; leave step out, or "
            "give the directory of several iterations"
        )
    return source


def _check_model(source: Source, run: RunState, model: ModelConfig | None) -> None:
    """Compare the model of the run with the one that the checkpoint says it is of, if it does.

    Raises:
        CheckpointError: If they differ.
        ConfigError: If the run has a model of the user's own, whose tensors have any names.
    """
    if model is None:
        raise ConfigError(
            f"load_from: expected a checkpoint of MegatronStrategy for a model_provider, got {source.path} "
            f"({source.kind}); load its weights in the model_provider"
        )
    try:
        described = source.describe(None).model
    except (CheckpointError, ConfigError) as error:
        rank_zero_info(
            f"{source.path} does not say which model it is of ({error}); names and shapes of its weights are compared"
        )
        return
    if run.model_description.get("lora") is not None:
        described = replace(described, lora=None)
    check_same(run, {"model_description": described.to_dict()}, source.path, _VISIBLE)
