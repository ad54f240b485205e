"""Which documents come out of files of every kind, in which order, and what is said about what is none?"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.corpus import documents
from lightning_megatron.data.corpus.bad_documents import BadDocuments
from lightning_megatron.data.corpus.documents import read_documents
from lightning_megatron.data.corpus.files import find_files
from lightning_megatron.data.corpus.pieces import LineBlock, RowBatch, cut_into_pieces
from lightning_megatron.errors import DataError

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def _texts(
    *paths: Path, keys: tuple[str, ...] = ("text",), piece_bytes: int = 1 << 20, skip: list[str] | None = None
) -> list[tuple[str, ...]]:
    """All documents; with ``skip``, bad ones are left out and what is reported about them is put there."""
    bad = BadDocuments("fail" if skip is None else "skip", print if skip is None else skip.append)
    documents: list[tuple[str, ...]] = []
    for piece in cut_into_pieces(find_files(list(paths)), keys, piece_bytes):
        found = read_documents(piece, keys, stop_at_bad=skip is None)
        bad.add(piece.path, found.bad, found.num_bad, found.num_units)
        documents += found.documents
    return documents


def _lines(number: int) -> bytes:
    return b"".join(json.dumps({"text": f"{i} " * (i % 40), "id": i}).encode() + b"\n" for i in range(number))


def _write_table(path: Path, columns: dict[str, list[str | None]], rows_a_group: int = 100) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=rows_a_group, write_page_checksum=True)


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("line one\nline two\n")
    (tmp_path / "b.py.gz").write_bytes(gzip.compress(b"x = 1\n"))
    (tmp_path / "c.txt.zst").write_bytes(COMPRESS[".zst"](b"y"))

    assert _texts(tmp_path) == [("line one\nline two\n",), ("x = 1\n",), ("y",)]


def test_bytes_that_are_not_utf8_and_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "x.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude42"}\n')

    assert _texts(tmp_path) == [("caf\ufffd",), ("a\ufffdb",), ("🙂",)]


def test_json_lines_give_the_asked_keys_and_blank_lines_nothing(tmp_path: Path) -> None:
    lines = [json.dumps({"title": "t1", "text": "a"}), "", json.dumps({"text": "b", "title": "t2"}), "   "]
    (tmp_path / "x.jsonl").write_text("\r\n".join(lines))

    assert _texts(tmp_path, keys=("text", "title")) == [("a", "t1"), ("b", "t2")]


@pytest.mark.parametrize("compression", [".gz", ".zst"])
def test_a_compressed_file_gives_the_lines_of_the_plain_one_in_several_blocks(tmp_path: Path, compression: str) -> None:
    data = _lines(3000)
    (tmp_path / "plain.jsonl").write_bytes(data)
    # Two members or frames, as `cat` puts them together, cut in the middle of a line.
    packed = COMPRESS[compression](data[:50001]) + COMPRESS[compression](data[50001:])
    (tmp_path / f"packed.jsonl{compression}").write_bytes(packed)
    files = find_files([tmp_path / f"packed.jsonl{compression}"])

    pieces = list(cut_into_pieces(files, piece_bytes=20000))

    assert _texts(files[0], piece_bytes=20000) == _texts(tmp_path / "plain.jsonl")
    assert len(pieces) > 1
    assert all(isinstance(piece, LineBlock) and piece.lines.endswith(b"\n") for piece in pieces)
    assert sum(piece.num_bytes for piece in pieces) == len(packed)


@pytest.mark.parametrize("rows_a_group", [7, 1000])
def test_a_table_gives_its_columns_in_batches_smaller_than_its_row_groups(tmp_path: Path, rows_a_group: int) -> None:
    texts = [f"text {i} " * (i % 9) for i in range(500)]
    titles = [f"title {i}" for i in range(500)]
    _write_table(tmp_path / "x.parquet", {"title": titles, "other": titles, "text": texts}, rows_a_group)  # type: ignore[dict-item]
    files = find_files([tmp_path])

    pieces = list(cut_into_pieces(files, ("text", "title"), piece_bytes=2000))

    assert _texts(*files, keys=("text", "title"), piece_bytes=2000) == list(zip(texts, titles, strict=True))
    assert all(isinstance(piece, RowBatch) and len(piece.columns[0]) < 300 for piece in pieces)
    assert sum(piece.num_bytes for piece in pieces) == files[0].stat().st_size


BAD_LINES = [
    ('{"text": "unfinished', r"line 3 is not JSON \(.* at column 10\); correct or remove that line"),
    ('["text"]', "line 3 holds an array, not a JSON object"),
    ('{"body": "x", "id": 1}', "line 3 has no key 'text'; choose --json-keys from body, id"),
    ('{"text": 5}', "line 3 has a number under 'text', not a string"),
    ('{"text": null}', "line 3 has null under 'text', not a string"),
    ('"\xff', r"line 3 is not JSON \(its bytes are not UTF-8\)"),
    ("[" * 100000, "line 3 is not JSON"),
]


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_reported_with_file_and_line(tmp_path: Path, line: str, message: str, compression: str) -> None:
    good = json.dumps({"text": "good"})
    path = tmp_path / f"x.jsonl{compression}"
    path.write_bytes(COMPRESS[compression](f"{good}\n\n{line}\n{good}\n".encode("latin-1")))

    with pytest.raises(DataError, match=rf"x\.jsonl{compression}, {message}"):
        _texts(path)
    reported: list[str] = []
    assert _texts(path, skip=reported) == [("good",), ("good",)]
    assert len(reported) == 1
    assert re.search(rf"skipped: .*x\.jsonl{compression}, {message}", reported[0])


@pytest.mark.parametrize("compression", ["", ".gz"])
def test_line_numbers_count_through_all_pieces_of_a_file(tmp_path: Path, compression: str) -> None:
    for name in ("a", "b"):
        lines = [b"" if i % 5 == 0 else b'{"text": "x"}' if i % 37 else b"{" for i in range(1, 401)]
        (tmp_path / f"{name}.jsonl{compression}").write_bytes(COMPRESS[compression](b"\n".join(lines)))
    reported: list[str] = []

    _texts(tmp_path, piece_bytes=100, skip=reported)

    expected = [f"{name}.jsonl{compression}, line {i}" for name in "ab" for i in range(37, 401, 37) if i % 5]
    assert [re.findall(r"([ab]\.jsonl\S*, line \d+) ", line)[0] for line in reported] == expected


def test_rows_without_text_are_reported_with_their_number(tmp_path: Path) -> None:
    _write_table(tmp_path / "x.parquet", {"text": ["a", None, "c", None]}, rows_a_group=2)

    with pytest.raises(DataError, match=r"x\.parquet, row 2 has no text under 'text': null"):
        _texts(tmp_path)
    reported: list[str] = []
    assert _texts(tmp_path, piece_bytes=1, skip=reported) == [("a",), ("c",)]
    assert [line.split(" has ")[0].split(", ")[1] for line in reported] == ["row 2", "row 4"]


def test_tables_without_such_a_column_of_strings_are_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"n": [1], "t": [["a"]]}), tmp_path / "x.parquet")

    for key, message in (("text", "no column 'text'; choose --json-keys from n, t"), ("n", "column 'n' of type int64")):
        with pytest.raises(DataError, match=rf"x\.parquet has (a )?{message}"):
            _texts(tmp_path, keys=(key,))


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst", "x.txt.gz", "x.parquet"])
@pytest.mark.parametrize("damage", ["cut", "foreign", "bytes"])
def test_a_damaged_file_is_named_and_the_rest_of_it_is_one_error(tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / name
    if name.endswith("parquet"):
        _write_table(path, {"text": [f"text {i}" for i in range(5000)]})
    else:
        path.write_bytes(COMPRESS[path.suffix](_lines(5000)))
    data = path.read_bytes()
    middle = len(data) // 2
    flipped = bytes(byte ^ 0x55 for byte in data[middle : middle + 50])
    damaged = {"cut": data[:-9], "foreign": b"plain text" * 20, "bytes": data[:middle] + flipped + data[middle + 50 :]}
    path.write_bytes(damaged[damage])
    (tmp_path / "y.jsonl").write_text('{"text": "after"}\n')

    with pytest.raises(DataError, match=rf"{name} (is damaged|ends in the middle)"):
        _texts(tmp_path)
    reported: list[str] = []
    assert _texts(tmp_path, skip=reported)[-1] == ("after",)
    assert len(reported) == 1


@pytest.mark.parametrize("piece_bytes", [1000, 1 << 20])
def test_of_a_file_that_is_cut_off_the_whole_lines_are_kept(tmp_path: Path, piece_bytes: int) -> None:
    packed = gzip.compress(_lines(5000))
    (tmp_path / "x.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "plain.jsonl").write_bytes(_lines(5000))
    expected = _texts(tmp_path / "plain.jsonl")
    reported: list[str] = []

    found = _texts(tmp_path / "x.jsonl.gz", piece_bytes=piece_bytes, skip=reported)

    assert 1500 < len(found) < 3500
    assert found == expected[: len(found)]
    assert ["x.jsonl.gz ends in the middle" in line for line in reported] == [True]


def test_a_binary_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"ab\0cd")

    with pytest.raises(DataError, match=r"x\.bin is not a text file: it contains zero bytes"):
        _texts(tmp_path / "x.bin")


def test_only_the_first_bad_documents_are_reported_and_all_are_counted() -> None:
    reported: list[str] = []
    bad = BadDocuments("skip", reported.append)
    (piece,) = [LineBlock(path="x", lines=b"{\n" * 15, num_bytes=30)]
    for _ in range(4):
        found = read_documents(piece, ["text"], stop_at_bad=False)
        bad.add("x", found.bad, found.num_bad, found.num_units)

    assert bad.count == 60
    assert len(reported) == 21
    assert "line 16 " in reported[10]
    assert reported[-1] == "skipped: more of them are only counted"


@settings(max_examples=50, deadline=None)
@given(
    files=st.lists(st.one_of(st.text(max_size=40), st.lists(st.text(max_size=30), max_size=8)), min_size=1, max_size=8),
    piece_bytes=st.integers(1, 100),
    compression=st.sampled_from(list(COMPRESS)),
)
def test_pieces_of_any_size_give_the_same_documents(
    tmp_path_factory: pytest.TempPathFactory, files: list[str | list[str]], piece_bytes: int, compression: str
) -> None:
    folder = tmp_path_factory.mktemp("inputs")
    expected: list[tuple[str]] = []
    for number, content in enumerate(files):
        if isinstance(content, str):
            text = content.replace("\0", "")
            (folder / f"{number}.txt{compression}").write_bytes(COMPRESS[compression](text.encode()))
            expected.append((text,))
        else:
            data = "".join(json.dumps({"text": text}) + "\n" for text in content).encode()
            (folder / f"{number}.jsonl{compression}").write_bytes(COMPRESS[compression](data))
            expected += [(text,) for text in content]

    assert _texts(folder, piece_bytes=piece_bytes) == expected


@pytest.mark.parametrize("parser", ["orjson", "json"])
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"text": "a\\u00e9\xc3\xa9", "n": NaN}', ("a\u00e9\u00e9",)),
        (b'{"text": "a\\ud800b"}', ("a\ufffdb",)),
        (b'{"text": "first", "text": "last", "n": 123456789012345678901234567890}', ("last",)),
        (b'{"text": "a"} x', ["is not JSON (Extra data at column 15)", "correct or remove that line"]),
        (b'{"text": "\xff"}', ["is not JSON (its bytes are not UTF-8)", "correct or remove that line"]),
    ],
)
def test_a_line_is_read_alike_by_either_parser(
    line: bytes, expected: object, parser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert documents._orjson is not None
    if parser == "json":
        monkeypatch.setattr(documents, "_orjson", None)

    assert documents._parse_line(line, ["text"]) == expected
