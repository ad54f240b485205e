"""Describe an indexed dataset: sizes, lengths and the beginning of its documents."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.indexed import CHUNK, IndexedDataset, check_dataset
from lightning_megatron.errors import DataError
from lightning_megatron.storage.paths import readable_size

MAX_TOKENS_SHOWN = 256
"""Tokens of a document decoded for a preview, at most; a document may be a book."""
_MAX_CHARACTERS_SHOWN = 400
"""Characters of a decoded document shown in a preview, at most."""
_MAX_IDS_SHOWN = 64
"""Token ids of a document shown in a preview, at most."""


def dataset_prefix(path: str) -> str | None:
    """Prefix of the dataset at ``path``, which may be the prefix or one of its files; None if there is no dataset."""
    if path.endswith((".bin", ".idx")) and os.path.isfile(path):
        return path[: -len(".bin")]
    if os.path.isfile(f"{path}.bin") or os.path.isfile(f"{path}.idx"):
        return path
    return None


def describe_dataset(
    prefix: str,
    num_documents: int = 0,
    tokenizer: Any = None,
) -> dict[str, Any]:
    """Describe a dataset as JSON-serializable values, after checking its whole index.

    Args:
        prefix: Path of both files without suffix.
        num_documents: Documents whose beginning is shown, at most.
        tokenizer: A transformers tokenizer that decodes them; None shows token ids.

    Raises:
        DataError: If the dataset is missing, damaged or foreign, or the tokenizer lacks a token.
    """
    dataset = check_dataset(prefix, option="path", for_training=False)
    count = dataset.num_documents
    counts = np.diff(dataset.document_bounds)
    report: dict[str, Any] = {
        "kind": "dataset",
        "prefix": prefix,
        "format": dataset.format,
        "documents": count,
        "sequences": len(dataset.lengths),
        "tokens": len(dataset.tokens),
        "dtype": str(dataset.dtype),
        "bin_bytes": dataset.tokens.nbytes,
        "idx_bytes": os.path.getsize(prefix + ".idx"),
        "lengths": _summary(dataset.lengths),
        "histogram": _histogram(dataset.lengths),
        "sequences_per_document": _summary(counts) if count else None,
    }
    if num_documents and count:
        numbers = range(min(num_documents, count))
        report["first_documents"] = [_preview(dataset, number, tokenizer) for number in numbers]
    return report


def as_text(report: dict[str, Any]) -> str:
    """Format the report of ``describe_dataset`` for a terminal."""
    rows = {
        "format": report["format"],
        "documents": report["documents"],
        "sequences": report["sequences"],
        "tokens": report["tokens"],
        "dtype": report["dtype"],
        ".bin": readable_size(report["bin_bytes"]),
        ".idx": readable_size(report["idx_bytes"]),
        "lengths": report["lengths"],
        "a document": report["sequences_per_document"],
    }
    lines = [report["prefix"]]
    lines += [f"  {name:10}  {_format_value(value)}" for name, value in rows.items() if value]
    lines += ["", "Sequences by length in tokens"]
    for bucket in report["histogram"]:
        span = f"{bucket['first']:,}"
        if bucket["last"] > bucket["first"]:
            span += f" - {bucket['last']:,}"
        count = bucket["count"]
        lines.append(f"  {span:>21}  {count:>13,}  {count / report['sequences']:6.1%}")
    for document in report.get("first_documents", ()):
        unit = "token" if document["num_tokens"] == 1 else "tokens"
        lines += [
            "",
            f"Document {document['number']}, {document['num_tokens']:,} {unit}",
            *_preview_lines(document),
        ]
    return "\n".join(lines)


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:,}" for name, number in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def _summary(values: NDArray[Any]) -> dict[str, int | float]:
    return {
        "min": int(values.min()),
        "mean": round(float(values.mean()), 2),
        "max": int(values.max()),
    }


def _histogram(values: NDArray[Any]) -> list[dict[str, int]]:
    """Number of values between consecutive powers of two, from the smallest to the largest value."""
    counts = np.zeros(65, dtype=np.int64)
    for begin in range(0, len(values), CHUNK):
        _, exponents = np.frexp(values[begin : begin + CHUNK])
        counts += np.bincount(exponents, minlength=65)
    first, last = np.flatnonzero(counts)[[0, -1]].tolist()
    return [
        {
            "first": 2**n // 2,
            "last": 2**n - 1,
            "count": int(counts[n]),
        }
        for n in range(first, last + 1)
    ]


def _preview(
    dataset: IndexedDataset,
    number: int,
    tokenizer: Any,
) -> dict[str, Any]:
    begin, end = dataset.document_bounds[number : number + 2]
    document = dataset.tokens[:0]
    if end > begin:
        document, _ = dataset.sequences(begin, end)
    tokens = document[:MAX_TOKENS_SHOWN]
    text = None
    if tokenizer is not None:
        is_foreign = (tokens < 0) | (tokens >= len(tokenizer)) | (tokens != np.floor(tokens))
        foreign = tokens[is_foreign]
        if foreign.size:
            raise DataError(
                f"{dataset.prefix} holds token {foreign[0]}, the tokenizer has 0 to {len(tokenizer) - 1}; give the one "
                "that made the dataset"
            )
        text = str(tokenizer.decode(tokens.tolist()))
    return {
        "number": number,
        "num_tokens": len(document),
        "tokens": tokens.tolist(),
        "text": text,
    }


def _preview_lines(document: dict[str, Any]) -> list[str]:
    tokens = document["tokens"]
    num_tokens = document["num_tokens"]
    text = document["text"]
    if text is None:
        shown = " ".join(map(str, tokens[:_MAX_IDS_SHOWN]))
        is_cut = num_tokens > _MAX_IDS_SHOWN
    else:
        shown = text[:_MAX_CHARACTERS_SHOWN]
        is_cut = len(text) > _MAX_CHARACTERS_SHOWN or num_tokens > len(tokens)
    if is_cut:
        shown += " …"
    return [f"  {line}" for line in shown.split("\n")]
