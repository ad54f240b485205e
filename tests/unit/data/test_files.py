"""Which files do inputs stand for, in which order, and what is said about those that cannot be used?"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.data.corpus import files
from lightning_megatron.data.corpus.files import FileFormat, find_files, format_of
from lightning_megatron.errors import ConfigError, DataError


def _touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def _names(folder: Path, *inputs: str) -> list[str]:
    return [str(path.relative_to(folder)) for path in find_files([str(folder / text) for text in inputs])]


def test_a_folder_gives_text_source_and_json_lines_files_sorted_by_path(tmp_path: Path) -> None:
    _touch(tmp_path, "b.txt", "a/z.py", "a/b.jsonl", "a.md", "image.png", "config.json", "C.TXT", "no_suffix")
    _touch(tmp_path, "c.jsonl.gz", "d.jsonl.zst", "e.txt.gz", "f.parquet", "g.tar.gz", ".h.parquet")

    found = ["C.TXT", "a/b.jsonl", "a/z.py", "a.md", "b.txt", "c.jsonl.gz", "d.jsonl.zst", "e.txt.gz", "f.parquet"]
    assert _names(tmp_path, ".") == found


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
        ("x" * 300, r"x cannot be read \(File name too long\)"),
        ("~nobody_of_this_name/x", r"x does not exist"),
        ("pipe", r"pipe is neither a file nor a folder"),
        ("pip*", r"pipe is neither a file nor a folder"),
        ("broken*", r"broken\.txt does not exist"),
        ("empty", r"empty holds no \.jsonl, \.parquet, \.txt or source file"),
    ],
)
def test_an_input_without_files_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken.txt").symlink_to("nothing")

    with pytest.raises(DataError, match=message):
        find_files([tmp_path / text])


def test_a_folder_that_cannot_be_searched_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _touch(tmp_path, "a.txt", "closed/b.txt")

    def scan(path: str) -> Any:  # root may read all folders
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(DataError, match=r"closed cannot be searched \(Permission denied\)"):
        find_files([tmp_path])


@pytest.mark.parametrize(
    ("name", "content", "compression"),
    [
        ("a.jsonl", "json lines", ""),
        ("a.JSON.GZ", "json lines", ".gz"),
        ("a.jsonl.zst", "json lines", ".zst"),
        ("a.parquet", "parquet", ""),
        ("a.txt.zst", "text", ".zst"),
        ("a.gz", "text", ".gz"),
        ("LICENSE", "text", ""),
    ],
)
def test_the_name_says_the_format(name: str, content: str, compression: str) -> None:
    assert format_of(name) == FileFormat(content=content, compression=compression)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "library"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    _touch(tmp_path, "a.jsonl", name)
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=rf"{name} needs the library {library}, .* pip install .*\[data\]"):
        find_files([tmp_path])
