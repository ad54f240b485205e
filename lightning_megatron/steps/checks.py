"""Which number of a batch is wrong? Checks on the host that name the key, the value, its place and the rule."""

from __future__ import annotations

import torch

from lightning_megatron.errors import DataError

IGNORED_LABELS = (-100, -1)
"""Hugging Face's and Megatron's labels for "no target here"."""


def check_numbers(name: str, values: torch.Tensor, limit: int | None, rule: str) -> None:
    """Raise unless all ``values`` are at least 0 and below ``limit``.

    Args:
        name: The batch's key.
        values: Of any shape, integers.
        limit: Smallest number that is too large; None for no limit.
        rule: What sets the limit, e.g. ``vocab_size``.

    Raises:
        DataError: With the first number that is out of range.
    """
    wrong = values < 0 if limit is None else (values < 0) | (values >= limit)
    if not wrong.any():
        return
    place = wrong.nonzero()[0].tolist()
    value = values[tuple(place)].item()
    allowed = "at least 0" if limit is None else f"in 0..{limit - 1} ({rule}={limit})"
    raise DataError(f"{name}{place} is {value} and must be {allowed}; correct the data")


def check_labels(
    name: str, labels: torch.Tensor, limit: int, rule: str, ignored: tuple[int, ...] = IGNORED_LABELS
) -> None:
    """Raise unless all ``labels`` are in 0..limit-1 or ignored ones.

    Args:
        name: The batch's key.
        labels: Of any shape, integers.
        limit: Smallest number that is too large.
        rule: What sets the limit, e.g. ``vocab_size``.
        ignored: The labels for "no target here".

    Raises:
        DataError: With the first label that is neither.
    """
    is_ignored = torch.isin(labels, torch.tensor(ignored, dtype=labels.dtype))
    wrong = ~is_ignored & ((labels < 0) | (labels >= limit))
    if not wrong.any():
        return
    place = wrong.nonzero()[0].tolist()
    value = labels[tuple(place)].item()
    raise DataError(
        f"{name}{place} is {value} and must be in 0..{limit - 1} ({rule}={limit}), or -100 for no target; correct the "
        "data, or the model's config"
    )


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], rule: str) -> None:
    """Raise unless ``tensor`` has ``shape``.

    Raises:
        DataError: With both shapes and what sets the right one.
    """
    if tuple(tensor.shape) != shape:
        raise DataError(f"{name} has the shape {list(tensor.shape)} and must have {list(shape)} ({rule}); correct it")


def check_rows(name: str, tensor: torch.Tensor, rows: int, width: int, rule: str) -> None:
    """Raise unless ``tensor`` has ``width`` numbers for each row: [rows, width], or [rows] for one.

    Raises:
        DataError: With both shapes and what sets the right one.
    """
    if width != 1 or tensor.dim() != 1 or len(tensor) != rows:
        check_shape(name, tensor, (rows, width), rule)


def check_integers(name: str, tensor: torch.Tensor, rule: str) -> None:
    """Raise unless ``tensor`` has an integer dtype.

    Raises:
        DataError: With the dtype and why it must be another one.
    """
    if tensor.is_floating_point() or tensor.dtype is torch.bool:
        raise DataError(f"{name} is {tensor.dtype} and must be an integer type ({rule}); use {name}.long()")


def check_floats(name: str, tensor: torch.Tensor, rule: str) -> None:
    """Raise unless ``tensor`` has a floating-point dtype and finite numbers.

    Raises:
        DataError: With the dtype and why it must be another one, or with the first number that is not finite.
    """
    if not tensor.is_floating_point():
        raise DataError(f"{name} is {tensor.dtype} and must be a float type ({rule}); use {name}.float()")
    wrong = ~tensor.isfinite()
    if wrong.any():
        place = wrong.nonzero()[0].tolist()
        raise DataError(f"{name}{place} is {tensor[tuple(place)].item()} and must be finite; correct the data")
