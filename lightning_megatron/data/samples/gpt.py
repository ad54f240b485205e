"""Which tokens are sample number i of a split? Megatron's GPT dataset, opened without collectives or stale caches.

The index (which documents in which order, where samples begin) is the engine's own, so that the order of samples equals
Megatron's for the same file, split, sequence length, seed and number of samples.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_megatron.data.formats.mmap import read_header
from lightning_megatron.data.samples.split import SplitName, canonical_split, split_ranges
from lightning_megatron.data.serving.sampler import PADDING_ROW
from lightning_megatron.errors import DataError

_log = logging.getLogger(__name__)


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
