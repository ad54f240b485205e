"""An index is built once however many jobs want it, and never used half-built or stale."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from lightning_megatron.data.blend import Source, SplitRequest, open_samples
from lightning_megatron.data.gpt import GPTObjective
from lightning_megatron.data.samples import Part, SampleOrder, Samples, build_once
from lightning_megatron.errors import DataError
from tests.unit.data.corpus import write_corpus
from tests.unit.data.engine_samples import engine_dataset, engine_rows

SEQ_LENGTH = 16
ORDER = SampleOrder(num_samples=3, fingerprint="f")


def _request(prefix: Path, **changes: Any) -> SplitRequest:
    request = SplitRequest(
        name="train",
        sources=(Source(str(prefix)),),
        split="8,1,1",
        objective=GPTObjective(seq_length=SEQ_LENGTH),
        seed=1234,
        num_samples=None,
    )
    return replace(request, **changes)


def _rows(samples: Samples) -> np.ndarray:
    return samples.rows(range(len(samples)))["text"].numpy()


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _write(text: str = "content") -> Callable[[str], SampleOrder]:
    def write(staging: str) -> SampleOrder:
        Path(staging, "file").write_text(text)
        return ORDER

    return write


# ---- one builder at a time ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _SlowObjective(GPTObjective):
    """Takes its time, and leaves a trace of every index that it lays out."""

    trace: str

    @override
    def open(self, part: Part, folder: str) -> Any:
        if not os.listdir(folder):
            with open(self.trace, "a") as stream:
                stream.write(f"{part.prefix}\n")
            time.sleep(0.05)
        return super().open(part, folder)


def test_processes_that_start_at_once_build_an_index_once(tmp_path: Path) -> None:
    from megatron.core.datasets import helpers  # noqa: F401 (once, not in each process)

    prefixes = [tmp_path / "a", tmp_path / "b"]
    for seed, prefix in enumerate(prefixes):
        write_corpus(prefix, 50, seed=seed)
    trace = tmp_path / "trace"
    request = _request(
        prefixes[0],
        sources=tuple(Source(str(prefix), 0.5) for prefix in prefixes),
        objective=_SlowObjective(seq_length=SEQ_LENGTH, trace=str(trace)),
        num_samples=200,
    )
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    together = context.Barrier(4)

    def job() -> None:
        torch.set_num_threads(1)  # as in a worker of a DataLoader: a forked process has no OpenMP threads
        together.wait()
        samples = open_samples(request, str(tmp_path / "cache"))
        results.put((samples.fingerprint, _rows(samples).tobytes()))

    processes = [context.Process(target=job, daemon=True) for _ in range(4)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=200) for _ in processes]
    for process in processes:
        process.join()

    assert sorted(trace.read_text().split()) == sorted(map(str, prefixes))
    assert len(set(outcomes)) == 1
    assert len(os.listdir(tmp_path / "cache")) == 3


def test_a_builder_that_was_killed_blocks_nobody_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "index"

    def write_half_and_die(staging: str) -> SampleOrder:
        Path(staging, "file").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
        return ORDER

    process = multiprocessing.get_context("fork").Process(
        target=build_once, args=(str(folder), write_half_and_die, "corpus")
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == [".index.lock", ".index.partial"]

    assert build_once(str(folder), _write("whole"), "corpus") == ORDER

    assert _files(tmp_path) == ["index/file", "index/index.json"]
    assert (folder / "file").read_text() == "whole"


# ---- whole or not at all ------------------------------------------------------------------------------------------


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("file", "damage"), [("sample_index.npy", _truncate), ("index.json", Path.unlink), ("dataset_index.npy", _truncate)]
)
def test_a_damaged_index_is_built_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, damage: Callable[[Path], None]
) -> None:
    prefixes = [tmp_path / "a", tmp_path / "b"]
    for seed, prefix in enumerate(prefixes):
        write_corpus(prefix, 30, seed=seed)
    cache = tmp_path / "cache"
    request = _request(prefixes[0], sources=tuple(Source(str(prefix)) for prefix in prefixes))
    open_samples(request, str(cache))
    expected = _rows(open_samples(request, str(cache)))
    assert caplog.text == ""
    damaged = list(cache.glob(f"*/{file}"))
    for path in damaged:
        damage(path)

    assert np.array_equal(_rows(open_samples(request, str(cache))), expected)

    assert caplog.text.count("is damaged and is not used") >= len(damaged) > 0
    assert [name for name in os.listdir(cache) if name.startswith(".")] == []
    caplog.clear()
    open_samples(request, str(cache))
    assert caplog.text == ""


# ---- which index --------------------------------------------------------------------------------------------------


def test_a_dataset_written_again_under_the_same_name_gets_a_new_index(tmp_path: Path) -> None:
    request = _request(tmp_path / "corpus")
    write_corpus(tmp_path / "corpus", 50, seed=0)
    open_samples(request, None)
    write_corpus(tmp_path / "corpus", 50, seed=1)

    rows = _rows(open_samples(request, None))

    blend = ([str(tmp_path / "corpus")], None)
    assert np.array_equal(rows, engine_rows(engine_dataset(blend, split="8,1,1", name="train", num_samples=None)))


def test_an_index_that_is_removed_while_a_run_lasts_still_serves_it_and_no_new_process(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 50)
    samples = open_samples(_request(tmp_path / "corpus"), str(tmp_path / "cache"))
    shutil.rmtree(tmp_path / "cache")

    samples.rows([0])
    with pytest.raises(DataError, match=r"cache/gpt-train-.*\.npy cannot be read .*; start the run again"):
        pickle.loads(pickle.dumps(samples))
