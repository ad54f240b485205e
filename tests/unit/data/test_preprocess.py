"""Preprocessing writes the tokenizer's tokens in input order for any number of workers, or no dataset at all."""

import gzip
import importlib.util
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data import preprocess
from lightning_megatron.data.documents import cut_into_pieces
from lightning_megatron.data.indexed import check_dataset
from lightning_megatron.data.pieces import Piece
from lightning_megatron.data.preprocess import (
    DocumentEncoder,
    EncodedPiece,
    PreprocessOptions,
    PreprocessResult,
    split_sentences,
)
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.data.tokenizer_training import TokenizerTrainingOptions, train_tokenizer
from lightning_megatron.errors import ConfigError, DataError
from tests.marks import exhaustive
from tests.tokenizers import make_tokenizer
from tests.unit.data.corpus import read_documents


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "corpus.txt").write_text("one two three four five six seven " * 30)
    train_tokenizer(
        TokenizerTrainingOptions(
            input=[folder / "corpus.txt"], vocab_size=300, output=folder / "tokenizer"
        )
    )
    return folder / "tokenizer"


def _run(folder: Path, tokenizer: Path, **options: Any) -> PreprocessResult:
    defaults: dict[str, Any] = {
        "input": [folder / "in"],
        "output_prefix": folder / "out" / "x",
        "tokenizer": tokenizer,
    }
    return preprocess.preprocess(PreprocessOptions(**(defaults | options)))


def _documents(prefix: str) -> list[list[int]]:
    """Documents as Megatron-Core reads them, their sequences joined."""
    return [
        [token for tokens in document for token in tokens] for document in read_documents(prefix)[0]
    ]


def _write_inputs(folder: Path) -> list[str]:
    """Write two JSON lines files and return their texts in document order."""
    (folder / "in").mkdir()
    texts = [f"one two {number} three" * (1 + number % 7) for number in range(200)]
    lines = [json.dumps({"text": text, "title": f"title {text[:9]}"}) for text in texts]
    (folder / "in" / "a.jsonl").write_text("\n".join(lines[:120]) + "\n")
    (folder / "in" / "b.jsonl").write_text("\n".join(lines[120:]))
    return texts


@pytest.mark.parametrize("kind", ["limited", "python"])
def test_documents_are_complete_and_without_special_tokens(
    tmp_path: Path, tokenizer: Path, kind: str
) -> None:
    """With a tokenizer that was saved with truncation and padding, and with a slow (Python) tokenizer."""
    from transformers import ByT5Tokenizer

    texts = _write_inputs(tmp_path)
    saved = load_tokenizer(tokenizer) if kind == "limited" else ByT5Tokenizer()
    if kind == "limited":
        saved.backend_tokenizer.enable_truncation(max_length=3)
        saved.backend_tokenizer.enable_padding(length=10)
    saved.save_pretrained(tmp_path / "tokenizer")

    result = _run(tmp_path, tmp_path / "tokenizer", append_eod=True)

    reference = load_tokenizer(tokenizer if kind == "limited" else tmp_path / "tokenizer")
    expected = [
        [*reference.encode(text, add_special_tokens=False), reference.eos_token_id]
        for text in texts
    ]
    assert _documents(result.prefixes[0]) == expected
    assert (result.documents, result.tokens) == (len(texts), sum(map(len, expected)))


def test_a_beginning_that_documents_lack_is_told(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.txt").write_text("is it <s>?")
    folder = Path(make_tokenizer(tmp_path / "tokenizer", bos=True))
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "bos_token": "<s>"}))
    with pytest.warns(UserWarning, match="tokenizer puts <s> before texts, and documents get none"):
        result = _run(tmp_path, folder)
    ((first, *rest),) = _documents(result.prefixes[0])
    beginning = load_tokenizer(folder).bos_token_id
    assert first != beginning
    assert rest.count(beginning) == 1


def test_number_of_workers_does_not_change_the_output(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_inputs(tmp_path)
    (tmp_path / "in" / "c.py").write_text("print('one')\n")
    (tmp_path / "in" / "d.jsonl.gz").write_bytes(
        gzip.compress((tmp_path / "in" / "a.jsonl").read_bytes())
    )
    # Small pieces, so that workers finish out of order.
    monkeypatch.setattr(preprocess, "cut_into_pieces", partial(cut_into_pieces, piece_bytes=500))
    outputs = []
    for workers in (1, 2, 3):
        output_prefix = tmp_path / f"w{workers}"
        result = _run(tmp_path, tokenizer, workers=workers, output_prefix=output_prefix)
        (prefix,) = result.prefixes
        outputs.append((Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()))

    assert outputs[0] == outputs[1] == outputs[2]


def test_document_numbers_match_across_keys_and_output_is_not_overwritten(
    tmp_path: Path, tokenizer: Path
) -> None:
    (tmp_path / "in").mkdir()
    rows = [
        ("one", ""),
        ("", "two"),
        ("", ""),
        ("three four", "five"),
    ]
    lines = [json.dumps({"text": text, "title": title}) for text, title in rows]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines))
    result = _run(tmp_path, tokenizer, json_keys=("title", "text"))
    encode = load_tokenizer(tokenizer).encode
    titles_and_texts = (["", "two", "", "five"], ["one", "", "", "three four"])
    for prefix, texts in zip(result.prefixes, titles_and_texts, strict=True):
        assert _documents(prefix) == [encode(text) for text in texts]
        assert check_dataset(prefix).lengths.all()  # a document without tokens has no sequence
    assert (result.documents, result.empty_documents) == (4, 4)
    with pytest.raises(
        DataError,
        match=r"output_prefix=\S+/x would overwrite \S+x_text_document.idx, \S+.bin; choose",
    ):
        _run(tmp_path, tokenizer)


@pytest.mark.parametrize("workers", [1, 2])
def test_invalid_lines_end_the_run_or_are_skipped(
    tmp_path: Path, tokenizer: Path, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_inputs(tmp_path)
    with open(tmp_path / "in" / "a.jsonl", "a") as stream:
        stream.write('{bad\n{"text": "one"}\n{"text": "last", "title": "t"}\n')
    (tmp_path / "in" / "c.jsonl.gz").write_bytes(b"no gzip")

    with pytest.raises(DataError, match=r"a\.jsonl, line 121 is not JSON"):
        _run(tmp_path, tokenizer, workers=workers)
    assert list((tmp_path / "out").iterdir()) == []
    result = _run(
        tmp_path, tokenizer, workers=workers, on_error="skip", json_keys=("text", "title")
    )

    assert (result.documents, result.skipped) == (201, 3)
    assert [len(_documents(prefix)) for prefix in result.prefixes] == [201, 201]
    printed = capsys.readouterr().err
    for message in (
        "a.jsonl, line 121 is not JSON",
        "a.jsonl, line 122 has no key 'title'",
        "c.jsonl.gz cannot be read",
    ):
        assert message in printed


@pytest.mark.parametrize("keep_newlines", [False, True])
def test_sentences_become_sequences_of_a_document(
    tmp_path: Path, tokenizer: Path, keep_newlines: bool
) -> None:
    (tmp_path / "in").mkdir()
    texts = [["One two. ", "Three Mr. four?\n", "Five!"], [], ["Six seven."]]
    lines = [json.dumps({"text": "".join(sentences)}) for sentences in texts]
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines))
    (prefix,) = _run(
        tmp_path, tokenizer, split_sentences=True, append_eod=True, keep_newlines=keep_newlines
    ).prefixes
    reference = load_tokenizer(tokenizer)
    ids = [
        [reference.encode(each if keep_newlines else each.strip()) for each in sentences]
        for sentences in texts
    ]
    for document in filter(None, ids):
        document[-1].append(reference.eos_token_id)
    assert prefix.endswith("x_text_sentence")
    assert read_documents(prefix)[0] == ids


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="aB.!? \n\r\t\"'()1é。\u2029\u00a0\u3000\u200b🙂-", max_size=40),
    st.integers(1, 2),
)
def test_sentence_splitting_loses_no_character(text: str, times: int) -> None:
    long = text * (1 if times == 1 else 400)  # the library splits long texts again

    assert "".join(split_sentences(long, "en", True)) == (long if long.strip() else "")
    dropped = split_sentences(long, "en", False)
    assert all(dropped)
    assert "".join("".join(dropped).split()) == "".join(long.split())


def test_invalid_options_and_inputs_are_refused(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    _write_inputs(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    without_eos = load_tokenizer(tokenizer)
    without_eos.eos_token = None
    without_eos.save_pretrained(tmp_path / "without_eos")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"one": 0}))).save_pretrained(
        tmp_path / "words"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for options, message in (
        ({"input": [tmp_path / "empty.txt"]}, "no document has a token under 'text' in 1 files"),
        (
            {"tokenizer": tmp_path / "words"},
            r"words cannot encode a text \(.*UNK.*\); use another tokenizer",
        ),
        (
            {"tokenizer": tmp_path / "without_eos", "append_eod": True},
            "needs an eos_token, .*without_eos has none",
        ),
        (
            {"json_keys": ("text", "a/b")},
            "json_keys='text a/b': expected keys, each once, without a slash",
        ),
        ({"split_sentences": True}, r"split_sentences needs the library sentencex; .*\[data\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            _run(tmp_path, **({"tokenizer": tokenizer} | options))
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("when", ["before sending", "while sending"])
def test_killed_worker_ends_the_run(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    _write_inputs(tmp_path)
    (tmp_path / "in" / "c.txt").write_text("one")

    class KilledEncoder(DocumentEncoder):
        def __call__(self, piece: Piece) -> EncodedPiece:
            encoded = super().__call__(piece)
            if piece.files:
                if when == "before sending":
                    os.kill(os.getpid(), signal.SIGKILL)
                # Killed while it sends a large message.
                threading.Timer(
                    0.005,
                    os.kill,
                    (os.getpid(), signal.SIGKILL),
                ).start()
                encoded.keys[0] = (bytes(50_000_000), *encoded.keys[0][1:])
            return encoded

    monkeypatch.setattr(preprocess, "DocumentEncoder", KilledEncoder)
    with pytest.raises(
        RuntimeError,
        match="a tokenizing worker failed; .*memory may have run out: DataLoader worker",
    ):
        _run(tmp_path, tokenizer, workers=2)
    assert list((tmp_path / "out").iterdir()) == []
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    "sent",
    [signal.SIGINT, exhaustive(signal.SIGTERM)],
)
def test_interrupt_leaves_no_dataset_and_no_process(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()

    def endless(
        files: list[Path], keys: list[str], max_document_bytes: int | None
    ) -> Iterator[Piece]:
        started.set()
        while True:
            yield Piece(files=(str(files[0]),), num_bytes=1)

    def run() -> None:
        # Shells make background jobs, and so their children, ignore SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _run(tmp_path, tokenizer, input=[tmp_path / "a.txt"], workers=2)

    monkeypatch.setattr(preprocess, "cut_into_pieces", endless)
    (tmp_path / "a.txt").write_text("one two three\n" * 100)
    process = context.Process(target=run)
    process.start()
    assert started.wait(200)
    time.sleep(0.5)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid or 0, sent)
    process.join(200)
    deadline = time.monotonic() + 10
    while (
        any(os.path.exists(f"/proc/{child}") for child in children) and time.monotonic() < deadline
    ):
        time.sleep(0.05)

    assert process.exitcode
    assert len(children) == 2
    assert not [child for child in children if os.path.exists(f"/proc/{child}")]
    assert not list((tmp_path / "out").iterdir())
