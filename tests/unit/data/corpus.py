"""Small datasets with known tokens."""

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


def opened(objective: Objective, part: Part) -> Any:
    """The samples of a part, with their index in a new folder beside the dataset."""
    return objective.open(part, tempfile.mkdtemp(prefix="index-", dir=os.path.dirname(part.prefix)))
