"""Read parts of Megatron's tensors from Hugging Face's files or any stored model, block by block, into their place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lightning_megatron.convert.filling import Filling
from lightning_megatron.convert.hugging_face_files import WeightFiles
from lightning_megatron.convert.legacy.names import VOCABULARY
from lightning_megatron.convert.matching import Match
from lightning_megatron.convert.pieces import Piece, Place, columns, index, padding, pieces
from lightning_megatron.convert.rules import Rule
from lightning_megatron.convert.stored.base import Key, StoredModel
from lightning_megatron.convert.targets.casting import cast
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import ModelConfig

BLOCK_BYTES = 8 << 20
"""What is read at a time; taking rows from it and converting them may hold three times as much besides."""

_GAP_BYTES = 1 << 20
"""Rows that are nearer to each other in a file are read at once, with what is between them."""


def rows_at_once(row_bytes: int) -> int:
    """Rows of a block."""
    return max(1, BLOCK_BYTES // max(1, row_bytes))


def read_rows(files: WeightFiles, names: Sequence[str], rule: Rule, place: Place, target: torch.Tensor) -> None:
    """Fill ``target`` with the part of a Megatron tensor that ``place`` says; rows of padding become zero.

    Args:
        files: What to read.
        names: The rule's tensors as the files call them.
        rule: How they make the Megatron tensor.
        place: Which part.
        target: Of ``place.size``, on any device and of any dtype.

    Raises:
        CheckpointError: If the files do not fill it.
    """
    filling = Filling(rule.megatron, target)
    filling.put(padding(place), 0)
    for piece in pieces(rule, place):
        read = _read_transposed if rule.transposed else _read
        read(files, names[piece.tensor], piece, place, filling)
    filling.whole()


def read_box(source: StoredModel, key: Key, start: Sequence[int], target: torch.Tensor) -> None:
    """Fill ``target`` with the box of a stored tensor that begins at ``start``; rows of padding become zero.

    Args:
        source: What to read, some rows at a time.
        key: Which tensor.
        start: First index along each axis.
        target: Of the box's shape, on any device and of any dtype.

    Raises:
        CheckpointError: If the source does not fill it, or a number does not fit into its dtype.
    """
    spec, filling = source.tensors[key], Filling(key.name, target)
    first, last = start[0], min(start[0] + target.shape[0], spec.shape[0])
    if key.name in VOCABULARY:
        filling.put(slice(max(0, last - first), None), 0)
    columns = tuple(slice(a, a + size) for a, size in zip(start[1:], target.shape[1:], strict=True))
    step = rows_at_once(spec.num_bytes // max(1, spec.shape[0]))
    for begin in range(first, last, step):
        rows = source.read(key, begin, min(begin + step, last))[:, *columns]
        filling.put(slice(begin - first, begin - first + len(rows)), cast(rows, target.dtype, key.name))
    filling.whole()


def _read(files: WeightFiles, name: str, piece: Piece, place: Place, filling: Filling) -> None:
    ours, theirs = piece.ours, piece.theirs
    if bool((theirs[1:] < theirs[:-1]).any()):
        theirs, order = theirs.sort()
        ours = ours[order]
    for first, last in _blocks(theirs, files.tensors[name].row_bytes):
        start, stop = int(theirs[first]), int(theirs[last - 1]) + 1
        block = files.rows(name, start, stop)
        if block.dim() > 1:
            block = block[:, columns(place)]
        filling.put(index(ours[first:last]), block[index(theirs[first:last] - start)])


def _read_transposed(files: WeightFiles, name: str, piece: Piece, place: Place, filling: Filling) -> None:
    """The file's rows are the target's columns."""
    wanted = columns(place)
    step = rows_at_once(files.tensors[name].row_bytes)
    for start in range(wanted.start, wanted.stop, step):
        stop = min(start + step, wanted.stop)
        block = files.rows(name, start, stop)[:, index(piece.theirs)]
        filling.put((index(piece.ours), slice(start - wanted.start, stop - wanted.start)), transposed(block))


def transposed(matrix: torch.Tensor) -> torch.Tensor:
    """A copy that is transposed: of contiguous memory torch makes it some times faster than of a part of a matrix."""
    return matrix.contiguous().t().contiguous()


def _blocks(rows: torch.Tensor, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut ascending ``rows`` where a gap is not worth reading, and into blocks of a bounded size.

    Yields:
        First and last + 1 position in ``rows``.
    """
    gap, most = max(1, _GAP_BYTES // max(1, row_bytes)), rows_at_once(row_bytes)
    cuts = ((rows[1:] - rows[:-1]) > gap).nonzero().flatten() + 1
    for run in torch.tensor_split(torch.arange(len(rows)), cuts.tolist()):
        first, end = int(run[0]), int(run[-1]) + 1
        while first < end:
            last = int(torch.searchsorted(rows[first:end], rows[first] + most)) + first
            yield first, last
            first = last


# ---- what may be wrong ----------------------------------------------------------------------------------------------


def unequal_copies(matched: Match, files: WeightFiles, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with tied copies, of whose rows the ``part``-th of ``parts`` are compared."""
    problems = []
    for copy, source in matched.copies.items():
        tensor = files.tensors[copy]
        rows, step = tensor.shape[0], rows_at_once(tensor.row_bytes)
        stop = rows * (part + 1) // parts
        for start in range(rows * part // parts, stop, step):
            end = min(start + step, stop)
            if not torch.equal(files.rows(copy, start, end), files.rows(source, start, end)):
                problems.append(
                    f"{copy!r} differs from {source!r}, to which the config ties it (if it should not be tied, set "
                    "tie_word_embeddings=false in config.json)"
                )
                break
    return problems


def raise_problems(problems: Sequence[str], files: WeightFiles, model: ModelConfig) -> None:
    """Raise one error about all of ``problems``, if there are any.

    Raises:
        CheckpointError: Each tensor that is missing, foreign, or of another shape or kind is named.
    """
    if problems:
        counted = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise CheckpointError(
            f"the weights in {files.directory} are not those of this {model.family} model ({model.task}), {counted}: "
            f"{'; '.join(problems)}. Use the weights that belong to this config, all of their files, unquantized"
        )
