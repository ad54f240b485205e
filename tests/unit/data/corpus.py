"""Small datasets with known tokens, and Megatron-Core's own GPT samples of them, in one process and without caches."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_megatron.data.samples import Objective, Part
from tests.unit.data.indexed_files import build


def write_corpus(prefix: Path, num_documents: int, seed: int = 0, longest: int = 60) -> list[NDArray[np.uint16]]:
    """Write documents of random lengths and ids, and return them."""
    random = np.random.default_rng(seed)
    documents = [
        random.integers(0, 60000, size=int(random.integers(1, longest))).astype(np.uint16) for _ in range(num_documents)
    ]
    build(prefix, [[document.tolist()] for document in documents])
    return documents


def opened(objective: Objective, part: Part) -> Any:
    """The samples of a part, with their index in a new folder beside the dataset."""
    folder = tempfile.mkdtemp(prefix="index-", dir=os.path.dirname(part.prefix))
    objective.lay_out(part).save(folder)
    return objective.open(part, folder)


class _NoTokenizer:
    """What the engine reads of a tokenizer; no id of a dataset is padding."""

    vocab_size, eod = None, -2
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
    """Rows of the engine's dataset before they are cut into inputs and labels: [rows, seq_length + 1]."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        **{"random_seed": 1234, "sequence_length": seq_length, "blend": blend, "split": split, "path_to_cache": ""},
        **dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False),
        create_attention_mask=False,
        tokenizer=_NoTokenizer(),
        **options,
    )
    # The other splits get the same number: weights without a number are an error for them too.
    sizes = [num_samples] * len(Split)
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[Split[name].value]
    places = [(dataset, index) for index in range(len(dataset))]
    if hasattr(dataset, "datasets"):
        pairs = zip(dataset.dataset_index, dataset.dataset_sample_index, strict=True)
        places = [(dataset.datasets[number], index) for number, index in pairs]
    return np.stack([part._query_document_sample_shuffle_indices(index)[0] for part, index in places])
