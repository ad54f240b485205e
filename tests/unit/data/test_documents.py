"""Which documents come out of which inputs, in which order, and what is said about bad ones?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.data.corpus.documents import cut_into_pieces, find_files, read_documents
from lightning_megatron.errors import DataError


def _touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def _names(folder: Path, *inputs: str) -> list[str]:
    return [str(path.relative_to(folder)) for path in find_files([str(folder / text) for text in inputs])]


def _texts(*paths: Path, keys: tuple[str, ...] = ("text",), piece_bytes: int = 1 << 20) -> list[tuple[str, ...]]:
    pieces = cut_into_pieces(find_files(list(paths)), piece_bytes)
    return [document for piece in pieces for document in read_documents(piece, keys)]


def test_a_folder_gives_text_source_and_json_lines_files_sorted_by_path(tmp_path: Path) -> None:
    _touch(tmp_path, "b.txt", "a/z.py", "a/b.jsonl", "a.md", "image.png", "config.json", "C.TXT", "no_suffix")

    assert _names(tmp_path, ".") == ["C.TXT", "a/b.jsonl", "a/z.py", "a.md", "b.txt"]


def test_a_folder_search_leaves_out_hidden_files_caches_and_installed_packages(tmp_path: Path) -> None:
    _touch(tmp_path, "a.py", ".hidden.py", ".git/x.py", "__pycache__/x.py", "site-packages/x.py", "b/node_modules/x.js")

    assert _names(tmp_path, ".") == ["a.py"]
    assert _names(tmp_path, "site-packages") == ["site-packages/x.py"]


def test_inputs_keep_their_order_and_a_file_counts_once(tmp_path: Path) -> None:
    _touch(tmp_path, "a.txt", "b.txt", "c.txt")
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")

    assert _names(tmp_path, "c.txt", "*.txt", "a.txt") == ["c.txt", "a.txt", "b.txt"]


def test_a_pattern_gives_files_of_any_suffix_and_searches_folders(tmp_path: Path) -> None:
    _touch(tmp_path, "x/a.log", "x/b.log", "x/deep/c.log", "x/deep/d.txt")

    assert _names(tmp_path, "x/*.log") == ["x/a.log", "x/b.log"]
    assert _names(tmp_path, "x/**/*.log") == ["x/a.log", "x/b.log", "x/deep/c.log"]
    assert _names(tmp_path, "x/d*") == ["x/deep/d.txt"]


def test_a_file_named_by_itself_is_taken_whatever_its_suffix(tmp_path: Path) -> None:
    _touch(tmp_path, "LICENSE", "x.log")

    assert _names(tmp_path, "LICENSE", "x.log") == ["LICENSE", "x.log"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("absent.txt", r"absent\.txt does not exist; give an existing file"),
        ("*.nothing", r"\*\.nothing matches no file; check the pattern"),
        ("empty", r"empty holds no \.jsonl, \.txt or source file"),
    ],
)
def test_an_input_without_files_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(DataError, match=message):
        find_files([tmp_path / text])


def test_no_input_is_refused() -> None:
    with pytest.raises(DataError, match="no input path was given"):
        find_files([])


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("line one\nline two\n")
    (tmp_path / "b.py").write_text("x = 1\n")

    assert _texts(tmp_path) == [("line one\nline two\n",), ("x = 1\n",)]


def test_bytes_that_are_not_utf8_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")

    assert _texts(tmp_path) == [("caf�",)]


def test_a_binary_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"ab\0cd")

    with pytest.raises(DataError, match=r"x\.bin is not a text file: it contains zero bytes"):
        _texts(tmp_path / "x.bin")


def test_json_lines_give_the_asked_keys_and_blank_lines_nothing(tmp_path: Path) -> None:
    lines = [json.dumps({"title": "t1", "text": "a"}), "", json.dumps({"text": "b", "title": "t2"}), "   "]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))

    assert _texts(tmp_path, keys=("text", "title")) == [("a", "t1"), ("b", "t2")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "unfinished', r"line 3 is not JSON \(.*\); correct or remove that line"),
        ('["text"]', "line 3 holds a list, not a JSON object"),
        ('{"body": "x", "id": 1}', "line 3 has no key 'text'; choose --json-keys from body, id"),
        ('{"text": 5}', "line 3 has a int under 'text', not a string"),
        ('"\xff', "line 3 is not JSON"),
    ],
)
def test_a_bad_line_is_reported_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    good = json.dumps({"text": "good"})
    (tmp_path / "x.jsonl").write_bytes(f"{good}\n\n{line}\n{good}\n".encode("latin-1"))

    with pytest.raises(DataError, match=rf"x\.jsonl, {message}"):
        _texts(tmp_path)


def test_text_files_have_no_other_key_than_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")

    with pytest.raises(DataError, match=r"json keys title, body cannot be read from .*a\.txt"):
        _texts(tmp_path, keys=("title", "body"))


@settings(max_examples=60, deadline=None)
@given(
    files=st.lists(st.one_of(st.text(max_size=40), st.lists(st.text(max_size=30), max_size=8)), min_size=1, max_size=8),
    piece_bytes=st.integers(1, 100),
)
def test_pieces_of_any_size_give_the_same_documents(
    tmp_path_factory: pytest.TempPathFactory, files: list[str | list[str]], piece_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("inputs")
    expected: list[tuple[str]] = []
    for number, content in enumerate(files):
        if isinstance(content, str):
            data = content.replace("\0", "")
            (folder / f"{number}.txt").write_bytes(data.encode("utf-8"))
            expected.append((data,))
        else:
            (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in content))
            expected += [(text,) for text in content]

    assert _texts(folder, piece_bytes=piece_bytes) == expected


def test_pieces_account_for_every_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 300)
    (tmp_path / "b.jsonl").write_text('{"text": "y"}\n' * 50)
    files = find_files([tmp_path])

    pieces = list(cut_into_pieces(files, 100))

    assert sum(piece.num_bytes for piece in pieces) == sum(path.stat().st_size for path in files)
