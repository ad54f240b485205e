"""The command ``inspect``: describe a dataset or checkpoint, as short text or as complete JSON.

Slow imports are inside the functions.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_megatron.errors import ConfigError, DataError, printable, require_number
from lightning_megatron.storage.paths import as_path, readable_size

if TYPE_CHECKING:
    from lightning_megatron.convert.source import Source, Stored

_MAX_NAMED = 5
_MODEL_FIELDS = (
    "family",
    "model_type",
    "architecture",
    "architectures",
    "task",
    "num_layers",
    "num_hidden_layers",
    "n_layer",
    "num_decoder_layers",
    "hidden_size",
    "n_embd",
    "d_model",
    "ffn_hidden_size",
    "intermediate_size",
    "n_inner",
    "d_ff",
    "num_attention_heads",
    "n_head",
    "num_heads",
    "num_query_groups",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "n_positions",
    "padded_vocab_size",
    "position_embedding_type",
    "normalization",
)
"""Fields of a model config to show in text."""
_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")
"""Index of a layer or expert in the name of a tensor."""


def inspect_path(
    path: str | Path,
    *,
    tokenizer: Path | None = None,
    documents: int | None = None,
    json: bool = False,
) -> None:
    """Describe a dataset (documents, tokens, lengths) or a checkpoint (tensors, model, layout).

    Reads and checks the complete index of a dataset, but not all of its tokens; reads no weights of a checkpoint, and
    runs no code from it.

    Args:
        path: Prefix of a dataset, or its .bin or .idx; a *.ckpt, a checkpoint of Megatron-Core (torch_dist) or of
            Megatron-LM, or a Hugging Face model directory.
        tokenizer: Decode the first documents with this transformers tokenizer.
        documents: Show the beginning of the first N documents (default: 3 with --tokenizer, else 0).
        json: Print JSON instead of text.

    Raises:
        ConfigError: If ``documents`` is negative, or an option for datasets is given for a checkpoint.
        DataError: If the path does not exist, is neither a dataset nor a checkpoint, or is damaged.
    """
    if documents is not None:
        require_number("documents", documents)
    report = _report_dataset(str(path), tokenizer, documents, json)
    if report is None and (checkpoint := as_path(path)).exists():
        report = _report_checkpoint(checkpoint, json)
        for name, value in (("tokenizer", tokenizer), ("documents", documents)):
            if report is not None and value is not None:
                raise ConfigError(
                    f"{name}={value} is for datasets, and {path} is a checkpoint; leave it out"
                )
    if report is None:
        raise DataError(_error_message(str(path)))
    for line in report.split("\n"):
        print(printable(line))


def _report_dataset(
    path: str, tokenizer_folder: Path | None, documents: int | None, as_json: bool
) -> str | None:
    from lightning_megatron.data.indexed_report import as_text, dataset_prefix, describe_dataset

    prefix = dataset_prefix(path)
    if prefix is None:
        return None
    if path.endswith(".bin") and not os.path.exists(f"{prefix}.idx"):
        from lightning_megatron.convert.weight_files import directory_of

        if directory_of(Path(path)) is not None:  # weights of a Hugging Face model
            return None
    tokenizer = None
    num_shown = 0
    if tokenizer_folder is not None:
        from lightning_megatron.data.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(tokenizer_folder)
        num_shown = 3
    if documents is not None:
        num_shown = documents
    description = describe_dataset(prefix, num_shown, tokenizer)
    return json.dumps(description, indent=2) if as_json else as_text(description)


def _error_message(path: str) -> str:
    problem = "is neither a dataset (.bin and .idx) nor a supported checkpoint"
    folder = as_path(path)
    if not folder.exists():
        problem = f"does not exist, nor do {path}.bin and .idx"
    datasets = {str(index.with_suffix("")) for index in folder.glob("*.idx")}
    checkpoints = {str(checkpoint) for checkpoint in folder.glob("*.ckpt")}
    names = sorted(datasets | checkpoints)
    fix = "the prefix of a dataset, e.g. data/corpus_document, one of its files, a *.ckpt or a model directory"
    if names:
        shown = names[:_MAX_NAMED]
        if len(names) > _MAX_NAMED:
            shown.append("…")
        fix = f"one of these in it: {', '.join(shown)}"
    return f"path={path} {problem}; give {fix}"


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def _report_checkpoint(path: Path, as_json: bool) -> str | None:
    from lightning_megatron.convert.formats import find_source

    source = find_source(path)
    if source is None:
        return None
    files = [source.path] if source.path.is_file() else source.path.rglob("*")
    sizes = [file.stat().st_size for file in files if file.is_file()]
    facts = {name: value for name, value in source.metadata.items() if value not in (None, {}, [])}
    if not as_json:
        return _as_text(source, facts, f"{len(sizes):,}, {readable_size(sum(sizes))}")
    report = {
        "kind": source.kind,
        "path": str(source.path),
        **facts,
        "files": len(sizes),
        "stored_bytes": sum(sizes),
    }
    weights = source.weights
    report["tensors"] = [
        {
            "name": name,
            "shape": tensor.shape,
            "dtype": _dtype(tensor),
            "num_bytes": tensor.num_bytes,
            "is_optimizer": name not in weights,
        }
        for name, tensor in _sort_names(source.stored).items()
    ]
    return json.dumps(report, indent=2, default=str)


def _sort_names(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Sort by name, ``layers.10`` after ``layers.9``."""

    def with_padded_numbers(name: str) -> str:
        return _NUMBER.sub(lambda number: number[0].zfill(9), name)

    names = sorted(tensors, key=with_padded_numbers)
    return {name: tensors[name] for name in names}


def _dtype(tensor: Stored) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _as_text(
    source: Source,
    facts: Mapping[str, Any],
    files: str,
) -> str:
    """Format facts, totals and weights; weights whose names differ only in indices share a line."""
    rows = [("kind", source.kind)]
    for name, value in facts.items():
        rows.append((name.replace("_", " "), _format_fact(name, value)))
    rows.append(("files", files))
    weights = _sort_names(source.weights)
    state = {
        name: tensor for name, tensor in _sort_names(source.stored).items() if name not in weights
    }
    if weights:
        rows.append(("weights", _total(weights.values())))
    if state:
        # exp_avg, ...: the part between "optimizer.state." and the name of the weight
        kinds = [name.removeprefix("optimizer.state.").partition(".")[0] for name in state]
        names = ", ".join(dict.fromkeys(kinds))
        rows.append(("optimizer state", f"{_total(state.values())}: {names}"))
    lines = [str(source.path)]
    lines += [f"  {row}" for row in columns(rows)]
    lines += ["", "Weights"]
    lines += [f"  {row}" for row in columns(_weights(weights))]
    return "\n".join(map(printable, lines))  # a name may contain a line break


def columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Format rows as lines of left-aligned columns."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = map(str.ljust, row, widths)
        yield "  ".join(cells).rstrip()


def _weights(tensors: Mapping[str, Stored]) -> Iterator[tuple[str, str, str, str]]:
    groups: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    for name, tensor in tensors.items():
        group = (_NUMBER.sub("#", name), tensor.shape, _dtype(tensor))
        groups.setdefault(group, []).append(name)
    for group in sorted(groups, key=itemgetter(0)):
        _, shape, dtype = group
        names = groups[group]
        num_bytes = sum(tensors[name].num_bytes for name in names)
        yield _join_names(names), str(list(shape)), dtype, readable_size(num_bytes)


def _join_names(names: list[str]) -> str:
    """One pattern for all names, e.g. ``layers.{0-31}.weight``, with their number if the range has gaps."""
    pattern = ""
    size = 1
    for column in zip(*map(_NUMBER.split, names), strict=True):
        if len(set(column)) == 1:
            pattern += column[0]
        else:
            numbers = [int(part) for part in column]
            low = min(numbers)
            high = max(numbers)
            pattern += f"{{{low}-{high}}}"
            size *= high - low + 1
    if size != len(names):
        pattern += f" ({len(names)} of them)"
    return pattern


def _total(tensors: Collection[Stored]) -> str:
    num_elements = sum(math.prod(tensor.shape) for tensor in tensors)
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    dtypes = ", ".join(dict.fromkeys(map(_dtype, tensors)))
    return f"{len(tensors):,} tensors, {num_elements:,} elements, {readable_size(num_bytes)} of {dtypes}"


def _format_fact(name: str, value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    if name in ("model", "config", "args"):
        known = {field: value.get(field) for field in _MODEL_FIELDS}
        value = {field: item for field, item in known.items() if item is not None}
    items = []
    for key, item in value.items():
        text = _format_fact("", item)
        if isinstance(item, Mapping):
            text = f"({text})"
        items.append(f"{key} {text}")
    return ", ".join(items)
