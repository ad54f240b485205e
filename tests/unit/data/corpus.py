"""Small datasets with known tokens, and an independent account of the order in which Megatron takes them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.indexed import IndexedDatasetWriter
from lightning_megatron.data.samples import Objective, Part


def write_corpus(prefix: Path, num_documents: int, seed: int = 0, longest: int = 60) -> list[NDArray[np.uint16]]:
    """Write documents of random lengths and ids, and return them."""
    random = np.random.default_rng(seed)
    documents = [
        random.integers(0, 60000, size=int(random.integers(1, longest))).astype(np.uint16) for _ in range(num_documents)
    ]
    with IndexedDatasetWriter(str(prefix), np.dtype("<u2")) as writer:
        for tokens in documents:
            writer.add_documents(tokens.tobytes(), [len(tokens)])
    return documents


def megatron_samples(
    documents: list[NDArray[np.uint16]], seq_length: int, seed: int, num_samples: int | None
) -> NDArray[np.int64]:
    """All samples of one split in Megatron's order: [samples, seq_length + 1].

    Written from the description of the algorithm, with loops over tokens instead of an index.
    """
    per_epoch = sum(map(len, documents))
    epochs = 1
    while num_samples is not None and epochs * per_epoch < num_samples * seq_length + 1:
        epochs += 1
    separate = False
    in_first = 0
    if epochs > 1:
        assert num_samples is not None
        in_first = ((epochs - 1) * per_epoch - 1) // seq_length
        separate = num_samples - in_first < int(0.80 * ((per_epoch - 1) // seq_length))
    state = np.random.RandomState(seed)

    def shuffled_documents(times: int) -> list[int]:
        order = np.tile(np.arange(len(documents), dtype=np.int32), times)
        state.shuffle(order)
        return order.tolist()

    order = shuffled_documents(epochs - 1) + shuffled_documents(1) if separate else shuffled_documents(epochs)
    stream = np.concatenate([documents[index] for index in order]).astype(np.int64)
    count = (len(stream) - 1) // seq_length
    samples = np.stack([stream[i * seq_length : i * seq_length + seq_length + 1] for i in range(count)])
    first = np.arange(in_first if separate else count, dtype=np.uint32)
    state.shuffle(first)
    if not separate:
        return samples[first]
    last = np.arange(in_first, count, dtype=np.uint32)
    state.shuffle(last)
    return samples[np.concatenate((first, last))]


def opened(objective: Objective, part: Part) -> Any:
    """The samples of a part, with their index in a new folder beside the dataset."""
    return objective.open(part, tempfile.mkdtemp(prefix="index-", dir=os.path.dirname(part.prefix)))
