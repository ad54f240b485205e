"""Are the tokens on disk those of the tokenizer, in input order, for any number of workers?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_megatron.data.corpus import preprocess as module
from lightning_megatron.data.corpus.preprocess import PreprocessOptions, PreprocessResult, preprocess
from lightning_megatron.data.corpus.tokenizer import TokenizerTrainingOptions, load_tokenizer, train_tokenizer
from lightning_megatron.data.formats.legacy import LegacyDataset
from lightning_megatron.data.formats.mmap import check_dataset
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


@pytest.mark.parametrize("name", ["cached", "lazy"])
def test_the_older_format_holds_the_same_documents_as_int32(tmp_path: Path, tokenizer: Path, name: str) -> None:
    _write_inputs(tmp_path)
    (new,) = _run(tmp_path, tokenizer).prefixes
    result = _run(tmp_path, tokenizer, output_prefix=tmp_path / "old", dataset_impl=name, workers=2)

    old = LegacyDataset(result.prefixes[0])

    assert [[tokens.tolist()] for (tokens,) in old.documents()] == [[tokens] for tokens in _documents(new)]
    assert old.header.dtype == np.dtype("<i4")
    assert (result.documents, result.tokens) == (200, sum(map(len, _documents(new))))


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
    # Pieces so small that workers overtake each other.
    monkeypatch.setattr(module, "cut_into_pieces", lambda files: CUT(files, 500))
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


def test_documents_without_tokens_are_left_out_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, text in (("a", "one"), ("b", ""), ("c", "two")):
        (tmp_path / "in" / f"{name}.txt").write_text(text)

    result = _run(tmp_path, tokenizer, append_eod=True)

    assert (result.documents, result.empty_documents) == (2, 1)


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
    for options, message in (
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"json_keys": ()}, "must name at least one key"),
        ({"json_keys": ("a", "a")}, "json_keys='a a' must name at least one key, each once"),
        ({"dataset_impl": "infer"}, "dataset_impl=infer is not written; choose from mmap, cached, lazy"),
    ):
        with pytest.raises(ConfigError, match=message):
            _run(tmp_path, tokenizer, **options)


RUN_FOREVER = """
import sys
from lightning_megatron.data.corpus import preprocess as module
from lightning_megatron.data.corpus.documents import Piece

def endless(files):
    print("started", flush=True)
    while True:
        yield Piece(paths=(str(files[0]),), start=0, stop=0, is_json_lines=False, num_bytes=1)

module.cut_into_pieces = endless
module.preprocess(module.PreprocessOptions(
    input=[sys.argv[1]], output_prefix=sys.argv[2], tokenizer=sys.argv[3], workers=int(sys.argv[4])))
"""


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


@pytest.mark.parametrize(("sent", "workers"), [(signal.SIGINT, 2), (signal.SIGKILL, 2), (signal.SIGINT, 1)])
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

    assert len(children) == (workers if workers > 1 else 0)
    assert not [child for child in children if os.path.exists(f"/proc/{child}")]
    names = [path.name for path in (tmp_path / "out").iterdir()]
    assert not [name for name in names if not name.startswith(".")]
    assert sent == signal.SIGKILL or not names
