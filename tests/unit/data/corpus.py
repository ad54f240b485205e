"""Megatron datasets with known tokens, written by its builder or by hand in the formats of Megatron 1.x and 2.x.

Also Megatron-Core's own GPT samples of such datasets, built in one process without caches.
"""

import os
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.index_cache import open_samples
from lightning_megatron.data.samples import Objective, Part

Documents = list[list[list[int]]]
"""Documents of sequences."""

INT32 = (4, 4, "i", 1, "int32")
"""Token type that Megatron 1.x and 2.x stored for every vocabulary size."""


def build(prefix: Path, documents: Documents, dtype: str = "uint16") -> str:
    """Write a dataset with Megatron-Core's builder and return its prefix."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
    for document in documents:
        flat = torch.tensor([token for tokens in document for token in tokens])
        builder.add_document(flat, [len(tokens) for tokens in document])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def read_documents(prefix: object) -> tuple[list[list[list[Any]]], str]:
    """Read documents of sequences and the dtype name of their tokens with Megatron-Core."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    bounds = dataset.document_indices.tolist()
    documents = [
        [dataset[i].tolist() for i in range(*pair)]
        for pair in zip(bounds, bounds[1:], strict=False)
    ]
    return documents, dataset[0].dtype.name


def longs(*values: int) -> bytes:
    """Little-endian int64 values, as stored in index files."""
    return struct.pack(f"<{len(values)}q", *values)


def write_legacy(
    prefix: Path,
    documents: Documents,
    kind: tuple[int, int, str, int, str] = INT32,
) -> str:
    """Write a dataset in the format of Megatron 1.x and 2.x (``cached``, ``lazy``), byte by byte.

    Args:
        prefix: Path of both files without suffix.
        documents: Tokens of each sequence of each document.
        kind: Type code, element size, struct letter of a token, elements per token, dtype name in Megatron-Core.
    """
    code, element_size, letter, elements, _ = kind
    data = b""
    ends = [0]
    sizes = []
    bounds = [0]
    for document in documents:
        for tokens in document:
            data += struct.pack(f"<{len(tokens)}{letter}", *tokens)
            ends.append(ends[-1] + len(tokens) * elements)
            sizes.append(len(tokens))
        bounds.append(len(sizes))
    index = b"TNTIDX\0\0" + struct.pack("<QQQ", 1, code, element_size)
    index += struct.pack(
        "<QQQ",
        len(sizes),
        len(sizes),
        len(bounds),
    )
    index += longs(
        *range(len(sizes) + 1),
        *ends,
        *sizes,
        *bounds,
    )
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(data)
    return str(prefix)


def write_corpus(
    prefix: Path, num_documents: int, seed: int = 0, longest: int = 60
) -> list[NDArray[np.uint16]]:
    """Write documents of random lengths and ids, and return them."""
    random = np.random.default_rng(seed)
    documents = [
        random.integers(
            0,
            60000,
            size=int(random.integers(1, longest)),
        ).astype(np.uint16)
        for _ in range(num_documents)
    ]
    build(prefix, [[document.tolist()] for document in documents])
    return documents


def opened(objective: Objective, part: Part) -> Any:
    """Open the samples of a part, with the index in a new directory next to the dataset."""
    return open_samples(
        objective,
        [part],
        tempfile.mkdtemp(
            prefix="index-",
            dir=os.path.dirname(part.prefix),
        ),
    )


class _NoTokenizer:
    """Tokenizer attributes that Megatron-Core reads; no token of a dataset is padding."""

    vocab_size = None
    eod = -2
    unique_identifiers: ClassVar = {"class": "none"}


def engine_rows(
    blend: tuple[list[str], Sequence[float] | None],
    num_samples: int | None,
    *,
    split: str = "8,1,1",
    name: str = "train",
    seq_length: int = 16,
    **options: bool,
) -> NDArray[np.int64]:
    """Rows of Megatron-Core's GPT dataset before the split into inputs and labels: [rows, seq_length + 1]."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        **{
            "random_seed": 1234,
            "sequence_length": seq_length,
            "blend": blend,
            "split": split,
            "path_to_cache": "",
        },
        **dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False),
        create_attention_mask=False,
        tokenizer=_NoTokenizer(),
        **options,
    )
    # The other splits get the same size: weights without a size are an error for them too.
    sizes = [num_samples] * len(Split)
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[
        Split[name].value
    ]
    members = [(dataset, index) for index in range(len(dataset))]
    if hasattr(dataset, "datasets"):
        pairs = zip(dataset.dataset_index, dataset.dataset_sample_index, strict=True)
        members = [(dataset.datasets[number], index) for number, index in pairs]
    return np.stack(
        [part._query_document_sample_shuffle_indices(index)[0] for part, index in members]
    )
