"""Samples of one split in a fixed order: objectives, those of a GPT, splits, blends, and indices that are built once.

A GPT's: all documents of a split, shuffled, are one stream of tokens; sample k is its tokens from k * seq_length to
(k + 1) * seq_length, both included, so neighbours share one. The samples are shuffled in turn. Both shuffles, and the
rule by which the last pass is shuffled by itself, are Megatron's, so samples and order equal its own for the same file,
split, sequence length, seed and number of samples (megatron-core 0.16.1, datasets/gpt_dataset.py). Its ``GPTDataset``
itself is not used, only the functions beneath it that lay out samples and shuffle them. It reads document by document:
with 4,096 tokens a sample 18 M tokens/s from documents of 50 tokens and 73 M from those of 5,000, where this reads
250 M and 300 M. It counts a partial last sample in single precision, and builds on global rank 0 alone, not atomically.

Datasets of a blend are taken in turn such that after every sample each has come as close to its share as it can; the
greedy rule is the engine's (megatron-core 0.16.1, datasets/helpers.cpp:build_blending_indices).

Each dataset's index is in a folder of its own, and so is the order in which a blend takes datasets; each is built once
for all jobs. A folder's name covers everything that determines its content, with sizes and times of the dataset's
files: the engine's own key has only the path (datasets/megatron_dataset.py), so after preprocessing again under the
same name it would use the index of the old file.
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
from lightning_megatron.files import staged

_log = logging.getLogger(__name__)

Rows: TypeAlias = dict[str, torch.Tensor]
"""Tensors of a batch on the host, each with one row per sample: [rows, ...]."""


class Samples(Protocol):
    """The samples of one split in a fixed order; sample ``i`` is the same on every rank, in every worker and run."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal samples in equal order; a resumed run finds out by it whether it goes on in its own."""

    def __len__(self) -> int:
        """Samples."""

    def rows(self, indices: Sequence[int]) -> Rows:
        """The samples at ``indices``, at least one, stacked.

        Raises:
            DataError: If what the samples are made of is damaged.
        """


# ---- splits ---------------------------------------------------------------------------------------------------------

SplitName: TypeAlias = Literal["train", "valid", "test"]
SPLIT_NAMES: tuple[SplitName, ...] = ("train", "valid", "test")

_WEIGHT = re.compile(r"\d+(\.\d*)?|\.\d+")


def parse_split(split: str) -> tuple[float, float, float]:
    """Weights of training, validation and test; missing ones are 0.

    Stricter than the engine, which picks whatever looks like a number: it reads ``-1,1`` as ``1,1`` and ``1e-3`` as
    ``1`` and ``3`` (megatron-core 0.16.1, datasets/blended_megatron_dataset_config.py:parse_and_normalize_split).

    Args:
        split: Up to three numbers between commas or slashes, e.g. ``949,50,1``.

    Raises:
        ConfigError: If it is anything else, or all weights are 0.
    """
    parts = [part.strip() for part in re.split("[,/]", split)]
    is_read = all(map(_WEIGHT.fullmatch, parts)) and any(map(float, parts))
    if not is_read or len(parts) > len(SPLIT_NAMES):
        raise ConfigError(f"split={split!r} must be one to three weights like 949,50,1 of digits and points, not all 0")
    train, valid, test = [float(part) for part in parts] + [0.0] * (len(SPLIT_NAMES) - len(parts))
    return train, valid, test


def canonical_split(split: str) -> str:
    """The same weights in the only spelling that the engine cannot misread."""
    return ",".join(np.format_float_positional(weight, trim="-") for weight in parse_split(split))


def split_ranges(split: str, num_sequences: int) -> dict[SplitName, range]:
    """Sequences of each split; an empty range where the weight is 0 or too small for one sequence.

    The same floating-point steps as the engine, so that the bounds agree to the last document (megatron-core 0.16.1,
    convert_split_vector_to_split_matrix and blended_megatron_dataset_builder.py:_build_megatron_dataset_splits).
    """
    weights = np.array(parse_split(split), dtype=np.float64)
    bounds = accumulate((weights / weights.sum()).tolist(), initial=0.0)
    pairs = pairwise(int(round(bound * num_sequences)) for bound in bounds)
    return {name: range(*pair) for name, pair in zip(SPLIT_NAMES, pairs, strict=True)}


# ---- objectives -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Part:
    """The documents of one dataset that belong to one split, and how many samples of them are asked for."""

    prefix: str
    """Dataset, without suffix."""
    weight: float | None = None
    """Its share of a blend before normalisation; None if datasets are taken in proportion to their sizes."""
    split: str
    """Weights of train, valid and test, e.g. ``949,50,1``."""
    name: SplitName
    """The split."""
    seed: int
    """Of the order, and of what is drawn for each sample."""
    num_samples: int | None
    """Samples that are needed, of a blend those of all its parts, over as many passes as it takes; None for one."""


class Objective(ABC):
    """How samples are cut out of documents for one kind of model. Implementations are frozen dataclasses."""

    name: ClassVar[str]
    """``gpt``, ``bert`` or ``t5``."""
    index_type: ClassVar[type[SavedArrays]]
    """Which documents the samples are made of, in which order."""

    @property
    @abstractmethod
    def index_key(self) -> str:
        """What of this objective the index (which documents, in which order) depends on, as text for a cache's name."""

    @abstractmethod
    def count(self, part: Part) -> int:
        """Samples in one pass over the documents of ``part``; reads ``.idx`` only, and ignores ``num_samples``.

        Raises:
            DataError: If there is not even one, with the rule and the fix: the engine would wait for ever.
        """

    @abstractmethod
    def build_index(self, part: Part) -> SavedArrays:
        """The index of ``part``: at least ``num_samples`` samples."""

    def open(self, part: Part, folder: str) -> IndexedSamples:
        """The samples of ``part`` by the index that was saved to ``folder``."""
        return IndexedSamples(self, part, open_dataset(part.prefix), self.index_type.load(folder))

    @abstractmethod
    def order_key(self, part: Part) -> str:
        """What of an order besides its index tells it from others, for a fingerprint."""

    @abstractmethod
    def read(self, dataset: IndexedDataset, index: Any, indices: Sequence[int], seed: int) -> Rows:
        """The samples at ``indices`` of ``index``, of the objective's ``index_type``."""


class SavedArrays:
    """Arrays that are saved as ``FIELD.npy`` each, and mapped into memory when loaded; subclasses are dataclasses."""

    folder = ""
    """Where they were loaded from."""

    def save(self, folder: str) -> None:
        """Write to ``folder``."""
        for field in fields(self):  # type: ignore[arg-type]
            np.save(os.path.join(folder, f"{field.name}.npy"), getattr(self, field.name))

    @classmethod
    def load(cls, folder: str) -> Self:
        """Map the files of ``folder`` into memory.

        Raises:
            DataError: If one is damaged, or not there any more: a run opens its index again for each validation.
        """
        arrays = {}
        for field in fields(cls):  # type: ignore[arg-type]
            path = os.path.join(folder, f"{field.name}.npy")
            try:
                # A plain view of the map: slices of a numpy.memmap cost more than the copies that are made of them.
                arrays[field.name] = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
            except (OSError, ValueError, EOFError) as error:
                raise DataError(
                    f"{path} cannot be read ({error}): removed or damaged; start the run again, which builds it anew"
                ) from error
        loaded = cls(**arrays)
        loaded.__dict__["folder"] = folder
        return loaded

    def __getstate__(self) -> str | dict[str, Any]:
        """Maps of files do not travel to other processes, which open them again."""
        return self.folder or self.__dict__

    def __setstate__(self, state: str | dict[str, Any]) -> None:
        self.__dict__.update(state if isinstance(state, dict) else vars(self.load(state)))

    def fingerprint(self, facts: str) -> str:
        """Of ``facts`` and the beginning of each array: any difference in an order reshuffles all of it."""
        digest = hashlib.sha256(facts.encode())
        for field in fields(self):  # type: ignore[arg-type]
            digest.update(np.ascontiguousarray(getattr(self, field.name)[:4096]).tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class IndexedSamples:
    """Samples of one split of one dataset; each process maps the files for itself, and shares their pages."""

    objective: Objective
    """How they are cut out."""
    part: Part
    """Of which documents."""
    dataset: IndexedDataset
    """What is read."""
    index: Any
    """In which order; of the objective's ``index_type``."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def fingerprint(self) -> str:
        """Of the order."""
        return self.index.fingerprint(f"({len(self)}, {self.objective.order_key(self.part)})")  # type: ignore[no-any-return]

    def rows(self, indices: Sequence[int]) -> Rows:
        """The samples at ``indices``, at least one, stacked.

        Raises:
            DataError: If a file of the dataset is not as it was opened, or holds what the samples cannot.
        """
        self._check_unchanged()
        try:
            return self.objective.read(self.dataset, self.index, indices, self.part.seed)
        finally:
            self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Raise unless both files have the sizes that they were opened with: 1 us on a local disk.

        Beyond the end of a file that was cut, its map reads zeros up to the end of the page, and behind that the kernel
        ends the process (SIGBUS). Called before a read, this leaves the kernel no page to end us for; called after it,
        no zero is taken for a token. A file that was deleted or replaced as a whole can still be read.
        """
        for suffix, file in self.dataset.files.items():
            if (now := file.size()) != len(file):
                raise DataError(
                    f"{self.dataset.prefix}{suffix}: expected {len(file)} bytes, got {now}: it was cut or overwritten "
                    "while it was in use; copy it again and resume from the last checkpoint, and give new data a new "
                    "name"
                )


# ---- samples of a GPT -----------------------------------------------------------------------------------------------

Int32s: TypeAlias = NDArray[np.int32]
Int64s: TypeAlias = NDArray[np.int64]
PADDING = -1
"""Fills a last sample up where the documents end before it."""
_OWN_SHUFFLE_BELOW = 0.80
"""The last pass is shuffled by itself if less of it than this is needed: Megatron's rule. Otherwise the documents that
come once more than others would be spread over the whole run."""


@dataclass(frozen=True, kw_only=True)
class GPTIndex(SavedArrays):
    """Which documents come in which order, where samples begin, and in which order the samples come."""

    document_index: NDArray[np.int32]
    """The documents in the stream: [passes * documents]."""
    sample_index: NDArray[Any]
    """Where each sample begins and the last one ends: place in ``document_index``, token in that document:
    [samples + 1, 2], int32 or int64."""
    shuffle_index: NDArray[Any]
    """The sample that comes first, second, ...: [samples], uint32 or int64."""

    def __len__(self) -> int:
        """Samples."""
        return len(self.shuffle_index)


@dataclass(frozen=True, kw_only=True)
class GPTObjective(Objective):
    """Rows of ``seq_length`` predictions: ``text`` [rows, seq_length + 1] int64."""

    seq_length: int
    """Predictions of a sample; it has one token more."""
    drop_last_partial_validation_sequence: bool = True
    """Leave out the tokens at the end of the validation documents that fill no whole sample; otherwise they are one
    more sample, padded with -1. Training and test always leave them out, as in Megatron."""
    name = "gpt"
    index_type = GPTIndex

    @property
    @override
    def index_key(self) -> str:
        return f"seq_length={self.seq_length} drop_last={self.drop_last_partial_validation_sequence}"

    @override
    def count(self, part: Part) -> int:
        return self._measured(part)[0]

    @override
    def build_index(self, part: Part) -> GPTIndex:
        _, lengths, documents = self._measured(part)
        keep_partial = self._keeps_partial(part)
        return build_gpt_index(lengths.copy(), documents, self.seq_length, part.num_samples, part.seed, keep_partial)

    @override
    def order_key(self, part: Part) -> str:
        return str(self.seq_length)

    @override
    def read(self, dataset: IndexedDataset, index: GPTIndex, indices: Sequence[int], seed: int) -> Rows:
        """``text`` [rows, seq_length + 1] int64; -1 where there is no token."""
        width = self.seq_length + 1
        pieces, begins, counts = _pieces(dataset, index, np.asarray(indices, dtype=np.int64))
        ends = np.cumsum(counts)
        found = dataset.tokens[np.repeat(begins - (ends - counts), counts) + np.arange(ends[-1])].astype(np.int64)
        if len(found) < len(pieces) * width:
            filled = np.add.reduceat(counts, np.cumsum(pieces) - pieces)
            partly = np.full((len(pieces), width), PADDING, dtype=np.int64)
            partly[np.arange(width) < filled[:, None]] = found
            found = partly
        return {"text": torch.from_numpy(found.reshape(len(pieces), width))}

    def _measured(self, part: Part) -> tuple[int, Int32s, Int32s]:
        """Samples in one pass, at least one; tokens of each document of the dataset; and the documents of ``part``."""
        lengths = open_dataset(part.prefix).lengths
        bounds = split_ranges(part.split, len(lengths))[part.name]
        documents = np.arange(bounds.start, bounds.stop, dtype=np.int32)
        tokens = int(lengths[bounds.start : bounds.stop].sum(dtype=np.int64))
        samples = _count(tokens, self.seq_length, self._keeps_partial(part))
        if samples == 0:
            weight = f"give {part.name} a larger weight or weight 0, " if len(documents) < len(lengths) else ""
            raise DataError(
                f"split={part.split!r} gives {part.name} {len(documents)} of {len(lengths)} documents of {part.prefix}"
                f" with {tokens} tokens, one sample of seq_length={self.seq_length} needs {self.seq_length + 1};"
                f" {weight}lower seq_length, or add documents (each line of a .jsonl, each .txt file is one)"
            )
        return samples, lengths, documents

    def _keeps_partial(self, part: Part) -> bool:
        return part.name == "valid" and not self.drop_last_partial_validation_sequence


def build_gpt_index(
    lengths: Int32s, documents: Int32s, seq_length: int, num_samples: int | None, seed: int, keep_partial: bool
) -> GPTIndex:
    """Lay out the samples.

    Args:
        lengths: Tokens of each document of the dataset.
        documents: Those of the split; together they have a token to predict.
        seq_length: Predictions of a sample.
        num_samples: Samples that are needed; None for one pass.
        seed: Of both shuffles.
        keep_partial: Whether tokens at the end that fill no whole sample are one.
    """
    from megatron.core.datasets import helpers
    from megatron.core.datasets.gpt_dataset import _build_document_index, _build_shuffle_index

    per_pass = int(lengths[documents].sum(dtype=np.int64))
    passes = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // per_pass))
    before_last = _count((passes - 1) * per_pass, seq_length)
    of_last = (num_samples or 0) - before_last
    alone = passes > 1 and of_last < int(_OWN_SHUFFLE_BELOW * _count(per_pass, seq_length))
    random = np.random.RandomState(seed)

    order = _build_document_index(documents, passes, random, alone)
    begins = helpers.build_sample_idx(lengths, order, seq_length, passes, per_pass, True, True)
    # The engine counts a partial sample in single precision (helpers.cpp:build_sample_idx): from 2^24 tokens on one
    # sample too few or too many, which is then padding alone.
    if keep_partial and (passes * per_pass - 1) % seq_length:
        last = np.flatnonzero(lengths[order])[-1]
        begins = np.concatenate((begins, np.array([[last, lengths[order[last]] - 1]], dtype=begins.dtype)))
    total = len(begins) - 1
    samples = _build_shuffle_index(before_last if alone else total, total, random)
    return GPTIndex(document_index=order, sample_index=begins, shuffle_index=samples)


def _pieces(dataset: IndexedDataset, index: GPTIndex, indices: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Pieces of documents that make up rows: how many for each row; for each its first token and its length.

    A row is the end of one document, whole documents, and the beginning of another, or a piece of one document.
    """
    samples = index.shuffle_index[indices].astype(np.int64)
    first, first_token = index.sample_index[samples].astype(np.int64).T
    last, last_token = index.sample_index[samples + 1].astype(np.int64).T
    pieces = last - first + 1
    row_ends = np.cumsum(pieces)
    places = np.repeat(first - (row_ends - pieces), pieces) + np.arange(row_ends[-1])
    documents = index.document_index[places]
    ends = dataset.lengths[documents].astype(np.int64)
    ends[row_ends - 1] = last_token + 1
    starts = np.zeros_like(ends)
    starts[row_ends - pieces] = first_token
    return pieces, dataset.positions[documents] // dataset.dtype.itemsize + starts, ends - starts


def _count(tokens: int, seq_length: int, keep_partial: bool = False) -> int:
    """Samples in a stream of tokens."""
    predictions = max(0, tokens - 1)
    return -(-predictions // seq_length) if keep_partial else predictions // seq_length


# ---- blends ---------------------------------------------------------------------------------------------------------

MAX_DATASETS = 32766
"""The engine numbers datasets in 16 bits."""
_SURPLUS = 0.005
"""Samples that Megatron lays out of each dataset beyond its share; they may cost a pass more, and so change the order
(megatron-core 0.16.1, blended_megatron_dataset_config.py:mid_level_dataset_surplus)."""
_MAX_OPEN = 64
"""Datasets of a blend that a process holds open: each takes about five file descriptors, of 1,024 in all."""


def parse_blend(data_path: str | Sequence[str | float]) -> list[tuple[str, float | None]]:
    """The prefixes of the datasets that the user names, with their weights; None where sizes decide.

    Stricter than the engine, which takes a list that it does not understand for prefixes alone (megatron-core 0.16.1,
    datasets/utils.py:get_blend_from_list).

    Args:
        data_path: A prefix; prefixes, taken in proportion to their sizes; or weights and prefixes in turn, where
            weights are numbers or their spelling, e.g. ``[0.7, "books", 0.3, "web"]``. A weight of 0 leaves a dataset
            out, as it does in ``split``.

    Raises:
        ConfigError: If it is anything else.
    """
    is_one = isinstance(data_path, str) or not isinstance(data_path, Sequence)
    items: list[Any] = [data_path] if is_one else list(data_path)
    shown = reprlib.repr(items)
    weights: list[float | None] = []
    if len(items) > 1 and _number(items[0]) is not None:
        weights, items = [_number(item) for item in items[::2]], items[1::2]
    are_weights = all(weight is not None and 0 <= weight < math.inf for weight in weights)
    are_prefixes = all(isinstance(item, str) and item.strip() and _number(item) is None for item in items)
    if not items or not are_prefixes or not are_weights or len(weights) not in (0, len(items)):
        raise ConfigError(f"data_path={shown} must be prefixes (./30 for 30), or finite weights and prefixes in turn")
    prefixes = map(os.path.expanduser, items)
    blend = [pair for pair in zip(prefixes, weights or [None] * len(items), strict=True) if pair[1] != 0]
    if not 1 <= len(blend) <= MAX_DATASETS:
        raise ConfigError(f"data_path={shown} gives {len(blend)} datasets a weight, expected 1 to {MAX_DATASETS}")
    return blend


def _number(item: object) -> float | None:
    """What an item is worth as a number; None if it is none."""
    try:
        return float(item)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True, kw_only=True)
class BlendIndex(SavedArrays):
    """The order of datasets in a blend."""

    dataset_index: NDArray[np.int16]
    """The dataset of each sample: [samples]."""
    sample_index: NDArray[np.int64]
    """Its number in that dataset: [samples]."""
    part_samples: NDArray[np.int64]
    """Samples that have to be laid out of each dataset, 0 for one pass: [datasets]."""

    def sized_parts(self, parts: Sequence[Part]) -> list[Part]:
        """What each of ``parts`` gives to the blend."""
        return [replace(p, num_samples=n or None) for p, n in zip(parts, self.part_samples.tolist(), strict=True)]


def build_blend_index(weights: Sequence[float | None], counts: Sequence[int], num_samples: int | None) -> BlendIndex:
    """The order in which several datasets are taken.

    It equals the engine's where that has one. The engine takes no weights for one pass, and no more than one pass
    without weights; and it fails where its greedy rule takes more of a dataset than it has laid out.

    One pass takes no sample twice. Without weights it has all; with weights it ends where the first dataset has none
    left for its share, as in ``interleave_datasets`` of Hugging Face datasets (``first_exhausted``). No dataset runs
    out before: of N samples the greedy rule takes at most w * (N - 1) + 1 from a dataset of weight w.

    Args:
        weights: Of the datasets; all None to take them in proportion to their sizes.
        counts: Samples in one pass over each.
        num_samples: Samples that are needed, over as many passes as it takes; None for one pass.
    """
    from megatron.core.datasets import helpers

    is_weighted = weights[0] is not None
    shares = np.array(weights if is_weighted else counts, dtype=np.float64)
    shares = shares / shares.sum()
    laid_out = np.zeros(len(weights), dtype=np.int64)
    if num_samples is None:
        size = int(min(counts / shares)) if is_weighted else sum(counts)
    elif not is_weighted:
        size = num_samples
    else:
        # Megatron rounds the samples of each dataset up, so there are a few more than requested.
        rounded = np.ceil(num_samples * shares)
        size, laid_out[:] = int(rounded.sum()), np.ceil(rounded * (1 + _SURPLUS))
        shares = shares / shares.sum()  # twice, as in Megatron: the last bit may decide who comes first
    dataset_index, sample_index = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    if num_samples is None and not is_weighted:
        helpers.build_exhaustive_blending_indices(dataset_index, sample_index, list(counts), len(weights))
    else:
        helpers.build_blending_indices(dataset_index, sample_index, shares, len(weights), size, False)
    part_samples = np.maximum(laid_out, np.bincount(dataset_index, minlength=len(weights)))
    part_samples[part_samples <= np.asarray(counts)] = 0
    return BlendIndex(dataset_index=dataset_index, sample_index=sample_index, part_samples=part_samples)


class BlendedSamples:
    """Several datasets as one; each is opened when a sample of it is read, and only some are open at a time.

    Args:
        blend: The order of datasets.
        openers: Open one dataset each; picklable.
        fingerprint: Of the order of datasets, and of the samples in each.
    """

    def __init__(self, blend: BlendIndex, openers: Sequence[Callable[[], Samples]], fingerprint: str) -> None:
        self._blend, self._openers, self.fingerprint = blend, openers, fingerprint
        self._dataset = lru_cache(_MAX_OPEN)(lambda number: openers[number]())

    def __len__(self) -> int:
        return len(self._blend.dataset_index)

    def rows(self, indices: Sequence[int]) -> Rows:
        """The samples at ``indices``, stacked; all datasets give rows of the same lengths."""
        places = np.asarray(indices, dtype=np.int64)
        datasets, samples = self._blend.dataset_index[places], self._blend.sample_index[places]
        groups = [np.flatnonzero(datasets == dataset) for dataset in np.unique(datasets)]
        parts = [self._dataset(int(datasets[group[0]])).rows(samples[group].tolist()) for group in groups]
        back = torch.from_numpy(np.argsort(np.concatenate(groups)))
        return {key: torch.cat([part[key] for part in parts])[back] for key in parts[0]}

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens its own."""
        return BlendedSamples, (self._blend, self._openers, self.fingerprint)


# ---- which index ----------------------------------------------------------------------------------------------------

_LAYOUT = 1
"""Of the files in a folder; a change makes the old folders unknown."""


def open_samples(objective: Objective, parts: Sequence[Part], index_cache: str | None) -> Samples:
    """The samples of a split, after building on disk whatever this machine does not see there.

    Args:
        objective: How samples are cut out of documents.
        parts: One for each dataset of the blend, which differ in prefix and weight.
        index_cache: Folder for all indices; None for one next to each dataset.

    Raises:
        DataError: If a dataset is missing on this machine, or a folder cannot be written.
    """
    first = parts[0]
    if len(parts) == 1:
        return objective.open(first, _built(objective, first, index_cache)[0])

    def write(staging: str) -> str:
        blend = build_blend_index([part.weight for part in parts], list(map(objective.count, parts)), first.num_samples)
        blend.save(staging)
        fingerprints = [_built(objective, part, index_cache)[1] for part in blend.sized_parts(parts)]
        digest = hashlib.sha256(repr(fingerprints).encode())
        digest.update(blend.dataset_index[:4096].tobytes())
        return digest.hexdigest()[:16]

    identity = (_key(objective, first), [(_identity(part.prefix), part.weight) for part in parts])
    folder = _folder((objective.name, first.name, "blend"), identity, first.prefix, index_cache)
    fingerprint = build_once(folder, write, f"the blend of {', '.join(part.prefix for part in parts[:3])}")
    blend = BlendIndex.load(folder)
    shares = [(part, _built(objective, part, index_cache)[0]) for part in blend.sized_parts(parts)]
    return BlendedSamples(blend, [partial(objective.open, *share) for share in shares], fingerprint)


def _built(objective: Objective, part: Part, index_cache: str | None) -> tuple[str, str]:
    """The folder of an index that is on disk now, and the fingerprint of its samples."""

    def write(staging: str) -> str:
        objective.build_index(part).save(staging)
        return objective.open(part, staging).fingerprint

    identity = (_key(objective, part), _identity(part.prefix))
    folder = _folder((objective.name, part.name), identity, part.prefix, index_cache)
    return folder, build_once(folder, write, part.prefix)


def _key(objective: Objective, part: Part) -> tuple[object, ...]:
    return objective.index_key, canonical_split(part.split), part.name, part.seed, part.num_samples


def _folder(names: tuple[str, ...], identity: object, prefix: str, index_cache: str | None) -> str:
    root = index_cache or os.path.join(prefix, "cache")
    digest = hashlib.sha256(repr((_LAYOUT, identity)).encode()).hexdigest()[:24]
    return os.path.join(os.path.abspath(root), "-".join((*names, digest)))


def _identity(prefix: str) -> tuple[object, ...]:
    """Tells a dataset from the one that was at the same place before.

    Raises:
        DataError: If it is missing on this machine.
    """
    open_dataset(prefix)
    stats = [os.stat(prefix + suffix) for suffix in (".idx", ".bin")]
    return (os.path.abspath(prefix), *((stat.st_size, stat.st_mtime_ns) for stat in stats))


# ---- folders that are built once ------------------------------------------------------------------------------------

_MANIFEST = "index.json"
_QUIET_WAIT_S = 5.0


def build_once(folder: str, write: Callable[[str], str], subject: str) -> str:
    """The fingerprint of what ``folder`` holds, after one of the processes that want it has built what is not there.

    Its ``index.json`` has the sizes of its files, so that damage is noticed. Whoever builds holds a lock, which ends
    with the process, and the others wait.

    Args:
        folder: Absolute path; its name stands for its content.
        write: Fills an empty folder, and gives its content's fingerprint: equal for equal orders of equal documents.
        subject: What the index is of, for messages.

    Raises:
        DataError: If it cannot be written.
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
            _log.warning("Waiting for the process that builds the index %s; if there is none, delete %s.", path, file)
            held = lock.acquire()
        with held:
            fingerprint = _read_fingerprint(path)
            if fingerprint is None:
                _log.info("Building the index of %s in %s.", subject, folder)
                with staged(path.parent, path.name, error=DataError) as hidden:
                    staging = hidden / path.name
                    staging.mkdir()
                    fingerprint = write(str(staging))
                    sizes = {each.name: each.stat().st_size for each in staging.iterdir()}
                    manifest = json.dumps({"order": {"fingerprint": fingerprint}, "sizes": sizes}, indent=1)
                    (staging / _MANIFEST).write_text(manifest, encoding="utf-8")
            # Whoever opened the file before finds a whole folder when the lock is released.
            file.unlink(missing_ok=True)
            return fingerprint
    except OSError as error:
        raise DataError(
            f"the index of {subject} cannot be written to {folder} ({error.strerror or error}); set index_cache"
        ) from error


def _read_fingerprint(folder: Path) -> str | None:
    """What a folder says of itself; None if there is none, or its files are not as they were written."""
    if not folder.is_dir():
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if all((folder / name).stat().st_size == size for name, size in manifest["sizes"].items()):
            return str(manifest["order"]["fingerprint"])
    _log.warning("The index %s is damaged and is not used.", folder)
    return None
