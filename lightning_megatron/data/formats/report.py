"""How is the description of a dataset shown: as text, as JSON, as a picture?"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_megatron.data.formats.description import DatasetDescription, DocumentPreview
from lightning_megatron.data.formats.distribution import Bin
from lightning_megatron.errors import DataError

_BAR_WIDTH = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_MOST_CHARACTERS = 400
"""Characters of a document that are shown."""
_MOST_NUMBERS = 64
"""Tokens of a document that are shown as numbers."""
_BINS_OF_TEXT, _BINS_OF_PICTURE = 10, 40
_BARS, _MARKS = "#3b6fb6", "#d9622b"


def as_text(description: DatasetDescription, previews: Sequence[DocumentPreview]) -> str:
    """A report of a screen or so for a terminal."""
    header, lengths = description.header, description.lengths
    rows = [
        ("format", header.format),
        ("documents", f"{header.num_documents:,}"),
        ("sequences", f"{header.num_sequences:,}{_sequences_of_a_document(description)}"),
        ("tokens", f"{description.num_tokens:,}"),
        ("dtype", f"{header.dtype}, {header.dtype.itemsize} bytes a token"),
        ("size", f".bin {_size(header.bin_bytes)}, .idx {_size(header.idx_bytes)}"),
        ("lengths", ", ".join(f"{name} {number:,}" for name, number in lengths.summary().items())),
    ]
    if description.modes is not None:
        pairs = zip(description.modes.values.tolist(), description.modes.counts.tolist(), strict=True)
        rows.append(("modes", ", ".join(f"{count:,} of mode {mode}" for mode, count in pairs)))
    if header.remark is not None:
        rows.append(("note", header.remark))
    lines = [header.prefix, *(f"  {name:9}  {value}" for name, value in rows)]
    lines += ["", "Sequences by length in tokens", *_bars(lengths.bins(_BINS_OF_TEXT), lengths.count)]
    for preview in previews:
        unit = "token" if preview.num_tokens == 1 else "tokens"
        lines += ["", f"Document {preview.number}, {preview.num_tokens:,} {unit}", *_shown(preview)]
    return "\n".join(lines)


def as_json(description: DatasetDescription, previews: Sequence[DocumentPreview]) -> dict[str, Any]:
    """The same for programs: a dictionary of JSON's types."""
    header, per_document, modes = description.header, description.sequences_per_document, description.modes
    result: dict[str, Any] = {
        "kind": "dataset",
        "prefix": header.prefix,
        "format": header.format,
        "documents": header.num_documents,
        "sequences": header.num_sequences,
        "tokens": description.num_tokens,
        "dtype": str(header.dtype),
        "bin_bytes": header.bin_bytes,
        "idx_bytes": header.idx_bytes,
        "lengths": description.lengths.summary(),
        "histogram": [asdict(each) for each in description.lengths.bins(_BINS_OF_TEXT)],
        "sequences_per_document": None if per_document is None else per_document.summary(),
        "modes": None
        if modes is None
        else {str(mode): int(count) for mode, count in zip(modes.values, modes.counts, strict=True)},
        "note": header.remark,
    }
    if previews:
        result["first_documents"] = [asdict(preview) for preview in previews]
    return result


def draw_lengths(description: DatasetDescription, path: Path) -> None:
    """Write a picture of the histogram of lengths as PNG; an older one is replaced when it is complete.

    Raises:
        DataError: If ``path`` cannot be written.
    """
    # The figure class draws without pyplot, which would choose a backend for the whole process.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.2), dpi=150, layout="constrained")
    _draw_histogram(figure, description)
    staging = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(staging, format="png")
        os.replace(staging, path)
    except OSError as error:
        raise DataError(f"png={path} cannot be written ({error.strerror}); give a file that can be") from error
    finally:
        with contextlib.suppress(OSError):
            staging.unlink()


def _draw_histogram(figure: Any, description: DatasetDescription) -> None:
    header, lengths = description.header, description.lengths
    axes = figure.add_subplot()
    drawn = [each for each in lengths.bins(_BINS_OF_PICTURE) if each.first > 0]
    heights: list[float] = [each.count for each in drawn]
    if lengths.is_wide:
        # By their widths on the axis: bins begin at integers, so neighbours are not equally wide where these are small.
        heights = [each.count / math.log2((each.last + 1) / each.first) for each in drawn]
        axes.set_xscale("log", base=2)
    widths = [each.last + 1 - each.first for each in drawn]
    axes.bar([each.first for each in drawn], heights, widths, align="edge", color=_BARS, linewidth=0)
    for axis in (axes.xaxis, axes.yaxis):  # plain numbers: nobody calls a length 2^10
        axis.set_major_formatter("{x:,.0f}")
    axes.yaxis.get_major_locator().set_params(integer=True)
    for name, share, style in (("median", 0.5, "-"), ("p90", 0.9, "--"), ("p99", 0.99, ":")):
        value = lengths.quantile(share)
        if value > 0:  # an empty sequence has no place on the axis
            axes.axvline(value, color=_MARKS, linewidth=1.4, linestyle=style, label=f"{name} {value:,}")
    empty = int(lengths.counts[lengths.values == 0].sum())
    axes.set_title(
        f"{Path(header.prefix).name}: {header.num_documents:,} documents, {description.num_tokens:,} tokens"
        + (f", {empty:,} empty sequences not shown" if empty else "")
    )
    axes.set_xlabel("tokens of a sequence" + (", logarithmic" if lengths.is_wide else ""))
    axes.set_ylabel("sequences" + (" per doubling of the length" if lengths.is_wide else ""))
    axes.grid(visible=True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if lengths.maximum > 0:
        figure.legend(loc="outside lower center", ncols=3, frameon=False)


def _sequences_of_a_document(description: DatasetDescription) -> str:
    per_document = description.sequences_per_document
    if per_document is None:
        return ""
    if per_document.minimum == per_document.maximum:
        return f", {per_document.minimum} a document"
    return (
        f", {per_document.mean:,.1f} a document ({per_document.minimum:,} to {per_document.maximum:,},"
        f" median {per_document.quantile(0.5):,})"
    )


def _size(num_bytes: int) -> str:
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    size, unit = float(num_bytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{num_bytes:,} bytes ({size:.3g} {unit})"


def _bars(bins: Sequence[Bin], total: int) -> list[str]:
    tallest = max(each.count for each in bins)
    names = [f"{each.first:,}" if each.first == each.last else f"{each.first:,} - {each.last:,}" for each in bins]
    name_width, count_width = max(map(len, names)), len(f"{tallest:,}")
    return [
        f"  {name:>{name_width}}  {_bar(each.count / tallest):{_BAR_WIDTH}}  {each.count:>{count_width},}"
        f"  {each.count / total:6.1%}"
        for name, each in zip(names, bins, strict=True)
    ]


def _bar(share: float) -> str:
    eighths = round(share * _BAR_WIDTH * 8)
    if share > 0:
        eighths = max(eighths, 1)  # few are not none
    full, rest = divmod(eighths, 8)
    return _EIGHTHS[8] * full + (_EIGHTHS[rest] if rest else "")


def _shown(preview: DocumentPreview) -> list[str]:
    if preview.text is None:
        shown = preview.tokens[:_MOST_NUMBERS]
        return [f"  {' '.join(map(str, shown))}{' …' if len(shown) < preview.num_tokens else ''}"]
    text = preview.text
    is_cut = len(text) > _MOST_CHARACTERS or len(preview.tokens) < preview.num_tokens
    # What a terminal would obey is shown as Python writes it.
    lines = text[:_MOST_CHARACTERS].split("\n")
    safe = ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines]
    return [f"  {line}" for line in safe[:-1]] + [f"  {safe[-1]}{' …' if is_cut else ''}"]
