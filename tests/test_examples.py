"""Does each program in examples/ run as a user would run it?"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.corpus import VOCAB_SIZE, make_corpus
from tests.ranks import ROOT


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.slow
def test_pretrain_gpt_trains_in_four_processes_and_leaves_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "pretrain_gpt.py", "--data-path", corpus, "--vocab-size", str(VOCAB_SIZE)]
        + ["--max-steps", "20", "--output", tmp_path],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert list(tmp_path.rglob("last.ckpt"))
    (metrics,) = tmp_path.rglob("metrics.csv")
    losses = [float(row["train_loss"]) for row in csv.DictReader(metrics.open()) if row["train_loss"]]
    assert losses[-1] < losses[0]


def test_examples_are_short_enough_to_be_read_at_once() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 100, path.name
