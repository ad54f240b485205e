"""Is sample i what Megatron's algorithm says, and is a stale or half-written index never used?"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_megatron.data.samples.gpt import IndexRequest, build_index, cache_folder, open_samples
from lightning_megatron.data.samples.split import split_ranges
from lightning_megatron.data.serving.sampler import PADDING_ROW
from lightning_megatron.errors import DataError
from tests.unit.data.corpus import megatron_samples, write_corpus

SEQ_LENGTH = 16


def _request(prefix: Path, num_samples: int | None = None, **changes: object) -> IndexRequest:
    request = IndexRequest(
        prefix=str(prefix), split="8,1,1", name="train", seq_length=SEQ_LENGTH, seed=1234, num_samples=num_samples
    )
    return replace(request, **changes)  # type: ignore[arg-type]


def _all_rows(request: IndexRequest) -> np.ndarray:
    folder = cache_folder(request, None)
    count = build_index(request, folder).num_samples
    samples = open_samples(request, folder)
    assert count == len(samples)
    return samples[list(range(count))]["text"].numpy()


@pytest.mark.parametrize("name", ["train", "valid", "test"])
def test_one_pass_takes_the_samples_that_the_algorithm_says(tmp_path: Path, name: str) -> None:
    documents = write_corpus(tmp_path / "corpus", 50)
    part = split_ranges("8,1,1", 50)[name]  # type: ignore[index]
    expected = megatron_samples(documents[part.start : part.stop], SEQ_LENGTH, 1234, None)

    assert np.array_equal(_all_rows(_request(tmp_path / "corpus", name=name)), expected)


@pytest.mark.parametrize("share_of_last_epoch", [0.3, 0.95, 1.0])
@pytest.mark.parametrize("full_epochs", [0, 1, 4])
def test_many_passes_take_the_samples_that_the_algorithm_says(
    tmp_path: Path, full_epochs: int, share_of_last_epoch: float
) -> None:
    documents = write_corpus(tmp_path / "corpus", 50)
    train = documents[:40]
    num_samples = int((full_epochs + share_of_last_epoch) * (sum(map(len, train)) // SEQ_LENGTH))
    expected = megatron_samples(train, SEQ_LENGTH, 1234, num_samples)

    rows = _all_rows(_request(tmp_path / "corpus", num_samples))

    assert len(rows) >= num_samples
    assert np.array_equal(rows, expected)


def test_another_seed_gives_another_order_of_the_same_documents(tmp_path: Path) -> None:
    documents = write_corpus(tmp_path / "corpus", 50)

    rows = _all_rows(_request(tmp_path / "corpus", seed=7))

    assert np.array_equal(rows, megatron_samples(documents[:40], SEQ_LENGTH, 7, None))
    assert not np.array_equal(rows, _all_rows(_request(tmp_path / "corpus")))


def test_the_fingerprint_of_an_order_changes_only_with_the_order(tmp_path: Path) -> None:
    documents = write_corpus(tmp_path / "corpus", 50)
    per_epoch = sum(map(len, documents[:40])) // SEQ_LENGTH

    def fingerprint(num_samples: int, **changes: object) -> str:
        request = _request(tmp_path / "corpus", num_samples, **changes)
        return build_index(request, cache_folder(request, None)).fingerprint

    base = fingerprint(per_epoch // 2)
    assert fingerprint(per_epoch // 4) == base
    assert fingerprint(2 * per_epoch) != base
    assert fingerprint(per_epoch // 2, seed=1) != base
    assert fingerprint(per_epoch // 2, split="7,2,1") != base
    # A last epoch that is barely used is shuffled by itself, so the order differs though the passes are as many.
    assert fingerprint(per_epoch + per_epoch // 4) != fingerprint(2 * per_epoch - 2)


def test_a_dataset_written_again_under_the_same_name_gets_a_new_index(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    write_corpus(prefix, 50, seed=0)
    before = cache_folder(_request(prefix), None)
    _all_rows(_request(prefix))
    documents = write_corpus(prefix, 50, seed=1)

    assert cache_folder(_request(prefix), None) != before
    assert np.array_equal(_all_rows(_request(prefix)), megatron_samples(documents[:40], SEQ_LENGTH, 1234, None))


def test_an_index_that_was_interrupted_is_not_taken_for_a_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "corpus", 50)
    request = _request(tmp_path / "corpus")
    folder = cache_folder(request, str(tmp_path / "cache"))
    saved: list[str] = []

    def save_one_file_then_die(path: str, *args: object, **kwargs: object) -> None:
        if saved:
            raise KeyboardInterrupt
        saved.append(path)
        Path(path).write_bytes(b"half")

    with monkeypatch.context() as patched:
        patched.setattr(np, "save", save_one_file_then_die)
        with pytest.raises(KeyboardInterrupt):
            build_index(request, folder)

    assert saved
    assert not os.path.exists(folder)
    assert build_index(request, folder).num_samples == len(open_samples(request, folder))


def test_a_machine_without_the_cache_computes_the_same_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_corpus(tmp_path / "corpus", 50)
    request = _request(tmp_path / "corpus", num_samples=200)
    expected = _all_rows(request)

    samples = open_samples(request, str(tmp_path / "elsewhere"))

    assert np.array_equal(samples[list(range(len(samples)))]["text"].numpy(), expected)
    assert "not visible on this machine" in caplog.text
    assert not (tmp_path / "elsewhere").exists()


def test_an_existing_index_is_opened_and_not_built_again(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 50)
    request = _request(tmp_path / "corpus")
    folder = cache_folder(request, None)
    build_index(request, folder)
    times = {path.name: path.stat().st_mtime_ns for path in Path(folder).iterdir()}

    build_index(request, folder)

    assert {path.name: path.stat().st_mtime_ns for path in Path(folder).iterdir()} == times
    assert len(times) == 4


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 50)
    (tmp_path / "file").write_text("in the way")
    request = _request(tmp_path / "corpus")

    with pytest.raises(DataError, match="cannot be written to .*file.*; set index_cache to a folder"):
        build_index(request, cache_folder(request, str(tmp_path / "file")))


def test_a_padding_row_has_no_valid_token_and_no_weight(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 50)
    request = _request(tmp_path / "corpus")
    samples = open_samples(request, str(tmp_path / "elsewhere"))

    batch = samples[[0, PADDING_ROW, 1]]

    assert batch["text"][1].tolist() == [-1] * (SEQ_LENGTH + 1)
    assert (batch["text"][[0, 2]] >= 0).all()
    assert batch["text"].dtype == torch.int64
    assert batch["sample_mask"].tolist() == [1, 0, 1]
