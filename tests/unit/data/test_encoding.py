"""Text that is not of its encoding is refused with file and byte, or replaced and counted where that is asked for."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.cli.generate import read_prompts
from lightning_megatron.data.documents import (
    cut_into_pieces,
    read_documents,
    read_records,
    read_texts,
)
from lightning_megatron.data.encoding import Decoder, TextEncoding
from lightning_megatron.data.input_files import find_files
from lightning_megatron.data.preprocess import PreprocessOptions, preprocess
from lightning_megatron.data.tokenizer import load_tokenizer
from lightning_megatron.data.tokenizer_training import TokenizerTrainingOptions, train_tokenizer
from lightning_megatron.errors import ConfigError, DataError
from tests.cli.command import run_cli
from tests.unit.data.corpus import read_documents as read_dataset

TEXT = "Ein Café, 12 °C — »ja«"
"""Each letter is in cp1252; the dash is not in latin-1."""
LATIN = "Ein Café, 12 °C"


def _write(
    folder: Path,
    name: str,
    text: str,
    encoding: str,
) -> Path:
    """A file of one text: JSON lines, or the text itself, compressed if its name says so."""
    is_json = ".jsonl" in name
    content = json.dumps({"text": text}, ensure_ascii=False) if is_json else text
    data = content.encode(encoding)
    if name.endswith(".gz"):
        data = gzip.compress(data)
    (folder / name).write_bytes(data)
    return folder / name


def _read(path: Path, **encoding: Any) -> tuple[list[str], list[str], int]:
    """Texts, messages of bad documents, and number of replaced characters."""
    decoder = Decoder(TextEncoding(**encoding))
    texts: list[str] = []
    bad: list[str] = []
    for piece in cut_into_pieces(find_files([path])):
        documents, messages = read_documents(piece, ["text"], decoder)
        texts += [text for (text,) in documents]
        bad += messages
    return texts, bad, decoder.num_replaced


NAMES = ("a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz")


@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_are_not_utf8_are_refused_with_file_and_offset(
    tmp_path: Path, name: str
) -> None:
    path = _write(tmp_path, name, LATIN, "latin-1")
    offset = LATIN.index("é") + (len('{"text": "') if ".jsonl" in name else 0)
    texts, (message,), replaced = _read(path)
    assert texts == []
    assert replaced == 0
    assert str(path) in message
    assert f"is not utf-8: byte 0xe9 at offset {offset} of it" in message
    assert "encoding=latin-1" in message
    assert "errors=replace" in message
    with pytest.raises(DataError, match="is not utf-8: byte 0xe9"):
        list(read_texts(str(path)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("encoding", ["utf-8", "UTF8", "utf-8-sig", "cp1252"])
def test_each_encoding_gives_the_text(tmp_path: Path, name: str, encoding: str) -> None:
    assert _read(
        _write(tmp_path, name, TEXT, encoding),
        name=encoding,
    ) == ([TEXT], [], 0)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le"])
def test_wide_encodings_are_for_text_files(tmp_path: Path, encoding: str) -> None:
    assert _read(
        _write(tmp_path, "a.txt", TEXT, encoding),
        name=encoding,
    ) == ([TEXT], [], 0)
    lines = _write(tmp_path, "a.jsonl", TEXT, encoding)
    with pytest.raises(
        ConfigError, match=f"encoding={encoding}: expected one with the bytes of ASCII"
    ):
        train_tokenizer(
            TokenizerTrainingOptions(
                input=[lines], vocab_size=300, output=tmp_path / "new", encoding=encoding
            )
        )


@pytest.mark.parametrize("name", NAMES)
def test_replaced_characters_are_counted_without_the_texts_own(tmp_path: Path, name: str) -> None:
    data = f"own \ufffd, {LATIN}".encode()
    path = _write(tmp_path, name, "", "utf-8")
    damaged = data.replace("é".encode(), b"\xe9").replace("°".encode(), b"\xb0")
    content = b'{"text": "' + damaged + b'"}' if ".jsonl" in name else damaged
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    expected = data.decode().replace("é", "\ufffd").replace("°", "\ufffd")
    assert _read(path, errors="replace") == ([expected], [], 2)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32-be", "gb18030", "euc_jp"])
def test_own_replacement_characters_of_the_text_are_not_counted(
    tmp_path: Path, encoding: str
) -> None:
    own = "\ufffd" if encoding != "euc_jp" else ""  # which cannot write it
    path = _write(tmp_path, "a.txt", f"{own}a{own}", encoding)
    wrong = {"utf-16": b"\x00\xd8", "utf-32-be": b"\x00\x11\x00\x00"}.get(encoding, b"\xff")
    path.write_bytes(path.read_bytes() + wrong)
    assert _read(path, name=encoding, errors="replace") == ([f"{own}a{own}\ufffd"], [], 1)


def test_surrogates_are_refused_as_bytes_and_counted_as_escapes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a\xed\xa0\x80b"}\n')
    assert _read(path)[0] == []
    assert "is not utf-8: byte 0xed at offset 11 of it" in _read(path)[1][0]
    path.write_bytes(b'{"text": "\\ud800 \\ud83d\\ude42 \\udc00"}\n')
    assert _read(path) == (["\ufffd \U0001f642 \ufffd"], [], 2)


MARKED = [
    ("utf-8-sig", {"name": "utf-8"}, ""),
    ("utf-16", {"name": "utf-16"}, ""),
    ("utf-16", {"name": "utf-16-le"}, ""),
    ("utf-32", {"name": "utf-32"}, ""),
    ("utf-16", {}, "is not utf-8: it begins with the byte order mark of utf-16; give its encoding"),
    ("utf-32", {"errors": "replace"}, "begins with the byte order mark of utf-32"),
    (
        "utf-8-sig",
        {"name": "latin-1"},
        "is not latin-1: it begins with the byte order mark of utf-8",
    ),
    (
        "utf-16",
        {"name": "cp1252", "errors": "replace"},
        "begins with the byte order mark of utf-16",
    ),
]


@pytest.mark.parametrize(("written", "options", "message"), MARKED)
def test_byte_order_mark_is_dropped_or_names_the_encoding(
    tmp_path: Path, written: str, options: Any, message: str
) -> None:
    texts, bad, replaced = _read(
        _write(
            tmp_path,
            "a.txt",
            TEXT,
            written,
        ),
        **options,
    )
    assert texts == ([] if message else [TEXT])
    assert [message in problem for problem in bad] == ([True] if message else [])
    assert replaced == 0


def test_offset_counts_the_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfab\xe9")
    assert "byte 0xe9 at offset 5 of it" in _read(tmp_path / "a.txt")[1][0]


def test_json_lines_need_an_encoding_with_the_bytes_of_ascii(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"{}")
    for encoding in ("utf-16", "utf-32-le", "cp037", "utf-7"):
        with pytest.raises(
            ConfigError, match=f"encoding={encoding}: expected one with the bytes of ASCII"
        ):
            list(
                read_texts(
                    str(tmp_path),
                    decoder=Decoder(TextEncoding(name=encoding)),
                )
            )
    for encoding in ("latin-1", "cp1252", "shift_jis", "gb18030", "euc_kr", "big5", "koi8-r"):
        assert TextEncoding(name=encoding).extends_ascii


def test_prompts_and_instructions_are_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\n{"prompt": "caf\xe9", "completion": "x"}\n')
    message = r"a.jsonl, line 2 is not utf-8: byte 0xe9 at offset 15 of it; save it as UTF-8"
    with pytest.raises(DataError, match=message):
        list(read_records([tmp_path / "a.jsonl"]))
    (tmp_path / "prompts.txt").write_bytes(b"one\r\ntwo \xe9\n")
    with pytest.raises(
        ConfigError,
        match=r"prompts.txt is not utf-8: byte 0xe9 at offset 9 of it; save it as UTF-8",
    ):
        read_prompts(None, tmp_path / "prompts.txt", 1)
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfone\r\n\ntwo")
    assert read_prompts(None, tmp_path / "prompts.txt", 1) == ["one", "two"]


@pytest.mark.parametrize("name", ["", "no-such-codec", "rot13", "base64", "a\0b"])
def test_unknown_encodings_are_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match="expected a text encoding such as utf-8, latin-1 or utf-16"
    ):
        TextEncoding(name=name)


def test_commands_take_the_encoding_and_report_what_was_replaced(tmp_path: Path) -> None:
    path = _write(tmp_path, "a.txt", LATIN * 20, "latin-1")
    tokenizer = tmp_path / "tokenizer"
    train = [
        "train-tokenizer",
        "--input",
        str(path),
        "--vocab-size",
        "300",
        "--output",
        str(tokenizer),
    ]
    code, _, error = run_cli(tmp_path, *train)
    assert code == 2
    assert f"{path} is not utf-8: byte 0xe9 at offset 7" in error
    assert "Traceback" not in error
    assert not (tokenizer / "tokenizer.json").exists()
    code, output, _ = run_cli(tmp_path, *train, "--errors", "replace")
    assert code == 0
    assert "40 characters that are not of the encoding were replaced by U+FFFD" in output

    prefix = str(tmp_path / "x")
    options: dict[str, Any] = {
        "input": [path],
        "output_prefix": prefix,
        "tokenizer": tokenizer,
        "encoding": "latin-1",
        "workers": 2,
    }
    assert preprocess(PreprocessOptions(**options)).replaced == 0
    ((tokens,),) = read_dataset(f"{prefix}_text_document")[0]
    assert load_tokenizer(tokenizer).decode(tokens) == LATIN * 20
    again = {**options, "output_prefix": f"{prefix}2", "encoding": "utf-8", "errors": "replace"}
    assert preprocess(PreprocessOptions(**again)).replaced == 40
