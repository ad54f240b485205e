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
    return path if any(os.path.isfile(path + suffix) for suffix in (".bin", ".idx")) else None


def describe_dataset(prefix: str, num_documents: int = 0, tokenizer: Any = None) -> dict[str, Any]:
    """Describe a dataset as JSON-serializable values, after checking its whole index.

    Args:
        prefix: Path of both files without suffix.
        num_documents: Documents whose beginning is shown, at most.
        tokenizer: A transformers tokenizer that decodes them; None shows token ids.

    Raises:
        DataError: If the dataset is missing, damaged or foreign, or the tokenizer lacks a token.
    """
    dataset = check_dataset(prefix, option="path", for_training=False)
    count, counts = dataset.num_documents, np.diff(dataset.document_bounds)
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
        report["first_documents"] = [
            _preview(dataset, n, tokenizer) for n in range(min(num_documents, count))
        ]
    return report


def as_text(report: dict[str, Any]) -> str:
    """Format the report of ``describe_dataset`` for a terminal."""
    rows: dict[str, Any] = {
        name: report[name] for name in ("format", "documents", "sequences", "tokens", "dtype")
    }
    rows |= {f".{suffix}": readable_size(report[f"{suffix}_bytes"]) for suffix in ("bin", "idx")}
    rows |= {"lengths": report["lengths"], "a document": report["sequences_per_document"]}
    lines = [
        report["prefix"],
        *(f"  {name:10}  {_format_value(value)}" for name, value in rows.items() if value),
    ]
    lines += ["", "Sequences by length in tokens"]
    for bucket in report["histogram"]:
        span = f"{bucket['first']:,}" + (
            f" - {bucket['last']:,}" if bucket["last"] > bucket["first"] else ""
        )
        lines.append(
            f"  {span:>21}  {bucket['count']:>13,}  {bucket['count'] / report['sequences']:6.1%}"
        )
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
    chunks = (np.frexp(values[begin : begin + CHUNK])[1] for begin in range(0, len(values), CHUNK))
    counts = np.sum([np.bincount(exponents, minlength=65) for exponents in chunks], axis=0)
    first, last = np.flatnonzero(counts)[[0, -1]].tolist()
    return [
        {"first": 2**n // 2, "last": 2**n - 1, "count": int(counts[n])}
        for n in range(first, last + 1)
    ]


def _preview(dataset: IndexedDataset, number: int, tokenizer: Any) -> dict[str, Any]:
    begin, end = dataset.document_bounds[number : number + 2]
    tokens, num_tokens = dataset.tokens[:0], 0
    if end > begin:
        tokens, lengths = dataset.sequences(begin, end)
        tokens, num_tokens = tokens[:MAX_TOKENS_SHOWN], len(tokens)
    text = None
    if tokenizer is not None:
        foreign = tokens[(tokens < 0) | (tokens >= len(tokenizer)) | (tokens != np.floor(tokens))]
        if foreign.size:
            known = (
                f"the tokenizer has 0 to {len(tokenizer) - 1}; give the one that made the dataset"
            )
            raise DataError(f"{dataset.prefix} holds token {foreign[0]}, {known}")
        text = str(tokenizer.decode(tokens.tolist()))
    return {"number": number, "num_tokens": num_tokens, "tokens": tokens.tolist(), "text": text}


def _preview_lines(document: dict[str, Any]) -> list[str]:
    tokens, text, num_tokens = document["tokens"], document["text"], document["num_tokens"]
    shown, is_cut = " ".join(map(str, tokens[:_MAX_IDS_SHOWN])), num_tokens > _MAX_IDS_SHOWN
    if text is not None:
        shown, is_cut = (
            text[:_MAX_CHARACTERS_SHOWN],
            len(text) > _MAX_CHARACTERS_SHOWN or num_tokens > len(tokens),
        )
    return [f"  {line}" for line in (shown + " …" * is_cut).split("\n")]
