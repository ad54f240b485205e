r"""Read, check, write, merge and describe Megatron's indexed datasets: ``PREFIX.bin`` (tokens), ``PREFIX.idx`` (where).

``.bin``: all tokens one after the other. ``.idx``, little endian, in two formats:

* mmap: 9 bytes ``MMIDIDX\0\0``; u64 version 1; u8 type of a token; u64 N sequences; u64 D; int32[N] lengths in tokens;
  int64[N] positions in bytes; int64[D] the first sequence of each document and, last, N. For GPT a document is one
  sequence, so D = N + 1; multimodal datasets, which are refused, have int8[N] modes behind it. Type 6 is float64; type
  7 was float64 until 2022 and is float32 since: the size of ``.bin`` tells which it is. Source: megatron-core 0.16.1,
  datasets/indexed_dataset.py:_IndexWriter and _IndexReader.
* cached/lazy, of Megatron 1.x and 2.x, which is read, and no longer written: 8 bytes ``TNTIDX\0\0``; u64
  version 1; u64 type of a token; u64 element size; u64 N sequences; u64 S; u64 D; int64[N+1] where each sequence's axes
  begin among the S; int64[N+1] where its tokens begin in ``.bin``, in elements; int64[S] length of each axis; int64[D]
  as above. A sequence of tokens has one axis, so S = N. Files of fairseq, and of Megatron before November 2019, have
  neither D nor its array: an empty sequence ends a document (Megatron's ``create_doc_idx``) and remains part of it
  here; if no sequence is empty, each is taken for a document. Until 2022 type 6 was Python's float, stored as 8 bytes
  though its element size was said to be 4 (positions count 4 bytes then), and 7 was float64; since 2023, 6 is float64
  and 7 is float32. Source: Megatron-LM at 0058b1a5, megatron/data/indexed_dataset.py.

The engine's ``IndexedDataset`` and ``IndexedDatasetBuilder`` do not serve here. The reader asserts where a file is
damaged, takes 19 us for a run of 20 sentences (2 us here) and cannot gather the pieces of a batch at once, and closes
its maps when it is collected, so that arrays which outlive it end the process. The builder leaves half-written files
under their names when it is interrupted, takes ten times as long and ten times the memory for its lists, and both cost
the import of torch, which ``inspect`` does not need.

``merge_datasets`` copies tokens, or widens them, piece by piece; the new index is held in memory: 8 bytes a sequence,
and about 25 at the peak, while it is written.
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
from lightning_megatron.files import exit_on_sigterm, readable_size, staged

MAGIC = b"MMIDIDX\x00\x00"
OLD_MAGIC = b"TNTIDX\x00\x00"
UINT16_VOCAB_LIMIT = 65500
"""Vocabularies below this are stored as uint16, larger ones as int32: Megatron's rule (``DType.optimal_dtype``)."""
CHUNK = 1 << 18
"""Elements of an index that are checked at a time: the index of a billion documents has 20 GB."""
PIECE_TOKENS = 1 << 22
"""Tokens that are copied at a time."""

_TYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), 1)
}
"""Types of tokens by their number in ``.idx``."""
_OLD_TYPES: dict[tuple[int, int], np.dtype[Any]] = {
    **{(code, dtype.itemsize): dtype for code, dtype in _TYPES.items()},
    (6, 4): np.dtype("<f8"),
    (7, 8): np.dtype("<f8"),
}
"""Types of tokens by their number and element size in the old format."""
_AGAIN = "run preprocess again, or copy both files again from their source"


@dataclass(frozen=True, eq=False)
class IndexedDataset:
    """A dataset that is mapped into memory: pages are shared by all processes, and read when they are touched."""

    prefix: str
    """Path of both files without suffix."""
    format: str
    """The name by which Megatron's users know it."""
    dtype: np.dtype[Any]
    """Type of a token."""
    lengths: NDArray[np.int32]
    """Tokens of each sequence: [N]."""
    positions: NDArray[np.int64]
    """Where each sequence begins in ``.bin``: [N], in bytes."""
    document_bounds: NDArray[np.int64]
    """The first sequence of each document and, last, N: [documents + 1]."""
    files: dict[str, mmap.mmap]
    """The maps of both files, by suffix."""

    def __post_init__(self) -> None:
        """Refuse a ``.bin`` that has not the size by which the last sequence ends.

        Raises:
            DataError: As since then it was cut or replaced.
        """
        size, width = len(self.files[".bin"]), self.dtype.itemsize
        end = int(self.positions[-1]) + int(self.lengths[-1]) * width
        if size != end or size % width:
            raise _damaged(self.prefix, f"accounts for {end} bytes, and .bin has {size}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Maps of files do not travel to other processes, which open the dataset again."""
        return open_dataset, (self.prefix,)

    @property
    def num_documents(self) -> int:
        """Documents in the dataset."""
        return len(self.document_bounds) - 1

    @cached_property
    def tokens(self) -> NDArray[Any]:
        """All tokens, one sequence after the other."""
        return np.frombuffer(self.files[".bin"], self.dtype)

    def sequences(self, begin: int, end: int) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """The tokens of consecutive sequences, at least one, and the length of each."""
        lengths = self.lengths[begin:end]
        first = int(self.positions[begin]) // self.dtype.itemsize
        return self.tokens[first : first + int(lengths.sum(dtype=np.int64))], lengths


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The type in which tokens of a vocabulary of this size are stored."""
    return np.dtype("<u2") if vocab_size < UINT16_VOCAB_LIMIT else np.dtype("<i4")


def open_dataset(prefix: str, *, option: str = "data_path", for_training: bool = True) -> IndexedDataset:
    """The dataset at ``prefix``, after checks that touch only a few bytes of the files; all of an old format's index.

    Args:
        prefix: Path of both files without suffix.
        option: The setting that ``prefix`` was given for.
        for_training: Refuse tokens that are no integers, on which nothing can be trained.

    Raises:
        DataError: If a file is missing, empty or not of this format, or ``.idx`` has not the size that it announces.
    """
    if prefix.endswith((".bin", ".idx")):
        raise DataError(f"{option}={prefix} is a file, it must be the prefix; write {prefix[:-4]}")
    missing = [prefix + suffix for suffix in (".idx", ".bin") if not os.path.isfile(prefix + suffix)]
    if missing:
        raise DataError(
            f"{option}={prefix} needs two files, missing: {', '.join(missing)}; give the prefix that preprocess"
            " printed, e.g. data/corpus_text_document"
        )
    files = {suffix: _mapped(prefix + suffix) for suffix in (".idx", ".bin")}
    is_old = files[".idx"][: len(OLD_MAGIC)] == OLD_MAGIC
    index = (_read_old if is_old else _read_mmap)(prefix, files)
    dataset = IndexedDataset(prefix, "cached/lazy" if is_old else "mmap", *index, files)
    if for_training and dataset.dtype.kind == "f":
        raise DataError(f"{prefix} holds {dataset.dtype}: expected integers, on which a model can be trained")
    return dataset


def check_dataset(prefix: str, *, option: str = "data_path", for_training: bool = True) -> IndexedDataset:
    """The dataset at ``prefix``, after reading the whole ``.idx`` (not ``.bin``) and checking all of it.

    Arguments are those of ``open_dataset``.

    Raises:
        DataError: Also if a length is negative, a sequence does not begin where the one before ends, the files do not
            belong together, or the documents are not in order.
    """
    dataset = open_dataset(prefix, option=option, for_training=for_training)
    bounds, last, end = dataset.document_bounds, len(dataset.lengths), 0
    for begin in range(0, last, CHUNK):
        sizes = dataset.lengths[begin : begin + CHUNK].astype(np.int64) * dataset.dtype.itemsize
        ends = end + np.cumsum(sizes)
        if (sizes < 0).any() or (dataset.positions[begin : begin + CHUNK] != ends - sizes).any():
            raise _damaged(prefix, "has a sequence that does not begin where the one before ends")
        end = int(ends[-1])
    # Compared, not subtracted: damaged bounds may be any 64-bit numbers.
    if (bounds[1:] < bounds[:-1]).any() or bounds[0] != 0 or bounds[-1] != last:
        raise _damaged(prefix, f"has document bounds that do not ascend from 0 to the {last} sequences")
    return dataset


_Files: TypeAlias = dict[str, mmap.mmap]
_Index: TypeAlias = tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]
"""Type of a token, lengths, positions and document bounds, as in ``IndexedDataset``."""


def _read_mmap(prefix: str, files: _Files) -> _Index:
    index = np.frombuffer(files[".idx"], np.uint8)
    code, num_sequences, num_bounds = _read_header(prefix, index, MAGIC, "<QBQQ")
    if code not in _TYPES:
        raise _damaged(prefix, f"says token type {code}, there are {', '.join(map(str, _TYPES))}")
    layout = [("<i4", num_sequences), ("<i8", num_sequences), ("<i8", num_bounds)]
    lengths, positions, bounds = _cut(prefix, index, 34, layout)
    dtype = _TYPES[code]
    if code == 7 and 0 < 8 * int(lengths.sum(dtype=np.int64)) == len(files[".bin"]):
        dtype = np.dtype("<f8")
    return dtype, lengths, positions, bounds


def _read_old(prefix: str, files: _Files) -> _Index:
    index = np.frombuffer(files[".idx"], np.uint8)
    code, element_size, num_sequences, num_axes, num_bounds = _read_header(prefix, index, OLD_MAGIC, "<6Q")
    if (code, element_size) not in _OLD_TYPES:
        known = ", ".join(f"{number} of {width}" for number, width in sorted(_OLD_TYPES))
        raise _damaged(prefix, f"says token type {code} of {element_size} bytes, there are {known}")
    layout = [("<i8", num_sequences + 1), ("<i8", num_sequences + 1), ("<i8", num_axes)]
    if len(index) == 64 + 16 * num_sequences + 8 * num_axes:  # neither D nor its array
        axes, elements, lengths = _cut(prefix, index, 48, layout)
        bounds = _bounds_of_empty_sequences(prefix, lengths)
    else:
        axes, elements, lengths, bounds = _cut(prefix, index, 56, [*layout, ("<i8", num_bounds)])
    if num_axes != num_sequences or (axes != np.arange(len(axes))).any():
        raise _damaged(prefix, "has sequences of other than one axis, so it is not of text")
    dtype = _OLD_TYPES[code, element_size]
    ends, as_int32 = np.cumsum(lengths), lengths.astype(np.int32)
    is_wrong = (elements[1:] != ends * (dtype.itemsize // element_size)) | (as_int32 != lengths)
    if elements[0] or is_wrong.any():
        raise _damaged(prefix, "has a sequence that does not begin where the one before ends")
    return dtype, as_int32, (ends - lengths) * dtype.itemsize, bounds


def _bounds_of_empty_sequences(prefix: str, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    ends = np.flatnonzero(lengths == 0) + 1
    found = "an empty sequence ends a document" if len(ends) else "each sequence is taken for a document"
    warnings.warn(
        f"{prefix}.idx names no documents (fairseq, or Megatron before November 2019): {found}; fairseq itself stored "
        "every token one too high",
        stacklevel=2,
    )
    return np.unique([0, *ends, len(lengths)]) if len(ends) else np.arange(len(lengths) + 1)


def _read_header(prefix: str, index: NDArray[np.uint8], magic: bytes, fields: str) -> tuple[int, ...]:
    """What the header has after magic number and version."""
    head = index[: len(magic) + struct.calcsize(fields)].tobytes()
    if len(head) < len(magic) + struct.calcsize(fields) or not head.startswith(magic):
        raise _damaged(prefix, f"begins with {head[:9]!r} and has {len(index)} bytes")
    version, *values = struct.unpack(fields, head[len(magic) :])
    if version != 1:
        raise _damaged(prefix, f"says version {version}, the only version is 1")
    return tuple(values)


def _cut(prefix: str, index: NDArray[np.uint8], begin: int, layout: Sequence[tuple[str, int]]) -> list[NDArray[Any]]:
    """The arrays that follow each other from the byte ``begin`` to the end."""
    bounds = list(accumulate((np.dtype(dtype).itemsize * count for dtype, count in layout), initial=begin))
    if len(index) != bounds[-1]:
        counts = ", ".join(str(count) for _, count in layout)
        raise _damaged(prefix, f"has {len(index)} bytes, arrays of {counts} elements need {bounds[-1]}")
    if not all(count for _, count in layout):
        raise DataError(f"{prefix}.idx holds no sequence; preprocess inputs that contain text into {prefix}")
    return [index[a:b].view(dtype) for (a, b), (dtype, _) in zip(pairwise(bounds), layout, strict=True)]


def _damaged(prefix: str, what: str) -> DataError:
    return DataError(f"{prefix}.idx {what}: damaged, truncated or foreign; {_AGAIN}")


class IndexedDatasetWriter:
    """Writes one dataset; ``dataset_writers`` opens and completes it."""

    def __init__(self, tokens: BinaryIO, index: BinaryIO, dtype: np.dtype[Any]) -> None:
        self._bin, self._idx, self._dtype = tokens, index, dtype
        self._lengths, self.counts = array("i"), array("i")
        """The second: sequences of each document."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return self._bin.tell() // self._dtype.itemsize

    def add_documents(self, tokens: bytes | memoryview, lengths: ArrayLike, sequences: ArrayLike | None = None) -> None:
        """Append documents.

        Args:
            tokens: The tokens of all of them, in the dataset's type.
            lengths: Tokens of each sequence.
            sequences: Sequences of each document; None if every document is one.
        """
        self._bin.write(tokens)
        own = np.asarray(lengths, np.intc)
        self._lengths.frombytes(own.tobytes())
        counts = np.ones_like(own) if sequences is None else np.asarray(sequences, np.intc)
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
    """Writers of datasets that appear together, when all of them are complete, whatever ends the process.

    ``.idx`` appears behind ``.bin``, and so vouches for it.

    Args:
        output_prefix: What the paths of all files begin with; the folder is made if need be.
        dtype: Type of a token.
        endings: What follows in the names of each dataset, without a slash.

    Raises:
        DataError: If a file is there already, nothing can be written there, another process does, or the disk is full.
    """
    prefixes = [f"{output_prefix}{ending}" for ending in endings]
    paths = [prefix + suffix for prefix in prefixes for suffix in (".idx", ".bin")]
    if existing := list(filter(os.path.lexists, paths)):  # the only copy of a corpus may be what stands there
        given = f"output_prefix={output_prefix}"
        raise DataError(f"{given} would overwrite {', '.join(existing)}; choose another or remove them")
    folder, names = Path(prefixes[0]).parent, [os.path.basename(prefix) for prefix in prefixes]
    indices = [f"{name}.idx" for name in names]
    with (
        exit_on_sigterm(),
        staged(folder, names[0], last=indices, error=DataError) as hidden,
        contextlib.ExitStack() as files,
    ):
        writers = []
        for name in names:
            tokens, index = (files.enter_context(open(hidden / f"{name}{end}", "wb")) for end in (".bin", ".idx"))
            writers.append(IndexedDatasetWriter(tokens, index, dtype))
        yield writers
        for writer in writers:
            writer.complete()


def _mapped(path: str) -> mmap.mmap:
    """The file as a map, whose ``size()`` is the file's at any time."""
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError is that of an empty file
        raise DataError(f"{path} cannot be read ({error}); make it readable, or make or copy it again") from error


# ---- merging --------------------------------------------------------------------------------------------------------


def merge_datasets(inputs: Sequence[str], output_prefix: str) -> IndexedDataset:
    """Write the datasets at ``inputs`` one after the other, in the mmap format, as one dataset.

    Documents and sequences stay as they are; the type of tokens is the smallest that holds those of all inputs.

    Raises:
        DataError: If an input is missing, damaged, foreign or does not go with the others, or ``output_prefix`` exists
            or cannot be written.
    """
    from tqdm import tqdm

    if output_prefix.endswith((".bin", ".idx")) or not os.path.basename(output_prefix):
        raise DataError(f"output_prefix={output_prefix} must be the prefix of two files; write it like data/corpus")
    sources = [check_dataset(prefix, option="input", for_training=False) for prefix in inputs]
    for source in sources:
        if source.dtype != sources[0].dtype and "f" in (source.dtype.kind, sources[0].dtype.kind):
            types = f"{source.prefix} holds {source.dtype} and {sources[0].prefix} {sources[0].dtype}"
            raise DataError(f"{types}; only integers mix")
    dtype = np.result_type(*(source.dtype for source in sources))
    # A corpus that is done within a second needs no bar.
    total = sum(len(source.tokens) for source in sources)
    bar = tqdm(total=total, unit=" tokens", unit_scale=True, desc="Writing", mininterval=0.5, delay=1.0)
    with dataset_writers(output_prefix, dtype) as (writer,), bar:
        for source in sources:
            for begin in range(0, len(source.tokens), PIECE_TOKENS):
                piece = source.tokens[begin : begin + PIECE_TOKENS]
                writer.add_documents(piece.astype(dtype, copy=False).data, ())
                bar.update(len(piece))
            open_dataset(source.prefix, for_training=False)  # refuses one that was cut meanwhile, whose map reads zeros
            writer.add_documents(b"", source.lengths, np.diff(source.document_bounds))
    return open_dataset(output_prefix, for_training=False)


def convert_dataset(source: str, output_prefix: str) -> IndexedDataset:
    """Write the dataset of an old format (cached, lazy) at ``source`` in the mmap format.

    Documents, sequences and the type of tokens stay as they are.

    Raises:
        DataError: As ``merge_datasets``, or if ``source`` is in the mmap format.
    """
    if open_dataset(source, option="input", for_training=False).format == "mmap":
        raise DataError(f"{source}.idx is in the mmap format (MMIDIDX) already; use the dataset as it is")
    return merge_datasets([source], output_prefix)


# ---- description ----------------------------------------------------------------------------------------------------

MAX_TOKENS_SHOWN = 256
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
        report["first_documents"] = [_document(dataset, n, tokenizer) for n in range(min(num_documents, count))]
    return report


def as_text(report: dict[str, Any]) -> str:
    """What ``describe_dataset`` found, on a screen or so of a terminal."""
    rows: dict[str, Any] = {name: report[name] for name in ("format", "documents", "sequences", "tokens", "dtype")}
    rows |= {f".{suffix}": readable_size(report[f"{suffix}_bytes"]) for suffix in ("bin", "idx")}
    rows |= {"lengths": report["lengths"], "a document": report["sequences_per_document"]}
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
    return {"min": int(numbers.min()), "mean": round(float(numbers.mean()), 2), "max": int(numbers.max())}


def _histogram(numbers: NDArray[Any]) -> list[dict[str, int]]:
    """How many lie between powers of two, from the smallest to the largest."""
    bits = (np.frexp(numbers[begin : begin + CHUNK])[1] for begin in range(0, len(numbers), CHUNK))
    counts = np.sum([np.bincount(each, minlength=65) for each in bits], axis=0)
    first, last = np.flatnonzero(counts)[[0, -1]].tolist()
    return [{"first": 2**n // 2, "last": 2**n - 1, "count": int(counts[n])} for n in range(first, last + 1)]


def _document(dataset: IndexedDataset, number: int, tokenizer: Any) -> dict[str, Any]:
    begin, end = dataset.document_bounds[number : number + 2]
    tokens, num_tokens = dataset.tokens[:0], 0
    if end > begin:
        tokens, lengths = dataset.sequences(begin, end)
        tokens, num_tokens = tokens[:MAX_TOKENS_SHOWN], len(tokens)
    text = None
    if tokenizer is not None:
        foreign = tokens[(tokens < 0) | (tokens >= len(tokenizer)) | (tokens != np.floor(tokens))]
        if foreign.size:
            known = f"the tokenizer has 0 to {len(tokenizer) - 1}; give its own"
            raise DataError(f"{dataset.prefix} holds token {foreign[0]}, {known}")
        text = str(tokenizer.decode(tokens.tolist()))
    return {"number": number, "num_tokens": num_tokens, "tokens": tokens.tolist(), "text": text}


def _beginning(document: dict[str, Any]) -> list[str]:
    tokens, text, num_tokens = document["tokens"], document["text"], document["num_tokens"]
    shown, is_cut = " ".join(map(str, tokens[:_MOST_NUMBERS])), num_tokens > _MOST_NUMBERS
    if text is not None:
        shown, is_cut = text[:_MOST_CHARACTERS], len(text) > _MOST_CHARACTERS or num_tokens > len(tokens)
    return [f"  {line}" for line in (shown + " …" * is_cut).split("\n")]
