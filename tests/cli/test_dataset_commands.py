"""Do the commands on datasets do what they say, and is each mistake one line that leaves nothing behind?"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_megatron.cli import main
from lightning_megatron.data.indexed import IndexedDatasetWriter
from tests.ranks import ROOT
from tests.unit.data.indexed_files import write_legacy


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the datasets ``new`` (uint16) and ``old`` (legacy, int32), and a file that is none."""
    monkeypatch.chdir(tmp_path)
    with IndexedDatasetWriter("new", np.dtype("<u2")) as writer:
        writer.add_documents(np.array([1, 2, 3], dtype="<u2").tobytes(), [2, 1])
    write_legacy(Path("old"), [[[1, 2]], [[3]]])
    (tmp_path / "notes.txt").write_text("a corpus")
    return tmp_path


def test_merge_says_what_it_wrote(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset  # the engine's own reader

    assert main(["merge", "--input", "new", "old", "--output-prefix", "sub/both"]) == 0

    assert capsys.readouterr().out == (
        "sub/both: 4 documents, 4 sequences, 6 tokens from new, old\nnote: new was widened from uint16 to int32\n"
    )
    read = IndexedDataset("sub/both")
    assert [read[index].tolist() for index in range(len(read))] == [[1, 2], [3], [1, 2], [3]]


def test_convert_dataset_says_what_it_wrote(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert-dataset", "--input", "old", "--output-prefix", "converted"]) == 0

    assert capsys.readouterr().out == "converted: 2 documents, 2 sequences, 3 tokens from old\n"


def test_inspect_decodes_the_first_documents(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["inspect", f"{corpus}.bin", "--tokenizer", str(corpus.parent / "tok")]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{corpus}\n  format     mmap\n  documents  60\n  sequences  60, 1 a document\n")
    for number in range(3):
        beginning = (corpus.parent / "text" / f"{number:02}.txt").read_text()[:200]
        assert f"tokens\n  {beginning}" in text
    assert "Document 3" not in text

    assert main([*arguments, "--json", "--documents", "1"]) == 0
    described = json.loads(capsys.readouterr().out)
    (document,) = described["first_documents"]
    assert (described["kind"], described["documents"], described["dtype"]) == ("dataset", 60, "uint16")
    assert document["text"].startswith((corpus.parent / "text" / "00.txt").read_text()[:200])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["inspect"], "the following arguments are required: PATH; see lightning-megatron inspect --help"),
        (
            ["inspect", "nowhere"],
            "path=nowhere does not exist, nor do nowhere.bin and .idx; give the prefix of a dataset",
        ),
        (
            ["inspect", "."],
            "path=. is a folder, and neither a dataset nor a checkpoint that is read; give one of",
        ),
        (
            ["inspect", "empty"],
            "path=empty is a folder, and neither a dataset nor a checkpoint that is read; give the",
        ),
        (
            ["inspect", "notes.txt"],
            "path=notes.txt is no indexed dataset (.bin and .idx) and no checkpoint; give the prefix",
        ),
        (["inspect", "new", "--documents", "-1"], "--documents -1 must be at least 0; correct it"),
        (["inspect", "new", "--png", "a.png"], "unrecognized arguments: --png a.png; see lightning-megatron inspect"),
        (["inspect", "new", "--tokenizer", "t"], "tokenizer folder t does not exist; train one with train-tokenizer"),
        (
            ["inspect", "damaged.idx"],
            "damaged.idx has 0 bytes, its header alone needs 34: truncated; run pre",
        ),
        (["merge", "--input", "new"], "the following arguments are required: --output-prefix; see lightning-megatron"),
        (
            ["merge", "--input", "new", "--output-prefix", "new"],
            "--output-prefix new is the input new itself; choose an",
        ),
        (
            ["merge", "--input", "new", "--output-prefix", "old"],
            "--output-prefix old would overwrite old.idx, old.bin;",
        ),
        (
            ["merge", "--input", "new.bin", "old.bin", "--output-prefix", "x"],
            "--input new.bin is a file, it must be the",
        ),
        (
            ["merge", "--input", "new", "nowhere", "--output-prefix", "x"],
            "--input nowhere needs two files, missing: now",
        ),
        (["merge", "--input", "new", "damaged", "--output-prefix", "x"], "damaged.idx has 0 bytes, its header"),
        (
            ["merge", "--input", "new", "--output-prefix", "notes.txt/x"],
            "notes.txt/x.bin and .idx cannot be written (File exists); give an output prefix in a folder that can be",
        ),
        (["convert-dataset", "--input", "new", "--output-prefix", "x"], "new.idx is in the mmap format (MMIDIDX) alr"),
        (["convert-dataset", "--input", "old", "--output-prefix", "x.idx"], "--output-prefix x.idx ends like a file"),
        (["convert-dataset", "--input", "damaged", "--output-prefix", "x"], "damaged.idx has 0 bytes, its header"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    folder: Path, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    (folder / "damaged.idx").write_bytes(b"")
    (folder / "damaged.bin").write_bytes(b"")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: {line}")
    assert printed.err.count("\n") == 1
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_terminals_without_unicode_are_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with IndexedDatasetWriter("long", np.dtype("<u2")) as writer:
        writer.add_documents(bytes(2 * 100), [100])
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["inspect", "long", "--documents", "1"]) == 0

    assert written.getvalue().decode("ascii").endswith("0 0 ?\n")


def test_whoever_reads_only_the_beginning_sees_no_traceback(folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "lightning_megatron", "inspect", "new"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
