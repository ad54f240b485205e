"""Where fewer nodes are there than ``num_nodes``, their copies of the model take the microbatches of the others."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.checkpoint.runs import callback
from tests.parity.training import Case, Layout, Sentences, loader_of, module_of, trainer_of
from tests.ranks import RankError, run_ranks

CASE = Case(layout=Layout(dp=2, num_microbatches=2), steps=5, labels="uneven")
"""Of two nodes with a process each."""

Kind = Literal["loader", "datamodule", "stream"]


class _Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Any:
        return iter(Sentences(12))


def _losses(kind: Kind, case: Case, folder: Path | None = None) -> list[float]:
    """Of the steps of ``case``, on as many nodes as there are ranks; goes on with what ``folder`` has."""
    from lightning_megatron import DatasetDataModule

    losses: list[float] = []
    saved = None if folder is None else folder / "two.ckpt"

    def record(trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        losses.append(float(outputs["loss"]))
        if trainer.global_step == 2 and saved is not None:
            trainer.save_checkpoint(saved)

    os.environ |= {"LOCAL_RANK": "0", "GROUP_RANK": os.environ["RANK"]}
    trainer = trainer_of(case, devices=1, num_nodes=case.layout.dp, callbacks=[callback(on_train_batch_end=record)])
    data: dict[str, Any] = {"train_dataloaders": loader_of(case)}
    if kind == "datamodule":
        rows = Sentences(5 * case.global_batch_size, case.labels)
        data = {"datamodule": DatasetDataModule(train=rows, micro_batch_size=3)}
    if kind == "stream":
        data = {"train_dataloaders": torch.utils.data.DataLoader(_Stream(), batch_size=6)}
    trainer.fit(module_of(case), **data, ckpt_path=saved if saved is not None and saved.exists() else None)
    return losses


@pytest.mark.parametrize("kind", ["loader", "datamodule"])
def test_a_run_resumed_on_fewer_nodes_takes_the_same_steps(kind: Kind, tmp_path: Path) -> None:
    whole, rest = (run_ranks(_losses, size, kind, CASE, tmp_path)[0] for size in (2, 1))
    # One copy sums four microbatches where two sum two each and add them: fp32 in another order.
    assert rest == pytest.approx(whole[2:], rel=1e-6)


def test_what_fewer_nodes_cannot_share_is_refused() -> None:
    uneven = replace(CASE, layout=Layout(dp=3, num_microbatches=1))
    with pytest.raises(RankError, match="2 of num_nodes=3 are there, so dp=2 instead of 3: expected copies"):
        run_ranks(_losses, 2, "loader", uneven)
    wide = replace(CASE, layout=Layout(dp=2, tp=2))
    with pytest.raises(RankError, match=r"world size 1 \(devices x num_nodes\) is not a multiple of tp=2"):
        run_ranks(_losses, 1, "loader", wide)
    with pytest.raises(RankError, match=r"expected a DataLoader of a map-style dataset with a batch_size"):
        run_ranks(_losses, 1, "stream", CASE)
