"""Write datasets of Megatron 1.x and 2.x (``cached``, ``lazy``) byte by byte."""

from __future__ import annotations

import struct
from pathlib import Path

INT32 = (4, 4, "i", 1, "int32")
"""What Megatron stored, whatever the vocabulary."""


def longs(values: list[int]) -> bytes:
    """As the index has them."""
    return struct.pack(f"<{len(values)}q", *values)


def write_legacy(prefix: Path, documents: list[list[list[int]]], kind: tuple[int, int, str, int, str] = INT32) -> str:
    """Documents of sequences.

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
    index += longs(list(range(len(sizes) + 1))) + longs(ends) + longs(sizes) + longs(bounds)
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(data)
    return str(prefix)
