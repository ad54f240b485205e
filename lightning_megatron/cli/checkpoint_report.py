"""How are the contents of a checkpoint shown: as text of a screen or two, and as JSON with every fact and tensor?"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

from lightning_megatron.cli.failure import printable
from lightning_megatron.convert.contents import CheckpointContents, TensorEntry

_UNITS = ("bytes", "kB", "MB", "GB", "TB")
_SHAPE_OF_A_MODEL = (
    *("family", "model_type", "architecture", "architectures", "task"),
    *("num_layers", "num_hidden_layers", "n_layer", "num_decoder_layers", "hidden_size", "n_embd", "d_model"),
    *("ffn_hidden_size", "intermediate_size", "n_inner", "d_ff", "num_attention_heads", "n_head", "num_heads"),
    *("num_query_groups", "num_key_value_heads", "vocab_size", "max_position_embeddings", "n_positions"),
    *("padded_vocab_size", "position_embedding_type", "normalization"),
)
"""What a reader of text wants of the dozens of fields."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def as_text(contents: CheckpointContents) -> str:
    """Facts, totals, and weights; those that differ only in a number of their name share a line."""
    rows = [("kind", contents.kind)]
    rows += [(name.replace("_", " "), _fact(name, value)) for name, value in contents.facts.items()]
    rows += [("files", f"{contents.num_files:,}, {_size(contents.stored_bytes)}")]
    weights = [each for each in contents.tensors if not each.is_optimizer]
    state = [each for each in contents.tensors if each.is_optimizer]
    if weights:
        rows.append(("weights", _total(weights)))
    if state:
        rows.append(("optimizer state", f"{_total(state)}: {_kinds_of_state(state)}"))
    width = max(len(name) for name, _ in rows)
    lines = [str(contents.path), *(f"  {name.ljust(width)}  {value}" for name, value in rows), "", "Weights"]
    return "\n".join(map(printable, [*lines, *_table(weights)]))  # a name may hold a line break, too


def as_json(contents: CheckpointContents) -> dict[str, Any]:
    """The same for programs: a dictionary of JSON's types."""
    return {
        "kind": contents.kind,
        "path": str(contents.path),
        **contents.facts,
        "files": contents.num_files,
        "stored_bytes": contents.stored_bytes,
        "tensors": [{**asdict(each), "is_optimizer": each.is_optimizer} for each in contents.tensors],
    }


def _table(tensors: list[TensorEntry]) -> Iterator[str]:
    rows = list(_rows(tensors))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    for name, shape, dtype, size in rows:
        yield f"  {name.ljust(widths[0])}  {shape.ljust(widths[1])}  {dtype.ljust(widths[2])}  {size.rjust(widths[3])}"


def _rows(tensors: list[TensorEntry]) -> Iterator[tuple[str, str, str, str]]:
    def pattern(each: TensorEntry) -> tuple[str, tuple[int, ...], str]:
        return _NUMBER.sub("#", each.name), each.shape, each.dtype

    ordered = sorted(tensors, key=lambda each: _NUMBER.sub("#", each.name))  # stable: numbers stay in order
    for _, group in groupby(ordered, pattern):
        alike = list(group)
        shape, size = str(list(alike[0].shape)), _size(sum(each.num_bytes for each in alike))
        yield _name(alike), shape, alike[0].dtype, size


def _name(alike: list[TensorEntry]) -> str:
    """One name for all: ``layers.{0-31}.weight`` for whole ranges, ``#`` and how many otherwise."""
    first = alike[0].name
    if len(alike) == 1:
        return first
    numbers = [[int(number) for number in _NUMBER.findall(each.name)] for each in alike]
    changing = [place for place in range(len(numbers[0])) if len({each[place] for each in numbers}) > 1]
    if len(changing) == 1:
        values = [each[changing[0]] for each in numbers]
        if values == list(range(values[0], values[0] + len(values))):
            replaced = iter(range(len(numbers[0])))
            span = f"{{{values[0]}-{values[-1]}}}"
            return _NUMBER.sub(lambda match: span if next(replaced) == changing[0] else match.group(), first)
    return f"{_NUMBER.sub('#', first)} ({len(alike)} times)"


def _total(tensors: list[TensorEntry]) -> str:
    numbers = sum(math.prod(each.shape) for each in tensors)
    dtypes = ", ".join(dict.fromkeys(each.dtype for each in tensors))
    return (
        f"{len(tensors):,} tensors, {numbers:,} numbers, {_size(sum(each.num_bytes for each in tensors))} of {dtypes}"
    )


def _kinds_of_state(state: list[TensorEntry]) -> str:
    """``exp_avg`` and others: what stands between ``optimizer.state.`` and the weight's name."""
    return ", ".join(dict.fromkeys(each.name.removeprefix("optimizer.state.").split(".")[0] for each in state))


def _fact(name: str, value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    if name in ("model", "config", "args"):
        value = {field: value[field] for field in _SHAPE_OF_A_MODEL if value.get(field) is not None}
    parts = [
        f"{field} ({_fact('', each)})" if isinstance(each, Mapping) else f"{field} {each}"
        for field, each in value.items()
    ]
    return ", ".join(parts)


def _size(num_bytes: float) -> str:
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1000, unit + 1
    return f"{num_bytes:,.0f} {_UNITS[unit]}" if unit == 0 else f"{num_bytes:,.3g} {_UNITS[unit]}"
