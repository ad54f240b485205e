"""Items of any map-style dataset become rows; what cannot become one is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate

from lightning_megatron.datamodules import DatasetSamples
from lightning_megatron.errors import DataError

datasets = pytest.importorskip("datasets")

TOKENS = torch.randint(0, 1000, (5, 6), generator=torch.Generator().manual_seed(3))
LABELS = TOKENS.flip(1)


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Items as ``kind`` holds them."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return len(TOKENS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.kind(TOKENS[index]), "labels": self.kind(LABELS[index]), "weight": 0.5 * index}


def _hugging_face(**more: Any) -> Any:
    columns = {"input_ids": TOKENS.tolist(), "labels": LABELS.tolist(), "weight": [0.5 * i for i in range(5)]}
    return datasets.Dataset.from_dict({**columns, **more})


SOURCES = {
    "unsigned_arrays": lambda: Rows(lambda row: row.numpy().astype(np.uint16)),
    "lists": lambda: Rows(torch.Tensor.tolist),
    "subset": lambda: Subset(Rows(torch.Tensor.clone), range(5)),
    "hugging_face": _hugging_face,
    "hugging_face_on_the_fly": lambda: _hugging_face().with_transform(dict),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_items_are_stacked(source: Any) -> None:
    samples = DatasetSamples(source())
    rows = samples.rows([3, 0, 4])
    assert len(samples) == 5
    assert rows.keys() == {"input_ids", "labels", "weight"}
    # As torch stacks tensors itself.
    expected = default_collate([Rows(torch.Tensor.clone)[i] for i in (3, 0, 4)])
    for key in ("input_ids", "labels"):
        assert rows[key].dtype == torch.int64
        assert torch.equal(rows[key], expected[key])
    assert rows["weight"].tolist() == [1.5, 0.0, 2.0]


class Numbers(IterableDataset[dict[str, int]]):
    def __iter__(self) -> Any:
        yield {"input_ids": 1}


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (lambda: datasets.DatasetDict({"train": _hugging_face()}), r"a DatasetDict must be one map-style dataset"),
        (Numbers, "a Numbers must be one .* return a DataLoader of it from train_dataloader"),
        (list, "a list must be one .* of at least one item"),
    ],
)
def test_what_is_no_map_style_dataset_is_refused_at_once(dataset: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        DatasetSamples(dataset())


def _items(*items: Any) -> Any:
    return list(items)


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        (TensorDataset(TOKENS), "item 1 of the dataset is a tuple with no keys; give dicts"),
        (_items({}, {"a": [1, 2]}, {"a": [3]}), r"items 1, 2 .* under 'a' \(.*\[2\] .*\[1\] .*\); .* pad them"),
        (_items({}, {"a": 1}, {"b": 1}), "item 2 of the dataset is a dict with 'b'; give dicts that all have the"),
        (_hugging_face(text=list("abcde")), "items 1, 2 cannot be stacked under 'text'"),
    ],
)
def test_items_that_cannot_be_stacked_are_named(dataset: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        DatasetSamples(dataset).rows([1, 2])


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ([TOKENS], "a batch is a list; the DataLoader must yield dicts of tensors"),
        ({"a": torch.zeros(3)}, "collate gave 3 rows for 2 items; return one row per item"),
    ],
)
def test_a_function_that_makes_no_batch_is_named(batch: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        DatasetSamples(_hugging_face(), lambda _: batch).rows([0, 1])
