"""The command ``inspect``: a dataset or checkpoint as text of a screen or two, or as JSON with everything."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_megatron.errors import ConfigError, DataError, printable, require_number
from lightning_megatron.files import as_path, readable_size

if TYPE_CHECKING:
    from lightning_megatron.convert.shards import Source, Stored

_MOST_NAMED = 5
_SHAPE_OF_A_MODEL = (
    *("family", "model_type", "architecture", "architectures", "task"),
    *("num_layers", "num_hidden_layers", "n_layer", "num_decoder_layers", "hidden_size", "n_embd", "d_model"),
    *("ffn_hidden_size", "intermediate_size", "n_inner", "d_ff", "num_attention_heads", "n_head", "num_heads"),
    *("num_query_groups", "num_key_value_heads", "vocab_size", "max_position_embeddings", "n_positions"),
    *("padded_vocab_size", "position_embedding_type", "normalization"),
)
"""What a reader of text wants of the dozens of fields."""
_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")


def inspect_path(
    path: str | Path, *, tokenizer: Path | None = None, documents: int | None = None, json: bool = False
) -> None:
    """Describe a dataset (documents, tokens, lengths) or a checkpoint (tensors, model, layout).

    Reads and checks all of a dataset's index, not all of its tokens; reads no weight of a checkpoint, and runs no code
    of it.

    Args:
        path: Prefix of a dataset, or its .bin or .idx; a *.ckpt, a checkpoint of Megatron-Core (torch_dist) or of
            Megatron-LM, or a Hugging Face model directory.
        tokenizer: Decode the first documents with this transformers tokenizer.
        documents: Show the beginning of the first N documents (default: 3 with --tokenizer, else 0).
        json: Print JSON instead of text.

    Raises:
        ConfigError: If ``documents`` is negative, or an option is for datasets and a checkpoint is there.
        DataError: If nothing is there, or something that is neither or that is damaged.
    """
    if documents is not None:
        require_number("documents", documents)
    report = _dataset(str(path), tokenizer, documents, json)
    if report is None and (place := as_path(path)).exists():
        report = _checkpoint(place, json)
        for name, value in (("tokenizer", tokenizer), ("documents", documents)):
            if report is not None and value is not None:
                raise ConfigError(f"{name}={value} is for datasets, and {path} is a checkpoint; leave it out")
    if report is None:
        raise DataError(_unknown(str(path)))
    print("\n".join(map(printable, report.split("\n"))), flush=True)


def _dataset(path: str, tokenizer_folder: Path | None, documents: int | None, as_json: bool) -> str | None:
    from lightning_megatron.data.indexed import as_text, dataset_prefix, describe_dataset

    if (prefix := dataset_prefix(path)) is None:
        return None
    if path.endswith(".bin") and not os.path.exists(f"{prefix}.idx"):
        from lightning_megatron.convert.hugging_face import directory_of

        if directory_of(Path(path)) is not None:  # weights of a model
            return None
    tokenizer = None
    if tokenizer_folder is not None:
        from lightning_megatron.data.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(tokenizer_folder)
    count = documents if documents is not None else 0 if tokenizer is None else 3
    described = describe_dataset(prefix, count, tokenizer)
    return json.dumps(described, indent=2) if as_json else as_text(described)


def _unknown(path: str) -> str:
    is_what = "is neither a dataset (.bin and .idx) nor a checkpoint that is read"
    folder = as_path(path)
    if not folder.exists():
        is_what = f"does not exist, nor do {path}.bin and .idx"
    found = sorted({str(each.with_suffix("")) for each in folder.glob("*.idx")} | set(map(str, folder.glob("*.ckpt"))))
    fix = "the prefix of a dataset, e.g. data/corpus_document, one of its files, a *.ckpt or a model directory"
    if found:
        fix = f"one of these in it: {', '.join(found[:_MOST_NAMED])}{', …' if len(found) > _MOST_NAMED else ''}"
    return f"path={path} {is_what}; give {fix}"


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def _checkpoint(path: Path, as_json: bool) -> str | None:
    from lightning_megatron.convert.contents import find_source

    source = find_source(path)
    if source is None:
        return None
    files = [source.path] if source.path.is_file() else [each for each in source.path.rglob("*") if each.is_file()]
    stored_bytes = sum(each.stat().st_size for each in files)
    facts = {name: value for name, value in source.metadata.items() if value not in (None, {}, [])}
    if not as_json:
        return _as_text(source, facts, f"{len(files):,}, {readable_size(stored_bytes)}")
    shown = {"kind": source.kind, "path": str(source.path), **facts, "files": len(files), "stored_bytes": stored_bytes}
    weights = source.weights
    shown["tensors"] = [
        {
            **{"name": name, "shape": each.shape, "dtype": _dtype(each), "num_bytes": each.num_bytes},
            "is_optimizer": name not in weights,
        }
        for name, each in _in_order(source.stored).items()
    ]
    return json.dumps(shown, indent=2, default=str)


def _in_order(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Sorted by name, ``layers.10`` behind ``layers.9``."""
    return dict(sorted(tensors.items(), key=lambda each: _NUMBER.sub(lambda number: number[0].zfill(9), each[0])))


def _dtype(tensor: Stored) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _as_text(source: Source, facts: Mapping[str, Any], files: str) -> str:
    """Facts, totals, and weights; those that differ only in a number of their name share a line."""
    rows = [("kind", source.kind)]
    rows += [(name.replace("_", " "), _fact(name, value)) for name, value in facts.items()]
    rows.append(("files", files))
    weights = _in_order(source.weights)
    state = {name: source.stored[name] for name in _in_order(source.stored) if name not in weights}
    if weights:
        rows.append(("weights", _total(weights.values())))
    if state:  # exp_avg and others: what stands between "optimizer.state." and the weight's name
        kinds = dict.fromkeys(name.removeprefix("optimizer.state.").split(".")[0] for name in state)
        rows.append(("optimizer state", f"{_total(state.values())}: {', '.join(kinds)}"))
    lines = [*(f"  {row}" for row in columns(rows)), "", "Weights", *(f"  {row}" for row in columns(_weights(weights)))]
    return "\n".join(map(printable, [str(source.path), *lines]))  # a name may hold a line break, too


def columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The rows as lines of left-aligned columns."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _weights(tensors: Mapping[str, Stored]) -> Iterator[tuple[str, str, str, str]]:
    alike: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    for name, each in tensors.items():
        alike.setdefault((_NUMBER.sub("#", name), each.shape, _dtype(each)), []).append(name)
    for (_, shape, dtype), names in sorted(alike.items(), key=lambda each: each[0][0]):
        yield _name(names), str(list(shape)), dtype, readable_size(sum(tensors[name].num_bytes for name in names))


def _name(names: list[str]) -> str:
    """One name for all: ``layers.{0-31}.weight``, and how many if these are not all between."""
    shown, between = "", 1
    for column in zip(*map(_NUMBER.split, names), strict=True):
        if len(set(column)) == 1:
            shown += column[0]
        else:
            low, high = min(map(int, column)), max(map(int, column))
            shown, between = f"{shown}{{{low}-{high}}}", between * (high - low + 1)
    return shown if between == len(names) else f"{shown} ({len(names)} of them)"


def _total(tensors: Collection[Stored]) -> str:
    numbers, num_bytes = sum(math.prod(each.shape) for each in tensors), sum(each.num_bytes for each in tensors)
    dtypes = ", ".join(dict.fromkeys(map(_dtype, tensors)))
    return f"{len(tensors):,} tensors, {numbers:,} numbers, {readable_size(num_bytes)} of {dtypes}"


def _fact(name: str, value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    if name in ("model", "config", "args"):
        value = {field: value[field] for field in _SHAPE_OF_A_MODEL if value.get(field) is not None}
    shown = ((field, f"({_fact('', each)})" if isinstance(each, Mapping) else each) for field, each in value.items())
    return ", ".join(f"{field} {each}" for field, each in shown)
