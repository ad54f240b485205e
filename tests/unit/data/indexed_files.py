"""Datasets of Megatron: by its own builder, and by hand in the formats of its versions 1.x and 2.x."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

Documents = list[list[list[int]]]
"""Documents of sequences."""

INT32 = (4, 4, "i", 1, "int32")
"""What Megatron stored, whatever the vocabulary."""


def build(prefix: Path, documents: Documents, dtype: str = "uint16") -> str:
    """A dataset by the engine's builder."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
    for document in documents:
        flat = torch.tensor([token for tokens in document for token in tokens])
        builder.add_document(flat, [len(tokens) for tokens in document])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def read_by_the_engine(prefix: object) -> tuple[list[list[list[Any]]], str]:
    """Documents of sequences, and the name of the type of their tokens."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    bounds = dataset.document_indices.tolist()
    documents = [[dataset[i].tolist() for i in range(*pair)] for pair in zip(bounds, bounds[1:], strict=False)]
    return documents, dataset[0].dtype.name


def longs(*values: int) -> bytes:
    """As the index has them."""
    return struct.pack(f"<{len(values)}q", *values)


def write_legacy(prefix: Path, documents: Documents, kind: tuple[int, int, str, int, str] = INT32) -> str:
    """A dataset of Megatron 1.x or 2.x (``cached``, ``lazy``), byte by byte.

    Args:
        prefix: Path of both files without suffix.
        documents: Tokens of each sequence of each document.
        kind: Code, element size, struct's letter of a token, elements of a token, the engine's name of the type.
    """
    code, element_size, letter, elements, _ = kind
    data, ends, sizes, bounds = b"", [0], [], [0]
    for document in documents:
        for tokens in document:
            data += struct.pack(f"<{len(tokens)}{letter}", *tokens)
            ends.append(ends[-1] + len(tokens) * elements)
            sizes.append(len(tokens))
        bounds.append(len(sizes))
    index = b"TNTIDX\0\0" + struct.pack("<QQQ", 1, code, element_size)
    index += struct.pack("<QQQ", len(sizes), len(sizes), len(bounds))
    index += longs(*range(len(sizes) + 1), *ends, *sizes, *bounds)
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(data)
    return str(prefix)
