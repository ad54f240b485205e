"""How does any stored model become a Hugging Face model directory? Tensor by tensor, in blocks of rows.

Where Hugging Face's rows are Megatron's, blocks go from file to file. Where they are scattered over Megatron's tensor
(queries, keys and values; transposed matrices), that one tensor is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lightning_megatron.convert.companions import companion_files
from lightning_megatron.convert.directory import Directory, files_of, saved_config, size_in_bytes
from lightning_megatron.convert.options import ConvertOptions
from lightning_megatron.convert.pieces import names_of, shapes_of
from lightning_megatron.convert.reading import rows_at_once, transposed
from lightning_megatron.convert.rules import Rule
from lightning_megatron.convert.shapes import rows_of, rules_by_name, tensor_shapes
from lightning_megatron.convert.stored.base import Key, Spec, StoredModel
from lightning_megatron.convert.targets.casting import cast, dtype_of


def write_hugging_face(source: StoredModel, options: ConvertOptions) -> None:
    """Write a directory that ``AutoModelFor*.from_pretrained`` loads, with config and tokenizer.

    Tensors of a head that ``source`` lacks are left out; transformers begins them anew, too.

    Raises:
        CheckpointError: If the source is damaged, a number does not fit into the dtype that was asked for, or
            something cannot be written; nothing is at ``options.save_path`` then.
    """
    dtype, rules = dtype_of(options.dtype), rules_by_name(source.model)
    keys = [key for key in tensor_shapes(source.model) if key in source.tensors]
    contents = {}
    for key in keys:
        spec = source.tensors[key]
        for name, shape in zip(names_of(rules[key.name], key.layer), _shapes(rules[key.name], spec), strict=True):
            contents[name] = (shape, dtype or spec.dtype)
    config = saved_config(source.hf_config, source.model, contents)
    if len(keys) < len(tensor_shapes(source.model)) and _is_headless(source.hf_config):
        config.architectures = source.hf_config.architectures
    target = Directory(options.save_path, files_of(contents, size_in_bytes(options.max_shard_size)))
    try:
        target.begin(config, companion_files(source.companions, options.tokenizer))
        for key in keys:
            for name, blocks in _tensors(source, key, rules[key.name]):
                target.write_rows(name, (cast(block, dtype, name) for block in blocks))
        target.finish()
    finally:
        target.discard()


def _is_headless(hf_config: Any) -> bool:
    return str((getattr(hf_config, "architectures", None) or [""])[0]).endswith("Model")


def _shapes(rule: Rule, spec: Spec) -> tuple[tuple[int, ...], ...]:
    return shapes_of(rule, rows_of(spec.shape, 0, spec.shape[0], spec.dtype))


def _tensors(source: StoredModel, key: Key, rule: Rule) -> Iterator[tuple[str, Iterator[torch.Tensor]]]:
    """The Hugging Face tensors that one of Megatron's has, each in blocks of rows."""
    spec = source.tensors[key]
    first = 0
    whole = source.read(key, 0, spec.shape[0]) if rule.order is not None or rule.transposed else None
    for name, length in zip(names_of(rule, key.layer), rule.rows or spec.shape[:1], strict=True):
        if whole is None:
            yield name, _rows(source, key, first, first + length)
        else:
            yield name, _scattered_rows(whole, rule, first, first + length)
        first += length


def _rows(source: StoredModel, key: Key, first: int, last: int) -> Iterator[torch.Tensor]:
    """The rows between two of Megatron's tensor."""
    spec = source.tensors[key]
    step = rows_at_once(spec.num_bytes // max(1, spec.shape[0]))
    for start in range(first, last, step):
        yield source.read(key, start, min(start + step, last))


def _scattered_rows(whole: torch.Tensor, rule: Rule, first: int, last: int) -> Iterator[torch.Tensor]:
    """The rows (columns, if transposed) of the concatenation of Hugging Face's tensors between two."""
    ours = slice(first, last) if rule.order is None else torch.argsort(rule.order)[first:last]
    if rule.transposed:
        step = rows_at_once(len(whole) * whole.element_size())
        for start in range(0, whole.shape[1], step):
            yield transposed(whole[:, start : start + step][ours])
        return
    assert isinstance(ours, torch.Tensor)
    step = rows_at_once(whole[:1].nbytes)
    for rows in ours.split(step):
        yield whole[rows]
