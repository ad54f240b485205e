"""Batches with wrong numbers are refused on every rank that waits for them, in the same words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.parity.training import Case, Layout, Sentences, module_of, trainer_of
from tests.ranks import run_ranks

FOUR_RANKS = Layout(tp=2, pp=2, num_microbatches=2)


def _message(case: Case, key: str, value: Any) -> str:
    """Why the first batch is refused on this rank."""
    rows = [dict(row) for row in Sentences(4)]  # type: ignore[attr-defined]
    rows[2][key] = rows[2][key].clone() if key in rows[2] else torch.zeros(16, dtype=torch.long)
    rows[2][key][5] = value
    if key not in ("input_ids", "labels"):
        rows = [{key: torch.zeros(16, dtype=torch.long), **row} for row in rows]
    from lightning_megatron import DataError

    try:
        trainer_of(case).fit(module_of(case), DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    except DataError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("input_ids", 83, ("input_ids", "83", "vocab")),
        ("labels", -7, ("labels", "-7", "-100")),
        ("token_types", 0, ("token_types", "input_ids, ")),
    ],
)
def test_every_rank_says_what_is_wrong(key: str, value: int, words: tuple[str, ...]) -> None:
    messages = run_ranks(_message, FOUR_RANKS.world_size, Case(layout=FOUR_RANKS), key, value)
    assert len(set(messages)) == 1
    for word in words:
        assert word in messages[0]


def _own_check_fails(case: Case) -> str:
    from lightning_megatron import GPTTrainStep

    class Picky(GPTTrainStep):
        def check_batch(self, batch: dict[str, torch.Tensor]) -> None:
            raise KeyError("mine")

    try:
        trainer_of(case).fit(module_of(case, train_step=Picky()), DataLoader(Sentences(4), batch_size=4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_a_defect_in_a_check_of_ones_own_ends_all_ranks_of_the_copy() -> None:
    first, *others = run_ranks(_own_check_fails, FOUR_RANKS.world_size, Case(layout=FOUR_RANKS))
    assert first == "KeyError: 'mine'"
    assert set(others) == {"DataError: KeyError('mine')"}


def _without_rows(case: Case) -> str:
    rows = [{"input_ids": torch.arange(16)[None].repeat(number, 1)} for number in (4, 0)]

    from lightning_megatron import DataError

    try:
        trainer_of(case).fit(module_of(case), DataLoader(rows, batch_size=None))  # type: ignore[arg-type]
    except DataError as error:
        return str(error)
    return "nothing was raised"


def test_a_batch_without_rows_is_refused() -> None:
    for message in run_ranks(_without_rows, FOUR_RANKS.world_size, Case(layout=FOUR_RANKS)):
        assert "a batch has no rows" in message


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
