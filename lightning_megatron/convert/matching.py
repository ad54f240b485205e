"""Do these files belong to this model? Every tensor that is missing, foreign or of another shape, all at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from lightning_megatron.convert.family import Family
from lightning_megatron.convert.hugging_face_files import StoredTensor
from lightning_megatron.convert.rules import LAYER
from lightning_megatron.models.config import ModelConfig

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
"""Where transformers keeps heads, beside the headless model."""
_BODY = ("embedding", "encoder", "decoder")
"""What Megatron's keys begin with unless the tensor belongs to a head or a pooler."""
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """One tensor that the model has, under its Hugging Face name."""

    shape: tuple[int, ...]
    megatron: str
    """Key of the rule that names it."""

    @property
    def is_of_head(self) -> bool:
        """Whether it belongs to a head or a pooler, which a fine-tuned model may start anew."""
        return not self.megatron.startswith(_BODY)


@dataclass(kw_only=True)
class Match:
    """Which tensor of the files is which of the model's."""

    stored_name: dict[str, str] = field(default_factory=dict)
    """For each tensor of the model its name in the files; new ones are left out."""
    new: list[str] = field(default_factory=list)
    """Tensors of heads that the files lack altogether."""
    ignored: list[str] = field(default_factory=list)
    """Tensors of the files that belong to other heads."""
    copies: dict[str, str] = field(default_factory=dict)
    """Names in the files of tied tensors, and of what they must be equal to."""
    problems: list[str] = field(default_factory=list)
    """What is wrong, each with the name."""


def match(
    expected: Mapping[str, Expected], stored: Mapping[str, StoredTensor], family: Family, model: ModelConfig
) -> Match:
    """Find every tensor of ``model`` in the files, as transformers would, and everything that is wrong with them."""
    found = Match()
    tensors = _renamed(stored, expected, family)
    is_headless = bool(family.base_prefix) and not any(name.startswith(family.base_prefix) for name in stored)
    hf_class = _hugging_face_class(family, model.task)
    tied = _tied_names(hf_class)
    for name in expected:
        candidates = [name, *(copy for copy, source in tied.items() if source == name and copy not in expected)]
        actual = next((tensors[candidate] for candidate in candidates if candidate in tensors), None)
        if actual is not None:
            found.stored_name[name] = actual
    _sort_missing(found, expected, model, is_headless)
    used = set(found.stored_name.values())
    extra = {name: actual for name, actual in tensors.items() if actual not in used}
    _sort_extra(found, extra, tied, _Known.of(family, model, hf_class))
    for name, actual in found.stored_name.items():
        found.problems += _differences(actual, stored[actual], expected[name].shape)
    for actual, source in found.copies.items():
        shape = stored[source].shape
        if stored[actual].shape != shape:
            found.problems.append(
                f"{actual!r} has the shape {list(stored[actual].shape)}, and {source!r}, to which it is tied, "
                f"{list(shape)}"
            )
    return found


def _differences(name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> list[str]:
    problems = []
    if tensor.shape != shape:
        problems.append(f"{name!r} has the shape {list(tensor.shape)} in the file, not {list(shape)}")
    if tensor.dtype not in _FLOATS:
        kind = tensor.dtype_name.removeprefix("torch.")
        problems.append(f"{name!r} is {kind}, not float32, float16 or bfloat16")
    return problems


# ---- names ----------------------------------------------------------------------------------------------------------


def _renamed(stored: Collection[str], expected: Collection[str], family: Family) -> dict[str, str]:
    """Names as the model with its head has them -> names in the files."""
    prefix = family.base_prefix
    names: dict[str, str] = {}
    for actual in stored:
        # As transformers does (conversion_mapping.py, "legacy"): TensorFlow's words in files of 2019.
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", actual)
        name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
        if prefix and name not in expected and prefix + name in expected:
            name = prefix + name
        names[name] = actual
    return names


def _hugging_face_class(family: Family, task: str) -> Any:
    import transformers

    return getattr(transformers, family.architectures[task])


def _tied_names(hf_class: Any) -> dict[str, str]:
    """Each tied copy's name -> what it is a copy of."""
    tied = getattr(hf_class, "_tied_weights_keys", None)
    return dict(tied) if isinstance(tied, Mapping) else {}


def _head_of(name: str) -> str:
    """The head's module: ``cls.predictions`` of ``cls.predictions.transform.dense.weight``."""
    return ".".join(name.split(".")[:-1][:2])


def _sort_missing(found: Match, expected: Mapping[str, Expected], model: ModelConfig, is_headless: bool) -> None:
    """A head that the files lack altogether is new, unless it is the language model's own and they have its body."""
    heads_there = {_head_of(name) for name in found.stored_name}
    may_be_new = is_headless or model.architecture == "bert"
    for name in expected:
        if name in found.stored_name:
            continue
        if may_be_new and expected[name].is_of_head and _head_of(name) not in heads_there:
            found.new.append(name)
        else:
            found.problems.append(f"{name!r} is missing")


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What files may hold besides the model."""

    buffers: tuple[str, ...]
    """Globs."""
    no_weights: tuple[str, ...]
    """Regular expressions of transformers."""
    others: frozenset[str]
    """Tensors of the family's other tasks."""
    base_prefix: str

    @classmethod
    def of(cls, family: Family, model: ModelConfig, hf_class: Any) -> _Known:
        return cls(
            buffers=family.buffers,
            no_weights=tuple(getattr(hf_class, "_keys_to_ignore_on_load_unexpected", None) or ()),
            others=frozenset(_names(family, model)),
            base_prefix=family.base_prefix,
        )


def _names(family: Family, model: ModelConfig) -> Iterable[str]:
    """Tensors of no layer that the family's models have, whatever their task."""
    for task in family.architectures:
        for rule in family.rules(replace(model, task=task)):
            yield from (name for name in rule.hugging_face if LAYER not in name)


def _sort_extra(found: Match, extra: Mapping[str, str], tied: Mapping[str, str], known: _Known) -> None:
    for name, actual in extra.items():
        is_buffer = any(fnmatchcase(name, glob) or fnmatchcase(actual, glob) for glob in known.buffers)
        if is_buffer or any(re.search(pattern, name) for pattern in known.no_weights):
            continue
        if tied.get(name) in found.stored_name:
            found.copies[actual] = found.stored_name[tied[name]]
        elif name in known.others or (
            not (known.base_prefix and name.startswith(known.base_prefix)) and name.split(".")[0] in _HEADS
        ):
            found.ignored.append(actual)
        else:
            found.problems.append(f"{actual!r} is not part of the model")
