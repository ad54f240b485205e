"""Input files of a corpus: how paths are resolved, documents and their order, and errors for unreadable documents."""

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.documents import BadDocuments, cut_into_pieces, read_documents
from lightning_megatron.data.input_files import find_files
from lightning_megatron.errors import DataError

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def _read(
    *paths: Path,
    keys: tuple[str, ...] = ("text",),
    piece_bytes: int = 1 << 20,
    skip: list[str] | None = None,
) -> list[tuple[str, ...]]:
    """All documents; with ``skip``, bad documents are left out and their messages appended to it."""
    bar = SimpleNamespace(write=lambda line, file: None if skip is None else skip.append(line))
    bad = BadDocuments("fail" if skip is None else "skip", bar)
    documents: list[tuple[str, ...]] = []
    for piece in cut_into_pieces(find_files(list(paths)), keys, piece_bytes):
        read, messages = read_documents(piece, keys)
        bad.add(messages)
        documents += read
    return documents


def _lines(number: int) -> bytes:
    records = [{"text": f"{i} " * (i % 40), "id": i} for i in range(number)]
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _write_table(path: Path, columns: dict[str, Any]) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, write_page_checksum=True)


FOUND = [
    # A directory: text, source and JSON lines files sorted by path, but no hidden, cached or installed files.
    (
        ["."],
        ["C.TXT", "a/b.jsonl", "a/z.py", "b.txt", "c.jsonl.gz", "e.txt.zst", "f.parquet", "x/d.md"],
    ),
    (["site-packages"], ["site-packages/x.py"]),
    # A pattern: files of any suffix; directories are searched.
    (["x/*.log"], ["x/a.log"]),
    # Inputs keep their order; a file counts once; a file given by its path may have any suffix.
    (["no_suffix", "b.txt", "*.txt"], ["no_suffix", "b.txt"]),
]


def test_files_are_found_in_a_fixed_order(tmp_path: Path) -> None:
    names = "b.txt a/z.py a/b.jsonl image.png config.json C.TXT no_suffix .h.parquet c.jsonl.gz e.txt.zst f.parquet"
    more = "g.tar.gz x/a.log x/d.md .hidden.py .git/x.py __pycache__/x.py site-packages/x.py a/node_modules/x.js"
    for name in f"{names} {more}".split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    for inputs, expected in FOUND:
        assert [
            str(path.relative_to(tmp_path))
            for path in find_files([tmp_path / name for name in inputs])
        ] == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [("pip*", "pipe does not exist, or is not"), ("sub", "sub matches no file, or")],
)
def test_input_without_files_is_refused(tmp_path: Path, name: str, message: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "sub").mkdir()
    with pytest.raises(DataError, match=message):
        find_files([tmp_path / name])


def test_an_input_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match=r"a\.txt is given 2 times: expected each input once"):
        find_files([tmp_path / "a.txt", tmp_path / "*.txt", tmp_path / "a.txt"])


def test_documents_that_a_directory_search_leaves_out_are_told(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.json.gz", ".c.csv", "sub/d.jsonl.xz", "e.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    with pytest.warns(UserWarning, match=r"2 files are left out, such as .*b\.json\.gz: a dir"):
        assert find_files([tmp_path]) == [tmp_path / "a.jsonl"]
    (tmp_path / "sub" / "link.jsonl").symlink_to("../gone.jsonl")
    with pytest.raises(
        DataError, match=r"link\.jsonl: expected a link to a file, got one to \.\./g"
    ):
        find_files([tmp_path])
    (tmp_path / "gone.jsonl").write_text("{}\n")
    with pytest.warns(UserWarning, match="left out"):
        assert len(find_files([tmp_path])) == 2


def test_text_file_or_json_line_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("line one\nline two\n")
    (tmp_path / "b.py.gz").write_bytes(gzip.compress(b"x = 1\n"))
    (tmp_path / "c.txt.zst").write_bytes(COMPRESS[".zst"](b"\xef\xbb\xbfy"))
    (tmp_path / "latin.txt").write_bytes("café".encode())
    (tmp_path / "x.jsonl").write_text(
        '{"text": "a\\ud800b"}\r\n\n   \r\n{"text": "\\ud83d\\ude42", "title": "t"}'
    )

    expected = ["line one\nline two\n", "x = 1\n", "y", "café", "a\ufffdb", "🙂"]
    assert _read(tmp_path) == [(text,) for text in expected]
    (tmp_path / "x.jsonl").write_text('{"title": "t", "text": "a"}')
    assert _read(tmp_path / "x.jsonl", keys=("text", "title")) == [("a", "t")]


def test_parquet_is_read_in_batches_smaller_than_row_groups(tmp_path: Path) -> None:
    texts = [f"text {i} " * (i % 9) for i in range(500)]
    _write_table(tmp_path / "x.parquet", {"title": texts[::-1], "other": texts, "text": texts})
    pieces = list(
        cut_into_pieces(
            [tmp_path / "x.parquet"],
            ("text", "title"),
            piece_bytes=4096,
        )
    )
    rows = [row for piece in pieces for row in piece.rows]
    pairs = zip(texts, texts[::-1], strict=True)
    assert rows == [{"text": text, "title": title} for text, title in pairs]
    assert len(pieces) > 5
    assert sum(piece.num_bytes for piece in pieces) == (tmp_path / "x.parquet").stat().st_size


BAD: list[tuple[str, bytes, str]] = [
    (
        "text",
        b'{"text": "unfinished',
        r"line 3 is not JSON \(.* at column 10\); correct or remove that line",
    ),
    (
        "text",
        b'{"body": "x", "id": 1}',
        "line 3 has no key 'text'; choose the json key from body, id",
    ),
    ("text", b'{"text": 5}', "line 3 has the type int under 'text', expected a string"),
    ("text", b'"\xff', r"line 3 is not utf-8: byte 0xff at offset 1 of it; give its encoding"),
    ("text", b"", "row 2 has the type NoneType under 'text', expected a string"),
    ("t", b"", "row 1 has no key 't'; choose the json key from text, n"),
]


@pytest.mark.parametrize(("key", "line", "message"), BAD)
def test_invalid_document_is_reported_with_its_line_or_row(
    tmp_path: Path, key: str, line: bytes, message: str
) -> None:
    """A JSON line, or a row of a Parquet table where ``line`` is empty."""
    good = b'{"text": "good"}\n'
    (tmp_path / "x.jsonl").write_bytes(good + b"\n" + line + b"\n" + good)
    if not line:
        _write_table(tmp_path / "x.jsonl", {"text": ["good", None, "good"], "n": [1, 2, 3]})
        (tmp_path / "x.jsonl").rename(tmp_path / "x.parquet")
    with pytest.raises(DataError, match=rf"x\.\w+,? {message}"):
        _read(tmp_path, keys=(key,))
    reported: list[str] = []
    assert _read(
        tmp_path,
        keys=(key,),
        skip=reported,
    ) == [("good",), ("good",)] * (key == "text")
    assert re.search(rf"skipped: .*x\.\w+,? {message}", reported[0])
    assert len(reported) == (1 if key == "text" else 3)


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst", "x.txt.gz", "x.parquet"])
@pytest.mark.parametrize("damage", ["cut", "foreign", "bytes"])
def test_damaged_file_is_one_error_and_later_files_are_read(
    tmp_path: Path, name: str, damage: str
) -> None:
    path = tmp_path / name
    if name.endswith("parquet"):
        _write_table(path, {"text": [f"text {i}" for i in range(5000)]})
    else:
        path.write_bytes(COMPRESS[path.suffix](_lines(5000)))
    data = path.read_bytes()
    middle = len(data) // 2
    corrupted = bytes(byte ^ 0x55 for byte in data[middle : middle + 50])
    damaged = {
        "cut": data[:-9],
        "foreign": b"plain text" * 20,
        "bytes": data[:middle] + corrupted + data[middle + 50 :],
    }
    path.write_bytes(damaged[damage])
    (tmp_path / "y.jsonl").write_text('{"text": "after"}\n')

    with pytest.raises(DataError, match=rf"{name} cannot be read"):
        _read(tmp_path)
    reported: list[str] = []
    assert _read(tmp_path, skip=reported)[-1] == ("after",)
    assert len(reported) == 1


@settings(max_examples=50, deadline=None)
@given(
    files=st.lists(
        st.one_of(
            st.text(max_size=40),
            st.lists(st.text(max_size=30), max_size=8),
        ),
        min_size=1,
        max_size=8,
    ),
    piece_bytes=st.integers(1, 100),
    compression=st.sampled_from(list(COMPRESS)),
)
def test_piece_size_does_not_change_documents(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[str | list[str]],
    piece_bytes: int,
    compression: str,
) -> None:
    folder = tmp_path_factory.mktemp("inputs")
    expected: list[tuple[str]] = []
    for number, content in enumerate(files):
        if isinstance(content, str):
            text = content.replace("\0", "").lstrip("\ufeff")
            (folder / f"{number}.txt{compression}").write_bytes(
                COMPRESS[compression](text.encode())
            )
            expected.append((text,))
        else:
            data = "".join(json.dumps({"text": text}) + "\n" for text in content).encode()
            # Two concatenated gzip members or zstd frames, split in the middle of a line.
            compress = COMPRESS[compression]
            middle = len(data) // 2
            packed = compress(data[:middle]) + compress(data[middle:])
            (folder / f"{number}.jsonl{compression}").write_bytes(packed)
            expected += [(text,) for text in content]

    assert _read(folder, piece_bytes=piece_bytes) == expected
