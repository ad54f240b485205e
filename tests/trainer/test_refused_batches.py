"""Batches with wrong numbers are refused on every rank that waits for them, in the same words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.parity.training import Case, Layout, Sentences, module_of, trainer_of
from tests.ranks import run_ranks

FOUR_RANKS = Layout(tp=2, pp=2, num_microbatches=2)


def _rows(key: str, value: int) -> list[dict[str, torch.Tensor]]:
    """Four rows, in the third of which a number is wrong."""
    rows = [{key: torch.zeros(16, dtype=torch.long), **row} for row in Sentences(4)]  # type: ignore[attr-defined]
    rows[2][key] = rows[2][key].clone()
    rows[2][key][5] = value
    return rows


REFUSED: tuple[tuple[Any, int | None, tuple[str, ...]], ...] = (
    (_rows("input_ids", 83), 4, ("input_ids", "83", "vocab")),
    (_rows("labels", -7), 4, ("labels", "-7", "-100")),
    (_rows("token_types", 0), 4, ("token_types", "input_ids, ")),
    ([{"input_ids": torch.arange(16)[None].repeat(n, 1)} for n in (4, 0)], None, ("a batch has no rows",)),
)


def _messages(case: Case) -> list[str]:
    """Why the first batch of each is refused on this rank; last one that a check of the user's own fails on."""
    from lightning_megatron import DataError, GPTTrainStep

    class Picky(GPTTrainStep):
        def check_batch(self, batch: dict[str, torch.Tensor]) -> None:
            raise KeyError("mine")

    told = []
    cases: list[tuple[Any, int | None, Any]] = [(rows, size, None) for rows, size, _ in REFUSED]
    for rows, batch_size, step in (*cases, (Sentences(4), 4, Picky())):
        loader: DataLoader[Any] = DataLoader(rows, batch_size=batch_size)
        with pytest.raises((DataError, KeyError)) as error:
            trainer_of(case).fit(module_of(case, train_step=step), loader)
        told.append(f"{error.type.__name__}: {error.value}")
    return told


def test_every_rank_says_what_is_wrong() -> None:
    ranks = run_ranks(_messages, FOUR_RANKS.world_size, Case(layout=FOUR_RANKS))
    for (_, _, words), (first, *others) in zip(REFUSED, zip(*ranks, strict=True), strict=False):
        assert others == [first] * 3
        assert all(word in first for word in words)
    # A defect in a check of one's own ends all ranks of the copy.
    assert [told[-1] for told in ranks] == ["KeyError: 'mine'"] + ["DataError: KeyError('mine')"] * 3


def _warnings_without_labels(case: Case) -> list[str]:
    import warnings

    rows = [{"input_ids": torch.arange(16), "labels": torch.full((16,), -100)} for _ in range(12)]
    rows[11] = {"input_ids": torch.arange(16), "labels": torch.arange(16)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_of(case, use_distributed_sampler=False)
        trainer.fit(module_of(case), DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    return [str(w.message) for w in caught if "no label" in str(w.message)]


def test_a_step_without_any_label_is_told_by_a_warning() -> None:
    first, *others = run_ranks(_warnings_without_labels, 4, Case(layout=FOUR_RANKS, steps=3))
    assert len(first) == 2
    assert others == [[], [], []]
