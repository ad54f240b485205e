"""A run that was interrupted and resumed is the same run, to the last digit; what else there is to say is told.

Compared are every loss, gradient norm, learning rate and token of the steps that follow, and at the end each weight,
moment, step count, learning rate and random state (dropout is on). The reference is the run without interruption.
"""

import logging
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lightning_megatron
from tests.checkpoint.runs import (
    EXPERT_BIAS,
    GLOBAL_BATCH,
    LLAMA,
    VOCAB_SIZE,
    Run,
    Trace,
    differences,
    fit,
    rows_dataset,
    train,
    train_with_checkpoints,
)
from tests.ranks import run_ranks

STEPS_PER_EPOCH = 5


def _train_and_save(run: Run, stops: list[int], folder: Path) -> None:
    """For each of ``stops`` a run that ``max_steps`` ends there, saved the way a script does after ``fit``."""
    for stop in stops:
        train(run.but(trainer={"max_steps": stop}), folder / f"{stop}.ckpt")


def _resume_each(run: Run, stops: list[int], folder: Path) -> list[Trace]:
    return [fit(run.but(ckpt_path=str(folder / f"{stop}.ckpt")))[1] for stop in stops]


def _assert_each_goes_on(run: Run, stops: list[int], folder: Path) -> None:
    whole = run_ranks(train, 1, run)
    run_ranks(_train_and_save, 1, run, stops, folder)
    resumed = run_ranks(_resume_each, 1, run, stops, folder)
    for index, stop in enumerate(stops):
        _assert_goes_on_as(whole, [of_rank[index] for of_rank in resumed], after=stop)


def _assert_goes_on_as(whole: list[Trace], resumed: list[Trace], after: int) -> None:
    for rank, (expected, found) in enumerate(zip(whole, resumed, strict=True)):
        steps = {step: numbers for step, numbers in expected.steps.items() if step > after}
        assert steps, "nothing is left to compare"
        assert found.steps == steps, f"rank {rank} took other steps"
        assert differences(expected.state, found.state) == [], f"rank {rank} ended in another state"


VALIDATED = Run(validate=True, trainer={"val_check_interval": 3})
EP2 = Run(model={**LLAMA, "model_type": "mixtral", "num_local_experts": 4}, strategy={"ep": 2, **EXPERT_BIAS})


@pytest.mark.parametrize(
    ("run", "keeps"),
    [
        pytest.param(
            Run(strategy={"tp": 2, "sequence_parallel": True}, optimizer={"name": "sgd"}), {}, id="tp2 sp, sgd"
        ),
        pytest.param(Run(strategy={"pp": 2, "vpp": 2}), {}, id="pp2 vpp2"),
        pytest.param(VALIDATED, {"every_n_train_steps": None, "monitor": "val_loss"}, id="dp2, validated"),
        pytest.param(Run(strategy={"cp": 2}), {}, id="cp2"),
        pytest.param(EP2, {}, id="ep2, bias"),
    ],
)
def test_a_run_resumed_in_mid_epoch_is_exactly_the_same(tmp_path: Path, run: Run, keeps: dict[str, Any]) -> None:
    from lightning_megatron.engine.lr_schedule import LRSchedule

    schedule = LRSchedule(style="cosine", warmup_steps=2, weight_decay_incr_style="linear", end_weight_decay=0.5)
    run = run.but(trainer={"max_steps": 7}, module={"lr_schedule": schedule})
    whole = run_ranks(train_with_checkpoints, 2, run, tmp_path, {"every_n_train_steps": 3, **keeps})

    resumed = run_ranks(train, 2, run.but(ckpt_path=str(tmp_path / "step=3.ckpt")))

    _assert_goes_on_as(whole, resumed, after=3)


def test_a_resumed_run_has_the_settings_that_it_was_started_with(tmp_path: Path) -> None:
    """A new learning rate or weight decay holds for all groups, with and without weight decay, and so do Adam's."""
    run = Run(trainer={"max_steps": 2})
    run_ranks(_train_and_save, 1, run, [2], tmp_path)
    changed = run.but(
        trainer={"max_steps": 3},
        module={"lr": 0.125},
        optimizer={"weight_decay": 0.5, "beta1": 0.75, "eps": 0.25},
        ckpt_path=str(tmp_path / "2.ckpt"),
    )
    (trace,) = run_ranks(train, 1, changed)
    assert trace.steps[3]["lr"] == [0.125, 0.125]
    assert sorted(trace.steps[3]["weight_decay"]) == [0, 0.5]
    group = "optimizer.0.param_groups.{}.{}"
    for index in (0, 1):
        assert trace.state[group.format(index, "betas.0")] == 0.75
        assert trace.state[group.format(index, "eps")] == 0.25


def test_a_run_that_max_steps_ended_goes_on_with_a_larger_max_steps(tmp_path: Path) -> None:
    run = Run(trainer={"max_steps": 9})
    _assert_each_goes_on(run, [3, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 3], tmp_path)


def _train_after_an_early_question(run: Run) -> Trace:
    """Train a module whose schedule needs the number of steps, which has Lightning make the loader early."""
    from lightning_megatron.module import MegatronModule

    class Asking(MegatronModule):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == 2 * STEPS_PER_EPOCH
            return super().configure_optimizers()

    return fit(run, module_class=Asking)[1]


def test_a_run_that_max_epochs_ended_and_one_whose_loader_was_asked_for_early_go_on(tmp_path: Path) -> None:
    run = Run(trainer={"max_epochs": 2})
    whole = run_ranks(train_with_checkpoints, 1, run, tmp_path, {"every_n_train_steps": 3})
    run_ranks(train, 1, run.but(trainer={"max_epochs": 1}), tmp_path / "step=5.ckpt")

    for after, how in ((STEPS_PER_EPOCH, train), (3, _train_after_an_early_question)):
        resumed = run_ranks(how, 1, run.but(ckpt_path=str(tmp_path / f"step={after}.ckpt")))
        _assert_goes_on_as(whole, resumed, after)


@pytest.mark.parametrize(
    "run",
    [
        Run(),
        Run(indexed={"train": rows_dataset()}, data_module="DatasetDataModule", trainer={"max_epochs": 3}),
    ],
    ids=["loader", "data module"],
)
def test_a_run_of_max_steps_that_was_saved_at_the_end_of_an_epoch_goes_on(tmp_path: Path, run: Run) -> None:
    run, ends = run.but(trainer={"max_steps": 9}), {"every_n_train_steps": None, "save_on_train_epoch_end": True}
    whole = run_ranks(train_with_checkpoints, 1, run, tmp_path, {**ends, "every_n_epochs": 1})
    resumed = run_ranks(train, 1, run.but(ckpt_path=str(tmp_path / f"step={STEPS_PER_EPOCH}.ckpt")))
    _assert_goes_on_as(whole, resumed, STEPS_PER_EPOCH)


class _Noisy:
    """A dataset that draws from every global random stream, as augmentations and random masks do."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        import torch

        ids = self.rows[index]["input_ids"].clone()
        ids[0] = torch.randint(0, VOCAB_SIZE, ())
        ids[1] = np.random.randint(0, VOCAB_SIZE)
        ids[2] = random.randrange(VOCAB_SIZE)
        return {"input_ids": ids}


def _loader_of_random_order(dp: int) -> Any:
    """The order comes from torch's global stream, as from every loader with ``shuffle=True``."""
    from torch.utils.data import DataLoader

    return DataLoader(_Noisy(rows_dataset()), batch_size=GLOBAL_BATCH // dp, shuffle=True)


def _loader_with_worker(dp: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(rows_dataset(), batch_size=GLOBAL_BATCH // dp, shuffle=True, num_workers=1)


def _loader_of_whole_batches(dp: int) -> Any:
    """A dataset whose samples are batches of another length each."""
    import torch
    from torch.utils.data import DataLoader

    rows = torch.stack([row["input_ids"] for row in rows_dataset()])
    batches = [{"input_ids": part[:, i:]} for i, part in enumerate(rows.split(GLOBAL_BATCH // dp))]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "loader",
    [
        _loader_of_random_order,
        _loader_with_worker,
        pytest.param(_loader_of_whole_batches, marks=pytest.mark.exhaustive),
    ],
)
def test_random_orders_and_random_samples_go_on(tmp_path: Path, loader: Any) -> None:
    _assert_each_goes_on(Run(loader=loader, trainer={"max_steps": 10}), [STEPS_PER_EPOCH + 3], tmp_path)


# ---- other data -----------------------------------------------------------------------------------------------------


class Mine(lightning_megatron.DatasetDataModule):
    """Of the user's own."""


LOADER = Run(trainer={"max_steps": 2})
MODULE = LOADER.but(indexed={"train": rows_dataset()}, data_module="DatasetDataModule")


def _said(run: Run) -> str:
    """The step that a resumed run comes to, and what it says on the way."""
    from lightning_utilities.core import rank_zero

    lightning_megatron.Mine = Mine  # type: ignore[attr-defined]
    lines: list[str] = []
    handler: Any = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    rank_zero.log.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            lines.append(f"step {fit(run)[0].global_step}")
        except lightning_megatron.CheckpointError as error:
            lines.append(str(error))
    return " ".join([*lines, *(str(warning.message) for warning in caught)])


def test_another_kind_of_data_and_a_run_that_is_over_are_told(tmp_path: Path) -> None:
    paths = {"loader": tmp_path / "loader.ckpt", "module": tmp_path / "module.ckpt"}
    for run, path in zip((LOADER, MODULE), paths.values(), strict=True):
        run_ranks(train, 1, run, path)
    anew, kind = "the training data begins anew", "expected Mine, got DatasetDataModule; resume with the same kind"
    sizes = "was written at tp=1 pp=1 vpp=1 cp=1 dp=1 and this run is at tp=2 pp=1 vpp=1 cp=1 dp=1"
    for saved, run, steps, says in (
        ("loader", LOADER, 3, ""),
        ("loader", LOADER.but(strategy={"tp": 2}), 3, sizes),
        ("loader", MODULE, 3, anew),
        ("module", LOADER, 3, anew),
        ("module", MODULE.but(data_module="Mine"), 3, kind),
        ("module", MODULE, 3, ""),
        ("module", MODULE, 1, "is of step 2, and max_steps=1: nothing is left to do"),
    ):
        resumed = run.but(trainer={"max_steps": steps}, ckpt_path=str(paths[saved]))
        said, *others = run_ranks(_said, run.strategy.get("tp", 1), resumed)
        assert says in said
        for told in (anew, sizes):
            assert (told in said) == (says == told)
            assert not any(told in each for each in others)
        assert ("step 3" in said) == (steps == 3 and says != kind)
