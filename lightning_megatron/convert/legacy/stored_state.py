"""Is what stands in the state of an optimizer what is expected there? Checked piece by piece, before it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_megatron.convert.pickled.tensor_handle import TensorHandle


class Unclear(Exception):
    """The state is of another kind; the text says what is not as expected."""


def mapping_of(stored: Any) -> Mapping[Any, Any]:
    """``stored``, a dictionary.

    Raises:
        Unclear: If it is none.
    """
    if not isinstance(stored, Mapping):
        raise Unclear(f"there is a {type(stored).__name__} where a dictionary is expected")
    return stored


def list_of(stored: Any) -> Sequence[Any]:
    """``stored``, a list.

    Raises:
        Unclear: If it is none.
    """
    if not isinstance(stored, (list, tuple)):
        raise Unclear(f"there is a {type(stored).__name__} where a list is expected")
    return stored


def handle_of(stored: Any) -> TensorHandle:
    """``stored``, a tensor.

    Raises:
        Unclear: If it is none.
    """
    if not isinstance(stored, TensorHandle):
        raise Unclear(f"there is a {type(stored).__name__} where a moment or a copy of a weight is expected")
    return stored


def plain(stored: Mapping[Any, Any]) -> dict[str, Any]:
    """What of ``stored`` is a number, a text or a tuple of them; not the numbers of parameters."""
    kinds = (int, float, str, bool, type(None))
    return {
        str(name): value
        for name, value in stored.items()
        if isinstance(value, kinds)
        or (isinstance(value, (list, tuple)) and name != "params" and all(isinstance(each, kinds) for each in value))
    }
