"""Loaders of streams resume where they keep a position, say so where they do not, and end on all replicas together."""

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.checkpoint.runs import NO_DROPOUT, SEQ_LENGTH, Run, callback, fit
from tests.marks import exhaustive
from tests.parity.training import refusal
from tests.ranks import run_ranks
from tests.recording import recorded_warnings

NUM_ROWS = 28
Kind = Literal["plain", "stateful", "hugging face", "torchdata"]
Seen = tuple[list[list[int]], list[str]]
"""First tokens of the rows of each step, and warnings."""


class _Numbers(IterableDataset[dict[str, Tensor]]):
    """Every n-th of some numbered rows, for a rank and its workers."""

    def __init__(self, num_rows: int, rank: int, num_ranks: int) -> None:
        self.num_rows = num_rows
        self.rank = rank
        self.num_ranks = num_ranks
        self.worker = 0
        self.num_workers = 1

    def _first(self) -> int:
        return 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        step = self.num_ranks * self.num_workers
        begin = self.rank + self.worker * self.num_ranks
        for place, number in enumerate(range(begin, self.num_rows, step)):
            if place >= self._first():
                self.done(place + 1)
                yield _row(number)

    def done(self, place: int) -> None:
        pass


class _NumbersWithState(_Numbers):
    """The same, with its position."""

    _begin = 0
    _place = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self._place = self._begin
        rows = super().__iter__()
        yield from rows
        self._begin = 0

    def _first(self) -> int:
        return self._begin

    def done(self, place: int) -> None:
        self._place = place

    def state_dict(self) -> dict[str, int]:
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._begin = state["place"]


def _share_rows(worker: int) -> None:
    """Give a worker its part, as torch's documentation of ``IterableDataset`` does."""
    info: Any = get_worker_info()
    if isinstance(info.dataset, _Numbers):
        info.dataset.worker = worker
        info.dataset.num_workers = info.num_workers


def _row(number: int) -> dict[str, Tensor]:
    return {"input_ids": (number + torch.arange(SEQ_LENGTH)) % 100}


def _loader(
    kind: Kind,
    workers: int,
    rank: int,
    dp: int,
) -> Any:
    if kind == "hugging face":
        import datasets
        from datasets.distributed import split_dataset_by_node

        rows = [_row(number)["input_ids"].tolist() for number in range(NUM_ROWS)]
        stream = datasets.Dataset.from_dict({"input_ids": rows}).to_iterable_dataset(num_shards=4)
        dataset: Any = split_dataset_by_node(
            stream,
            rank=rank,
            world_size=dp,
        ).with_format("torch")
    else:
        stateful = kind == "stateful" or kind == "torchdata"
        dataset = (_NumbersWithState if stateful else _Numbers)(NUM_ROWS, rank, dp)
    loader: Any = DataLoader
    if kind == "torchdata":
        loader = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    options: dict[str, Any] = {}
    if workers:
        options = {"multiprocessing_context": "fork", "worker_init_fn": _share_rows}
    return loader(dataset, batch_size=2, num_workers=workers, **options)


def _train(
    run: Run,
    kind: Kind,
    workers: int = 0,
    save_at: int | None = None,
    path: Path | None = None,
) -> Seen:
    """Train; return the rows of each step, to that with a checkpoint."""
    from lightning_megatron import MegatronModule

    seen: list[list[int]] = []

    class Streaming(MegatronModule):
        def train_dataloader(self) -> Any:
            strategy = self.megatron
            return _loader(kind, workers, strategy.data_parallel_rank, strategy.data_parallel_size)

    def record(
        trainer: Any,
        module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        seen.append(batch["input_ids"][:, 0].tolist())
        if trainer.global_step == save_at:
            trainer.save_checkpoint(path)

    with recorded_warnings("train_dataloaders: ") as messages:
        fit(
            run.but(loader=_no_loader),
            callback(on_train_batch_end=record),
            module_class=Streaming,
        )
    return seen[:save_at], messages


def _no_loader(dp: int) -> None:
    """The module has one."""


RUN = Run(
    model=NO_DROPOUT,
    strategy={"num_microbatches": 1},
    trainer={"max_steps": -1, "max_epochs": 2},
)
"""Seven steps an epoch on two replicas."""


@pytest.mark.parametrize(
    ("kind", "workers", "save_at"),
    [
        ("stateful", 0, 9),
        ("stateful", 2, 4),
        exhaustive("stateful", 2, 7),
        exhaustive("stateful", 3, 10),
        exhaustive("hugging face", 0, 9),
        exhaustive("hugging face", 2, 3),
        exhaustive("torchdata", 0, 9),
        exhaustive("torchdata", 2, 5),
    ],
)
def test_resume_is_exact(
    kind: Kind,
    workers: int,
    save_at: int,
    tmp_path: Path,
) -> None:
    if kind == "hugging face":
        pytest.importorskip("datasets")
    if kind == "torchdata":
        pytest.importorskip("torchdata")
    path = tmp_path / "a.ckpt"
    expected = run_ranks(_train, 2, RUN, kind, workers)
    numbers = sorted(number for seen, _ in expected for rows in seen for number in rows)
    assert numbers == sorted([*range(NUM_ROWS)] * 2)
    first = run_ranks(_train, 2, RUN, kind, workers, save_at, path)
    rest = run_ranks(
        _train,
        2,
        RUN.but(ckpt_path=str(path)),
        kind,
        workers,
    )
    for (seen, messages), (before, _), (after, _) in zip(expected, first, rest, strict=True):
        assert messages == []
        assert before + after == seen


def test_stream_without_a_position_is_reported_before_it_trains(tmp_path: Path) -> None:
    run = RUN.but(trainer={"max_epochs": 1})
    (_, messages), (_, others) = run_ranks(
        _train,
        2,
        run,
        "plain",
    )
    assert len(messages) == 1
    assert "cannot resume exactly" in messages[0]
    assert "_Numbers: it has no state_dict" in messages[0]
    assert others == []


def _refused(run: Run, workers: int) -> str:
    return refusal(_train, run, "stateful", workers)


def test_positions_of_other_replicas_or_workers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    run_ranks(_train, 2, RUN, "stateful", 0, 3, path)
    for message in run_ranks(
        _refused,
        2,
        RUN.but(ckpt_path=str(path)),
        1,
    ):
        assert "num_workers=1: expected the 0 of the run that wrote the checkpoint" in message
    (message,) = run_ranks(
        _refused,
        1,
        RUN.but(ckpt_path=str(path)),
        0,
    )
    assert "dp=1: expected the 2 data-parallel replicas" in message


def _whole_streams(run: Run) -> list[str]:
    import datasets

    stream = datasets.Dataset.from_list([_row(0), _row(1)]).to_iterable_dataset()
    stream = stream.shuffle(seed=1, buffer_size=2).with_format("torch")
    with recorded_warnings("train_dataloaders: ") as messages:
        loader = DataLoader(
            stream,
            batch_size=2,
            num_workers=1,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
        fit(run.but(loader=lambda dp: loader))
    return messages


def test_hugging_face_streams_that_repeat_rows_are_reported() -> None:
    pytest.importorskip("datasets")
    run = RUN.but(trainer={"max_epochs": 1})
    (shuffled, restarted, whole), others = run_ranks(_whole_streams, 2, run)
    assert "workers are started anew in each epoch" in restarted
    assert "IterableDataset: its state_dict lacks the content of its shuffle buffer" in shuffled
    assert "each of the 2 data-parallel replicas reads the whole stream" in whole
    assert others == []


def _divided(run: Run) -> list[str]:
    dataset = _NumbersWithState(8, 0, 1)
    # As litdata's and MosaicML's do.
    type(dataset).__module__ = "streaming.base.dataset"
    with recorded_warnings("divides its rows among 2 ranks") as messages:
        fit(run.but(loader=lambda dp: DataLoader(dataset, batch_size=2)))
    return messages


def test_libraries_that_divide_rows_among_all_ranks_are_reported() -> None:
    run = RUN.but(trainer={"max_epochs": 1})
    assert run_ranks(_divided, 2, run) == [[], []]
    (messages, others) = run_ranks(_divided, 2, run.but(strategy={"tp": 2}))
    assert len(messages) == 1
    assert others == []


def _uneven(run: Run) -> list[list[int]]:
    rank = int(os.environ["RANK"])
    dataset = _NumbersWithState(8 + 12 * rank, 0, 1)
    seen: list[list[int]] = []

    def record(*arguments: Any) -> None:
        seen.append(arguments[3]["input_ids"][:, 0].tolist())

    loader = DataLoader(dataset, batch_size=2)
    fit(run.but(loader=lambda dp: loader), callback(on_train_batch_end=record))
    return seen


def test_an_epoch_ends_with_the_first_replica() -> None:
    rows = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert run_ranks(_uneven, 2, RUN) == [rows + rows] * 2


def _reads(run: Run) -> tuple[int, int]:
    """Rows that this rank has read of its loader, and steps."""
    dataset = _NumbersWithState(8, 0, 1)
    loader = DataLoader(dataset, batch_size=2)
    trainer, _ = fit(run.but(loader=lambda dp: loader))
    return dataset._place, trainer.global_step


def test_one_rank_of_a_replica_reads() -> None:
    run = RUN.but(strategy={"tp": 2}, trainer={"max_epochs": 1})
    assert run_ranks(_reads, 2, run) == [(8, 4), (0, 4)]
