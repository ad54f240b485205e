"""Commands on corpora, datasets and weights: their reports, and cleanup after SIGTERM."""

import io
import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from lightning_megatron.cli import main
from lightning_megatron.data.indexed_writer import dataset_writers
from lightning_megatron.storage.paths import readable_size
from tests.convert.directories import save_as, tiny_llama
from tests.unit.data.corpus import write_legacy


def _documents(prefix: Path | str) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset  # the engine's own reader

    dataset = IndexedDataset(str(prefix))
    return [dataset[index].tolist() for index in range(len(dataset))]


# ---- text to datasets -----------------------------------------------------------------------------------------------


def test_preprocess_reports_its_output(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "preprocess --append-eod --input {}/text --tokenizer {}/tok --output-prefix {}"
    assert main(line.format(corpus.parent, corpus.parent, tmp_path / "x").split()) == 0
    tokens = sum(map(len, _documents(corpus)))
    size = sum(file.stat().st_size for file in corpus.parent.glob("text/*"))
    figures = f"60 documents, {tokens:,} tokens from {size:,} bytes at "
    assert re.fullmatch(
        rf"{tmp_path}/x_text_document: {figures}\d+\.\d\d MB/s\n", capsys.readouterr().out
    )


# ---- datasets -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with the datasets ``new`` (uint16) and ``old`` (legacy, int32)."""
    monkeypatch.chdir(tmp_path)
    with dataset_writers("new", np.dtype("<u2")) as (writer,):
        writer.add_documents(np.array([1, 2, 3], dtype="<u2").tobytes(), [2, 1])
    write_legacy(Path("old"), [[[1, 2]], [[3]]])
    return tmp_path


def test_merge_and_convert_dataset_report_their_output(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["merge", "--input", "new", "old", "--output-prefix", "sub/both"]) == 0
    assert main(["convert-dataset", "--input", "old", "--output-prefix", "converted"]) == 0
    assert capsys.readouterr().out == (
        "sub/both: 4 documents, 4 sequences, 6 tokens (int32) from new, old\n"
        "converted: 2 documents, 2 sequences, 3 tokens (int32) from old\n"
    )
    assert _documents("sub/both") == [[1, 2], [3], [1, 2], [3]]
    assert main(["convert-dataset", "--input", "old", "--output-prefix", "converted"]) == 2
    assert "would overwrite" in capsys.readouterr().err


def test_inspect_decodes_the_first_documents(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["inspect", f"{corpus}.bin", "--tokenizer", str(corpus.parent / "tok")]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{corpus}\n  format      mmap\n  documents   60\n  sequences   60\n")
    beginnings = [
        (corpus.parent / "text" / f"{number:02}.txt").read_text()[:200] for number in range(3)
    ]
    assert all(f"tokens\n  {beginning}" in text for beginning in beginnings)
    assert "Document 3" not in text

    assert main([*arguments, "--json", "--documents", "1"]) == 0
    described = json.loads(capsys.readouterr().out)
    (document,) = described["first_documents"]
    assert (described["kind"], described["documents"], described["dtype"]) == (
        "dataset",
        60,
        "uint16",
    )
    assert document["text"].startswith(beginnings[0])


def test_inspect_prints_to_ascii_terminals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with dataset_writers("long", np.dtype("<u2")) as (writer,):
        writer.add_documents(bytes(2 * 100), [100])
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["inspect", "long", "--documents", "1"]) == 0
    assert written.getvalue().decode("ascii").endswith("0 0 ?\n")


# ---- weights --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    folder = tmp_path_factory.mktemp("models") / "source"
    save_as(tiny_llama(), folder, "sharded_safetensors")
    return folder


@pytest.mark.parametrize(
    ("to", "hint"),
    [
        ("megatron", "start a run with MegatronStrategy(load_from={!r})"),
        ("megatron-legacy", "Megatron-LM loads it as a release, and starts at iteration 0"),
    ],
)
def test_convert_reports_its_output_and_use(
    source: Path, tmp_path: Path, to: str, hint: str, capfd: pytest.CaptureFixture[str]
) -> None:
    there = str(tmp_path / "there")
    back = str(tmp_path / "back")
    layout = ("--tp", "2", "--pp", "3", "--make-vocab-size-divisible-by", "8")
    assert (
        main(["convert", "--load-path", str(source), "--save-path", there, "--to", to, *layout])
        == 0
    )
    assert capfd.readouterr().out.splitlines()[1] == f"It holds weights only: {hint.format(there)}"
    assert (
        main(
            [
                "convert",
                "--load-path",
                there,
                "--save-path",
                back,
                "--to",
                "hf",
                "--max-shard-size",
                "20KB",
            ]
        )
        == 0
    )
    printed = capfd.readouterr()
    files = list(Path(back).iterdir())
    size = readable_size(sum(file.stat().st_size for file in files))
    report = rf"{re.escape(back)}: {len(files)} files, {size}, from .+ {re.escape(there)}, in \d+\.\d s \(.+/s\)\n"
    assert re.fullmatch(report, printed.out)
    assert "converting" not in printed.err, "a progress bar although stderr is not a terminal"


def test_sigterm_removes_a_partial_conversion(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_megatron.convert.hugging_face import HuggingFaceSource

    def read(*_: object) -> None:
        assert list(tmp_path.iterdir())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(HuggingFaceSource, "read", read)
    before = signal.getsignal(signal.SIGTERM)
    arguments = [
        "convert",
        "--load-path",
        str(source),
        "--save-path",
        str(tmp_path / "new"),
        "--to",
        "megatron",
    ]
    assert main(arguments) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert not list(tmp_path.iterdir())
