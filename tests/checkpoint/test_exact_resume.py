"""An interrupted and resumed run is bitwise equal to the uninterrupted one; resuming with other data is reported.

Compared are loss, gradient norm, learning rate and tokens of every later step, and at the end each weight, moment, step
count, learning rate and random state (dropout is on).
"""

import random
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
    assert_exact_resume,
    callback,
    fit,
    rows_dataset,
    train,
    train_with_checkpoints,
)
from tests.marks import exhaustive
from tests.ranks import run_ranks
from tests.recording import recorded_log, recorded_warnings

STEPS_PER_EPOCH = 5


TP2_SGD = Run(
    strategy={"tp": 2, "sequence_parallel": True},
    optimizer={"name": "sgd"},
)
TP2_MUON = Run(
    strategy={"tp": 2},
    optimizer={"name": "muon"},
)
VALIDATED = Run(validate=True, trainer={"val_check_interval": 3})
BY_VALIDATION = {"every_n_train_steps": None, "monitor": "val_loss"}
EP2 = Run(
    model={**LLAMA, "model_type": "mixtral", "num_local_experts": 4},
    strategy={"ep": 2, **EXPERT_BIAS},
)


@pytest.mark.parametrize(
    ("run", "keeps"),
    [
        pytest.param(TP2_SGD, {}, id="tp2 sp, sgd"),
        exhaustive(TP2_MUON, {}, id="tp2, muon"),
        pytest.param(
            Run(strategy={"pp": 2, "vpp": 2}),
            {},
            id="pp2 vpp2",
        ),
        pytest.param(VALIDATED, BY_VALIDATION, id="dp2, validated"),
        exhaustive(Run(strategy={"cp": 2}), {}, id="cp2"),
        pytest.param(EP2, {}, id="ep2, bias"),
    ],
)
def test_resume_in_mid_epoch_is_exact(
    tmp_path: Path,
    run: Run,
    keeps: dict[str, Any],
) -> None:
    from lightning_megatron.engine.lr_schedule import LRSchedule

    schedule = LRSchedule(
        style="cosine",
        warmup_steps=2,
        weight_decay_incr_style="linear",
        end_weight_decay=0.5,
    )
    run = run.but(trainer={"max_steps": 7}, module={"lr_schedule": schedule})
    keeps = {"every_n_train_steps": 3, **keeps}
    uninterrupted = run_ranks(train_with_checkpoints, 2, run, tmp_path, keeps)

    resumed = run_ranks(train, 2, run.but(ckpt_path=str(tmp_path / "step=3.ckpt")))

    assert_exact_resume(uninterrupted, resumed, 4)


def test_new_hyper_parameters_override_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Learning rate, weight decay, betas and epsilon apply to the groups with and without weight decay."""
    run = Run(trainer={"max_steps": 2})
    run_ranks(train, 1, run, tmp_path / "2.ckpt")
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


def _train_in_one_cycle(run: Run, save_as: Path | None = None) -> Trace:
    """Train with a scheduler of learning rate and momentum, and a callback that changes the weight decay."""
    import torch

    from lightning_megatron.module import MegatronModule

    class OneCycle(MegatronModule):
        def configure_optimizers(self) -> Any:
            optimizer = self.megatron.build_optimizer(self.optimizer_options, self.lr)
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    def raise_decay(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            for group in trainer.optimizers[0].param_groups:
                group["weight_decay"] = 0.5

    hook = callback(on_train_batch_start=raise_decay)
    trainer, trace = fit(run, hook, module_class=OneCycle)
    if save_as is not None:
        trainer.save_checkpoint(save_as)
    return trace


@pytest.mark.parametrize("optimizer", ["adamw", exhaustive("muon")])
def test_momentum_and_decay_that_a_run_has_changed_are_resumed(
    optimizer: str, tmp_path: Path
) -> None:
    run = Run(trainer={"max_steps": 4}, optimizer={"name": optimizer})
    uninterrupted = run_ranks(_train_in_one_cycle, 1, run)
    run_ranks(_train_in_one_cycle, 1, run.but(trainer={"max_steps": 2}), tmp_path / "2.ckpt")
    resumed = run_ranks(_train_in_one_cycle, 1, run.but(ckpt_path=str(tmp_path / "2.ckpt")))
    assert_exact_resume(uninterrupted, resumed, 3)


def _train_with_early_loader(run: Run) -> Trace:
    """Train a module that asks for the number of steps, for which Lightning makes the loader early."""
    from lightning_megatron.module import MegatronModule

    class EarlyLoaderModule(MegatronModule):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == 2 * STEPS_PER_EPOCH
            return super().configure_optimizers()

    return fit(run, module_class=EarlyLoaderModule)[1]


def test_resume_after_max_epochs_or_with_an_early_loader_is_exact(tmp_path: Path) -> None:
    run = Run(trainer={"max_epochs": 2})
    uninterrupted = run_ranks(train_with_checkpoints, 1, run, tmp_path, {"every_n_train_steps": 3})
    run_ranks(
        train,
        1,
        run.but(trainer={"max_epochs": 1}),
        tmp_path / "step=5.ckpt",
    )

    for step, resume in ((STEPS_PER_EPOCH, train), (3, _train_with_early_loader)):
        path = tmp_path / f"step={step}.ckpt"
        resumed = run_ranks(resume, 1, run.but(ckpt_path=str(path)))
        assert_exact_resume(uninterrupted, resumed, step + 1)


def _train_without_the_rest(run: Run, path: Path) -> Trace:
    """Train a module that skips the rest of the first epoch, at whose end the run is saved."""
    from lightning_megatron.module import MegatronModule

    class Skipping(MegatronModule):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            if self.current_epoch == 0 and batch_idx == 3:
                return -1
            return None

    def save(trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(path)

    return fit(run, callback(on_train_epoch_end=save), module_class=Skipping)[1]


def test_resume_after_the_rest_of_an_epoch_was_skipped_is_exact(tmp_path: Path) -> None:
    run = Run(trainer={"max_epochs": 2})
    path = tmp_path / "skipped.ckpt"
    uninterrupted = run_ranks(_train_without_the_rest, 1, run, path)
    resumed = run_ranks(train, 1, run.but(ckpt_path=str(path)))
    assert max(resumed[0].steps) == 3 + STEPS_PER_EPOCH
    assert_exact_resume(uninterrupted, resumed, 4)


DATASET: dict[str, Any] = {"indexed": {"train": rows_dataset()}, "data_module": "DatasetDataModule"}


@pytest.mark.parametrize(
    "run",
    [Run(), Run(**DATASET, trainer={"max_epochs": 3})],
    ids=["loader", "data module"],
)
def test_resume_from_the_end_of_an_epoch_is_exact(tmp_path: Path, run: Run) -> None:
    run = run.but(trainer={"max_steps": 9})
    ends = {
        "every_n_train_steps": None,
        "save_on_train_epoch_end": True,
        "every_n_epochs": 1,
    }
    uninterrupted = run_ranks(train_with_checkpoints, 1, run, tmp_path, ends)
    path = tmp_path / f"step={STEPS_PER_EPOCH}.ckpt"
    resumed = run_ranks(train, 1, run.but(ckpt_path=str(path)))
    assert_exact_resume(uninterrupted, resumed, STEPS_PER_EPOCH + 1)


class _NoisyRows(list[Any]):
    """Rows with values from every global random stream, as augmentations and random masks have."""

    def __getitem__(self, index: Any) -> Any:
        import torch

        ids = super().__getitem__(index)["input_ids"].clone()
        ids[0] = torch.randint(0, VOCAB_SIZE, ())
        ids[1] = np.random.randint(0, VOCAB_SIZE)
        ids[2] = random.randrange(VOCAB_SIZE)
        return {"input_ids": ids}


def _noisy_loader(dp: int) -> Any:
    """Loader whose order comes from torch's global random stream, as with every ``shuffle=True``."""
    from torch.utils.data import DataLoader

    rows: Any = _NoisyRows(rows_dataset())
    return DataLoader(rows, batch_size=GLOBAL_BATCH // dp, shuffle=True)


def _loader_with_worker(dp: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(
        rows_dataset(),
        batch_size=GLOBAL_BATCH // dp,
        shuffle=True,
        num_workers=1,
    )


def _loader_of_whole_batches(dp: int) -> Any:
    """Loader of a dataset whose samples are batches of different sequence lengths."""
    import torch
    from torch.utils.data import DataLoader

    rows = torch.stack([row["input_ids"] for row in rows_dataset()])
    batches = [{"input_ids": part[:, i:]} for i, part in enumerate(rows.split(GLOBAL_BATCH // dp))]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loader", "stops"),
    [
        (_noisy_loader, [3, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 3]),
        (_loader_with_worker, [STEPS_PER_EPOCH + 3]),
        exhaustive(_loader_of_whole_batches, [STEPS_PER_EPOCH + 3]),
    ],
)
def test_resume_with_larger_max_steps_is_exact(
    tmp_path: Path, loader: Any, stops: list[int]
) -> None:
    run = Run(loader=loader, trainer={"max_steps": 9})
    uninterrupted = run_ranks(train, 1, run)
    for stop in stops:
        path = tmp_path / f"{stop}.ckpt"
        run_ranks(
            train,
            1,
            run.but(trainer={"max_steps": stop}),
            path,
        )
        resumed = run_ranks(train, 1, run.but(ckpt_path=str(path)))
        assert_exact_resume(uninterrupted, resumed, stop + 1)


# ---- other data -----------------------------------------------------------------------------------------------------


class Mine(lightning_megatron.DatasetDataModule):
    """A user's data module."""


LOADER = Run(trainer={"max_steps": 2})
MODULE = LOADER.but(**DATASET)


def _resume_messages(run: Run) -> str:
    """Log lines, warnings, and the last step or the error of a resumed run."""
    from lightning_utilities.core import rank_zero

    lightning_megatron.Mine = Mine  # type: ignore[attr-defined]
    with recorded_log(rank_zero.log.name) as log, recorded_warnings() as warned:
        try:
            trainer, _ = fit(run)
            end = f"step {trainer.global_step}"
        except lightning_megatron.CheckpointError as error:
            end = str(error)
    return " ".join([log.getvalue(), end, *warned])


def test_resume_reports_other_data_other_layouts_and_finished_runs(tmp_path: Path) -> None:
    paths = {"loader": tmp_path / "loader.ckpt", "module": tmp_path / "module.ckpt"}
    for run, path in zip((LOADER, MODULE), paths.values(), strict=True):
        run_ranks(train, 1, run, path)
    restart = "the training data restarts"
    kind = "expected Mine, got DatasetDataModule; resume with the same kind"
    sizes = "was written at tp=1 pp=1 vpp=1 cp=1 dp=1 and this run is at tp=2 pp=1 vpp=1 cp=1 dp=1"
    for saved, run, steps, expected in (
        ("loader", LOADER, 3, ""),
        ("loader", LOADER.but(strategy={"tp": 2}), 3, sizes),
        ("loader", MODULE, 3, restart),
        ("module", LOADER, 3, restart),
        ("module", MODULE.but(data_module="Mine"), 3, kind),
        ("module", MODULE, 3, ""),
        ("module", MODULE, 1, "is of step 2, and max_steps=1: nothing is left to do"),
    ):
        resumed = run.but(trainer={"max_steps": steps}, ckpt_path=str(paths[saved]))
        messages, *of_other_ranks = run_ranks(_resume_messages, run.strategy.get("tp", 1), resumed)
        assert expected in messages
        for notice in (restart, sizes):
            assert (notice in messages) == (expected == notice)
            assert not any(notice in text for text in of_other_ranks)
        assert ("step 3" in messages) == (steps == 3 and expected != kind)
