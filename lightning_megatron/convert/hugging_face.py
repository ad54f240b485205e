"""Load Hugging Face model directories into a live model: each rank reads its own rows."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.convert.dequantized import open_dequantized
from lightning_megatron.convert.expert_files import with_separate_experts
from lightning_megatron.convert.family import Family
from lightning_megatron.convert.registry import (
    config_object,
    family_of,
    read_json,
    rules_of,
)
from lightning_megatron.convert.rules import VOCABULARY, Rule
from lightning_megatron.convert.shards import Key, Region
from lightning_megatron.convert.source import NO_WEIGHTS, Description, Source
from lightning_megatron.convert.weight_files import CONFIG_FILE, WeightFiles, add_tensor
from lightning_megatron.convert.weight_loader import WeightLoader
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.adapter_names import is_adapter
from lightning_megatron.models.config import ModelConfig

_log = logging.getLogger(__name__)

_HEADS = (
    "lm_head",
    "cls",
    "classifier",
    "score",
    "qa_outputs",
    "classification_head",
    "multiple_choice_head",
    "v_head",
)
"""First components of the names of heads in transformers' models."""
_VISION = "model.visual."
"""Prefix of the tensors of images in files of a larger model."""
_PREDICTION = re.compile(r"mtp\.(?:layers\.(\d+)\.)?")
"""Beginning of the names of multi-token prediction in files of families with linear attention; the first layer also has
tensors outside of it."""
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
        self._files: WeightFiles = open_dequantized(path)
        self.stored = self._files.tensors
        has_config = (path / CONFIG_FILE).is_file()
        config = {}
        if has_config:
            config = read_json(path)
        self.metadata = {"config": config}
        self.companions = path

    def describe(self, config: Path | None) -> Description:
        """See ``Source``; reads no weights, except T5's embedding and output layer to find out if they are tied."""
        if config is None and not (self.path / CONFIG_FILE).is_file():
            raise CheckpointError(
                f"model directory {self.path} has no {CONFIG_FILE}, so that its model is unknown; fetch it, or give "
                "one with --config"
            )
        hf_config = config_object(config or self.path)
        model = family_of(hf_config.model_type).model_config(hf_config)
        return Description(resolve_tied_output(model, self._files), hf_config)

    def match(
        self, model: ModelConfig, expected: Mapping[Key, tuple[int, ...]]
    ) -> dict[Key, torch.dtype]:
        """See ``Source``; prefixes, ignored keys and ties are those of transformers. Rank 0 compares tied tensors."""
        family = family_of(model.family)
        # For a head without a class the files are of another one, whose ignored keys are those of the family.
        first, *_ = family.classes.values()
        hf_class = family.load_class(family.classes.get(model.task, first))
        tied = None if model.task in family.heads else hf_class._tied_weights_keys
        self._files = with_separate_experts(self._files, model)
        stored = self._files.tensors
        self._rules = {rule.megatron: rule for rule in rules_of(model)}
        keys: dict[str, Key] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        names_of: dict[Key, list[str]] = {}
        for key, shape in expected.items():
            tensors = self._rules[key.name].tensors(shape, key.layer, key.expert)
            names_of[key] = list(tensors)
            keys |= dict.fromkeys(tensors, key)
            shapes |= tensors

        actual = _stored_names(stored, keys, family, self.path)
        ties = _resolve_ties(actual, keys, tied or {}, family)
        self._stored_name = {name: actual[name] for name in keys if name in actual}
        found = {}
        for name, in_file in self._stored_name.items():
            found[name] = stored[in_file]
        ignorable = hf_class._keys_to_ignore_on_load_unexpected or ()
        others = {name: actual[name] for name in actual.keys() - keys.keys()}
        left_out = self._predicting(others, model)
        of_other_heads: list[str] = []
        of_images: list[str] = []
        for name, in_file in others.items():
            if in_file in left_out or NO_WEIGHTS.search(in_file):
                continue
            if family.names.nested_base and name.startswith(_VISION):
                of_images.append(in_file)
                continue
            if any(re.search(pattern, name) for pattern in ignorable):
                continue
            module = name.split(".")[0]
            if module in (*_HEADS, family.names.output) or ".pooler." in name:
                of_other_heads.append(in_file)
            else:
                found[in_file] = stored[in_file]
        new = self._new_head_tensors(model, family, keys)
        required = {name: shape for name, shape in shapes.items() if name not in new}
        self.check(model, found, required)
        if dist.get_rank() == 0:
            self._compare_ties(model, ties)
            self._warn_of_left_out(left_out, of_images, of_other_heads)

        self._dtypes: dict[Key, torch.dtype] = {}
        for key, own_names in names_of.items():
            # Tensors of different dtypes that form one of Megatron's are promoted to a common one.
            dtypes = [found[name].dtype for name in own_names if name in found]
            if dtypes:
                self._dtypes[key] = functools.reduce(torch.promote_types, dtypes)
        return self._dtypes

    def _warn_of_left_out(
        self,
        predicting: Mapping[str, int],
        of_images: Collection[str],
        of_other_heads: Collection[str],
    ) -> None:
        if predicting:
            _log.warning(
                "left out, as transformers does: layers %s of multi-token prediction in %s",
                ", ".join(map(str, sorted(set(predicting.values())))),
                self.path,
            )
        if of_images:
            _log.warning(
                "left out, as transformers does: %d tensors of images in %s",
                len(of_images),
                self.path,
            )
        if of_other_heads:
            names = ", ".join(sorted(of_other_heads))
            _log.warning("of another head in %s and left out: %s", self.path, names)

    def _predicting(self, names: Mapping[str, str], model: ModelConfig) -> dict[str, int]:
        """Layers of multi-token prediction, which files may have after those of the model (DeepSeek-V3, GLM-4.5).

        Or in a module of their own, with numbers of their own (Qwen3-Next). transformers leaves them out, too.

        Args:
            names: Names in the files of tensors that the model does not have, by those in the full model.
            model: The model.

        Returns:
            The layers, by the names in the files.
        """
        if model.linear_attention is not None:
            return _in_own_module(names)
        count = self.metadata.get("config", {}).get("num_nextn_predict_layers")
        if type(count) is not int or model.architecture != "gpt":
            return {}
        layers = range(model.num_layers, model.num_layers + count)
        found = {}
        for name, in_file in names.items():
            layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
            if layer is not None and int(layer[1]) in layers:
                found[in_file] = int(layer[1])
        return found

    def _compare_ties(
        self,
        model: ModelConfig,
        ties: Iterable[tuple[str, str]],
    ) -> None:
        problems = [
            f"{one!r} differs from {other!r}, to which the config ties it; set tie_word_embeddings=false in config.json"
            " if it should not be tied"
            for one, other in ties
            if not self._files.are_equal(one, other)
        ]
        self.raise_mismatches(model, problems)

    def _new_head_tensors(
        self, model: ModelConfig, family: Family, keys: Mapping[str, Key]
    ) -> set[str]:
        """Missing tensors of head modules of which the files have no tensor at all; these are newly initialized."""
        base = family.names.base
        has_base = any(name.startswith(base) for name in self.stored)
        is_language_model = model.architecture != "bert" and model.has_output_layer
        if has_base and is_language_model:
            return set()
        stored_heads = {_head_of(name) for name in self._stored_name}
        return {
            name
            for name in keys.keys() - self._stored_name.keys()
            if not keys[name].name.startswith(_BODY) and _head_of(name) not in stored_heads
        }

    def read(self, region: Region) -> Tensor:
        """See ``Source``."""
        rule = self._rules[region.key.name]
        start = region.offset[0]
        stop = start + region.size[0]
        # For each row of the region: its row in the concatenation of Hugging Face tensors.
        source = torch.arange(start, stop)
        if rule.order is not None:
            source = rule.order[start:stop]
        dtype = self._dtypes[region.key]
        values = torch.empty(region.size, dtype=dtype)
        names = rule.names(region.key.layer, region.key.expert)
        rows_of_each = rule.rows or (region.shape[0],)
        for name, num_rows in zip(names, rows_of_each, strict=True):
            is_in_tensor = (source >= 0) & (source < num_rows)
            target_rows = is_in_tensor.nonzero().flatten()
            if len(target_rows):
                target = _as_slice(target_rows)
                if name:
                    rows = source[target_rows]
                    of_file = self._stored_name[name]
                    values[target] = self._read_rows(of_file, rows, region, rule)
                else:
                    values[target] = 0
            source = source - num_rows
        return values

    def _read_rows(
        self,
        name: str,
        rows: Tensor,
        region: Region,
        rule: Rule,
    ) -> Tensor:
        """Some rows of a tensor of the files, and the columns of ``region``, in Megatron's orientation."""
        if rule.stored_shape is not None:
            return self._files.read(name, (slice(None),)).reshape(-1)[rows]
        columns = region.slices[1:]
        first = int(rows.min())
        span = slice(first, int(rows.max()) + 1)
        box = (span, *columns)
        if rule.transposed:
            box = (*columns, span)
        if rule.num_stacked:
            expert = region.key.expert
            assert expert is not None, f"{region.key} is of no expert, and its rule stacks experts"
            block = self._files.read(name, (slice(expert, expert + 1), *box))[0]
        else:
            block = self._files.read(name, box)
        if rule.transposed:
            block = block.t()
        return block[_as_slice(rows - first)]


def _in_own_module(names: Mapping[str, str]) -> dict[str, int]:
    """Layers of multi-token prediction in a module of their own; argument and result as of ``_predicting``."""
    found = {}
    for name, in_file in names.items():
        layer = _PREDICTION.match(name)
        if layer is not None:
            found[in_file] = int(layer[1] or 0)
    return found


def _head_of(name: str) -> str:
    """Module of a head: ``cls.predictions`` of ``cls.predictions.transform.dense.weight``."""
    return ".".join(name.split(".")[:-1][:2])


def _resolve_ties(
    actual: dict[str, str],
    expected: Collection[str],
    tied_to: Mapping[str, str],
    family: Family,
) -> list[tuple[str, str]]:
    """Remove tied tensors from ``actual`` if the model has only the tensors that they are tied to.

    Args:
        actual: Names of the tensors of the files, by those in the full model.
        expected: Names of the model's tensors.
        tied_to: Names of the tensors that others are tied to, by those of the others.
        family: Family of the model.

    Returns:
        Pairs of names in the files whose tensors must be equal.
    """
    ties = []
    for tied, source in tied_to.items():
        name = _file_name(tied, family)
        if name in actual and name not in expected and source in expected:
            in_file = actual.pop(name)
            if actual.setdefault(source, in_file) != in_file:
                ties.append((in_file, actual[source]))
    return ties


def _stored_names(
    stored: Collection[str],
    expected: Collection[str],
    family: Family,
    path: Path,
) -> dict[str, str]:
    """Map names in the full model (headless prefix added) to names in the files of ``path``.

    Raises:
        CheckpointError: If two tensors of the files are one of the model.
    """
    names: dict[str, str] = {}
    for in_file in stored:
        name = _file_name(in_file, family)
        with_base = family.names.base + name
        if name not in expected and with_base in expected:
            name = with_base
        add_tensor(names, name, in_file, path)
    return names


def _file_name(name: str, family: Family) -> str:
    """Name in the full model of a tensor that files call ``name``."""
    if name == "lm_head.weight":
        return f"{family.names.output}.weight"
    nested = family.names.nested_base
    if nested and name.startswith(nested):
        return family.names.base + name.removeprefix(nested)
    return name


def _as_slice(rows: Tensor) -> slice | Tensor:
    """``rows`` as a slice if they are consecutive, so that indexing returns a view."""
    first = int(rows[0])
    last = int(rows[-1])
    has_length_of_range = last - first == len(rows) - 1
    if has_length_of_range and bool((rows.diff() == 1).all()):
        return slice(first, last + 1)
    return rows


def check_num_layers(model: ModelConfig, files: WeightFiles) -> None:
    """Check that the files have a tensor for each layer at least, before so many layers are built.

    Raises:
        CheckpointError: If they have fewer.
    """
    num_layers = model.num_layers + model.num_decoder_layers
    if num_layers > len(files.tensors):
        raise CheckpointError(
            f"the model's config says {num_layers:,} layers: expected tensors of each in its weights, got"
            f" {len(files.tensors):,} tensors; use the config.json of these weights"
        )


def resolve_tied_output(model: ModelConfig, files: WeightFiles) -> ModelConfig:
    """Untie the output layer of a T5 ``model`` if the files have both tensors and they differ, as transformers does."""
    if model.architecture != "t5":
        return model
    untied = replace(model, share_embeddings_and_output_weights=False)
    names = [rule.hugging_face[0] for rule in rules_of(untied) if rule.megatron in VOCABULARY]
    has_both = all(name in files.tensors for name in names)
    if has_both and not files.are_equal(*names):
        return untied
    return model


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
    # The engine's import takes seconds.
    from lightning_megatron.engine.collectives import call_on_all_ranks

    source = call_on_all_ranks(lambda: HuggingFaceSource(Path(path)))
    loader = WeightLoader(chunks, model, [source])
    loader.fill()
    head = [key for key in loader.missing if not is_adapter(key.name)]
    if head and dist.get_rank() == 0:
        names = ", ".join(hugging_face_names(head, model))
        _log.warning("not in %s and newly initialised: %s", path, names)
    return frozenset(key.name for key in loader.missing)


def hugging_face_names(keys: Collection[Key], model: ModelConfig) -> list[str]:
    """Hugging Face names of these tensors, in the order of the family's rules."""
    names: list[str] = []
    for rule in rules_of(model):
        for key in keys:
            if key.name == rule.megatron:
                names += rule.names(key.layer, key.expert)
    return names


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
    files = with_separate_experts(open_dequantized(directory), model)
    stored_names = _stored_names(files.tensors, names, family_of(model.family), directory)
    found: dict[str, tuple[str, bool]] = {}
    for name in names:
        if name not in stored_names:
            continue
        in_file = stored_names[name]
        location = files.tensors[in_file].location
        file = directory
        if isinstance(location, Path):
            file = location
        values = files.read(in_file, (slice(None),))
        is_finite = bool(values.isfinite().all())
        found[in_file] = (str(file), is_finite)
    return found
