"""A small indexed dataset with the vocabulary of the tests' models."""

from pathlib import Path

import numpy as np

from lightning_megatron.data.indexed import dataset_writers
from tests.checkpoint.runs import VOCAB_SIZE


def make_corpus(folder: Path) -> str:
    """The prefix of 112 samples: eight steps are less than one pass."""
    prefix = folder / "corpus"
    numbers = np.random.default_rng(0)
    with dataset_writers(prefix, np.dtype("<u2")) as (writer,):
        for _ in range(30):
            tokens = numbers.integers(0, VOCAB_SIZE, size=60).astype(np.uint16)
            writer.add_documents(tokens.tobytes(), [len(tokens)])
    return str(prefix)
