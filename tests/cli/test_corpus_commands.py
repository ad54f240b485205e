"""Does preprocess do what its options say, and leave nothing behind when its input is wrong?"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from lightning_megatron.cli import main


def _preprocess(corpus: Path, folder: Path, *arguments: str) -> int:
    output = ["--output-prefix", str(folder / "out" / "x"), "--tokenizer", str(corpus.parent / "tok")]
    return main(["preprocess", *output, *arguments])


def _documents(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset  # the engine's own reader

    dataset = IndexedDataset(str(prefix))
    return [dataset[index].tolist() for index in range(len(dataset))]


def test_a_compressed_copy_gives_the_same_dataset_and_the_last_line_has_the_figures(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [(corpus.parent / "text" / f"{number:02}.txt").read_text() for number in range(60)]
    data = gzip.compress("".join(json.dumps({"body": text}) + "\n" for text in texts).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(data)

    pattern = str(tmp_path / "*.gz")
    assert _preprocess(corpus, tmp_path, "--input", pattern, "--json-keys", "body", "--append-eod") == 0

    assert _documents(tmp_path / "out" / "x_body_document") == _documents(corpus)
    line = capsys.readouterr().out
    tokens = sum(map(len, _documents(corpus)))
    figures = f"60 documents, {tokens:,} tokens from {len(data):,} bytes at "
    assert line.startswith(f"{tmp_path / 'out' / 'x'}_body_document: {figures}")
    assert line.endswith(" MB/s\n")


def test_sentences_are_written_under_their_own_name(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("W1 w2. W3! W4?")

    assert _preprocess(corpus, tmp_path, "--input", str(tmp_path / "a.txt"), "--split-sentences") == 0

    assert len(_documents(tmp_path / "out" / "x_text_sentence")) == 3


def test_bad_lines_end_the_run_or_are_skipped_as_asked(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "w1"}\n{"text": 5}\n{"text": ""}\n')

    assert _preprocess(corpus, tmp_path, "--input", str(path)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith(f"error: {path}, line 2 has a number under 'text', not a string; store text there")
    assert list((tmp_path / "out").iterdir()) == []

    assert _preprocess(corpus, tmp_path, "--input", str(path), "--on-error", "skip") == 0
    printed = capsys.readouterr()
    assert f"skipped: {path}, line 2 has" in printed.err
    assert "x_text_document: 2 documents, " in printed.out
    assert "\n1 texts without a token" in printed.out
    assert "\n1 lines, rows or files were skipped" in printed.out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--keep-newlines"], "--keep-newlines needs --split-sentences"),
        (["--split-sentences", "--language", "english"], "--language english is no ISO 639 code"),
        (["--json-keys", "title"], "json keys title cannot be read from"),
        (["--json-keys", "a", "a"], "--json-keys 'a a' must name at least one key, each once"),
        (["--on-error", "ignore"], "argument --on-error: invalid choice: 'ignore'"),
    ],
)
def test_options_that_cannot_work_are_one_line(
    corpus: Path, tmp_path: Path, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("w1")

    assert _preprocess(corpus, tmp_path, "--input", str(tmp_path / "a.txt"), *arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {line}")
    assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists()
