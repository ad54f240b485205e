"""``DatasetSamples``: items of map-style datasets are collated into rows; unusable datasets are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from lightning_megatron.datamodules.dataset import DatasetDataModule, DatasetSamples
from lightning_megatron.errors import DataError

datasets = pytest.importorskip("datasets")

TOKENS = torch.randint(
    0,
    1000,
    (5, 6),
    generator=torch.Generator().manual_seed(3),
)


def _items(kind: Any) -> list[dict[str, Any]]:
    return [{"input_ids": kind(row), "weight": 0.5 * number} for number, row in enumerate(TOKENS)]


def _hugging_face() -> Any:
    return datasets.Dataset.from_dict(
        {"input_ids": TOKENS.tolist(), "weight": [0.5 * i for i in range(5)]}
    )


SOURCES: dict[str, Any] = {
    "unsigned_arrays": _items(lambda row: row.numpy().astype(np.uint16)),
    "lists": _items(torch.Tensor.tolist),
    "hugging_face": _hugging_face(),
    "hugging_face_on_the_fly": _hugging_face().with_transform(dict),
}


@pytest.mark.parametrize("source", [*SOURCES, "saved"])
def test_items_are_collated_into_rows(tmp_path: Path, source: str) -> None:
    dataset = SOURCES.get(source, str(tmp_path))
    if source == "saved":
        _hugging_face().save_to_disk(dataset)
    rows = DatasetDataModule(train=dataset).open("train", None).rows([3, 0, 4])
    assert rows.keys() == {"input_ids", "weight"}
    assert rows["input_ids"].dtype == torch.int64
    assert torch.equal(rows["input_ids"], TOKENS[[3, 0, 4]])
    assert rows["weight"].tolist() == [1.5, 0.0, 2.0]


class Numbers(IterableDataset[dict[str, int]]):
    def __iter__(self) -> Any:
        yield {"input_ids": 1}


@pytest.mark.parametrize(
    ("dataset", "collate", "message"),
    [
        (
            datasets.DatasetDict({"train": _hugging_face()}),
            None,
            r"a DatasetDict must be one map-style dataset",
        ),
        (Numbers(), None, "a Numbers must be one .* return a DataLoader from train_dataloader"),
        ([], None, "a list must be one .* of at least one item"),
        (
            [{}, {"a": [1, 2]}, {"a": [3]}],
            None,
            r"items 1, 2 .* under 'a' \(.*\[2\] .*\[1\] .*\); .* pad them",
        ),
        (
            [{}, {"a": 1}, {"b": 1}],
            None,
            "item 2 of the dataset is a dict with 'b'; give dicts that all have the",
        ),
        (
            _hugging_face(),
            lambda _: [TOKENS],
            "a batch is a list; the DataLoader must yield dicts of tensors",
        ),
        (
            _hugging_face(),
            lambda _: {"a": TOKENS},
            "collate gave 5 rows for 2 items; return one row per item",
        ),
    ],
)
def test_unusable_dataset_or_collate_is_refused(dataset: Any, collate: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        DatasetSamples(dataset, collate).rows([1, 2])
