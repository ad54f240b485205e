"""Text that any machine with Python has, as JSON lines: sources and documentation, and chats made of docstrings.

    python -m recipes.text packages --output runs/recipes/text/packages --megabytes 60
    python -m recipes.text chats --output runs/recipes/text/chats --megabytes 20

Nothing is downloaded. Files of equal content count once; their order is that of a hash of their paths.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDERS = (
    Path(sysconfig.get_path("stdlib")),
    Path(sysconfig.get_path("purelib")),
    Path("/usr/share/doc"),
)
"""Where text lies: the standard library, the installed packages, and Debian's documentation."""
SUFFIXES = (".py", ".rst", ".md", ".txt")
FILE_BYTES = 8_000_000
"""Size of a file of JSON lines; the first is what a tokenizer is trained on."""


def read_texts(
    folders: Sequence[Path], megabytes: float, suffixes: Sequence[str] = SUFFIXES
) -> list[str]:
    """Read distinct text files below ``folders``, ordered by hash of their paths, up to a total size."""
    paths = {
        path for folder in folders for suffix in suffixes for path in folder.rglob(f"*{suffix}")
    }
    texts: dict[bytes, str] = {}
    size = 0
    for path in sorted(paths, key=lambda path: hashlib.sha256(str(path).encode()).digest()):
        if size >= megabytes * 1e6:
            break
        if path.is_file() and (content := path.read_bytes()):
            digest = hashlib.sha256(content).digest()
            size += 0 if digest in texts else len(content)
            texts.setdefault(digest, content.decode(errors="replace"))
    return list(texts.values())


def chats(source: str) -> Iterator[dict[str, Any]]:
    """Yield a conversation about each documented function of a Python file.

    The questions are what the function does and how it is called; the answers are the first paragraph of its docstring
    and its signature.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        docstring = ast.get_docstring(node) or ""
        summary = " ".join(docstring.split("\n\n")[0].split())
        if not summary:  # also of a docstring of spaces alone
            continue
        signature = f"{node.name}({ast.unparse(node.args)})"
        yield {
            "messages": [
                {"role": "user", "content": f"What does {node.name} do?"},
                {"role": "assistant", "content": summary},
                {"role": "user", "content": "How is it called?"},
                {"role": "assistant", "content": signature},
            ]
        }


def write(records: Iterable[dict[str, Any]], folder: Path, megabytes: float) -> int:
    """Write JSON lines into files of ``FILE_BYTES`` in ``folder``, up to a total size; returns the number of lines."""
    folder.mkdir(parents=True)
    lines: list[str] = []
    size = total = count = number = 0
    for record in records:
        line = json.dumps(record) + "\n"
        lines.append(line)
        size += len(line)
        total += len(line)
        count += 1
        if size >= FILE_BYTES:
            (folder / f"{number:03}.jsonl").write_text("".join(lines))
            number += 1
            lines = []
            size = 0
        if total >= megabytes * 1e6:
            break
    if lines:
        (folder / f"{number:03}.jsonl").write_text("".join(lines))
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect text from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.text",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=("packages", "chats"))
    parser.add_argument("--output", type=Path, required=True, help="folder for the JSON lines")
    parser.add_argument("--megabytes", type=float, default=60.0, help="size of the text")
    options = parser.parse_args(arguments)
    if options.output.exists():
        parser.error(f"--output {options.output}: expected a new folder; remove it, or use it")
    records: Iterable[dict[str, Any]]
    if options.kind == "packages":
        records = ({"text": text} for text in read_texts(FOLDERS, options.megabytes))
    else:
        # A file gives a fifth of its size in chats at most.
        sources = read_texts(FOLDERS, 20 * options.megabytes, [".py"])
        records = (chat for source in sources for chat in chats(source))
    count = write(records, options.output, options.megabytes)
    print(f"{options.output}: {count:,} lines")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
