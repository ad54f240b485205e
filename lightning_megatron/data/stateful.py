"""Datasets and loaders that keep their own position, of other libraries."""

from __future__ import annotations

from typing import Any


def why_not_exact(dataset: Any) -> str | None:
    """Why a run on a streaming dataset cannot resume exactly, and what to do; None if it can."""
    if not _has_state(dataset):
        return (
            "it has no state_dict and load_state_dict; give a dataset that has, or a map-style one"
        )
    if _has_shuffle_buffer(getattr(dataset, "_ex_iterable", None)):
        return "its state_dict lacks the content of its shuffle buffer; leave out shuffle()"
    return None


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _has_shuffle_buffer(examples: Any) -> bool:
    """Whether a Hugging Face dataset shuffles in a buffer, here or in a dataset that it is made from."""
    if examples is None:
        return False
    if type(examples).__name__ == "BufferShuffledExamplesIterable":
        return True
    parts = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", [])]
    return any(_has_shuffle_buffer(part) for part in parts)
