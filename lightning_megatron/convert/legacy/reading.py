"""How is a legacy checkpoint of Megatron-LM read as whole tensors, whatever its version, layout and release?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.convert.companions import companion_files
from lightning_megatron.convert.contents import OF_MEGATRON_LM
from lightning_megatron.convert.legacy.arguments import (
    Shapes,
    bert_task,
    own_config,
    published_arguments,
    told_config,
)
from lightning_megatron.convert.legacy.arguments_out import HUGGING_FACE_CONFIG
from lightning_megatron.convert.legacy.comparison import check_copies, check_layout, check_tensors
from lightning_megatron.convert.legacy.layout import RankFiles, find_files, is_legacy
from lightning_megatron.convert.legacy.merged import Merged, merged, whole_shape
from lightning_megatron.convert.legacy.qkv import check_version
from lightning_megatron.convert.legacy.rank_state import RankState, load_rank
from lightning_megatron.convert.legacy.stacking import architecture_of, stack
from lightning_megatron.convert.registry import config_object, family_of
from lightning_megatron.convert.shapes import tensor_shapes
from lightning_megatron.convert.stored.base import Key, Spec
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import ModelConfig, variant_of

__all__ = ["LegacyModel", "is_legacy", "open_legacy"]

_OUTPUT = Key("output_layer.weight", None)
_ORDER_OF_MEGATRON_CORE = 3.0


def open_legacy(path: Path, config: Path | None = None, iteration: int | None = None) -> LegacyModel:
    """Look at a legacy checkpoint; of its numbers only tied copies are read, to see whether they are equal.

    Args:
        path: Its folder or file; see ``legacy/layout.py``.
        config: A Hugging Face ``config.json``, or a folder with one; None: as the checkpoint's arguments say.
        iteration: Which one below a folder of several; None for that of the tracker file.

    Raises:
        CheckpointError: If it is damaged, incomplete or unsafe, or is of another model than described; tensors that
            are missing, foreign or of another shape are named.
        ConfigError: If the config cannot be honoured.
    """
    files = find_files(path, iteration)
    states = {rank: load_rank(part) for rank, part in sorted(files.parts.items())}
    first = states[0, 0]
    check_layout(files, first.arguments)
    hf_config = config_object(config) if config is not None else own_config(first.arguments)
    architecture = architecture_of(states)
    if hf_config is not None:
        architecture = family_of(hf_config.model_type).model_config(hf_config).architecture
    stacked = stack(files, states, architecture)
    shapes = Shapes(
        of={key: whole_shape(key, shards) for key, shards in stacked.tensors.items()},
        num_layers=stacked.num_layers,
        architecture=architecture,
        tp=files.tp,
    )
    if hf_config is None:
        hf_config = _told_config(path, first.arguments, shapes)
    model = _described(hf_config, shapes)
    if config is None and HUGGING_FACE_CONFIG in first.arguments:
        model = variant_of(model, first.arguments)
    version = _version(first)
    check_version(version, model, files.tp)
    check_tensors(files, stacked, shapes.of, model)
    check_copies(files, stacked, model)
    return LegacyModel(
        path=path,
        model=model,
        hf_config=hf_config,
        iteration=first.iteration,
        files=files,
        merged={key: merged(key, stacked.tensors[key], model, version) for key in tensor_shapes(model)},
    )


def _told_config(path: Path, arguments: Mapping[str, Any], shapes: Shapes) -> Any:
    """The Hugging Face config that the arguments and the shapes tell."""
    arguments = arguments or published_arguments(shapes)
    layers, found = arguments.get("num_layers"), shapes.num_layers[shapes.stack]
    if type(layers) is int and layers > found:
        raise CheckpointError(
            f"{path} was written with num_layers={layers} and has {found} layers; give the folder of all stages, or if "
            "the model has no more, its Hugging Face config.json with --config"
        )
    return told_config(path, arguments, shapes)


def _described(hf_config: Any, shapes: Shapes) -> ModelConfig:
    family = family_of(hf_config.model_type)
    model = family.model_config(hf_config)
    if model.architecture == "bert" and not all(key in shapes.of for key in tensor_shapes(model)):
        model = family.model_config(hf_config, bert_task(shapes))
    if model.architecture == "t5" and _OUTPUT in shapes.of:
        model = replace(model, share_embeddings_and_output_weights=False)  # its config cannot say it: families/t5.py
    return model


def _version(state: RankState) -> float:
    """Which order the rows of queries, keys and values have."""
    is_of_megatron_core = not any(name.startswith("language_model.") for name in state.chunks[0])
    return _ORDER_OF_MEGATRON_CORE if is_of_megatron_core else state.version


@dataclass(frozen=True, kw_only=True, eq=False)
class LegacyModel:
    """A ``StoredModel``."""

    path: Path
    """What was opened."""
    model: ModelConfig
    """What its config says, with the head that is there."""
    hf_config: Any
    """A Hugging Face config object."""
    iteration: int
    """Steps done when it was written."""
    files: RankFiles
    """Where it is read from; what had to be unpacked is kept as long as this object."""
    merged: Mapping[Key, Merged]
    """How each tensor is put together."""

    @property
    def kind(self) -> str:
        """For messages."""
        return OF_MEGATRON_LM

    @cached_property
    def tensors(self) -> Mapping[Key, Spec]:
        """In the model's order."""
        return {
            key: Spec(shape=shape, dtype=self.merged[key].dtype) for key, shape in tensor_shapes(self.model).items()
        }

    @property
    def companions(self) -> Path | None:
        """The folder of the iteration, or that of all, if a tokenizer or a generation config is there."""
        folders = (self.files.path, self.files.path.parent) if self.files.path.is_dir() else ()
        return next((folder for folder in folders if companion_files(folder, None)), None)

    def read(self, key: Key, start: int, stop: int) -> torch.Tensor:
        """See ``StoredModel``."""
        return self.merged[key].rows(start, stop)
