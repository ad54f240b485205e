"""A wrong number of processes is refused on every rank before it can deadlock.

On fewer nodes than ``num_nodes``, the remaining replicas take the microbatches of the missing ones.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.checkpoint.runs import callback
from tests.cli.command import leave_torchrun
from tests.parity.training import (
    TP2,
    TP2_DP2,
    Case,
    Layout,
    Sentences,
    loader_of,
    module_of,
    refusal,
    trainer_of,
)
from tests.ranks import RankError, run_ranks


@pytest.mark.parametrize(
    ("started", "devices"),
    [(3, 2), (2, 4)],
)
def test_wrong_number_of_processes_is_refused(started: int, devices: int) -> None:
    (message,) = set(run_ranks(_start, started, devices))
    assert (
        f"processes: expected {devices} (devices={devices} x num_nodes=1), got {started}; start"
        in message
    )
    assert f"--nproc-per-node {devices}" in message


def _start(devices: int) -> str:
    return refusal(trainer_of, Case(layout=TP2), devices=devices)


def _wait_alone() -> tuple[str, float]:
    from lightning.pytorch.plugins.environments import LightningEnvironment

    from lightning_megatron import MegatronStrategy
    from lightning_megatron.run import rendezvous

    lines: list[str] = []
    rendezvous.rank_zero_info = lines.append  # type: ignore[assignment, attr-defined]
    options = {
        "num_nodes": 2,
        "strategy": MegatronStrategy(timeout=4),
        "plugins": [LightningEnvironment()],
    }
    trainer = trainer_of(Case(), **options)
    begin = time.monotonic()
    message = refusal(
        trainer.fit,
        module_of(Case()),
        loader_of(Case()),
    )
    return "\n".join([*lines, message]), time.monotonic() - begin


def test_single_node_reports_what_it_waits_for_and_times_out() -> None:
    ((text, seconds),) = run_ranks(_wait_alone, 1)
    assert "num_nodes=2: node 0 waits at" in text
    assert "at most 0:00:04" in text
    assert "expected 2 (num_nodes=2) within 0:00:04, got" in text
    assert seconds < 60


def _train_interactively() -> tuple[str, int]:
    """Train as in a Python prompt or notebook, which has no script that other processes could run."""
    leave_torchrun()
    sys.ps1 = ">>> "
    with pytest.raises(ValueError, match="devices=2 needs a script") as refused:
        trainer_of(Case(), devices=2, strategy="megatron_pp2")
    trainer = trainer_of(Case(), strategy="megatron", max_steps=2)
    trainer.fit(module_of(Case()), loader_of(Case()))
    return str(refused.value), trainer.global_step


def test_interactive_session_trains_on_one_device_only() -> None:
    ((message, steps),) = run_ranks(_train_interactively, 1)
    assert "torchrun --nproc-per-node 2 FILE.py" in message
    assert steps == 2


# ---- fewer nodes ----------------------------------------------------------------------------------------------------

CASE = Case(
    layout=Layout(dp=2, num_microbatches=2),
    steps=5,
    labels="uneven",
)
"""Run on two nodes with one process each."""

Kind = Literal["loader", "datamodule", "stream"]


class _Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Any:
        return iter(Sentences(12))


def _losses(
    kind: Kind,
    case: Case,
    folder: Path | None = None,
) -> list[float]:
    """Losses of ``case`` with one node per rank; saves to ``folder`` at step 2, or resumes from it."""
    from lightning_megatron import DatasetDataModule

    losses: list[float] = []
    saved = None if folder is None else folder / "two.ckpt"

    def record(
        trainer: Any,
        module: Any,
        outputs: Any,
        *_: Any,
    ) -> None:
        losses.append(float(outputs["loss"]))
        if trainer.global_step == 2 and saved is not None:
            trainer.save_checkpoint(saved)

    os.environ |= {"LOCAL_RANK": "0", "GROUP_RANK": os.environ["RANK"]}
    trainer = trainer_of(
        case,
        devices=1,
        num_nodes=case.layout.dp,
        callbacks=[callback(on_train_batch_end=record)],
    )
    data: dict[str, Any] = {"train_dataloaders": loader_of(case)}
    if kind == "datamodule":
        rows = Sentences(5 * case.global_batch_size, case.labels)
        data = {"datamodule": DatasetDataModule(train=rows, micro_batch_size=3)}
    if kind == "stream":
        data = {"train_dataloaders": torch.utils.data.DataLoader(_Stream(), batch_size=6)}
    trainer.fit(
        module_of(case),
        **data,
        ckpt_path=saved if saved is not None and saved.exists() else None,
    )
    return losses


@pytest.mark.parametrize("kind", ["loader", "datamodule"])
def test_resume_on_fewer_nodes_takes_the_same_steps(kind: Kind, tmp_path: Path) -> None:
    losses, resumed = (run_ranks(_losses, size, kind, CASE, tmp_path)[0] for size in (2, 1))
    # One replica sums four microbatches; two sum two each and add them: fp32 rounds differently.
    assert resumed == pytest.approx(losses[2:], rel=1e-6)


def test_fewer_nodes_that_cannot_share_the_batch_are_refused() -> None:
    uneven = replace(CASE, layout=Layout(dp=3, num_microbatches=1))
    with pytest.raises(
        RankError, match="2 of num_nodes=3 were started, so dp=2 instead of 3: expected replicas"
    ):
        run_ranks(_losses, 2, "loader", uneven)
    wide = replace(CASE, layout=TP2_DP2)
    with pytest.raises(
        RankError, match=r"world size 1 \(devices x num_nodes\) is not a multiple of tp=2"
    ):
        run_ranks(_losses, 1, "loader", wide)
    with pytest.raises(
        RankError, match=r"expected a DataLoader of a map-style dataset with a batch_size"
    ):
        run_ranks(_losses, 1, "stream", CASE)


def _listening() -> set[str]:
    from datetime import timedelta

    import psutil
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    from lightning_megatron.run import rendezvous

    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    store = rendezvous._rendezvous_store(TorchElasticEnvironment(), 1, timedelta(seconds=60))
    store.add("arrived", 1)
    while store.add("arrived", 0) < 2:
        time.sleep(0.05)
    connections = psutil.Process().net_connections(kind="tcp")
    addresses = {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    store.add("done", 1)
    while os.environ["RANK"] == "0" and store.add("done", 0) < 2:  # it is the server
        time.sleep(0.05)
    return addresses


def test_store_of_one_host_listens_at_its_address_alone() -> None:
    first, second = run_ranks(_listening, 2)
    assert first <= {"127.0.0.1", "::1"}
    assert len(first) == 1
    assert second == set()
