"""How is a Hugging Face model directory read as Megatron's tensors? Rows of one are gathered from those of the files.

A head that the files lack altogether is left out: no weights are invented here, and each target says what becomes of
a model without its head.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.convert.hugging_face_files import WeightFiles, open_weights
from lightning_megatron.convert.matching import Expected, Match, match
from lightning_megatron.convert.pieces import names_of, shapes_of
from lightning_megatron.convert.reading import raise_problems, read_rows, unequal_copies
from lightning_megatron.convert.registry import config_object, family_of, model_config, with_weights
from lightning_megatron.convert.rules import Rule
from lightning_megatron.convert.shapes import rows_of, rules_by_name, tensor_shapes
from lightning_megatron.convert.stored.base import Key, Spec
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import ModelConfig

_log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"


def open_hugging_face(path: Path, config: Path | None = None) -> HuggingFaceModel:
    """Look at a model directory; no weight is read, except to see whether tied copies are equal.

    Args:
        path: The directory; see ``open_weights``.
        config: A ``config.json`` (or its folder) for a directory without one.

    Raises:
        ConfigError: If the config is missing, or cannot be honoured.
        CheckpointError: If the files are missing or damaged, or are not those of this model; every tensor that is
            missing, superfluous, or of another shape or kind is named.
    """
    files = open_weights(path)
    if not (path / CONFIG_FILE).is_file() and config is None:
        raise CheckpointError(
            f"model directory {path} has no {CONFIG_FILE}, so that its model is unknown; fetch it, or give one with "
            "--config"
        )
    described = path if config is None else config
    model = with_weights(model_config(described), path)
    rules, shapes = rules_by_name(model), tensor_shapes(model)
    matched = match(_expected(shapes, rules), files.tensors, family_of(model.family), model)
    raise_problems(matched.problems or unequal_copies(matched, files), files, model)
    if matched.ignored:
        _log.warning("of another head in %s and left out: %s", path, ", ".join(matched.ignored))
    return HuggingFaceModel(files, matched, model, config_object(described))


def _expected(shapes: Mapping[Key, tuple[int, ...]], rules: Mapping[str, Rule]) -> dict[str, Expected]:
    expected = {}
    for key, shape in shapes.items():
        rule = rules[key.name]
        theirs = shapes_of(rule, rows_of(shape, 0, shape[0], torch.float32))
        for name, each in zip(names_of(rule, key.layer), theirs, strict=True):
            expected[name] = Expected(shape=each, megatron=key.name)
    return expected


class HuggingFaceModel:
    """A ``StoredModel``; its ``path`` is the directory of ``files``."""

    kind = "Hugging Face model directory"
    iteration = 0

    def __init__(self, files: WeightFiles, matched: Match, model: ModelConfig, hf_config: Any) -> None:
        self.path = files.directory
        self.companions = files.directory
        self.model = model
        self.hf_config = hf_config
        self._files = files
        self._rules = rules_by_name(model)
        self._names: dict[Key, Sequence[str]] = {}
        self._last: tuple[Key, torch.Tensor] | None = None
        self.tensors: dict[Key, Spec] = {}
        for key, shape in tensor_shapes(model).items():
            theirs = names_of(self._rules[key.name], key.layer)
            if all(name in matched.stored_name for name in theirs):
                self._names[key] = [matched.stored_name[name] for name in theirs]
                self.tensors[key] = Spec(shape=shape, dtype=self._dtype(self._names[key]))

    def _dtype(self, names: Sequence[str]) -> torch.dtype:
        """Of the tensors that make one of Megatron's: theirs, or if they differ the one that holds them all."""
        common: torch.dtype | None = None
        for name in names:
            dtype = self._files.tensors[name].dtype
            assert dtype is not None  # else there was a problem
            common = dtype if common is None else torch.promote_types(common, dtype)
        assert common is not None
        return common

    def read(self, key: Key, start: int, stop: int) -> torch.Tensor:
        """See ``StoredModel``; a transposed tensor is read as a whole and kept until another one is asked for."""
        if self._rules[key.name].transposed and (start, stop) != (0, self.tensors[key].shape[0]):
            if self._last is None or self._last[0] != key:
                self._last = None  # before the next one comes
                self._last = key, self._read(key, 0, self.tensors[key].shape[0])
            return self._last[1][start:stop].clone()
        self._last = None
        return self._read(key, start, stop)

    def _read(self, key: Key, start: int, stop: int) -> torch.Tensor:
        spec, rule, names = self.tensors[key], self._rules[key.name], self._names[key]
        place = rows_of(spec.shape, start, stop, spec.dtype)
        if len(names) == 1 and rule.order is None and not rule.transposed:
            return self._files.rows(names[0], start, stop)  # they are the file's: nothing is to be copied
        rows = torch.empty(place.size, dtype=spec.dtype)
        read_rows(self._files, names, rule, place, rows)
        return rows
