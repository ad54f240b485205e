"""Samples of one split in a fixed order: objectives, the GPT objective, splits, blends, and cached indices.

GPT samples: all documents of a split, shuffled, are one stream of tokens; sample k is its tokens from k * seq_length to
(k + 1) * seq_length, both included, so neighbours share one token. The samples are shuffled in turn. Both shuffles, and
the rule for shuffling the last pass separately, are Megatron's, so samples and order equal its own for the same file,
split, sequence length, seed and number of samples (megatron-core 0.16.1, datasets/gpt_dataset.py). Its ``GPTDataset``
itself is not used, only the functions beneath it that build the indices. It reads document by document: with 4,096
tokens per sample 18 M tokens/s from documents of 50 tokens and 73 M from those of 5,000, where this reads 250 M and
300 M. It counts a partial last sample in single precision, and builds on global rank 0 alone, not atomically.

Samples of a blend come from its datasets such that after each sample every dataset is as close to its share as
possible; the greedy rule is the engine's (megatron-core 0.16.1, datasets/helpers.cpp:build_blending_indices).

Each index, of a dataset or of a blend, has its own directory and is built once for all jobs. The name of the directory
covers everything that determines its content, including sizes and times of the dataset's files: the engine's own key
has only the path (datasets/megatron_dataset.py), so after preprocessing again under the same name it would use the
index of the old file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from typing_extensions import override

from lightning_megatron.data.indexed import IndexedDataset, open_dataset
from lightning_megatron.errors import ConfigError, DataError
from lightning_megatron.storage.publish import (
    FileChecksums,
    staged,
    verify_checksums,
    write_checksums,
)

_log = logging.getLogger(__name__)

Rows: TypeAlias = dict[str, torch.Tensor]
"""Tensors of a batch on the host, with one row per sample: [rows, ...]."""


class Samples(Protocol):
    """The samples of one split in a fixed order; sample ``i`` is the same on every rank, in every worker and run."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal samples in equal order; tells a resumed run whether its order is unchanged."""

    def __len__(self) -> int:
        """Number of samples."""

    def rows(self, indices: Sequence[int]) -> Rows:
        """Samples at ``indices``, at least one, stacked.

        Raises:
            DataError: If their source is damaged.
        """


# ---- splits ---------------------------------------------------------------------------------------------------------

SplitName: TypeAlias = Literal["train", "valid", "test"]
SPLIT_NAMES: tuple[SplitName, ...] = ("train", "valid", "test")

_WEIGHT = re.compile(r"\d+(\.\d*)?|\.\d+")


def parse_split(split: str) -> tuple[float, float, float]:
    """Weights of the training, validation and test split; missing ones are 0.

    Stricter than the engine, which picks whatever looks like a number: it reads ``-1,1`` as ``1,1`` and ``1e-3`` as
    ``1`` and ``3`` (megatron-core 0.16.1, datasets/blended_megatron_dataset_config.py:parse_and_normalize_split).

    Args:
        split: Up to three numbers between commas or slashes, e.g. ``949,50,1``.

    Raises:
        ConfigError: If it is anything else, or all weights are 0.
    """
    parts = [part.strip() for part in re.split("[,/]", split)]
    is_valid = all(map(_WEIGHT.fullmatch, parts)) and any(map(float, parts))
    if not is_valid or len(parts) > len(SPLIT_NAMES):
        raise ConfigError(
            f"split={split!r} must be one to three weights like 949,50,1 of digits and points, not all 0"
        )
    train, valid, test = [float(part) for part in parts] + [0.0] * (len(SPLIT_NAMES) - len(parts))
    return train, valid, test


def canonical_split(split: str) -> str:
    """The same weights, in a spelling that the engine cannot misread."""
    return ",".join(np.format_float_positional(weight, trim="-") for weight in parse_split(split))


def split_ranges(split: str, num_sequences: int) -> dict[SplitName, range]:
    """Sequences of each split; an empty range where the weight is 0 or too small for one sequence.

    By the same floating-point steps as the engine, so the bounds agree to the last document (megatron-core 0.16.1,
    convert_split_vector_to_split_matrix and blended_megatron_dataset_builder.py:_build_megatron_dataset_splits).
    """
    weights = np.array(parse_split(split), dtype=np.float64)
    bounds = accumulate((weights / weights.sum()).tolist(), initial=0.0)
    pairs = pairwise(int(round(bound * num_sequences)) for bound in bounds)
    return {name: range(*pair) for name, pair in zip(SPLIT_NAMES, pairs, strict=True)}


# ---- objectives -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Part:
    """The documents of one dataset that belong to one split, and the number of samples requested of them."""

    prefix: str
    """Path of the dataset without suffix."""
    weight: float | None = None
    """Weight of the dataset in a blend, not normalized; None to blend in proportion to sizes."""
    split: str
    """Weights of train, valid and test, e.g. ``949,50,1``."""
    name: SplitName
    """Name of the split."""
    seed: int
    """Seed of the order, and of the random numbers of each sample."""
    num_samples: int | None
    """Samples needed, of a blend over all its parts, in as many passes as it takes; None for one pass."""


class Objective(ABC):
    """How documents become samples for one kind of model. Implementations are frozen dataclasses."""

    name: ClassVar[str]
    """``gpt``, ``bert`` or ``t5``."""
    index_type: ClassVar[type[SavedArrays]]
    """Class of the index, which says which documents make up each sample, and the order of samples."""

    @property
    @abstractmethod
    def index_key(self) -> str:
        """Settings of this objective on which the index depends, as text for the name of its directory."""

    @abstractmethod
    def count(self, part: Part) -> int:
        """Number of samples in one pass over the documents of ``part``; reads only ``.idx``, ignores ``num_samples``.

        Raises:
            DataError: If there is none, with the rule and the fix; the engine would loop forever.
        """

    @abstractmethod
    def build_index(self, part: Part) -> SavedArrays:
        """Build the index of ``part``, of at least ``num_samples`` samples."""

    def open(self, part: Part, folder: str) -> IndexedSamples:
        """Samples of ``part`` by the index saved in ``folder``."""
        return IndexedSamples(self, part, open_dataset(part.prefix), self.index_type.load(folder))

    @abstractmethod
    def order_key(self, part: Part) -> str:
        """What determines the samples besides their index, for the fingerprint of an order."""

    @abstractmethod
    def read(self, dataset: IndexedDataset, index: Any, indices: Sequence[int], seed: int) -> Rows:
        """Samples at ``indices`` of ``index``, which has the type ``index_type``."""


class SavedArrays:
    """Arrays saved as one ``FIELD.npy`` each, and memory-mapped when loaded; subclasses are dataclasses."""

    folder = ""
    """Directory that the arrays were loaded from."""

    def save(self, folder: str) -> None:
        """Write the arrays to ``folder``."""
        for field in fields(self):  # type: ignore[arg-type]
            np.save(os.path.join(folder, f"{field.name}.npy"), getattr(self, field.name))

    @classmethod
    def load(cls, folder: str) -> Self:
        """Memory-map the arrays in ``folder``.

        Raises:
            DataError: If a file is damaged or gone: a run opens its index again for each validation.
        """
        arrays = {}
        for field in fields(cls):  # type: ignore[arg-type]
            path = os.path.join(folder, f"{field.name}.npy")
            try:
                # As a plain ndarray: slicing a numpy.memmap costs more than copying the slices.
                arrays[field.name] = np.load(path, mmap_mode="r", allow_pickle=False).view(
                    np.ndarray
                )
            except (
                Exception
            ) as error:  # of any type: NumPy reads the header as Python's source text
                raise DataError(
                    f"{path} cannot be read ({error}): removed or damaged; start the run again, which rebuilds it"
                ) from error
        loaded = cls(**arrays)
        loaded.__dict__["folder"] = folder
        return loaded

    def __getstate__(self) -> str | dict[str, Any]:
        """Pickle the directory: other processes load the arrays again, as memory maps cannot be pickled."""
        return self.folder or self.__dict__

    def __setstate__(self, state: str | dict[str, Any]) -> None:
        self.__dict__.update(state if isinstance(state, dict) else vars(self.load(state)))

    def fingerprint(self, key: str) -> str:
        """Hash of ``key`` and the beginning of each array, which suffices as any change reshuffles the whole order."""
        digest = hashlib.sha256(key.encode())
        for field in fields(self):  # type: ignore[arg-type]
            digest.update(np.ascontiguousarray(getattr(self, field.name)[:4096]).tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class IndexedSamples:
    """Samples of one split of one dataset; every process maps the files itself, and shares their pages."""

    objective: Objective
    """How documents become samples."""
    part: Part
    """Documents of the samples."""
    dataset: IndexedDataset
    """Dataset that holds the documents."""
    index: Any
    """Documents of each sample, and order of samples; of the objective's ``index_type``."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of samples and order."""
        return self.index.fingerprint(f"({len(self)}, {self.objective.order_key(self.part)})")  # type: ignore[no-any-return]

    def rows(self, indices: Sequence[int]) -> Rows:
        """Samples at ``indices``, at least one, stacked.

        Raises:
            DataError: If a file of the dataset changed since it was opened, or holds invalid tokens.
        """
        self._check_unchanged()
        try:
            return self.objective.read(self.dataset, self.index, indices, self.part.seed)
        finally:
            self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Raise unless both files have the sizes with which they were opened; takes 1 us on a local disk.

        Beyond the end of a truncated file, its memory map reads zeros up to the end of the page, and after that the
        kernel kills the process (SIGBUS). The check before a read prevents the latter; the check after it keeps zeros
        from being taken for tokens. A file that was deleted or replaced as a whole can still be read.
        """
        for suffix, file in self.dataset.files.items():
            if (now := file.size()) != len(file):
                raise DataError(
                    f"{self.dataset.prefix}{suffix}: expected {len(file)} bytes, got {now}: it was cut or overwritten "
                    "while it was in use; copy it again and resume from the last checkpoint, and give new data a new "
                    "name"
                )


# ---- GPT samples ----------------------------------------------------------------------------------------------------

Int32s: TypeAlias = NDArray[np.int32]
Int64s: TypeAlias = NDArray[np.int64]
PADDING = -1
"""Padding token of a partial last sample."""
_SEPARATE_LAST_PASS_BELOW = 0.80
"""The last pass is shuffled separately if a smaller fraction of it is needed: Megatron's rule. Otherwise documents that
come once more than others would be spread over the whole run."""


@dataclass(frozen=True, kw_only=True)
class GPTIndex(SavedArrays):
    """Order of the documents in the stream, bounds of the samples in it, and order of the samples."""

    document_index: NDArray[np.int32]
    """Documents in the order of the stream: [passes * documents]."""
    sample_index: NDArray[Any]
    """Beginning of each sample and end of the last one, as index into ``document_index`` and token of that document:
    [samples + 1, 2], int32 or int64."""
    shuffle_index: NDArray[Any]
    """Samples in the order in which they are read: [samples], uint32 or int64."""

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.shuffle_index)


@dataclass(frozen=True, kw_only=True)
class GPTObjective(Objective):
    """Next-token prediction: ``text`` [rows, seq_length + 1] int64, with ``seq_length`` predictions per row."""

    seq_length: int
    """Predictions of a sample, which has one more token."""
    drop_last_partial_validation_sequence: bool = True
    """Drop the tokens at the end of the validation documents that do not fill a sample; otherwise they are one more
    sample, padded with -1. Training and test always drop them, as in Megatron."""
    name = "gpt"
    index_type = GPTIndex

    @property
    @override
    def index_key(self) -> str:
        return (
            f"seq_length={self.seq_length} drop_last={self.drop_last_partial_validation_sequence}"
        )

    @override
    def count(self, part: Part) -> int:
        return self._measure(part)[0]

    @override
    def build_index(self, part: Part) -> GPTIndex:
        _, lengths, documents = self._measure(part)
        keep_partial = self._keeps_partial(part)
        return build_gpt_index(
            lengths.copy(), documents, self.seq_length, part.num_samples, part.seed, keep_partial
        )

    @override
    def order_key(self, part: Part) -> str:
        return str(self.seq_length)

    @override
    def read(
        self, dataset: IndexedDataset, index: GPTIndex, indices: Sequence[int], seed: int
    ) -> Rows:
        """``text`` [rows, seq_length + 1] int64, padded with -1."""
        width = self.seq_length + 1
        pieces, begins, counts = _row_pieces(dataset, index, np.asarray(indices, dtype=np.int64))
        ends = np.cumsum(counts)
        text = dataset.tokens[
            np.repeat(begins - (ends - counts), counts) + np.arange(ends[-1])
        ].astype(np.int64)
        if len(text) < len(pieces) * width:
            filled = np.add.reduceat(counts, np.cumsum(pieces) - pieces)
            padded = np.full((len(pieces), width), PADDING, dtype=np.int64)
            padded[np.arange(width) < filled[:, None]] = text
            text = padded
        return {"text": torch.from_numpy(text.reshape(len(pieces), width))}

    def _measure(self, part: Part) -> tuple[int, Int32s, Int32s]:
        """Samples in one pass, at least one; tokens of each document of the dataset; and documents of ``part``."""
        lengths = open_dataset(part.prefix).lengths
        bounds = split_ranges(part.split, len(lengths))[part.name]
        documents = np.arange(bounds.start, bounds.stop, dtype=np.int32)
        tokens = int(lengths[bounds.start : bounds.stop].sum(dtype=np.int64))
        samples = _count(tokens, self.seq_length, self._keeps_partial(part))
        if samples == 0:
            weight = (
                f"give {part.name} a larger weight or weight 0, "
                if len(documents) < len(lengths)
                else ""
            )
            raise DataError(
                f"split={part.split!r} gives {part.name} {len(documents)} of {len(lengths)} documents of {part.prefix}"
                f" with {tokens} tokens, one sample of seq_length={self.seq_length} needs {self.seq_length + 1};"
                f" {weight}lower seq_length, or add documents (each line of a .jsonl, each .txt file is one)"
            )
        return samples, lengths, documents

    def _keeps_partial(self, part: Part) -> bool:
        return part.name == "valid" and not self.drop_last_partial_validation_sequence


def build_gpt_index(
    lengths: Int32s,
    documents: Int32s,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    keep_partial: bool,
) -> GPTIndex:
    """Build the index of GPT samples.

    Args:
        lengths: Tokens of each document of the dataset.
        documents: Documents of the split, which together have at least one token to predict.
        seq_length: Predictions of a sample.
        num_samples: Samples needed; None for one pass.
        seed: Seed of both shuffles.
        keep_partial: Whether the tokens at the end that do not fill a sample are a sample, too.
    """
    from megatron.core.datasets import helpers
    from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index

    per_pass = int(lengths[documents].sum(dtype=np.int64))
    passes = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // per_pass))
    samples_before_last = _count((passes - 1) * per_pass, seq_length)
    samples_of_last = (num_samples or 0) - samples_before_last
    is_separate = passes > 1 and samples_of_last < int(
        _SEPARATE_LAST_PASS_BELOW * _count(per_pass, seq_length)
    )
    random = np.random.RandomState(seed)

    order = _build_document_index(documents, passes, random, is_separate)
    begins = helpers.build_sample_idx(lengths, order, seq_length, passes, per_pass, True, True)
    # The engine counts a partial sample in single precision (helpers.cpp:build_sample_idx): from 2^24 tokens on it
    # makes one sample too few, or one too many, which is only padding.
    if keep_partial and (passes * per_pass - 1) % seq_length:
        last = np.flatnonzero(lengths[order])[-1]
        begins = np.concatenate(
            (begins, np.array([[last, lengths[order[last]] - 1]], dtype=begins.dtype))
        )
    total = len(begins) - 1
    shuffle = _build_shuffle_index(samples_before_last if is_separate else total, total, random)
    return GPTIndex(document_index=order, sample_index=begins, shuffle_index=shuffle)


def _row_pieces(
    dataset: IndexedDataset, index: GPTIndex, indices: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """Pieces of documents that make up rows: pieces of each row; first token and length of each piece.

    A row is the end of one document, complete documents, and the beginning of another, or part of one document.
    """
    samples = index.shuffle_index[indices].astype(np.int64)
    first, first_token = index.sample_index[samples].astype(np.int64).T
    last, last_token = index.sample_index[samples + 1].astype(np.int64).T
    pieces = last - first + 1
    row_ends = np.cumsum(pieces)
    positions = np.repeat(first - (row_ends - pieces), pieces) + np.arange(row_ends[-1])
    documents = index.document_index[positions]
    ends = dataset.lengths[documents].astype(np.int64)
    ends[row_ends - 1] = last_token + 1
    starts = np.zeros_like(ends)
    starts[row_ends - pieces] = first_token
    return pieces, dataset.positions[documents] // dataset.dtype.itemsize + starts, ends - starts


def _count(tokens: int, seq_length: int, keep_partial: bool = False) -> int:
    """Number of samples in a stream of tokens."""
    predictions = max(0, tokens - 1)
    return -(-predictions // seq_length) if keep_partial else predictions // seq_length


# ---- blends ---------------------------------------------------------------------------------------------------------

MAX_DATASETS = 32766
"""The engine numbers datasets in 16 bits."""
_SURPLUS = 0.005
"""Fraction of samples that Megatron indexes of each dataset beyond its share; it may need one more pass for them, which
changes the order (megatron-core 0.16.1, blended_megatron_dataset_config.py:mid_level_dataset_surplus)."""
_MAX_OPEN = 64
"""Datasets of a blend that a process keeps open: each takes about five of 1,024 file descriptors."""


def parse_blend(data_path: str | Sequence[str | float]) -> list[tuple[str, float | None]]:
    """Prefix and weight of each dataset of a blend; the weight is None where sizes decide.

    Stricter than the engine, which takes a list that it cannot parse for prefixes alone (megatron-core 0.16.1,
    datasets/utils.py:get_blend_from_list).

    Args:
        data_path: A prefix; prefixes, blended in proportion to their sizes; or alternating weights and prefixes, where
            weights are numbers or strings, e.g. ``[0.7, "books", 0.3, "web"]``. A weight of 0 leaves a dataset out, as
            it does in ``split``.

    Raises:
        ConfigError: If it is anything else.
    """
    is_one = isinstance(data_path, str) or not isinstance(data_path, Sequence)
    items: list[Any] = [data_path] if is_one else list(data_path)
    shown = reprlib.repr(items)
    weights: list[float | None] = []
    if len(items) > 1 and _parse_number(items[0]) is not None:
        weights, items = [_parse_number(item) for item in items[::2]], items[1::2]
    are_weights = all(weight is not None and 0 <= weight < math.inf for weight in weights)
    are_prefixes = all(
        isinstance(item, str) and item.strip() and _parse_number(item) is None for item in items
    )
    if not items or not are_prefixes or not are_weights or len(weights) not in (0, len(items)):
        raise ConfigError(
            f"data_path={shown} must be prefixes (./30 for 30), or finite weights and prefixes in turn"
        )
    prefixes = map(os.path.expanduser, items)
    blend = [
        pair for pair in zip(prefixes, weights or [None] * len(items), strict=True) if pair[1] != 0
    ]
    if not 1 <= len(blend) <= MAX_DATASETS:
        raise ConfigError(
            f"data_path={shown} gives {len(blend)} datasets a weight, expected 1 to {MAX_DATASETS}"
        )
    return blend


def _parse_number(item: object) -> float | None:
    """The number that an item is or spells; None if it does not."""
    try:
        return float(item)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True, kw_only=True)
class BlendIndex(SavedArrays):
    """Order in which a blend takes samples from its datasets."""

    dataset_index: NDArray[np.int16]
    """The dataset of each sample: [samples]."""
    sample_index: NDArray[np.int64]
    """Index of each sample within its dataset: [samples]."""
    part_samples: NDArray[np.int64]
    """Samples to index of each dataset, 0 for one pass: [datasets]."""

    def sized_parts(self, parts: Sequence[Part]) -> list[Part]:
        """``parts`` with the number of samples that the blend needs of each."""
        return [
            replace(p, num_samples=n or None)
            for p, n in zip(parts, self.part_samples.tolist(), strict=True)
        ]


def build_blend_index(
    weights: Sequence[float | None], counts: Sequence[int], num_samples: int | None
) -> BlendIndex:
    """Build the order in which a blend takes samples from its datasets.

    It equals the engine's where that has one. The engine supports neither weights for one pass nor several passes
    without weights, and fails where its greedy rule takes more samples of a dataset than it has indexed.

    One pass takes no sample twice. Without weights it has all samples; with weights it ends where the first dataset has
    too few left for its share, as ``interleave_datasets`` of Hugging Face datasets (``first_exhausted``). No dataset
    runs out before: of N samples the greedy rule takes at most w * (N - 1) + 1 from a dataset of weight w.

    Args:
        weights: Weights of the datasets; all None to blend in proportion to sizes.
        counts: Samples in one pass over each dataset.
        num_samples: Samples needed, in as many passes as it takes; None for one pass.
    """
    from megatron.core.datasets import helpers

    is_weighted = weights[0] is not None
    shares = np.array(weights if is_weighted else counts, dtype=np.float64)
    shares = shares / shares.sum()
    indexed = np.zeros(len(weights), dtype=np.int64)
    if num_samples is None:
        size = int(min(counts / shares)) if is_weighted else sum(counts)
    elif not is_weighted:
        size = num_samples
    else:
        # Megatron rounds up the samples of each dataset, so there are a few more than requested.
        rounded = np.ceil(num_samples * shares)
        size, indexed[:] = int(rounded.sum()), np.ceil(rounded * (1 + _SURPLUS))
        shares = (
            shares / shares.sum()
        )  # twice, as in Megatron: the last bit may decide which dataset is first
    dataset_index, sample_index = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    if num_samples is None and not is_weighted:
        helpers.build_exhaustive_blending_indices(
            dataset_index, sample_index, list(counts), len(weights)
        )
    else:
        helpers.build_blending_indices(
            dataset_index, sample_index, shares, len(weights), size, False
        )
    part_samples = np.maximum(indexed, np.bincount(dataset_index, minlength=len(weights)))
    part_samples[part_samples <= np.asarray(counts)] = 0
    return BlendIndex(
        dataset_index=dataset_index, sample_index=sample_index, part_samples=part_samples
    )


class BlendedSamples:
    """Samples of several datasets as one; a dataset is opened when it is read, and only some are open at a time.

    Args:
        blend: Order of the datasets.
        openers: Functions that open one dataset each; picklable.
        fingerprint: Fingerprint of the order of datasets, and of the samples of each.
    """

    def __init__(
        self, blend: BlendIndex, openers: Sequence[Callable[[], Samples]], fingerprint: str
    ) -> None:
        self._blend, self._openers, self.fingerprint = blend, openers, fingerprint
        self._dataset = lru_cache(_MAX_OPEN)(lambda index: openers[index]())

    def __len__(self) -> int:
        return len(self._blend.dataset_index)

    def rows(self, indices: Sequence[int]) -> Rows:
        """Samples at ``indices``, stacked; rows of all datasets have the same lengths."""
        positions = np.asarray(indices, dtype=np.int64)
        datasets, samples = (
            self._blend.dataset_index[positions],
            self._blend.sample_index[positions],
        )
        groups = [np.flatnonzero(datasets == dataset) for dataset in np.unique(datasets)]
        parts = [
            self._dataset(int(datasets[group[0]])).rows(samples[group].tolist()) for group in groups
        ]
        order = torch.from_numpy(np.argsort(np.concatenate(groups)))
        return {key: torch.cat([part[key] for part in parts])[order] for key in parts[0]}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without open datasets: another process opens its own."""
        return BlendedSamples, (self._blend, self._openers, self.fingerprint)


# ---- cached indices -------------------------------------------------------------------------------------------------

_FORMAT_VERSION = 1
"""Version of the files of an index; a change invalidates existing directories."""


def open_samples(objective: Objective, parts: Sequence[Part], index_cache: str | None) -> Samples:
    """Open the samples of a split, after building the indices that are not on disk.

    Args:
        objective: How documents become samples.
        parts: One for each dataset of the blend; they differ in prefix and weight.
        index_cache: Directory for all indices; None for one next to each dataset.

    Raises:
        DataError: If a dataset is missing on this machine, or a directory cannot be written.
    """
    first = parts[0]
    if len(parts) == 1:
        return objective.open(first, _cached_index(objective, first, index_cache)[0])

    def write(staging: str) -> str:
        blend = build_blend_index(
            [part.weight for part in parts], list(map(objective.count, parts)), first.num_samples
        )
        blend.save(staging)
        fingerprints = [
            _cached_index(objective, part, index_cache)[1] for part in blend.sized_parts(parts)
        ]
        digest = hashlib.sha256(repr(fingerprints).encode())
        digest.update(blend.dataset_index[:4096].tobytes())
        return digest.hexdigest()[:16]

    identity = (
        _part_key(objective, first),
        [(_dataset_identity(part.prefix), part.weight) for part in parts],
    )
    folder = _index_folder(
        (objective.name, first.name, "blend"), identity, first.prefix, index_cache
    )
    fingerprint = build_once(
        folder, write, f"the blend of {', '.join(part.prefix for part in parts[:3])}"
    )
    blend = BlendIndex.load(folder)
    shares = [
        (part, _cached_index(objective, part, index_cache)[0]) for part in blend.sized_parts(parts)
    ]
    return BlendedSamples(blend, [partial(objective.open, *share) for share in shares], fingerprint)


def _cached_index(objective: Objective, part: Part, index_cache: str | None) -> tuple[str, str]:
    """Directory of the index of ``part``, built if it is missing, and the fingerprint of its samples."""

    def write(staging: str) -> str:
        objective.build_index(part).save(staging)
        return objective.open(part, staging).fingerprint

    identity = (_part_key(objective, part), _dataset_identity(part.prefix))
    folder = _index_folder((objective.name, part.name), identity, part.prefix, index_cache)
    return folder, build_once(folder, write, part.prefix)


def _part_key(objective: Objective, part: Part) -> tuple[object, ...]:
    return objective.index_key, canonical_split(part.split), part.name, part.seed, part.num_samples


def _index_folder(
    names: tuple[str, ...], identity: object, prefix: str, index_cache: str | None
) -> str:
    root = index_cache or os.path.join(prefix, "cache")
    digest = hashlib.sha256(repr((_FORMAT_VERSION, identity)).encode()).hexdigest()[:24]
    return os.path.join(os.path.abspath(root), "-".join((*names, digest)))


def _dataset_identity(prefix: str) -> tuple[object, ...]:
    """Path, sizes and modification times, which differ if the dataset was written again.

    Raises:
        DataError: If the dataset is missing on this machine.
    """
    open_dataset(prefix)
    stats = [os.stat(prefix + suffix) for suffix in (".idx", ".bin")]
    return (os.path.abspath(prefix), *((stat.st_size, stat.st_mtime_ns) for stat in stats))


# ---- directories that are built once --------------------------------------------------------------------------------

_MANIFEST = "index.json"
_QUIET_WAIT_S = 5.0
_READ_BYTES = 1 << 22
_REMEMBERED_FOLDERS = 256


def build_once(folder: str, write: Callable[[str], str], subject: str) -> str:
    """Build ``folder`` unless it exists, in one of the processes that need it, and return its fingerprint.

    Its ``checksums.json`` has the sizes and CRC-32 of its files: a damaged directory is built again. Each process reads
    the files for that once, at 4 to 5 GB/s from the page cache. The building process holds a lock, which ends with the
    process, and the other processes wait.

    Args:
        folder: Absolute path; its name identifies its content.
        write: Fills an empty directory, and returns a fingerprint that is equal for equal orders of equal documents.
        subject: What is indexed, for messages.

    Raises:
        DataError: If the directory cannot be written.
    """
    path = Path(folder)
    if (fingerprint := _read_fingerprint(path)) is not None:
        return fingerprint
    file = path.with_name(f".{path.name}.lock")
    lock = FileLock(file, mode=0o666)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            held = lock.acquire(timeout=_QUIET_WAIT_S)
        except Timeout:
            _log.warning(
                "Waiting for the process that builds the index %s; if there is none, delete %s.",
                path,
                file,
            )
            held = lock.acquire()
        with held:
            fingerprint = _read_fingerprint(path)
            if fingerprint is None:
                if os.path.lexists(path):
                    _log.warning(
                        "The index %s is damaged and is not used: it is built again.", folder
                    )
                _log.info("Building the index of %s in %s.", subject, folder)
                with staged(path.parent, path.name, error=DataError) as hidden:
                    staging = hidden / path.name
                    staging.mkdir()
                    fingerprint = write(str(staging))
                    manifest = json.dumps({"order": {"fingerprint": fingerprint}}, indent=1)
                    (staging / _MANIFEST).write_text(manifest, encoding="utf-8")
                    files = sorted(staging.iterdir())
                    write_checksums(staging, {file.name: _checksums_of(file) for file in files})
            # Processes that opened the lock file before find a complete directory when it is released.
            file.unlink(missing_ok=True)
            return fingerprint
    except OSError as error:
        raise DataError(
            f"the index of {subject} cannot be written to {folder} ({error.strerror or error}); set index_cache"
        ) from error


def _read_fingerprint(folder: Path) -> str | None:
    """Fingerprint of an index; None if the directory is missing or damaged."""
    if not folder.is_dir():
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ConfigError):
        entries = [(entry.name, entry.stat()) for entry in os.scandir(folder)]
        _verify_once(
            folder,
            tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in entries),
        )
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        return str(manifest["order"]["fingerprint"])
    return None


@lru_cache(_REMEMBERED_FOLDERS)
def _verify_once(folder: Path, files: tuple[tuple[str, int, int, int], ...]) -> None:
    """Verify the checksums of a directory unless this process has done so with the same files.

    Args:
        folder: The directory.
        files: Name, size, modification time and inode of each of its files.

    Raises:
        CheckpointError: If a file is damaged.
    """
    if any(not (folder / name).is_file() or (folder / name).is_symlink() for name, *_ in files):
        raise DataError(f"{folder}: expected files alone, got a directory or a link; remove it")
    verify_checksums(folder)


def _checksums_of(file: Path) -> FileChecksums:
    checksums = FileChecksums()
    with file.open("rb") as stream:
        while data := stream.read(_READ_BYTES):
            checksums.update(data)
    return checksums
