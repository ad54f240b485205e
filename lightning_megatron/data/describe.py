"""Describe an indexed dataset as text or JSON: documents, sequences, tokens, lengths, and how documents begin."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.indexed import CHUNK, IndexedDataset, check_dataset
from lightning_megatron.errors import DataError
from lightning_megatron.files import readable_size

MOST_TOKENS_SHOWN = 256
"""Tokens of a document that a preview decodes; a document may be a book."""
_MOST_CHARACTERS = 400
"""Characters of a document that are shown."""
_MOST_NUMBERS = 64
"""Tokens of a document that are shown as numbers."""


def dataset_prefix(path: str) -> str | None:
    """The prefix of the dataset that ``path`` is, be it the prefix or one of the files; None if it is none."""
    if path.endswith((".bin", ".idx")) and os.path.isfile(path):
        return path[: -len(".bin")]
    return path if any(os.path.isfile(path + suffix) for suffix in (".bin", ".idx")) else None


def describe_dataset(prefix: str, num_documents: int = 0, tokenizer: Any = None) -> dict[str, Any]:
    """What is known of a dataset whose index has been read and checked as a whole, in JSON's types.

    Args:
        prefix: Path of both files without suffix.
        num_documents: Of how many documents the beginning is shown; of fewer if there are fewer.
        tokenizer: A transformers tokenizer that turns these tokens into text.

    Raises:
        DataError: If the dataset is missing, damaged or foreign, or the tokenizer does not know a token.
    """
    dataset = check_dataset(prefix, option="path", for_training=False)
    modes, counts = np.unique(dataset.modes, return_counts=True)
    report: dict[str, Any] = {
        "kind": "dataset",
        "prefix": prefix,
        "format": dataset.format,
        "documents": dataset.num_documents,
        "sequences": len(dataset.lengths),
        "tokens": len(dataset.tokens),
        "dtype": str(dataset.dtype),
        "bin_bytes": dataset.tokens.nbytes,
        "idx_bytes": os.path.getsize(prefix + ".idx"),
        "lengths": _summary(dataset.lengths),
        "histogram": _histogram(dataset.lengths),
        "sequences_per_document": _summary(np.diff(dataset.document_bounds)) if dataset.num_documents else None,
        "modes": dict(zip(map(str, modes), counts.tolist(), strict=True)) or None,
        "note": dataset.note,
    }
    if num_documents and dataset.num_documents:
        report["first_documents"] = _first_documents(dataset, num_documents, tokenizer)
    return report


def as_text(report: dict[str, Any]) -> str:
    """What ``describe_dataset`` found, on a screen or so of a terminal."""
    rows: dict[str, Any] = {name: report[name] for name in ("format", "documents", "sequences", "tokens", "dtype")}
    rows |= {f".{suffix}": readable_size(report[f"{suffix}_bytes"]) for suffix in ("bin", "idx")}
    rows |= {"lengths": report["lengths"], "a document": report["sequences_per_document"], "modes": report["modes"]}
    rows["note"] = report["note"]
    lines = [report["prefix"], *(f"  {name:10}  {_shown(value)}" for name, value in rows.items() if value)]
    lines += ["", "Sequences by length in tokens"]
    for each in report["histogram"]:
        span = f"{each['first']:,}" + (f" - {each['last']:,}" if each["last"] > each["first"] else "")
        lines.append(f"  {span:>21}  {each['count']:>13,}  {each['count'] / report['sequences']:6.1%}")
    for document in report.get("first_documents", ()):
        unit = "token" if document["num_tokens"] == 1 else "tokens"
        lines += ["", f"Document {document['number']}, {document['num_tokens']:,} {unit}", *_beginning(document)]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:,}" for name, number in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def _summary(numbers: NDArray[Any]) -> dict[str, int | float]:
    mean = int(numbers.sum(dtype=np.int64)) / len(numbers)
    return {"min": int(numbers.min()), "mean": round(mean, 2), "max": int(numbers.max())}


def _histogram(numbers: NDArray[Any]) -> list[dict[str, int]]:
    """How many lie between powers of two, from the smallest to the largest."""
    by_bits: NDArray[np.int64] = np.zeros(65, dtype=np.int64)
    for begin in range(0, len(numbers), CHUNK):
        by_bits += np.bincount(np.frexp(numbers[begin : begin + CHUNK].astype(np.float64))[1], minlength=65)
    found = np.flatnonzero(by_bits)
    return [
        {"first": 2**bits // 2, "last": 2**bits - 1, "count": int(by_bits[bits])}
        for bits in range(int(found[0]), int(found[-1]) + 1)
    ]


def _first_documents(dataset: IndexedDataset, count: int, tokenizer: Any) -> list[dict[str, Any]]:
    bounds = dataset.document_bounds[: min(count, dataset.num_documents) + 1]
    ends = np.cumsum([0, *dataset.lengths[: bounds[-1]]])[bounds].tolist()
    documents = []
    for number, (begin, end) in enumerate(pairwise(ends)):
        tokens = dataset.tokens[begin : min(end, begin + MOST_TOKENS_SHOWN)]
        text = None if tokenizer is None else _decoded(tokens, tokenizer, dataset.prefix)
        documents.append({"number": number, "num_tokens": end - begin, "tokens": tokens.tolist(), "text": text})
    return documents


def _decoded(tokens: NDArray[Any], tokenizer: Any, prefix: str) -> str:
    foreign = tokens[(tokens < 0) | (tokens >= len(tokenizer)) | (tokens != np.floor(tokens))]
    if foreign.size:
        raise DataError(f"{prefix} holds token {foreign[0]}, the tokenizer has 0 to {len(tokenizer) - 1}; give its own")
    return str(tokenizer.decode(tokens.tolist()))


def _beginning(document: dict[str, Any]) -> list[str]:
    tokens, text, num_tokens = document["tokens"], document["text"], document["num_tokens"]
    shown, is_cut = " ".join(map(str, tokens[:_MOST_NUMBERS])), num_tokens > _MOST_NUMBERS
    if text is not None:
        shown, is_cut = text[:_MOST_CHARACTERS], len(text) > _MOST_CHARACTERS or num_tokens > len(tokens)
    return [f"  {line}" for line in (shown + " …" * is_cut).split("\n")]
