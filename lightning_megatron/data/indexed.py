r"""Read, check, write, merge and describe Megatron's indexed datasets: ``PREFIX.bin`` (tokens), ``PREFIX.idx`` (index).

``.bin``: the tokens of all sequences, concatenated. ``.idx``, little-endian, in one of two formats:

* mmap: 9 bytes ``MMIDIDX\0\0``; u64 version 1; u8 token type; u64 N sequences; u64 D; int32[N] lengths in tokens;
  int64[N] byte offsets in ``.bin``; int64[D] the first sequence of each document and, last, N. For GPT a document is
  one sequence, so D = N + 1; multimodal datasets, which are refused, append int8[N] modes. Type 6 is float64; type 7
  was float64 until 2022 and is float32 since: the size of ``.bin`` tells which. Source: megatron-core 0.16.1,
  datasets/indexed_dataset.py:_IndexWriter and _IndexReader.
* cached/lazy, of Megatron 1.x and 2.x, which can be read but not written: 8 bytes ``TNTIDX\0\0``; u64 version 1; u64
  token type; u64 element size; u64 N sequences; u64 S; u64 D; int64[N+1] where each sequence's axes begin among the S;
  int64[N+1] where its tokens begin in ``.bin``, in elements; int64[S] length of each axis; int64[D] as above. A
  sequence of tokens has one axis, so S = N. Files of fairseq, and of Megatron before November 2019, lack D and its
  array: an empty sequence ends a document (Megatron's ``create_doc_idx``) and remains part of it here; if no sequence
  is empty, each is a document. Until 2022 type 6 was Python's float, stored as 8 bytes with an element size of 4 in the
  header (offsets count 4 bytes then), and 7 was float64; since 2023, 6 is float64 and 7 is float32. Source: Megatron-LM
  at 0058b1a5, megatron/data/indexed_dataset.py.

The engine's ``IndexedDataset`` and ``IndexedDatasetBuilder`` are not used. The reader fails assertions on damaged
files, takes 19 us to read 20 consecutive sentences (2 us here), cannot gather the pieces of a batch at once, and closes
its memory maps when it is collected, so that arrays which outlive it crash the process. The builder leaves half-written
files under their final names when it is interrupted, and takes ten times as long and ten times the memory for its
lists. Both import torch, which ``inspect`` does not need.

``merge_datasets`` copies tokens, widened if need be, piece by piece; the new index is held in memory: 8 bytes per
sequence, and about 25 at the peak, while it is written.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import warnings
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_megatron.errors import DataError
from lightning_megatron.storage.publish import exit_on_sigterm, readable_size, staged

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
UINT16_VOCAB_LIMIT = 65500
"""Vocabularies below this size are stored as uint16, others as int32: Megatron's rule (``DType.optimal_dtype``)."""
CHUNK = 1 << 18
"""Index elements checked at a time: the index of a billion documents has 20 GB."""
PIECE_TOKENS = 1 << 22
"""Tokens copied at a time."""

_TYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), 1)
}
"""Token dtypes by their code in ``.idx``."""
_OLD_TYPES: dict[tuple[int, int], np.dtype[Any]] = {
    **{(code, dtype.itemsize): dtype for code, dtype in _TYPES.items()},
    (6, 4): np.dtype("<f8"),
    (7, 8): np.dtype("<f8"),
}
"""Token dtypes by their code and element size in the old format."""
_FIX = "run preprocess again, or copy both files again from their source"


@dataclass(frozen=True, eq=False)
class IndexedDataset:
    """A memory-mapped dataset: pages are read on first access and shared by all processes."""

    prefix: str
    """Path of both files without suffix."""
    format: str
    """Megatron's name of the format of ``.idx``: ``mmap`` or ``cached/lazy``."""
    dtype: np.dtype[Any]
    """Token dtype."""
    lengths: NDArray[np.int32]
    """Tokens of each sequence: [N]."""
    positions: NDArray[np.int64]
    """Byte offset of each sequence in ``.bin``: [N]."""
    document_bounds: NDArray[np.int64]
    """The first sequence of each document and, last, N: [documents + 1]."""
    files: dict[str, mmap.mmap]
    """Memory maps of both files, by suffix."""

    def __post_init__(self) -> None:
        """Check that ``.bin`` ends where its last sequence does.

        Raises:
            DataError: If it does not: it was truncated or replaced.
        """
        size, width = len(self.files[".bin"]), self.dtype.itemsize
        end = int(self.positions[-1]) + int(self.lengths[-1]) * width
        if size != end or size % width:
            raise _damaged(self.prefix, f"accounts for {end} bytes, and .bin has {size}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the prefix: other processes open the dataset again, as memory maps cannot be pickled."""
        return open_dataset, (self.prefix,)

    @property
    def num_documents(self) -> int:
        """Documents in the dataset."""
        return len(self.document_bounds) - 1

    @cached_property
    def tokens(self) -> NDArray[Any]:
        """The tokens of all sequences, concatenated."""
        return np.frombuffer(self.files[".bin"], self.dtype)

    def sequences(self, begin: int, end: int) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Tokens of the sequences from ``begin`` to ``end - 1``, at least one, and the length of each."""
        lengths = self.lengths[begin:end]
        first = int(self.positions[begin]) // self.dtype.itemsize
        return self.tokens[first : first + int(lengths.sum(dtype=np.int64))], lengths


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Dtype in which tokens of a vocabulary of this size are stored."""
    return np.dtype("<u2") if vocab_size < UINT16_VOCAB_LIMIT else np.dtype("<i4")


def open_dataset(
    prefix: str, *, option: str = "data_path", for_training: bool = True
) -> IndexedDataset:
    """Open the dataset at ``prefix`` after checks that read a few bytes of its files; of an old format all of ``.idx``.

    Args:
        prefix: Path of both files without suffix.
        option: Name of the setting that gives ``prefix``, for messages.
        for_training: Refuse tokens that are not integers.

    Raises:
        DataError: If a file is missing, empty or of another format, or ``.idx`` has another size than its header says.
    """
    if prefix.endswith((".bin", ".idx")):
        raise DataError(f"{option}={prefix}: expected a prefix, got a file; write {prefix[:-4]}")
    missing = [
        prefix + suffix for suffix in (".idx", ".bin") if not os.path.isfile(prefix + suffix)
    ]
    if missing:
        raise DataError(
            f"{option}={prefix} needs two files, missing: {', '.join(missing)}; give the prefix that preprocess"
            " printed, e.g. data/corpus_text_document"
        )
    files = {suffix: _map_file(prefix + suffix) for suffix in (".idx", ".bin")}
    is_old = files[".idx"][: len(OLD_MAGIC)] == OLD_MAGIC
    index = (_read_old if is_old else _read_mmap)(prefix, files)
    dataset = IndexedDataset(prefix, "cached/lazy" if is_old else "mmap", *index, files)
    if for_training and dataset.dtype.kind == "f":
        raise DataError(
            f"{prefix} holds {dataset.dtype}: expected integers, on which a model can be trained"
        )
    return dataset


def check_dataset(
    prefix: str, *, option: str = "data_path", for_training: bool = True
) -> IndexedDataset:
    """Open the dataset at ``prefix`` after checking all of its ``.idx``, and nothing of ``.bin``.

    Arguments are those of ``open_dataset``.

    Raises:
        DataError: Also if a length is negative, a sequence does not begin where the previous one ends, the files do not
            belong together, or the documents are not in order.
    """
    dataset = open_dataset(prefix, option=option, for_training=for_training)
    bounds, num_sequences, end = dataset.document_bounds, len(dataset.lengths), 0
    for begin in range(0, num_sequences, CHUNK):
        sizes = dataset.lengths[begin : begin + CHUNK].astype(np.int64) * dataset.dtype.itemsize
        ends = end + np.cumsum(sizes)
        if (sizes < 0).any() or (dataset.positions[begin : begin + CHUNK] != ends - sizes).any():
            raise _damaged(prefix, "has a sequence that does not begin where the previous one ends")
        end = int(ends[-1])
    # Compared, not subtracted, which may overflow: damaged bounds can be any 64-bit integers.
    if (bounds[1:] < bounds[:-1]).any() or bounds[0] != 0 or bounds[-1] != num_sequences:
        raise _damaged(
            prefix,
            f"has document bounds that do not ascend from 0 to the {num_sequences} sequences",
        )
    return dataset


_Files: TypeAlias = dict[str, mmap.mmap]
_Index: TypeAlias = tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]
"""Token dtype, lengths, positions and document bounds, as in ``IndexedDataset``."""


def _read_mmap(prefix: str, files: _Files) -> _Index:
    index = np.frombuffer(files[".idx"], np.uint8)
    code, num_sequences, num_bounds = _read_header(prefix, index, MAGIC, "<QBQQ")
    if code not in _TYPES:
        raise _damaged(
            prefix, f"has token type {code}, expected one of {', '.join(map(str, _TYPES))}"
        )
    layout = [("<i4", num_sequences), ("<i8", num_sequences), ("<i8", num_bounds)]
    lengths, positions, bounds = _split(prefix, index, 34, layout)
    dtype = _TYPES[code]
    if code == 7 and 0 < 8 * int(lengths.sum(dtype=np.int64)) == len(files[".bin"]):
        dtype = np.dtype("<f8")
    return dtype, lengths, positions, bounds


def _read_old(prefix: str, files: _Files) -> _Index:
    index = np.frombuffer(files[".idx"], np.uint8)
    code, element_size, num_sequences, num_axes, num_bounds = _read_header(
        prefix, index, OLD_MAGIC, "<6Q"
    )
    if (code, element_size) not in _OLD_TYPES:
        known = ", ".join(f"{other} of {width}" for other, width in sorted(_OLD_TYPES))
        raise _damaged(prefix, f"has token type {code} of {element_size} bytes, expected {known}")
    layout = [("<i8", num_sequences + 1), ("<i8", num_sequences + 1), ("<i8", num_axes)]
    if len(index) == 64 + 16 * num_sequences + 8 * num_axes:  # without D and its array
        axes, elements, lengths = _split(prefix, index, 48, layout)
        bounds = _infer_document_bounds(prefix, lengths)
    else:
        axes, elements, lengths, bounds = _split(prefix, index, 56, [*layout, ("<i8", num_bounds)])
    if num_axes != num_sequences or (axes != np.arange(len(axes))).any():
        raise _damaged(prefix, "has sequences of other than one axis, so it is not of text")
    dtype = _OLD_TYPES[code, element_size]
    ends, as_int32 = np.cumsum(lengths), lengths.astype(np.int32)
    is_wrong = (elements[1:] != ends * (dtype.itemsize // element_size)) | (as_int32 != lengths)
    if elements[0] or is_wrong.any():
        raise _damaged(prefix, "has a sequence that does not begin where the previous one ends")
    return dtype, as_int32, (ends - lengths) * dtype.itemsize, bounds


def _infer_document_bounds(prefix: str, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    ends = np.flatnonzero(lengths == 0) + 1
    rule = (
        "an empty sequence ends a document"
        if len(ends)
        else "each sequence is taken for a document"
    )
    warnings.warn(
        f"{prefix}.idx has no document index (fairseq, or Megatron before November 2019): {rule}; fairseq itself "
        "stored every token one too high",
        stacklevel=2,
    )
    return np.unique([0, *ends, len(lengths)]) if len(ends) else np.arange(len(lengths) + 1)


def _read_header(
    prefix: str, index: NDArray[np.uint8], magic: bytes, fields: str
) -> tuple[int, ...]:
    """Header fields after magic number and version."""
    head = index[: len(magic) + struct.calcsize(fields)].tobytes()
    if len(head) < len(magic) + struct.calcsize(fields) or not head.startswith(magic):
        raise _damaged(prefix, f"begins with {head[:9]!r} and has {len(index)} bytes")
    version, *values = struct.unpack(fields, head[len(magic) :])
    if version != 1:
        raise _damaged(prefix, f"has version {version}, expected 1")
    return tuple(values)


def _split(
    prefix: str, index: NDArray[np.uint8], begin: int, layout: Sequence[tuple[str, int]]
) -> list[NDArray[Any]]:
    """Consecutive arrays from the byte ``begin`` to the end of the index, as views."""
    bounds = list(
        accumulate((np.dtype(dtype).itemsize * count for dtype, count in layout), initial=begin)
    )
    if len(index) != bounds[-1]:
        counts = ", ".join(str(count) for _, count in layout)
        raise _damaged(
            prefix, f"has {len(index)} bytes, arrays of {counts} elements need {bounds[-1]}"
        )
    if not all(count for _, count in layout):
        raise DataError(
            f"{prefix}.idx holds no sequence; preprocess inputs that contain text into {prefix}"
        )
    return [
        index[a:b].view(dtype) for (a, b), (dtype, _) in zip(pairwise(bounds), layout, strict=True)
    ]


def _damaged(prefix: str, problem: str) -> DataError:
    return DataError(f"{prefix}.idx {problem}: damaged, truncated or foreign; {_FIX}")


class IndexedDatasetWriter:
    """Writes one dataset; made by ``dataset_writers``, which also completes it."""

    def __init__(self, tokens: BinaryIO, index: BinaryIO, dtype: np.dtype[Any]) -> None:
        self._bin, self._idx, self._dtype = tokens, index, dtype
        self._lengths, self.counts = array("i"), array("i")
        """Tokens of each sequence; sequences of each document."""

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return self._bin.tell() // self._dtype.itemsize

    def add_documents(
        self, tokens: bytes | memoryview, lengths: ArrayLike, sequences: ArrayLike | None = None
    ) -> None:
        """Append documents.

        Args:
            tokens: Tokens of all documents, concatenated, in the dataset's dtype.
            lengths: Tokens of each sequence.
            sequences: Sequences of each document; None if each document is one sequence.
        """
        self._bin.write(tokens)
        sizes = np.asarray(lengths, np.intc)
        self._lengths.frombytes(sizes.tobytes())
        counts = np.ones_like(sizes) if sequences is None else np.asarray(sequences, np.intc)
        self.counts.frombytes(counts.tobytes())

    def complete(self) -> None:
        """Write ``.idx``."""
        code = next(code for code, dtype in _TYPES.items() if dtype == self._dtype)
        lengths = np.asarray(self._lengths)
        positions = (np.cumsum(lengths, dtype=np.int64) - lengths) * self._dtype.itemsize
        bounds = np.cumsum(np.asarray(self.counts), dtype=np.int64)
        self._idx.write(MAGIC + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds) + 1))
        for part in (lengths, positions, np.zeros(1, np.int64), bounds):
            self._idx.write(part.data)


@contextlib.contextmanager
def dataset_writers(
    output_prefix: str | Path, dtype: np.dtype[Any], endings: Sequence[str] = ("",)
) -> Iterator[list[IndexedDatasetWriter]]:
    """Writers of datasets whose files appear together, when all of them are complete, however the process ends.

    ``.idx`` appears after ``.bin``, so where it exists both are complete.

    Args:
        output_prefix: Beginning of the paths of all files; its directory is created if need be.
        dtype: Token dtype.
        endings: What follows the prefix in the name of each dataset, without a slash.

    Raises:
        DataError: If a file exists already, the directory is not writable or another process writes there, or the disk
            is full.
    """
    prefixes = [f"{output_prefix}{ending}" for ending in endings]
    paths = [prefix + suffix for prefix in prefixes for suffix in (".idx", ".bin")]
    if existing := ", ".join(filter(os.path.lexists, paths)):  # it may be the only copy of a corpus
        raise DataError(
            f"output_prefix={output_prefix} would overwrite {existing}; choose another or remove them"
        )
    folder, names = Path(prefixes[0]).parent, [os.path.basename(prefix) for prefix in prefixes]
    indices = [f"{name}.idx" for name in names]
    with (
        exit_on_sigterm(),
        staged(folder, names[0], last=indices, error=DataError) as hidden,
        contextlib.ExitStack() as files,
    ):
        writers = []
        for name in names:
            tokens, index = (
                files.enter_context(open(hidden / f"{name}{end}", "wb")) for end in (".bin", ".idx")
            )
            writers.append(IndexedDatasetWriter(tokens, index, dtype))
        yield writers
        for writer in writers:
            writer.complete()


def _map_file(path: str) -> mmap.mmap:
    """Memory-map a file; the map's ``size()`` is the current size of the file."""
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: empty file
        raise DataError(
            f"{path} cannot be read ({error}); make it readable, or create or copy it again"
        ) from error


# ---- merging --------------------------------------------------------------------------------------------------------


def merge_datasets(inputs: Sequence[str], output_prefix: str) -> IndexedDataset:
    """Concatenate the datasets at ``inputs`` into one, in the mmap format.

    Documents and sequences are unchanged; the token dtype is the smallest that holds those of all inputs.

    Raises:
        DataError: If an input is missing, damaged, foreign or cannot be combined with the others, or ``output_prefix``
            exists or cannot be written.
    """
    from tqdm import tqdm

    if output_prefix.endswith((".bin", ".idx")) or not os.path.basename(output_prefix):
        raise DataError(
            f"output_prefix={output_prefix}: expected the prefix of two files, like data/corpus"
        )
    sources = [check_dataset(prefix, option="input", for_training=False) for prefix in inputs]
    for source in sources:
        if source.dtype != sources[0].dtype and "f" in (source.dtype.kind, sources[0].dtype.kind):
            types = (
                f"{source.prefix} holds {source.dtype} and {sources[0].prefix} {sources[0].dtype}"
            )
            raise DataError(f"{types}; only integer types can be merged")
    dtype = np.result_type(*(source.dtype for source in sources))
    # A corpus that is merged within a second needs no progress bar.
    total = sum(len(source.tokens) for source in sources)
    bar = tqdm(
        total=total, unit=" tokens", unit_scale=True, desc="Writing", mininterval=0.5, delay=1.0
    )
    with dataset_writers(output_prefix, dtype) as (writer,), bar:
        for source in sources:
            for begin in range(0, len(source.tokens), PIECE_TOKENS):
                piece = source.tokens[begin : begin + PIECE_TOKENS]
                writer.add_documents(piece.astype(dtype, copy=False).data, ())
                bar.update(len(piece))
            open_dataset(
                source.prefix, for_training=False
            )  # raises if it was truncated meanwhile: its map reads zeros
            writer.add_documents(b"", source.lengths, np.diff(source.document_bounds))
    return open_dataset(output_prefix, for_training=False)


def convert_dataset(source: str, output_prefix: str) -> IndexedDataset:
    """Rewrite the dataset of an old format (cached, lazy) at ``source`` in the mmap format.

    Documents, sequences and the token dtype are unchanged.

    Raises:
        DataError: As ``merge_datasets``, or if ``source`` is in the mmap format.
    """
    if open_dataset(source, option="input", for_training=False).format == "mmap":
        raise DataError(
            f"{source}.idx is in the mmap format (MMIDIDX) already; use the dataset as it is"
        )
    return merge_datasets([source], output_prefix)


# ---- description ----------------------------------------------------------------------------------------------------

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
