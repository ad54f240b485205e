"""Are the tokens on disk those of the tokenizer, in input order, for any number of workers?"""

from __future__ import annotations

import dataclasses
import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_megatron.data.corpus import preprocess as module
from lightning_megatron.data.corpus.encoder import DocumentEncoder, EncodedPiece
from lightning_megatron.data.corpus.pieces import Piece, TextFiles
from lightning_megatron.data.corpus.preprocess import PreprocessOptions, PreprocessResult, preprocess
from lightning_megatron.data.corpus.tokenizer import TokenizerTrainingOptions, load_tokenizer, train_tokenizer
from lightning_megatron.data.indexed import IndexedDatasetWriter, check_dataset
from lightning_megatron.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "corpus.txt").write_text("one two three four five six seven " * 30)
    train_tokenizer(
        TokenizerTrainingOptions(input=[folder / "corpus.txt"], vocab_size=300, output=folder / "tokenizer")
    )
    return folder / "tokenizer"


def _run(folder: Path, tokenizer: Path, **options: Any) -> PreprocessResult:
    defaults = {"input": [folder / "in"], "output_prefix": folder / "out" / "x", "tokenizer": tokenizer}
    return preprocess(PreprocessOptions(**(defaults | options)))


def _documents(prefix: str) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    return [dataset[index].tolist() for index in range(len(dataset))]


def _write_inputs(folder: Path) -> list[str]:
    """Inputs of several pieces; the texts in document order."""
    (folder / "in").mkdir()
    texts = [f"one two {number} three" * (1 + number % 7) for number in range(200)]
    lines = [json.dumps({"text": text, "title": f"title {text[:9]}"}) for text in texts]
    (folder / "in" / "a.jsonl").write_text("\n".join(lines[:120]) + "\n")
    (folder / "in" / "b.jsonl").write_text("\n".join(lines[120:]))
    return texts


@pytest.mark.parametrize("append_eod", [False, True])
def test_documents_are_the_tokenizers_ids_in_input_order(tmp_path: Path, tokenizer: Path, append_eod: bool) -> None:
    texts = _write_inputs(tmp_path)
    reference = load_tokenizer(tokenizer)
    end = [reference.eos_token_id] if append_eod else []

    result = _run(tmp_path, tokenizer, append_eod=append_eod)

    assert result.prefixes == (str(tmp_path / "out" / "x_text_document"),)
    expected = [reference.encode(text, add_special_tokens=False) + end for text in texts]
    assert _documents(result.prefixes[0]) == expected
    assert (result.documents, result.empty_documents) == (len(texts), 0)
    assert result.tokens == sum(map(len, expected))
    assert check_dataset(result.prefixes[0]).dtype == np.dtype("<u2")


def test_the_output_does_not_depend_on_the_number_of_workers(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_inputs(tmp_path)
    (tmp_path / "in" / "c.py").write_text("print('one')\n")
    (tmp_path / "in" / "d.jsonl.gz").write_bytes(gzip.compress((tmp_path / "in" / "a.jsonl").read_bytes()))
    # Pieces so small that workers overtake each other.
    monkeypatch.setattr(module, "cut_into_pieces", lambda files, keys: CUT(files, keys, 500))
    written = []
    for workers in (1, 2, 3):
        prefix = _run(tmp_path, tokenizer, workers=workers, output_prefix=tmp_path / f"w{workers}").prefixes[0]
        written.append([Path(prefix + suffix).read_bytes() for suffix in (".bin", ".idx")])

    assert written[0] == written[1] == written[2]


CUT = module.cut_into_pieces


def test_each_key_becomes_a_dataset_of_its_own(tmp_path: Path, tokenizer: Path) -> None:
    texts = _write_inputs(tmp_path)
    reference = load_tokenizer(tokenizer)

    result = _run(tmp_path, tokenizer, json_keys=("title", "text"))

    assert [Path(prefix).name for prefix in result.prefixes] == ["x_title_document", "x_text_document"]
    for prefix, expected in zip(result.prefixes, ([f"title {text[:9]}" for text in texts], texts), strict=True):
        assert _documents(prefix) == [reference.encode(text, add_special_tokens=False) for text in expected]


def test_no_key_appears_if_another_cannot_be_completed(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = IndexedDatasetWriter.complete

    def fail(writer: IndexedDatasetWriter) -> None:
        if "text" in str(writer._prefix):  # ends last, if datasets end in the reverse of the order of keys
            raise DataError("disk full")
        complete(writer)

    _write_inputs(tmp_path)
    monkeypatch.setattr(IndexedDatasetWriter, "complete", fail)
    for keys in (["text", "title"], ["title", "text"]):
        with pytest.raises(DataError, match="disk full"):
            _run(tmp_path, tokenizer, json_keys=keys)
        assert list((tmp_path / "out").iterdir()) == []


def test_an_empty_text_is_a_document_without_sequence_so_that_keys_stay_aligned(
    tmp_path: Path, tokenizer: Path
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    (tmp_path / "in").mkdir()
    rows = [("one", ""), ("", "two"), ("", ""), ("three four", "five")]
    lines = [json.dumps({"text": text, "title": title}) for text, title in rows]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines))

    result = _run(tmp_path, tokenizer, append_eod=True, json_keys=("text", "title"))

    datasets = [IndexedDataset(prefix) for prefix in result.prefixes]  # alive, or their arrays point nowhere
    # Document i is the same in both.
    assert [dataset.document_indices.tolist() for dataset in datasets] == [[0, 1, 1, 1, 2], [0, 0, 1, 1, 2]]
    assert (result.documents, result.empty_documents) == (4, 4)


def test_inputs_without_any_token_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("")

    with pytest.raises(DataError, match="no document has a token under 'text' in 1 files"):
        _run(tmp_path, tokenizer)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_ends_the_run_with_its_place_and_leaves_no_file(
    tmp_path: Path, tokenizer: Path, workers: int
) -> None:
    _write_inputs(tmp_path)
    with open(tmp_path / "in" / "a.jsonl", "a") as stream:
        stream.write("{bad\n")

    with pytest.raises(DataError, match=r"a\.jsonl, line 121 is not JSON"):
        _run(tmp_path, tokenizer, workers=workers)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("workers", [1, 3])
def test_bad_lines_are_skipped_under_every_key_and_counted(
    tmp_path: Path, tokenizer: Path, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_inputs(tmp_path)
    with open(tmp_path / "in" / "a.jsonl", "a") as stream:
        stream.write('{bad\n{"text": "one"}\n{"text": "last", "title": "t"}\n')
    (tmp_path / "in" / "c.jsonl.gz").write_bytes(b"no gzip")

    result = _run(tmp_path, tokenizer, workers=workers, on_error="skip", json_keys=("text", "title"))

    assert (result.documents, result.skipped) == (201, 3)
    assert [len(_documents(prefix)) for prefix in result.prefixes] == [201, 201]
    printed = capsys.readouterr().err
    for place in ("a.jsonl, line 121 is not JSON", "a.jsonl, line 122 has no key 'title'", "c.jsonl.gz is damaged"):
        assert f"{place}" in printed


def test_sentences_are_sequences_and_the_files_are_those_of_the_engines_builder(
    tmp_path: Path, tokenizer: Path
) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    (tmp_path / "in").mkdir()
    documents = [["One two. ", "Three Mr. four?\n", "Five!"], [], ["Six seven."], ["One. ", "Two."]]
    lines = [json.dumps({"text": "".join(sentences)}) for sentences in documents]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines))
    reference = load_tokenizer(tokenizer)

    for keep_newlines in (False, True):
        result = _run(
            tmp_path, tokenizer, split_sentences=True, append_eod=True, keep_newlines=keep_newlines, workers=2
        )
        (prefix,) = result.prefixes
        builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
        for sentences in documents:
            texts = [text if keep_newlines else text.strip() for text in sentences]
            ids = [reference.encode(text, add_special_tokens=False) for text in texts]
            if ids:
                ids[-1].append(reference.eos_token_id)
            builder.add_document(torch.tensor(sum(ids, [])), list(map(len, ids)))
        builder.finalize(str(tmp_path / "theirs.idx"))

        assert prefix.endswith("x_text_sentence")
        for suffix in (".bin", ".idx"):
            assert Path(prefix + suffix).read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
        assert (len(IndexedDataset(prefix)), result.documents, result.empty_documents) == (6, 4, 1)


def _with_largest_id(tokenizer: Path, folder: Path, largest: int) -> Path:
    """A copy whose last entry has the id ``largest``, with a gap before it."""
    load_tokenizer(tokenizer).save_pretrained(folder)
    saved = json.loads((folder / "tokenizer.json").read_text())
    rare = saved["model"]["vocab"].popitem()[0]
    saved["model"]["merges"] = [pair for pair in saved["model"]["merges"] if "".join(pair) != rare]
    saved["model"]["vocab"][rare] = largest
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    return folder


@pytest.mark.parametrize(("largest", "dtype"), [(65498, "<u2"), (65499, "<i4")])
def test_ids_beyond_the_number_of_entries_choose_the_type(
    tmp_path: Path, tokenizer: Path, largest: int, dtype: str
) -> None:
    _write_inputs(tmp_path)

    (prefix,) = _run(tmp_path, _with_largest_id(tokenizer, tmp_path / "gap", largest)).prefixes

    assert check_dataset(prefix).dtype == np.dtype(dtype)


def test_an_id_that_no_dataset_can_hold_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    _write_inputs(tmp_path)

    with pytest.raises(DataError, match="gap has the token id 2147483648, the largest .* is 2147483647"):
        _run(tmp_path, _with_largest_id(tokenizer, tmp_path / "gap", 2**31))


@pytest.mark.parametrize("when", ["before it answers", "while it writes"])
def test_a_worker_that_is_killed_ends_the_run(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    _write_inputs(tmp_path)
    (tmp_path / "in" / "c.txt").write_text("one")

    class Deadly(DocumentEncoder):
        def __call__(self, piece: Piece) -> EncodedPiece:
            encoded = super().__call__(piece)
            if isinstance(piece, TextFiles):
                if when == "before it answers":
                    os.kill(os.getpid(), signal.SIGKILL)
                # Half of it is a message that nobody will complete.
                threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGKILL)).start()
                large = dataclasses.replace(encoded.keys[0], tokens=bytes(50_000_000))
                return dataclasses.replace(encoded, keys=[large])
            return encoded

    monkeypatch.setattr(module, "DocumentEncoder", Deadly)
    with pytest.raises(RuntimeError, match="a tokenizing worker ended with exit code -9; .* use fewer workers"):
        _run(tmp_path, tokenizer, workers=2)
    assert list((tmp_path / "out").iterdir()) == []
    assert multiprocessing.active_children() == []


def test_an_end_token_that_does_not_exist_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    _write_inputs(tmp_path)
    loaded = load_tokenizer(tokenizer)
    loaded.eos_token = None
    loaded.save_pretrained(tmp_path / "no_end")

    assert _run(tmp_path, tmp_path / "no_end").documents == 200
    with pytest.raises(ConfigError, match="append_eod needs an end-of-sequence token, .*no_end has none"):
        _run(tmp_path, tmp_path / "no_end", append_eod=True)


def test_limits_saved_in_a_tokenizer_do_not_cut_documents(tmp_path: Path, tokenizer: Path) -> None:
    texts = _write_inputs(tmp_path)
    loaded = load_tokenizer(tokenizer)
    loaded.backend_tokenizer.enable_truncation(max_length=3)
    loaded.backend_tokenizer.enable_padding(length=10)
    loaded.save_pretrained(tmp_path / "limited")

    result = _run(tmp_path, tmp_path / "limited")

    reference = load_tokenizer(tokenizer)
    assert result.tokens == sum(len(reference.encode(text, add_special_tokens=False)) for text in texts)


def test_impossible_options_are_refused_at_once(tmp_path: Path, tokenizer: Path) -> None:
    _write_inputs(tmp_path)
    for options, message in (
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"json_keys": ()}, "must name at least one key"),
        ({"json_keys": ("a", "a")}, "json_keys='a a' must name at least one key, each once"),
        ({"on_error": "ignore"}, "on_error=ignore is not known; choose skip or fail"),
        ({"keep_newlines": True}, "keep_newlines needs split_sentences"),
        ({"split_sentences": True, "language": "english"}, "language=english is no ISO 639 code"),
    ):
        with pytest.raises(ConfigError, match=message):
            _run(tmp_path, tokenizer, **options)


RUN_FOREVER = """
import sys
from lightning_megatron.data.corpus import preprocess as module
from lightning_megatron.data.corpus.pieces import TextFiles

def endless(files, keys):
    print("started", flush=True)
    while True:
        yield TextFiles(paths=(str(files[0]),), num_bytes=1)

module.cut_into_pieces = endless
module.preprocess(module.PreprocessOptions(
    input=[sys.argv[1]], output_prefix=sys.argv[2], tokenizer=sys.argv[3], workers=int(sys.argv[4])))
"""


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


@pytest.mark.parametrize(
    ("sent", "workers"),
    [
        (signal.SIGINT, 2),
        *(pytest.param(each, 2, marks=pytest.mark.exhaustive) for each in (signal.SIGKILL, signal.SIGTERM)),
    ],
)
def test_an_interrupt_leaves_no_dataset_and_no_process(
    tmp_path: Path, tokenizer: Path, sent: signal.Signals, workers: int
) -> None:
    (tmp_path / "a.txt").write_text("one two three\n" * 100)
    arguments = [str(tmp_path / "a.txt"), str(tmp_path / "out" / "x"), str(tokenizer), str(workers)]
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_FOREVER, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # A shell has its background jobs ignore the interrupt, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.5)
        children = _children(process.pid)
        process.send_signal(sent)
        assert process.wait(timeout=30) != 0
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{child}") for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)

    assert len(children) == workers
    assert not [child for child in children if os.path.exists(f"/proc/{child}")]
    names = [path.name for path in (tmp_path / "out").iterdir()]
    assert not [name for name in names if not name.startswith(".")]
    assert sent == signal.SIGKILL or not names
