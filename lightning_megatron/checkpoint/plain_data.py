"""Plain data: numbers, strings, containers and tensors, which are read back without running code."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_megatron.checkpoint.pickles import read_pickle
from lightning_megatron.errors import type_of
from lightning_megatron.rank_zero import rank_zero_warn
from lightning_megatron.storage.checksums import require_file
from lightning_megatron.storage.paths import is_remote


def load_plain(file: Path) -> Any:
    """Read a torch file of plain data: numbers, strings, containers and tensors.

    Raises:
        CheckpointError: If the file holds anything else, or is damaged.
    """
    require_file(file)
    source: Path | io.BytesIO = file
    if is_remote(file):
        source = io.BytesIO(file.read_bytes())
    return read_pickle(source, foreign=False, name=str(file))


def plain_state(lightning_state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert Lightning's dict to types that can be read back without running code, where possible.

    Hyper-parameters are for people to read, so other objects among them become their ``repr``.
    """
    plain: dict[str, Any] = {name: as_plain_data(value) for name, value in lightning_state.items()}
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        values = plain.get(key, {})
        for name, value in values.items():
            values[name] = as_plain_data(value, f"hyper-parameter {name!r}")
    return plain


_PLAIN_FORMS: dict[type, Callable[[Any], Any]] = {
    np.generic: lambda each: each.item(),
    np.ndarray: torch.from_numpy,
    Path: str,
    bytearray: bytes,
}
_READABLE = (type(None), bool, int, float, str, torch.Tensor)


def as_plain_data(value: Any, readable: str = "") -> Any:
    """Convert a value to types that can be read back without running code: containers, numbers, strings, tensors.

    Args:
        value: Objects without such a form stay as they are; writing the checkpoint then fails with their name.
        readable: Name of the value for a warning, if such objects shall become text instead.
    """
    if isinstance(value, Mapping):
        return {as_plain_data(key): as_plain_data(each, readable) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        items = [as_plain_data(each, readable) for each in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Enum):  # also enums of numbers or strings, as files would name their class
        return as_plain_data(value.value, readable)
    for kind, plain in _PLAIN_FORMS.items():
        if isinstance(value, kind):
            value = plain(value)
            break
    if readable and not isinstance(value, _READABLE):
        rank_zero_warn(f"{readable} is {type_of(value)}; the checkpoint keeps its text only")
        return repr(value)
    return value


def torch_bytes(value: Any) -> bytes:
    """Bytes that ``torch.save`` would write to a file."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
