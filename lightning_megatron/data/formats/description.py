"""What is in an indexed dataset: how many documents, sequences and tokens, of which lengths, and how does it begin?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.formats.any_format import check_any_dataset
from lightning_megatron.data.formats.distribution import Distribution, distribution
from lightning_megatron.data.formats.index_files import DatasetHeader, reading
from lightning_megatron.errors import DataError

_SUFFIXES = (".bin", ".idx")
MOST_TOKENS_SHOWN = 256
"""Tokens of a document that a preview decodes; a document may be a book."""


@dataclass(frozen=True, kw_only=True)
class DatasetDescription:
    """What is known of a dataset whose index has been read and checked as a whole."""

    header: DatasetHeader
    """Where it is, in which format, how large."""
    lengths: Distribution
    """Tokens of the sequences."""
    sequences_per_document: Distribution | None
    """Sequences of the documents; None if there is no document."""
    modes: Distribution | None
    """Modes of the sequences; None if they have none."""

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
        lengths=distribution(_with_progress(header.lengths(), header.num_sequences)),
        sequences_per_document=distribution(_differences(header)) if header.num_documents > 0 else None,
        modes=distribution(header.modes()) if header.has_modes else None,
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
