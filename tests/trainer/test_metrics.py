"""Metrics are equal on every rank and count each row once; Lightning callbacks and loggers work with pipelines."""

import contextlib
import csv
import io
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils.data import DataLoader

from tests.checkpoint.runs import callback
from tests.marks import exhaustive
from tests.parity.training import (
    PP2,
    PP2_DP2,
    SEQ_LENGTH,
    TP2_DP2,
    TP2_PP2,
    Case,
    Layout,
    Sentences,
    common_result,
    loader_of,
    metrics_of,
    module_of,
    trainer_of,
)
from tests.ranks import run_ranks
from tests.recording import recorded_log

ROWS = 13  # not divisible by dp or microbatches: the last batches have padding rows, which must not count


def _counting_step() -> Any:
    from torchmetrics import MeanMetric, SumMetric

    from lightning_megatron import GPTTrainStep
    from lightning_megatron.steps.base import Batch

    class CountingStep(GPTTrainStep):
        """Counts rows and averages the loss of their first target."""

        def metrics(self) -> dict[str, Any]:
            return {"rows": SumMetric(), "first_loss": MeanMetric()}

        def update_metrics(
            self, metrics: Mapping[str, Any], batch: Batch, output: torch.Tensor
        ) -> None:
            real = batch["loss_mask"].sum(1) > 0
            metrics["rows"].update(real.sum())
            metrics["first_loss"].update(
                output[:, 0].float(),
                weight=real.float(),
            )

    return CountingStep()


def _validate_twice(case: Case, inference: bool) -> list[dict[str, float]]:
    """Validate twice and test; ``inference``: in inference mode as on GPUs, which Lightning turns off with gloo."""
    modes: set[bool] = set()

    def watch(*_: Any) -> None:
        modes.add(torch.is_inference_mode_enabled())

    module = module_of(case, train_step=_counting_step())
    trainer = trainer_of(case, callbacks=[callback(on_validation_epoch_end=watch)])
    loader: DataLoader[Any] = DataLoader(Sentences(ROWS), batch_size=4)
    keep_on = patch("lightning.pytorch.loops.utilities._distributed_is_initialized", lambda: False)
    results: list[dict[str, float]] = []
    with keep_on if inference else contextlib.nullcontext():
        for phase in (trainer.validate, trainer.validate, trainer.test):
            results += phase(module, loader, verbose=False)
    assert modes == {inference}
    return [dict(metrics) for metrics in results]


def test_metrics_are_equal_on_every_layout_rank_and_epoch() -> None:
    reference = common_result(_validate_twice, Case(), True)
    case = Case(layout=PP2_DP2)
    sharded = common_result(_validate_twice, case, False)
    expected, again, tested = reference
    assert expected["val_rows"] == tested["test_rows"] == ROWS
    assert tested["test_first_loss"] == expected["val_first_loss"]
    assert again == expected
    # A different summation order.
    assert sharded == [pytest.approx(metrics, rel=1e-5) for metrics in reference]


def _gather_in_validation(case: Case) -> dict[str, Any]:
    from lightning_megatron import (
        MegatronModule,
        avg_losses_across_data_parallel_group,
        gather_across_data_parallel_groups,
    )

    class Gathering(MegatronModule):
        gathered: dict[str, Any]

        def validation_step(
            self, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> torch.Tensor:
            rank = self.megatron.data_parallel_rank
            tokens = batch["input_ids"][: rank + 1]  # the number of rows differs between ranks
            number = torch.tensor(float(rank))
            inputs = {
                "tokens": tokens,
                "pair": (number, [torch.full((2, 1), rank)]),
            }
            losses = [number, 2 * number[None]]
            self.gathered = gather_across_data_parallel_groups(inputs)
            self.gathered["mean"] = avg_losses_across_data_parallel_group(losses)
            return super().validation_step(batch, batch_idx)

    module: Gathering = module_of(case, Gathering)
    loader = DataLoader(Sentences(8), batch_size=4)
    trainer_of(case).validate(module, loader, verbose=False)
    return module.gathered


def test_rows_and_losses_are_gathered_across_replicas() -> None:
    rows = Sentences(8).tokens
    for gathered in run_ranks(_gather_in_validation, 4, Case(layout=TP2_DP2)):
        # Evaluation assigns rows round-robin: data-parallel rank 0 has rows 0, 2, 4, 6.
        torch.testing.assert_close(gathered["tokens"], rows[[0, 1, 3]])
        ranks, [twice] = gathered["pair"]
        assert ranks.tolist() == [0.0, 1.0]
        assert twice.flatten().tolist() == [0, 0, 1, 1]
        assert gathered["mean"].tolist() == [0.5, 1.0]


# ---- logged metrics -------------------------------------------------------------------------------------------------

STEPS = 3


def _callback_metrics(case: Case) -> list[dict[str, float]]:
    """All callback metrics, after each training step and each validation."""
    seen: list[dict[str, float]] = []

    def keep(trainer: Any, *_: Any) -> None:
        seen.append(metrics_of(trainer))

    watch = callback(on_train_batch_end=keep, on_validation_end=keep)
    trainer = trainer_of(
        case,
        callbacks=[watch],
        max_steps=-1,
        max_epochs=2,
    )
    val_loader = loader_of(replace(case, steps=2))
    trainer.fit(module_of(case), loader_of(case), val_loader)
    return seen


def test_callback_metrics_equal_one_process() -> None:
    case = Case(
        layout=PP2,
        labels="uneven",
        steps=STEPS,
        clip=1.0,
    )
    actual = common_result(_callback_metrics, case)
    expected = common_result(_callback_metrics, case.on_one_process)
    logged = {
        "train_loss",
        "train_lm_loss",
        "val_loss",
        "val_lm_loss",
        "val_perplexity",
        "lr",
        "grad_norm",
    }
    assert set(actual[-1]) == logged
    # A loss of 5 has a resolution of 5e-7; norms differ more after some steps (comparison.py).
    assert actual == [pytest.approx(metrics, rel=5e-5) for metrics in expected]


def _logged_by_subclass(case: Case) -> dict[str, float]:
    """What a subclass logs of its batches: sums, means and a metric, of steps and epochs."""
    from torchmetrics import MeanMetric, SumMetric

    from lightning_megatron import MegatronModule

    class Logging(MegatronModule):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.tokens = SumMetric()
            self.mean_token = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            tokens = batch["input_ids"]
            self.log("rows", float(len(tokens)), reduce_fx="sum", sync_dist=True)
            self.log("largest", tokens.max().float(), reduce_fx="max", sync_dist=True)
            self.tokens(tokens.numel())
            self.mean_token(tokens.float())
            self.log_dict({"tokens": self.tokens, "mean_token": self.mean_token}, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            rows = len(batch["input_ids"])
            self.log("val_rows", float(rows), reduce_fx="sum", sync_dist=True, batch_size=rows)

    trainer = trainer_of(case, max_steps=-1, max_epochs=1)
    trainer.fit(module_of(case, Logging), loader_of(case), loader_of(case))
    names = {"rows", "largest", "tokens_epoch", "mean_token_epoch", "val_rows"}
    return {name: value for name, value in metrics_of(trainer).items() if name in names}


@pytest.mark.parametrize(
    "layout",
    [TP2_DP2, exhaustive(PP2_DP2), exhaustive(Layout(cp=2))],
)
def test_what_a_subclass_logs_counts_each_replica_once(layout: Layout) -> None:
    case = Case(layout=layout, steps=2)
    expected = common_result(_logged_by_subclass, case.on_one_process)
    assert expected["rows"] == case.global_batch_size
    assert expected["val_rows"] == 2 * case.global_batch_size
    assert expected["tokens_epoch"] == 2 * case.global_batch_size * SEQ_LENGTH
    assert common_result(_logged_by_subclass, case) == pytest.approx(expected, rel=1e-6)


# ---- callbacks and loggers ------------------------------------------------------------------------------------------


def _fit_with_callbacks_and_loggers(case: Case, folder: Path) -> dict[str, Any]:
    """Train with Lightning's callbacks and loggers; return what this rank printed and its last epoch."""
    from lightning.pytorch import callbacks, loggers

    early_stopping = callbacks.EarlyStopping("val_loss", mode="max", patience=2)
    displays = (
        callbacks.TQDMProgressBar(),
        callbacks.LearningRateMonitor(),
        callbacks.ModelSummary(max_depth=3),
    )
    trainer = trainer_of(
        case,
        callbacks=[early_stopping, *displays],
        logger=loggers.CSVLogger(folder, "csv"),
        enable_progress_bar=True,
        enable_model_summary=True,
        log_every_n_steps=1,
        max_steps=-1,
        max_epochs=10,
    )
    val_loader = loader_of(replace(case, steps=1))
    with (
        recorded_log("lightning.pytorch.callbacks.model_summary") as summary,
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        trainer.fit(module_of(case), loader_of(case), val_loader)
    return {
        "printed": printed.getvalue(),
        "summary": summary.getvalue(),
        "stopped": early_stopping.stopped_epoch,
    }


def test_lightning_callbacks_and_loggers_work_with_pipelines(tmp_path: Path) -> None:
    case = Case(layout=TP2_PP2, steps=STEPS)
    first, *others = run_ranks(_fit_with_callbacks_and_loggers, 4, case, tmp_path)
    # Patience: two epochs after the first.
    assert others == [{"printed": "", "summary": "", "stopped": 2}] * 3
    assert first["stopped"] == 2
    assert "train_loss" in first["printed"]
    assert "val_loss" in first["printed"]
    (file,) = tmp_path.glob("csv/**/*.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [int(row["step"]) for row in rows if row["train_loss"]] == list(range(3 * STEPS))
    assert sum(bool(row["val_loss"]) for row in rows) == 3
    assert {name for name in rows[0] if name.startswith("lr/")} == {
        "lr/no_weight_decay",
        "lr/weight_decay",
    }
    # The table of rank 0 covers both stages; a layer has 12 h^2 + 13 h parameters, h = 32.
    table = {}
    for line in first["summary"].splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 5:
            table[cells[1]] = cells[3:6]
    assert table["Name"] == ["Params", "Params per Device", "Mode"]
    # 83 tokens and 16 positions; per device with half of the 13 padding rows (vocabulary padded to a multiple of 16).
    assert table["embedding"] == ["3.2 K", "2.0 K", "train"]
    assert table["decoder"] == ["50.9 K", "12.9 K", "train"]
    assert table["decoder.layers.3"] == ["12.7 K", "0", "train"]
    assert table["output_layer"] == ["0", "0", "train"]
    assert re.search(r"54.0 K +Total params", first["summary"])
