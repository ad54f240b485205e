"""Hashes of what data holds: equal for copies in any format, others for data that was replaced."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_megatron.data.contents import (
    hash_of_files,
    hash_of_indexed,
    hash_of_rows,
    is_same,
    with_contents,
)
from lightning_megatron.data.indexed import open_dataset
from tests.unit.data.corpus import build, write_legacy


def _documents(first: int) -> list[list[list[int]]]:
    return [[[first + number] * (1 + number % 7)] for number in range(300)]


def test_datasets_of_equal_lengths_differ_by_tokens(tmp_path: Path) -> None:
    build(tmp_path / "a", _documents(0))
    other = build(tmp_path / "b", _documents(1))
    copies = [
        build(tmp_path / "wide", _documents(0), "int32"),
        write_legacy(tmp_path / "legacy", _documents(0)),
    ]
    expected = hash_of_indexed([open_dataset(str(tmp_path / "a"))])
    for prefix in copies:
        assert hash_of_indexed([open_dataset(prefix)]) == expected
    assert hash_of_indexed([open_dataset(other)]) != expected


def _lists(first: int) -> object:
    return [{"input_ids": [first, row], "name": None} for row in range(5)]


def _tensors(first: int) -> object:
    return tuple({"input_ids": torch.tensor([first, row])} for row in range(40))


def _arrays(first: int) -> object:
    return [{"input_ids": np.array([first, row])} for row in range(40)]


def _half_precision(first: int) -> object:
    return [torch.tensor(first + row, dtype=torch.bfloat16) for row in range(3)]


def _tensor_dataset(first: int) -> object:
    return TensorDataset(torch.arange(first, first + 40), torch.zeros(40))


def _hugging_face(first: int) -> object:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"input_ids": [[first, row] for row in range(40)]})


@pytest.mark.parametrize(
    "rows", [_lists, _tensors, _arrays, _half_precision, _tensor_dataset, _hugging_face]
)
def test_rows_of_known_classes_tell_their_contents(rows: Callable[[int], Any]) -> None:
    assert hash_of_rows(rows(0)) == hash_of_rows(rows(0)) != ""
    assert hash_of_rows(rows(0)) != hash_of_rows(rows(1))


def test_rows_of_other_classes_are_not_read() -> None:
    class Rows(list[int]):
        def __getitem__(self, index: Any) -> Any:
            raise AssertionError

    assert hash_of_rows(Rows([1, 2])) == ""
    assert hash_of_rows([]) == hash_of_rows(())


def test_files_of_equal_sizes_differ_by_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    paths[0].write_text("one\n" * 1000)
    paths[1].write_text("two\n" * 1000)
    shutil.copy(paths[0], paths[2])
    one, two, copy = (hash_of_files([path]) for path in paths)
    assert one == copy != two


def test_fingerprints_of_older_versions_are_of_the_order_alone() -> None:
    own = with_contents("order", "a")
    assert is_same("order", own)
    assert is_same(own, own)
    assert not is_same(with_contents("order", "b"), own)
    assert not is_same("other", own)
    assert not is_same(None, own)
