"""How do several datasets become one, each document and each token kept, in the order of the inputs?"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_megatron.data.formats.any_format import check_any_dataset
from lightning_megatron.data.formats.index_files import DatasetHeader
from lightning_megatron.data.formats.rewrite import RewrittenDataset, rewrite
from lightning_megatron.data.formats.staged import require_new
from lightning_megatron.errors import DataError


def merge_datasets(inputs: Sequence[str], output_prefix: str) -> RewrittenDataset:
    """Write the datasets at ``inputs`` one after the other, in the mmap format, as one dataset.

    The type of tokens is the smallest that holds those of all inputs. Legacy datasets are converted on the way.

    Raises:
        DataError: If an input is missing, damaged, foreign or does not go with the others, or ``output_prefix`` exists,
            is an input or cannot be written.
    """
    if not inputs:
        raise DataError("input=[] names no dataset; give at least one")
    _require_other(inputs, output_prefix)
    require_new(output_prefix)
    sources = [check_any_dataset(prefix, "input") for prefix in inputs]
    _require_modes_of_all_or_none(sources)
    dtype = _common_type(sources)
    merged = rewrite(sources, output_prefix, dtype, "Merging")
    widened = [source for source in sources if source.dtype != dtype]
    notes = [f"{source.prefix} was widened from {source.dtype} to {dtype}" for source in widened]
    return dataclasses.replace(merged, notes=(*merged.notes, *notes))


def _require_other(inputs: Sequence[str], output_prefix: str) -> None:
    same = [prefix for prefix in inputs if os.path.realpath(prefix) == os.path.realpath(output_prefix)]
    if same:
        raise DataError(f"output_prefix={output_prefix} is the input {same[0]} itself; choose another")


def _require_modes_of_all_or_none(sources: Sequence[DatasetHeader]) -> None:
    with_modes = [source.prefix for source in sources if source.has_modes]
    if 0 < len(with_modes) < len(sources):
        without = next(source.prefix for source in sources if not source.has_modes)
        raise DataError(
            f"{with_modes[0]} has modes (multimodal), {without} has none; merge datasets that all have them, or none"
        )


def _common_type(sources: Sequence[DatasetHeader]) -> np.dtype[Any]:
    first = sources[0]
    for source in sources:
        if source.dtype != first.dtype and "f" in (source.dtype.kind, first.dtype.kind):
            raise DataError(
                f"{source.prefix} holds {source.dtype} and {first.prefix} {first.dtype}; only integers can be merged"
                " with those of another type"
            )
    return np.result_type(*(source.dtype for source in sources))
