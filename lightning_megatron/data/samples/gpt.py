"""Which tokens are sample number i for a GPT? Megatron's order, and a reader that is fast on short documents too.

All documents of a split, shuffled, are one stream of tokens; sample k is its tokens from k * seq_length to
(k + 1) * seq_length, both included, so neighbours share one. The samples are shuffled in turn. Both shuffles, and the
rule by which the last pass is shuffled by itself, are Megatron's, so samples and order equal its own for the same file,
split, sequence length, seed and number of samples (megatron-core 0.16.1, datasets/gpt_dataset.py).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lightning_megatron.data.formats.mmap import HEADER_BYTES, IndexHeader, read_header, read_lengths
from lightning_megatron.data.samples.base import Objective, Part, Rows
from lightning_megatron.data.samples.split import SplitName, canonical_split, split_ranges
from lightning_megatron.data.serving.sampler import PADDING_ROW
from lightning_megatron.errors import DataError

_log = logging.getLogger(__name__)

PADDING = -1
"""Fills the last sample up where the documents end before it."""


@dataclass(frozen=True, kw_only=True)
class GPTObjective(Objective):
    """Rows of ``seq_length`` predictions: ``text`` [rows, seq_length + 1] int64."""

    seq_length: int
    """Predictions of a sample; it has one token more."""
    drop_last_partial_validation_sequence: bool = True
    """Leave out the tokens at the end of the validation documents that fill no whole sample; otherwise they are one
    more sample, padded with -1. Training and test always leave them out, as in Megatron."""

    @property
    @override
    def name(self) -> str:
        return "gpt"

    @property
    @override
    def index_key(self) -> str:
        return f"seq_length={self.seq_length} drop_last={self.drop_last_partial_validation_sequence}"

    @property
    @override
    def largest_token(self) -> int:
        return -1

    @override
    def count(self, part: Part) -> int:
        header = read_header(part.prefix)
        documents = split_ranges(part.split, header.num_sequences)[part.name]
        tokens = int(read_lengths(header)[documents.start : documents.stop].sum(dtype=np.int64))
        if tokens <= self.seq_length and not (tokens > 1 and self._keeps_partial(part)):
            raise DataError(
                f"split={part.split!r} gives {part.name} {len(documents)} of {header.num_sequences} documents of"
                f" {part.prefix} with {tokens} tokens, one sample of seq_length={self.seq_length} needs"
                f" {self.seq_length + 1}; give {part.name} a larger weight or weight 0, lower seq_length, or add"
                " documents"
            )
        return _num_samples(tokens, self.seq_length, self._keeps_partial(part))

    @override
    def open(self, part: Part, folder: str) -> GPTSamples:
        if folder and not os.path.exists(_paths(folder)[-1]):
            index = self._index(part)
            for path, array in zip(_paths(folder), index, strict=True):
                np.save(path, array)
        elif not folder:
            return GPTSamples(part.prefix, self.seq_length, index=self._index(part))
        return GPTSamples(part.prefix, self.seq_length, folder=folder)

    def _keeps_partial(self, part: Part) -> bool:
        return part.name == "valid" and not self.drop_last_partial_validation_sequence

    def _index(self, part: Part) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        self.count(part)
        header = read_header(part.prefix)
        documents = split_ranges(part.split, header.num_sequences)[part.name]
        return build_gpt_index(
            read_lengths(header),
            np.arange(documents.start, documents.stop, dtype=np.int32),
            self.seq_length,
            part.num_samples,
            part.seed,
            self._keeps_partial(part),
        )


def build_gpt_index(
    lengths: NDArray[np.int32],
    documents: NDArray[np.int32],
    seq_length: int,
    num_samples: int | None,
    seed: int,
    keep_partial: bool,
) -> tuple[NDArray[np.int32], NDArray[Any], NDArray[Any]]:
    """Which documents come in which order, where samples begin, and in which order the samples come.

    Args:
        lengths: Tokens of each document of the dataset.
        documents: Those of the split; together they have tokens for one sample at least.
        seq_length: Predictions of a sample.
        num_samples: Samples that are needed; None for one pass.
        seed: Of both shuffles.
        keep_partial: Whether tokens at the end that fill no whole sample are one.

    Returns:
        Documents [passes * documents] int32; for each sample and for the end the place in it, and the token in that
        document [samples + 1, 2] int32 or int64; samples [samples] uint32 or int64.
    """
    from megatron.core.datasets import helpers

    per_pass = int(lengths[documents].sum(dtype=np.int64))
    passes = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // per_pass))
    # The last pass is shuffled by itself if only a small part of it is needed: otherwise samples of documents that
    # are seen once more than others would be spread over the whole run.
    before_last = _num_samples((passes - 1) * per_pass, seq_length, False)
    separate = passes > 1 and num_samples is not None
    if separate:
        separate = num_samples - before_last < int(0.80 * _num_samples(per_pass, seq_length, False))  # type: ignore[operator]
    random = np.random.RandomState(seed)
    order = _shuffled_passes(documents, passes - separate, random)
    if separate:
        order = np.concatenate((order, _shuffled_passes(documents, 1, random)))
    begins = helpers.build_sample_idx(lengths, order, seq_length, passes, per_pass, True, True)
    # The engine counts a partial last sample in single precision (helpers.cpp:build_sample_idx), which is wrong from
    # 2^24 tokens on: it stops the process, or adds samples of padding.
    if keep_partial and (passes * per_pass - 1) % seq_length:
        last = np.flatnonzero(lengths[order])[-1]
        begins = np.concatenate((begins, np.array([[last, lengths[order[last]] - 1]], dtype=begins.dtype)))
    total = len(begins) - 1
    wide = total >= np.iinfo(np.uint32).max - 1
    samples = np.arange(total, dtype=np.int64 if wide else np.uint32)
    first = before_last if separate else total
    random.shuffle(samples[:first])
    random.shuffle(samples[first:])
    return order, begins, samples


class GPTSamples:
    """An open split. Files are mapped when the first row is read, by each process for itself, and shared in memory."""

    def __init__(
        self,
        prefix: str,
        seq_length: int,
        folder: str = "",
        index: tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None = None,
    ) -> None:
        """Bind the parts.

        Args:
            prefix: Dataset, without suffix.
            seq_length: Predictions of a sample.
            folder: Where the index is.
            index: The index, if it is not in a folder.
        """
        self._prefix = prefix
        self._row_length = seq_length + 1
        self._folder = folder
        self._given_index = index

    @property
    def fingerprint(self) -> str:
        """The beginning of an order tells it from others: any difference reshuffles all of it."""
        digest = hashlib.sha256(repr((len(self), self._row_length - 1)).encode())
        for array in self._index:
            digest.update(np.ascontiguousarray(array[:4096]).tobytes())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._index[2])

    def rows(self, indices: Sequence[int]) -> Rows:
        """``text`` [rows, seq_length + 1] int64; -1 where there is no token."""
        order, begins, samples = self._index
        lengths, positions, tokens = self._files
        chosen = samples[np.asarray(indices, dtype=np.int64)].astype(np.int64)
        first, first_offset = begins[chosen].astype(np.int64).T
        last, last_offset = begins[chosen + 1].astype(np.int64).T
        # A row is made of pieces: the end of one document, whole documents, and the beginning of another.
        pieces = last - first + 1
        piece_ends = np.cumsum(pieces)
        places = np.repeat(first - (piece_ends - pieces), pieces) + np.arange(piece_ends[-1])
        documents = order[places]
        ends = lengths[documents].astype(np.int64)
        ends[piece_ends - 1] = last_offset + 1
        starts = np.zeros_like(ends)
        starts[piece_ends - pieces] = first_offset
        counts = ends - starts
        where, odd = np.divmod(positions[documents], tokens.dtype.itemsize)
        if odd.any() or (counts < 0).any():
            raise DataError(f"{self._prefix}.idx is damaged; run preprocess again")
        count_ends = np.cumsum(counts)
        flat = np.repeat(where + starts - (count_ends - counts), counts) + np.arange(count_ends[-1])
        found = tokens[flat].astype(np.int64)
        if len(found) == len(indices) * self._row_length:
            text = found.reshape(len(indices), self._row_length)
        else:
            text = np.full((len(indices), self._row_length), PADDING, dtype=np.int64)
            filled = np.add.reduceat(counts, piece_ends - pieces)
            text[np.arange(self._row_length) < filled[:, None]] = found
        return {"text": torch.from_numpy(text)}

    def __getstate__(self) -> dict[str, Any]:
        """Maps of files do not travel to other processes."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_index", "_files")}

    @cached_property
    def _index(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        if self._given_index is not None:
            return self._given_index
        order, begins, samples = (np.load(path, mmap_mode="r").view(np.ndarray) for path in _paths(self._folder))
        return order, begins, samples

    @cached_property
    def _files(self) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[Any]]:
        """Lengths and positions of all documents, and all tokens."""
        header: IndexHeader = read_header(self._prefix)
        index = np.memmap(f"{self._prefix}.idx", mode="r").view(np.ndarray)
        split = HEADER_BYTES + 4 * header.num_sequences
        lengths = index[HEADER_BYTES:split].view("<i4")
        positions = index[split : split + 8 * header.num_sequences].view("<i8")
        return lengths, positions, np.memmap(f"{self._prefix}.bin", header.dtype, mode="r").view(np.ndarray)


def _num_samples(tokens: int, seq_length: int, keep_partial: bool) -> int:
    predictions = max(0, tokens - 1)
    return -(-predictions // seq_length) if keep_partial else predictions // seq_length


def _shuffled_passes(documents: NDArray[np.int32], passes: int, random: np.random.RandomState) -> NDArray[np.int32]:
    """All passes shuffled together."""
    order = np.tile(documents, passes)
    random.shuffle(order)
    return order


def _paths(folder: str) -> tuple[Path, Path, Path]:
    document, sample, shuffle = (Path(folder, f"{name}_index.npy") for name in ("document", "sample", "shuffle"))
    return document, sample, shuffle


# What follows goes when the DataModule no longer uses it.


@dataclass(frozen=True, kw_only=True)
class IndexRequest:
    """What determines the samples of a split and their order."""

    prefix: str
    """Dataset, without suffix."""
    split: str
    """Weights of train, valid and test."""
    name: SplitName
    """The split."""
    seq_length: int
    """Predictions of a sample; it has one token more."""
    seed: int
    """Of the order."""
    num_samples: int | None
    """Samples that are needed, over as many passes as it takes; None for one pass."""


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """An order of samples that exists on disk."""

    num_samples: int
    """Samples in it: at least as many as were requested."""
    fingerprint: str
    """Equal for equal orders of equal documents; a resumed run finds out by it whether it goes on in the same order."""


class IndexedSamples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """An open split; an item is a batch of rows, and its key the list of their places in the order."""

    def __init__(self, dataset: Any, seq_length: int) -> None:
        self._dataset = dataset
        self._row_length = seq_length + 1

    def __len__(self) -> int:
        """Samples, not batches."""
        return len(self._dataset)

    def __getitem__(self, indices: list[int]) -> dict[str, Tensor]:
        """``text`` [rows, seq_length + 1] int64 and ``sample_mask`` [rows] float32; padding is -1 with weight 0.

        The engine's own item is cut into inputs, targets, masks and positions again, much more work (megatron-core
        0.16.1, datasets/gpt_dataset.py:GPTDataset.__getitem__); the text that it is cut from is what the steps want.
        """
        rows = np.full((len(indices), self._row_length), -1, dtype=np.int64)
        mask = np.zeros(len(indices), dtype=np.float32)
        for row, index in enumerate(indices):
            if index != PADDING_ROW:
                rows[row], _ = self._dataset._query_document_sample_shuffle_indices(index)
                mask[row] = 1.0
        return {"text": torch.from_numpy(rows), "sample_mask": torch.from_numpy(mask)}


def cache_folder(request: IndexRequest, index_cache: str | None) -> str:
    """Where the index of ``request`` is kept: a folder of its own, which exists only when it is complete.

    Its name covers the files' sizes and times too. The engine's own key has only the path (megatron-core 0.16.1,
    datasets/megatron_dataset.py): after preprocessing again under the same name it would use the index of the old file.
    """
    root = index_cache or os.path.join(request.prefix, "cache", "GPTDataset_indices")
    stats = [os.stat(request.prefix + suffix) for suffix in (".idx", ".bin")]
    identity = (request, [(stat.st_size, stat.st_mtime_ns) for stat in stats])
    return os.path.join(root, f"{request.name}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:24]}")


def build_index(request: IndexRequest, folder: str) -> SampleOrder:
    """What ``folder`` holds for ``request``, after building it if need be; only one process calls this.

    Raises:
        DataError: If ``folder`` cannot be written.
    """
    if os.path.isdir(folder):
        return _order(_gpt_dataset(request, folder))
    try:
        parent = os.path.dirname(folder)
        os.makedirs(parent, exist_ok=True)
        # The engine writes under the final names; renaming its folder makes all files appear at once, complete.
        staging = tempfile.mkdtemp(prefix=".building-", dir=parent)
        try:
            order = _order(_gpt_dataset(request, staging))
            os.chmod(staging, 0o755)
            _rename_unless_there(staging, folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"the index of {request.prefix} cannot be written to {folder} ({error.strerror}); set index_cache to a"
            " folder that can be written"
        ) from error
    return order


def open_samples(request: IndexRequest, folder: str) -> IndexedSamples:
    """The samples of ``request``, by the index in ``folder``.

    A machine that does not share ``folder`` with the one that built it computes the same index in memory.

    Raises:
        DataError: If the dataset is missing on this machine.
    """
    read_header(request.prefix)
    if not os.path.isdir(folder):
        _log.warning(
            "The index %s is not visible on this machine and is computed again in memory; set index_cache to a folder"
            " that all machines share to save the time.",
            folder,
        )
        folder = _IN_MEMORY
    return IndexedSamples(_gpt_dataset(request, folder), request.seq_length)


def _order(dataset: Any) -> SampleOrder:
    """The beginning of an order tells it from others: any difference reshuffles all of it."""
    digest = hashlib.sha256(repr((len(dataset), dataset.config.sequence_length)).encode())
    for part in (dataset.document_index, dataset.sample_index, dataset.shuffle_index):
        digest.update(np.ascontiguousarray(part[:4096]).tobytes())
    return SampleOrder(num_samples=len(dataset), fingerprint=digest.hexdigest()[:16])


def _rename_unless_there(staging: str, folder: str) -> None:
    try:
        os.rename(staging, folder)
    except OSError:
        # Another job may have built the same index in the meantime; its files are as good.
        if not os.path.isdir(folder):
            raise


_IN_MEMORY = ""
"""The engine keeps the index in memory if its cache path is empty (None would be its default place)."""


class _NoTokenizer:
    """What the engine reads of a tokenizer. No id of the dataset is padding, nor is any other than -1."""

    vocab_size = None
    eod = -2
    unique_identifiers: ClassVar = {"class": "none"}


def _gpt_dataset(request: IndexRequest, folder: str) -> Any:
    """The engine's dataset; built directly, as its builder synchronises all ranks for each split."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=request.seed,
        sequence_length=request.seq_length,
        blend=([request.prefix], None),
        split=canonical_split(request.split),
        path_to_cache=folder,
        tokenizer=_NoTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    low_level = GPTDataset.build_low_level_dataset(request.prefix, config)
    sequences = split_ranges(request.split, len(low_level))[request.name]
    indices = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    return GPTDataset(low_level, request.prefix, indices, request.num_samples, Split[request.name], config)
