"""Describe an indexed dataset as text or JSON: documents, sequences, tokens, lengths, and how documents begin."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.formats.any_format import check_any_dataset
from lightning_megatron.data.formats.index_files import DatasetHeader, reading
from lightning_megatron.errors import DataError

_SUFFIXES = (".bin", ".idx")
MOST_TOKENS_SHOWN = 256
"""Tokens of a document that a preview decodes; a document may be a book."""
_MOST_CHARACTERS = 400
"""Characters of a document that are shown."""
_MOST_NUMBERS = 64
"""Tokens of a document that are shown as numbers."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Non-negative integers, counted: in memory that does not grow with their number."""

    count: int
    """How many they are."""
    sum: int
    """All of them added up."""
    minimum: int
    """The smallest."""
    maximum: int
    """The largest."""
    by_bits: list[int]
    """How many have 0, 1, 2, ... binary digits: how many are 0, 1, 2 to 3, 4 to 7, ..."""

    @property
    def mean(self) -> float:
        """The arithmetic mean."""
        return self.sum / self.count

    def summary(self) -> dict[str, int | float]:
        """The usual figures by their usual names."""
        return {"min": self.minimum, "mean": round(self.mean, 2), "max": self.maximum}

    def histogram(self) -> list[dict[str, int]]:
        """How many lie between powers of two, from the smallest to the largest."""
        return [
            {"first": 2**bits // 2, "last": 2**bits - 1, "count": count}
            for bits, count in enumerate(self.by_bits)
            if self.minimum.bit_length() <= bits <= self.maximum.bit_length()
        ]


@dataclass(frozen=True, kw_only=True)
class DatasetDescription:
    """What is known of a dataset whose index has been read and checked as a whole."""

    header: DatasetHeader
    """Where it is, in which format, how large."""
    lengths: Sizes
    """Tokens of the sequences."""
    sequences_per_document: Sizes | None
    """Sequences of the documents; None if there is no document."""
    modes: dict[int, int] | None
    """How many sequences have which mode; None if they have none."""

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences."""
        return self.lengths.sum


@dataclass(frozen=True, kw_only=True)
class DocumentPreview:
    """How a document begins."""

    number: int
    """Its place in the dataset, from 0."""
    num_tokens: int
    """Tokens in it."""
    tokens: list[int] | list[float]
    """The first of them."""
    text: str | None = None
    """What these are in text; None without a tokenizer."""


def dataset_prefix(path: str) -> str | None:
    """The prefix of the dataset that ``path`` is, be it the prefix or one of the files; None if it is none."""
    if path.endswith(_SUFFIXES) and os.path.isfile(path):
        return path[: -len(".bin")]
    return path if any(os.path.isfile(path + suffix) for suffix in _SUFFIXES) else None


def describe_dataset(prefix: str) -> DatasetDescription:
    """Read and check the whole index of the dataset at ``prefix``.

    Raises:
        DataError: If it is missing, damaged or foreign.
    """
    header = check_any_dataset(prefix, "path")
    return DatasetDescription(
        header=header,
        lengths=_sizes(_with_progress(header.lengths(), header.num_sequences)),
        sequences_per_document=_sizes(_differences(header)) if header.num_documents > 0 else None,
        modes=_modes(header) if header.has_modes else None,
    )


def first_documents(header: DatasetHeader, count: int, tokenizer: Any = None) -> list[DocumentPreview]:
    """How the first ``count`` documents begin; their tokens lie at the beginning of ``.bin``, one after the other.

    Args:
        header: The dataset, which has been checked.
        count: How many; fewer if there are fewer.
        tokenizer: A transformers tokenizer that turns tokens into text.

    Raises:
        DataError: If the tokenizer does not know a token, or ``.bin`` cannot be read.
    """
    lengths = (int(length) for chunk in header.lengths() for length in chunk)
    bounds = (int(bound) for chunk in header.document_bounds() for bound in chunk)
    previews = []
    begin = 0
    for number, (first, after) in enumerate(pairwise(islice(bounds, min(count, header.num_documents) + 1))):
        num_tokens = sum(islice(lengths, after - first))
        shown = min(num_tokens, MOST_TOKENS_SHOWN)
        path = Path(header.prefix + ".bin")
        with reading(path):
            tokens = np.fromfile(path, header.dtype, shown, offset=begin * header.dtype.itemsize)
        text = None if tokenizer is None else _decoded(tokens, tokenizer, header)
        previews.append(DocumentPreview(number=number, num_tokens=num_tokens, tokens=tokens.tolist(), text=text))
        begin += num_tokens
    return previews


def as_text(description: DatasetDescription, previews: Sequence[DocumentPreview]) -> str:
    """A report of a screen or so for a terminal."""
    header, lengths, per_document = description.header, description.lengths, description.sequences_per_document
    rows = [
        ("format", header.format),
        ("documents", f"{header.num_documents:,}"),
        ("sequences", f"{header.num_sequences:,}" + ("" if per_document is None else _a_document(per_document))),
        ("tokens", f"{description.num_tokens:,}"),
        ("dtype", f"{header.dtype}, {header.dtype.itemsize} bytes a token"),
        ("size", f".bin {_size(header.bin_bytes)}, .idx {_size(header.idx_bytes)}"),
        ("lengths", ", ".join(f"{name} {number:,}" for name, number in lengths.summary().items())),
    ]
    if description.modes is not None:
        rows.append(("modes", ", ".join(f"{count:,} of mode {mode}" for mode, count in description.modes.items())))
    if header.remark is not None:
        rows.append(("note", header.remark))
    lines = [header.prefix, *(f"  {name:9}  {value}" for name, value in rows), "", "Sequences by length in tokens"]
    for each in lengths.histogram():
        span = f"{each['first']:,}" + (f" - {each['last']:,}" if each["last"] > each["first"] else "")
        lines.append(f"  {span:>21}  {each['count']:>13,}  {each['count'] / lengths.count:6.1%}")
    for preview in previews:
        unit = "token" if preview.num_tokens == 1 else "tokens"
        lines += ["", f"Document {preview.number}, {preview.num_tokens:,} {unit}", *_shown(preview)]
    return "\n".join(lines)


def as_json(description: DatasetDescription, previews: Sequence[DocumentPreview]) -> dict[str, Any]:
    """The same for programs: a dictionary of JSON's types."""
    header, per_document, modes = description.header, description.sequences_per_document, description.modes
    result: dict[str, Any] = {
        "kind": "dataset",
        "prefix": header.prefix,
        "format": header.format,
        "documents": header.num_documents,
        "sequences": header.num_sequences,
        "tokens": description.num_tokens,
        "dtype": str(header.dtype),
        "bin_bytes": header.bin_bytes,
        "idx_bytes": header.idx_bytes,
        "lengths": description.lengths.summary(),
        "histogram": description.lengths.histogram(),
        "sequences_per_document": None if per_document is None else per_document.summary(),
        "modes": None if modes is None else {str(mode): count for mode, count in modes.items()},
        "note": header.remark,
    }
    if previews:
        result["first_documents"] = [asdict(preview) for preview in previews]
    return result


def _sizes(chunks: Iterable[NDArray[Any]]) -> Sizes:
    """Of all chunks together, which hold at least one number."""
    count = total = maximum = 0
    minimum = np.iinfo(np.int64).max
    by_bits: NDArray[np.int64] = np.zeros(65, dtype=np.int64)
    for chunk in filter(len, chunks):
        count, total = count + len(chunk), total + int(chunk.sum(dtype=np.int64))
        minimum, maximum = min(minimum, int(chunk.min())), max(maximum, int(chunk.max()))
        by_bits += np.bincount(np.frexp(chunk.astype(np.float64))[1], minlength=65)
    return Sizes(count=count, sum=total, minimum=minimum, maximum=maximum, by_bits=by_bits.tolist())


def _modes(header: DatasetHeader) -> dict[int, int]:
    counts = Counter[int]()
    for chunk in header.modes():
        modes, how_often = np.unique(chunk, return_counts=True)
        counts.update(dict(zip(modes.tolist(), how_often.tolist(), strict=True)))
    return dict(sorted(counts.items()))


def _decoded(tokens: NDArray[Any], tokenizer: Any, header: DatasetHeader) -> str:
    foreign = tokens[(tokens < 0) | (tokens >= len(tokenizer)) | (tokens != np.floor(tokens))]
    if foreign.size:
        raise DataError(
            f"{header.prefix} holds token {foreign[0]}, the tokenizer has 0 to {len(tokenizer) - 1}: it was made with"
            " another; give that one, or leave --tokenizer out"
        )
    return str(tokenizer.decode(tokens.tolist()))


def _differences(header: DatasetHeader) -> Iterator[NDArray[np.int64]]:
    """Sequences of each document, in chunks."""
    last: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
    for bounds in header.document_bounds():
        yield np.diff(np.concatenate([last, bounds]))
        last = bounds[-1:]


def _with_progress(chunks: Iterator[NDArray[Any]], total: int) -> Iterator[NDArray[Any]]:
    from tqdm import tqdm

    with tqdm(total=total, unit=" sequences", unit_scale=True, desc="Counting", mininterval=0.5, delay=1.0) as bar:
        for chunk in chunks:
            yield chunk
            bar.update(len(chunk))


def _a_document(sequences: Sizes) -> str:
    if sequences.minimum == sequences.maximum:
        return f", {sequences.minimum} a document"
    return f", {sequences.mean:,.1f} a document ({sequences.minimum:,} to {sequences.maximum:,})"


def _size(num_bytes: int) -> str:
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    size, unit = float(num_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{num_bytes:,} bytes ({size:.3g} {unit})"


def _shown(preview: DocumentPreview) -> list[str]:
    if preview.text is None:
        shown = preview.tokens[:_MOST_NUMBERS]
        return [f"  {' '.join(map(str, shown))}{' …' if len(shown) < preview.num_tokens else ''}"]
    text = preview.text
    is_cut = len(text) > _MOST_CHARACTERS or len(preview.tokens) < preview.num_tokens
    # What a terminal would obey is shown as Python writes it.
    lines = text[:_MOST_CHARACTERS].split("\n")
    safe = ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines]
    return [f"  {line}" for line in safe[:-1]] + [f"  {safe[-1]}{' …' if is_cut else ''}"]
