"""Megatron-Core's own samples of datasets, in one process and without caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray


class _NoTokenizer:
    """What the engine reads of a tokenizer; no id of a dataset is padding."""

    vocab_size = None
    eod = -2
    unique_identifiers: ClassVar = {"class": "none"}


def engine_dataset(
    blend: tuple[list[str], list[float] | None],
    *,
    split: str,
    name: str,
    num_samples: int | None,
    seq_length: int = 16,
    seed: int = 1234,
    **options: bool,
) -> Any:
    """The engine's dataset of one split: a GPTDataset for one prefix, else a BlendedDataset."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=blend,
        split=split,
        path_to_cache="",
        tokenizer=_NoTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **options,
    )
    # The others get the same number: weights without a number are an error for them too.
    sizes = [num_samples] * len(Split)
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[Split[name].value]


def engine_rows(dataset: Any, indices: Sequence[int] | None = None) -> NDArray[np.int64]:
    """Rows of the engine's dataset before they are cut into inputs and labels: [rows, seq_length + 1]."""
    rows = []
    for index in range(len(dataset)) if indices is None else indices:
        if hasattr(dataset, "datasets"):
            part = dataset.datasets[dataset.dataset_index[index]]
            rows.append(part._query_document_sample_shuffle_indices(dataset.dataset_sample_index[index])[0])
        else:
            rows.append(dataset._query_document_sample_shuffle_indices(index)[0])
    return np.stack(rows)
