"""Read a written legacy checkpoint with torch's own loader, which takes tensors and plain data."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.convert.convert import ConvertOptions


def load(file: Path) -> dict[str, Any]:
    """The pickle of one rank."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = torch.load(file, weights_only=True)
    assert isinstance(state, dict)
    return state


def files(root: Path) -> list[str]:
    """Every file below ``root``, sorted."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def flat(nested: Mapping[str, Any], before: str = "") -> dict[str, torch.Tensor]:
    """The tensors of nested dictionaries under the joined names."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in nested.items():
        tensors |= flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {before + name: value}
    return tensors


def options(source: Path, target: Path, **fields: Any) -> ConvertOptions:
    """With a small multiple for the vocabulary: each layout has rows that pad it."""
    base = ConvertOptions(load_path=source, save_path=target, to="megatron-legacy", make_vocab_size_divisible_by=8)
    return replace(base, **fields)
