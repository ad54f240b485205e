"""An index is built once however many jobs want it, and never used half-built or stale."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from lightning_megatron.data.gpt import GPTIndex, GPTObjective
from lightning_megatron.data.samples import Part, Samples, build_once, open_samples
from lightning_megatron.errors import DataError
from tests.unit.data.corpus import engine_rows, write_corpus

GPT = GPTObjective(seq_length=16)


def _parts(folder: Path, names: str = "a", **changes: Any) -> list[Part]:
    given = {"split": "8,1,1", "name": "train", "seed": 1234, "num_samples": None, **changes}
    return [Part(prefix=str(folder / name), **given) for name in names]


def _rows(samples: Samples) -> np.ndarray:
    return samples.rows(range(len(samples)))["text"].numpy()


# ---- one builder at a time ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _SlowObjective(GPTObjective):
    """Takes its time, and leaves a trace of every index that it lays out."""

    trace: str

    @override
    def lay_out(self, part: Part) -> GPTIndex:
        with open(self.trace, "a") as stream:
            stream.write(f"{part.prefix}\n")
        time.sleep(0.05)
        return super().lay_out(part)


def test_processes_that_start_at_once_build_an_index_once(tmp_path: Path) -> None:
    from megatron.core.datasets import helpers  # noqa: F401 (once, not in each process)

    for seed, name in enumerate("ab"):
        write_corpus(tmp_path / name, 50, seed=seed)
    trace = tmp_path / "trace"
    objective = _SlowObjective(seq_length=16, trace=str(trace))
    parts = _parts(tmp_path, "ab", weight=0.5, num_samples=200)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    together = context.Barrier(4)

    def job() -> None:
        torch.set_num_threads(1)  # as in a worker of a DataLoader: a forked process has no OpenMP threads
        together.wait()
        samples = open_samples(objective, parts, str(tmp_path / "cache"))
        results.put((samples.fingerprint, _rows(samples).tobytes()))

    processes = [context.Process(target=job, daemon=True) for _ in range(4)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=200) for _ in processes]
    for process in processes:
        process.join()

    assert sorted(trace.read_text().split()) == [part.prefix for part in parts]
    assert len(set(outcomes)) == 1
    assert len(os.listdir(tmp_path / "cache")) == 3


def test_a_builder_that_was_killed_blocks_nobody_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "index"

    def write(staging: str) -> str:
        Path(staging, "file").write_text("whole")
        return "fingerprint"

    def write_half_and_die(staging: str) -> str:
        Path(staging, "file").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    arguments = (str(folder), write_half_and_die, "corpus")
    process = multiprocessing.get_context("fork").Process(target=build_once, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert sorted(os.listdir(tmp_path)) == [".index.lock", ".index.partial"]

    assert build_once(str(folder), write, "corpus") == "fingerprint"
    assert os.listdir(tmp_path) == ["index"]
    assert sorted(os.listdir(folder)) == ["file", "index.json"]
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
    for seed, name in enumerate("ab"):
        write_corpus(tmp_path / name, 30, seed=seed)
    cache = tmp_path / "cache"
    parts = _parts(tmp_path, "ab")
    expected = _rows(open_samples(GPT, parts, str(cache)))
    assert caplog.text == ""
    damaged = list(cache.glob(f"*/{file}"))
    for path in damaged:
        damage(path)

    assert np.array_equal(_rows(open_samples(GPT, parts, str(cache))), expected)

    assert caplog.text.count("is damaged and is not used") >= len(damaged) > 0
    assert [name for name in os.listdir(cache) if name.startswith(".")] == []
    caplog.clear()
    open_samples(GPT, parts, str(cache))
    assert caplog.text == ""


# ---- which index --------------------------------------------------------------------------------------------------


def test_a_dataset_written_again_under_the_same_name_gets_a_new_index(tmp_path: Path) -> None:
    for seed in range(2):
        write_corpus(tmp_path / "a", 50, seed=seed)
        rows = _rows(open_samples(GPT, _parts(tmp_path), None))

    assert np.array_equal(rows, engine_rows(([str(tmp_path / "a")], None), None))


def test_an_index_that_is_removed_while_a_run_lasts_still_serves_it_and_no_new_process(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", 50)
    samples = open_samples(GPT, _parts(tmp_path), str(tmp_path / "cache"))
    again = pickle.loads(pickle.dumps(samples))
    assert np.array_equal(_rows(again), _rows(samples))
    shutil.rmtree(tmp_path / "cache")

    samples.rows([0])
    with pytest.raises(DataError, match=r"cache/gpt-train-.*\.npy cannot be read .*; start the run again"):
        pickle.loads(pickle.dumps(samples))
