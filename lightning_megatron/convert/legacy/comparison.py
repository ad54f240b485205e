"""Is this legacy checkpoint whole, and is it of the model that is described? Whatever differs is named."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_megatron.convert.legacy.layout import RankFiles
from lightning_megatron.convert.legacy.merged import Merged
from lightning_megatron.convert.legacy.names import VOCABULARY, split_axis
from lightning_megatron.convert.legacy.stacking import EMBEDDING, Shards, Stacked
from lightning_megatron.convert.shapes import tensor_shapes
from lightning_megatron.convert.stored.base import Key
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import ModelConfig

_OUTPUT, _OUTPUT_BIAS = "output_layer.weight", "output_layer.bias"
_HEADS = ("lm_head.", "pooler.", "binary_head.", "classification_head.", "token_head.", _OUTPUT_BIAS)
"""Of a BERT; which of them a model has depends on its task."""
_ROWS_AT_ONCE = 4096
_MOST_NAMED = 5
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_log = logging.getLogger(__name__)


def check_layout(files: RankFiles, arguments: Mapping[str, Any]) -> None:
    """Raise if the checkpoint's arguments know of more ranks than there are files.

    Raises:
        CheckpointError: With the number of each.
    """
    for name, found in (
        ("model_parallel_size", files.tp),
        ("tensor_model_parallel_size", files.tp),
        ("pipeline_model_parallel_size", files.pp),
    ):
        wanted = arguments.get(name)
        if type(wanted) is int and wanted > found:
            raise CheckpointError(
                f"{files.path} was written with {name}={wanted} and has the files of {found}; give the folder of all "
                "ranks, with those that are missing"
            )


def check_tensors(
    files: RankFiles, stacked: Stacked, shapes: Mapping[Key, tuple[int, ...]], model: ModelConfig
) -> None:
    """Raise unless the checkpoint has the tensors of ``model``; only a vocabulary may be larger, by its padding.

    Raises:
        CheckpointError: With what is missing, foreign, or of another shape.
    """
    expected = tensor_shapes(model)
    problems = [f"{_named(key)} is missing" for key in expected if key not in shapes]
    for key, shape in shapes.items():
        if key not in expected:
            problems += _foreign(key, stacked.tensors[key], model)
        elif not _fits(key, shape, expected[key]):
            problems.append(f"{_named(key)} has the shape {list(shape)}, not {list(expected[key])}")
        elif stacked.tensors[key][0].dtype not in _FLOATS:
            problems.append(f"{_named(key)} is {stacked.tensors[key][0].dtype}, not a number of 16 or 32 bits")
    if problems:
        more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise CheckpointError(
            f"{files.path} is not of this {model.family} model ({model.task}): {'; '.join(problems[:_MOST_NAMED])}"
            f"{more}. Give the config that belongs to it with --config, and all of its files"
        )
    left_out = [_named(key) for key in shapes if key not in expected and key.name.startswith(_HEADS)]
    if model.architecture == "bert" and left_out:
        _log.warning("of another head in %s and left out: %s", files.path, ", ".join(left_out))


def _foreign(key: Key, shards: Shards, model: ModelConfig) -> Iterator[str]:
    """What is wrong with a tensor that the model has not."""
    if model.architecture == "bert" and key.name.startswith(_HEADS):
        return
    if key.name == _OUTPUT and model.share_embeddings_and_output_weights:
        return  # of the last stage: a copy, which is compared
    if key.name == _OUTPUT_BIAS and model.architecture == "t5":
        # Megatron-LM's T5 has it, Hugging Face's has not: zeros do nothing.
        if any(bool(shard.whole().any()) for shard in shards):
            yield f"{_named(key)} is not zero, and this model has no such bias"
        return
    yield f"{_named(key)} is not part of the model"


def _fits(key: Key, shape: Sequence[int], expected: Sequence[int]) -> bool:
    if key.name in VOCABULARY:
        return len(shape) == len(expected) and shape[0] >= expected[0] and tuple(shape[1:]) == tuple(expected[1:])
    return tuple(shape) == tuple(expected)


def check_copies(files: RankFiles, stacked: Stacked, model: ModelConfig) -> None:
    """Raise unless tensors that several stages have are the same on all of them.

    Raises:
        CheckpointError: With the first that differs.
    """
    copies = list(stacked.copies)
    output = Key(_OUTPUT, None)
    if model.share_embeddings_and_output_weights and output in stacked.tensors:
        copies.append((EMBEDDING, stacked.tensors[output]))
    for key, shards in copies:
        if key not in stacked.tensors:
            raise CheckpointError(f"{files.path} has a copy of {_named(key)} and not the tensor itself; copy it again")
        axis = split_axis(key.name)
        first, other = (Merged(name=key.name, shards=each, axis=axis) for each in (stacked.tensors[key], shards))
        if first.shape != other.shape or not _are_equal(first, other):
            raise CheckpointError(
                f"the stages of {files.path} disagree in {_named(key)}, of which both have a copy; it is damaged, or a "
                "mixture of several checkpoints"
            )


def _are_equal(one: Merged, other: Merged) -> bool:
    for start in range(0, one.shape[0], _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, one.shape[0])
        if not torch.equal(one.rows(start, stop), other.rows(start, stop)):
            return False
    return True


def _named(key: Key) -> str:
    return key.name if key.layer is None else key.name.replace(".layers.", f".layers.{key.layer}.", 1)
