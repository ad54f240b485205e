"""Which texts does an input hold, and where is each? JSON lines, tables, and files of text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lightning_megatron.data.corpus.bad_documents import BadDocuments
from lightning_megatron.data.corpus.documents import read_documents
from lightning_megatron.data.corpus.files import PLAIN_TEXT_KEY, check_keys, find_files, format_of
from lightning_megatron.data.corpus.pieces import cut_into_pieces
from lightning_megatron.data.samples.records import read_records
from lightning_megatron.errors import DataError

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a character, which JSON can spell and no tokenizer takes; ``preprocess`` replaces it too."""


def read_texts(path: str, key: str = PLAIN_TEXT_KEY) -> Iterator[tuple[str, str]]:
    """Each text with its place, ``FILE, line N``, or ``FILE`` where the whole file is one text.

    Args:
        path: A file, a folder or a pattern, as for ``preprocess``.
        key: What holds the text in .jsonl and .parquet files.

    Raises:
        DataError: With the place, if something is no text; if a file is missing or cannot be read.
    """
    files = find_files([path])
    check_keys(files, [key])
    for file in files:
        yield from _lines(file, key) if format_of(file).content == "json lines" else _documents(file, key)


def _lines(file: Path, key: str) -> Iterator[tuple[str, str]]:
    for place, record in read_records([file], example=f'{{"{key}": "..."}}'):
        if key not in record:
            names = ", ".join(map(repr, record)) or "none"
            raise DataError(f"{place} has the keys {names}, and no {key!r}; name the text so, or set json_key")
        text = record[key]
        if not isinstance(text, str):
            raise DataError(f"{place} has no string under {key!r} (but {type(text).__name__}); give the text as one")
        yield place, _SURROGATE.sub("\ufffd", text)


def _documents(file: Path, key: str) -> Iterator[tuple[str, str]]:
    is_table = format_of(file).content == "parquet"
    bad, number = BadDocuments("fail", print), 0
    for piece in cut_into_pieces([file], [key]):
        found = read_documents(piece, [key])
        bad.add(str(file), found.bad, found.num_bad, found.num_units)
        for (text,) in found.documents:
            number += 1
            yield (f"{file}, row {number}" if is_table else str(file)), text
