"""How do a Hugging Face model's weights get into a model that is split over ranks? Each rank reads only its own rows.

Nothing is copied before every tensor of the files and of the model is accounted for, on all ranks. Then each rank walks
over its shards and reads the rows they consist of, a block at a time, straight into the parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from lightning_megatron.convert.hugging_face_files import WeightFiles, open_weights
from lightning_megatron.convert.matching import Expected, Match, match
from lightning_megatron.convert.pieces import Shard, names_of, shapes_of, shards_of
from lightning_megatron.convert.reading import raise_problems, read_rows, unequal_copies
from lightning_megatron.convert.registry import family_of, rules_of
from lightning_megatron.convert.rules import Rule
from lightning_megatron.engine.collectives import on_all_ranks_alike
from lightning_megatron.engine.groups import host_group
from lightning_megatron.models.config import ModelConfig

BAR_FROM_BYTES = 10**9
"""Smaller models are there before anyone would look at a progress bar."""
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
    rules = rules_of(model)
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
        rank, size = dist.get_rank(), dist.get_world_size()
        problems = _of_all_ranks(on_all_ranks_alike(lambda: unequal_copies(matched, files, rank, size)))
    raise_problems(problems, files, model)
    if dist.get_rank() != 0:
        return
    if matched.new:
        _log.warning("not in %s and newly initialised: %s", files.directory, ", ".join(matched.new))
    if matched.ignored:
        _log.warning("of another head in %s and left out: %s", files.directory, ", ".join(matched.ignored))


# ---- reading --------------------------------------------------------------------------------------------------------


def _fill(shards: Sequence[Shard], rules: Sequence[Rule], matched: Match, files: WeightFiles) -> None:
    total = sum(shard.data.numel() * shard.data.element_size() for shard in shards)
    with progress_bar("loading weights", total) as bar:
        for shard in shards:
            rule, place = rules[shard.place.rule], shard.place
            names = [matched.stored_name[name] for name in names_of(rule, place.layer) if name in matched.stored_name]
            if len(names) == len(rule.hugging_face):
                read_rows(files, names, rule, place, shard.data)
            bar.update(shard.data.numel() * shard.data.element_size())


def progress_bar(what: str, total_bytes: int) -> tqdm[Any]:
    """A bar on rank 0, for models that take a while, in a terminal."""
    hidden = dist.get_rank() != 0 or total_bytes < BAR_FROM_BYTES
    # None: shown only if standard error is a terminal.
    return tqdm(desc=what, total=total_bytes, unit="B", unit_scale=True, disable=True if hidden else None)
