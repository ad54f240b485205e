"""How do a Hugging Face model's weights get into a model that is split over ranks? Each rank reads only its own rows.

Nothing is copied before every tensor of the files and of the model is accounted for, on all ranks. Then each rank walks
over its shards and reads the rows they consist of, a block at a time, straight into the parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from lightning_megatron.convert.hugging_face_files import WeightFiles, open_weights
from lightning_megatron.convert.matching import Expected, Match, match
from lightning_megatron.convert.pieces import Piece, Shard, columns, index, names_of, pieces, shapes_of, shards_of
from lightning_megatron.convert.registry import family_of
from lightning_megatron.convert.rules import Rule
from lightning_megatron.engine.agreement import on_all_ranks_alike
from lightning_megatron.engine.groups import host_group
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import ModelConfig

BLOCK_BYTES = 8 << 20
"""What is read at a time; taking rows from it and converting them may hold three times as much besides."""
BAR_FROM_BYTES = 10**9
"""Smaller models are there before anyone would look at a progress bar."""

_GAP_BYTES = 1 << 20
"""Rows that are nearer to each other in a file are read at once, with what is between them."""
_TIMEOUT = timedelta(minutes=30)

_log = logging.getLogger(__name__)


@torch.no_grad()
def load_hugging_face(chunks: Iterable[Any], model: ModelConfig, path: str | Path) -> frozenset[str]:
    """Fill this rank's model chunks with the weights of a Hugging Face model directory. Every rank must call.

    Rows that pad the vocabulary become zero. A head that the files lack altogether (a classifier that is to be trained
    on a pretrained model) keeps the weights it has, with a warning that names it; tensors of other heads are left out.

    Args:
        chunks: This rank's model chunks.
        model: The description that they were built from.
        path: The directory; see ``open_weights``.

    Returns:
        Megatron's keys of the tensors that the files do not have.

    Raises:
        CheckpointError: If the files are missing or damaged, or are not those of this model; every tensor that is
            missing, superfluous, or of another shape or kind is named. On all ranks alike, before anything is changed.
    """
    rules = family_of(model.family).rules(model)
    shards = shards_of(chunks, rules, model)
    files = on_all_ranks_alike(lambda: open_weights(path))
    expected = _expected_on_all_ranks(rules, shards)
    matched = match(expected, files.tensors, family_of(model.family), model)
    _check(matched, files, model)
    on_all_ranks_alike(lambda: _fill(shards, rules, matched, files))
    return frozenset(expected[name].megatron for name in matched.new)


# ---- what must be there ---------------------------------------------------------------------------------------------


def _expected_on_all_ranks(rules: Sequence[Rule], shards: Sequence[Shard]) -> dict[str, Expected]:
    """Every tensor of the whole model, in the order of the rules."""
    mine = {
        (shard.place.rule, shard.place.layer if shard.place.layer is not None else -1): shapes_of(
            rules[shard.place.rule], shard.place
        )
        for shard in shards
    }
    # A stage of another copy of the model has nothing to add.
    is_first = any(shard.is_first_copy for shard in shards)
    places: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
    for theirs in _gathered(mine if is_first else {}):
        places |= theirs
    expected = {}
    for (number, layer), shapes in sorted(places.items()):
        rule = rules[number]
        for name, shape in zip(names_of(rule, layer), shapes, strict=True):
            expected[name] = Expected(shape=shape, megatron=rule.megatron)
    return expected


def _gathered(mine: Any) -> list[Any]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine, group=host_group(_TIMEOUT))
    return parts


def _of_all_ranks(mine: list[str]) -> list[str]:
    return list(dict.fromkeys(problem for theirs in _gathered(mine) for problem in theirs))


def _check(matched: Match, files: WeightFiles, model: ModelConfig) -> None:
    """Raise on all ranks alike if anything is wrong; say what is left out."""
    # Nodes with disks of their own may see other files.
    problems = _of_all_ranks(matched.problems)
    if not problems:
        # Tied copies are compared only where the rest is right, each rank a part of the rows.
        problems = _of_all_ranks(on_all_ranks_alike(lambda: _unequal_copies(matched, files)))
    if problems:
        counted = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise CheckpointError(
            f"the weights in {files.directory} are not those of this {model.family} model ({model.task}), {counted}: "
            f"{'; '.join(problems)}. Use the weights that belong to this config, all of their files, unquantized"
        )
    if dist.get_rank() != 0:
        return
    if matched.new:
        _log.warning("not in %s and newly initialised: %s", files.directory, ", ".join(matched.new))
    if matched.ignored:
        _log.warning("of another head in %s and left out: %s", files.directory, ", ".join(matched.ignored))


def _unequal_copies(matched: Match, files: WeightFiles) -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    problems = []
    for copy, source in matched.copies.items():
        tensor = files.tensors[copy]
        rows = tensor.shape[0]
        step = max(1, BLOCK_BYTES // max(1, tensor.row_bytes))
        stop = rows * (rank + 1) // size
        for start in range(rows * rank // size, stop, step):
            end = min(start + step, stop)
            if not torch.equal(files.rows(copy, start, end), files.rows(source, start, end)):
                problems.append(
                    f"{copy!r} differs from {source!r}, to which the config ties it (if it should not be tied, set "
                    "tie_word_embeddings=false in config.json)"
                )
                break
    return problems


# ---- reading --------------------------------------------------------------------------------------------------------


def _fill(shards: Sequence[Shard], rules: Sequence[Rule], matched: Match, files: WeightFiles) -> None:
    total = sum(shard.data.numel() * shard.data.element_size() for shard in shards)
    with progress_bar("loading weights", total) as bar:
        for shard in shards:
            rule, place = rules[shard.place.rule], shard.place
            names = [matched.stored_name.get(name) for name in names_of(rule, place.layer)]
            if None not in names:
                _pad(shard)
                for piece in pieces(rule, place):
                    _copy(files, str(names[piece.tensor]), rule, shard, piece)
            bar.update(shard.data.numel() * shard.data.element_size())


def progress_bar(what: str, total_bytes: int) -> tqdm[Any]:
    """A bar on rank 0, for models that take a while, in a terminal."""
    hidden = dist.get_rank() != 0 or total_bytes < BAR_FROM_BYTES
    # None: shown only if standard error is a terminal.
    return tqdm(desc=what, total=total_bytes, unit="B", unit_scale=True, disable=True if hidden else None)


def _pad(shard: Shard) -> None:
    """Zero for the rows past the vocabulary."""
    real = max(0, shard.place.shape[0] - shard.place.offset[0])
    shard.data[real:].zero_()


def _copy(files: WeightFiles, name: str, rule: Rule, shard: Shard, piece: Piece) -> None:
    """Read what ``piece`` says into the shard."""
    if rule.transposed:
        _copy_transposed(files, name, shard, piece)
        return
    row_bytes = files.tensors[name].row_bytes
    ours, theirs = piece.ours, piece.theirs
    if bool((theirs[1:] < theirs[:-1]).any()):
        theirs, order = theirs.sort()
        ours = ours[order]
    for first, last in _blocks(theirs, row_bytes):
        start, stop = int(theirs[first]), int(theirs[last - 1]) + 1
        block = files.rows(name, start, stop)
        if block.dim() > 1:
            block = block[:, columns(shard.place)]
        _put(shard.data, ours[first:last], block[index(theirs[first:last] - start)])


def _copy_transposed(files: WeightFiles, name: str, shard: Shard, piece: Piece) -> None:
    """The file's rows are the shard's columns."""
    wanted = columns(shard.place)
    step = max(1, BLOCK_BYTES // max(1, files.tensors[name].row_bytes))
    for start in range(wanted.start, wanted.stop, step):
        stop = min(start + step, wanted.stop)
        block = files.rows(name, start, stop)[:, index(piece.theirs)]
        _put(shard.data[:, start - wanted.start : stop - wanted.start], piece.ours, block.t())


def _blocks(rows: torch.Tensor, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut ascending ``rows`` where a gap is not worth reading, and into blocks of a bounded size.

    Yields:
        First and last + 1 position in ``rows``.
    """
    gap, most = max(1, _GAP_BYTES // max(1, row_bytes)), max(1, BLOCK_BYTES // max(1, row_bytes))
    cuts = ((rows[1:] - rows[:-1]) > gap).nonzero().flatten() + 1
    for run in torch.tensor_split(torch.arange(len(rows)), cuts.tolist()):
        first, end = int(run[0]), int(run[-1]) + 1
        while first < end:
            last = int(torch.searchsorted(rows[first:end], rows[first] + most)) + first
            yield first, last
            first = last


def _put(target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    place = index(rows)
    if isinstance(place, slice):
        target[place].copy_(values)
    else:
        target[place.to(target.device)] = values.to(target.device, target.dtype)
