"""Metrics are the same on every rank and count each row once; Lightning's callbacks and loggers with pipelines."""

import contextlib
import csv
import io
import logging
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
from tests.parity.training import Case, Layout, Sentences, common_result, loader_of, module_of, trainer_of
from tests.ranks import run_ranks

ROWS = 13  # more than divide by dp or microbatches: the last batches are filled up with rows that must not count


def _counting_step() -> Any:
    from torchmetrics import MeanMetric, SumMetric

    from lightning_megatron import GPTTrainStep
    from lightning_megatron.steps.base import Batch

    class CountingStep(GPTTrainStep):
        """Counts rows, and averages the loss of their first target."""

        def metrics(self) -> dict[str, Any]:
            return {"rows": SumMetric(), "first_loss": MeanMetric()}

        def update_metrics(self, metrics: Mapping[str, Any], batch: Batch, output: torch.Tensor) -> None:
            real = batch["loss_mask"].sum(1) > 0
            metrics["rows"].update(real.sum())
            metrics["first_loss"].update(output[:, 0].float(), weight=real.float())

    return CountingStep()


def _validate_twice(case: Case, inference: bool) -> list[dict[str, float]]:
    """In inference mode as on GPUs; where the backend is gloo Lightning turns it off."""
    modes: set[bool] = set()
    watch = callback(on_validation_epoch_end=lambda *_: modes.add(torch.is_inference_mode_enabled()))
    module, trainer = module_of(case, train_step=_counting_step()), trainer_of(case, callbacks=[watch])
    loader: DataLoader[Any] = DataLoader(Sentences(ROWS), batch_size=4)
    keep_on = patch("lightning.pytorch.loops.utilities._distributed_is_initialized", lambda: False)
    with keep_on if inference else contextlib.nullcontext():
        found = [phase(module, loader, verbose=False)[0] for phase in (*[trainer.validate] * 2, trainer.test)]
    assert modes == {inference}
    return [dict(metrics) for metrics in found]


def test_metrics_are_the_same_on_any_layout_every_rank_and_every_epoch() -> None:
    alone = common_result(_validate_twice, Case(), True)
    split = common_result(_validate_twice, Case(layout=Layout(pp=2, dp=2, num_microbatches=2)), False)
    expected, again, tested = alone
    assert expected["val_rows"] == tested["test_rows"] == ROWS
    assert tested["test_first_loss"] == expected["val_first_loss"]
    assert again == expected
    assert split == [pytest.approx(metrics, rel=1e-5) for metrics in alone]  # sums in another order


def _gather_in_validation(case: Case) -> dict[str, Any]:
    from lightning_megatron import (
        MegatronModule,
        avg_losses_across_data_parallel_group,
        gather_across_data_parallel_groups,
    )

    class Gathering(MegatronModule):
        gathered: dict[str, Any]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
            rank = self.megatron.data_parallel_rank
            tokens = batch["input_ids"][: rank + 1]  # another number of rows on each rank
            given = {"tokens": tokens, "pair": (torch.tensor(float(rank)), [torch.full((2, 1), rank)])}
            losses = [torch.tensor(float(rank)), torch.tensor([2.0 * rank])]
            self.gathered = gather_across_data_parallel_groups(given)
            self.gathered["mean"] = avg_losses_across_data_parallel_group(losses)
            return super().validation_step(batch, batch_idx)

    module = module_of(case, Gathering)
    trainer_of(case).validate(module, DataLoader(Sentences(8), batch_size=4), verbose=False)
    return module.gathered


def test_rows_and_losses_travel_between_the_copies_of_the_model() -> None:
    rows = Sentences(8).tokens
    for gathered in run_ranks(_gather_in_validation, 4, Case(layout=Layout(tp=2, dp=2))):
        # Evaluation deals rows out in turn: rank 0 has rows 0, 2, 4, 6.
        torch.testing.assert_close(gathered["tokens"], torch.stack([rows[0], rows[1], rows[3]]))
        assert gathered["pair"][0].tolist() == [0.0, 1.0]
        assert gathered["pair"][1][0].flatten().tolist() == [0, 0, 1, 1]
        assert gathered["mean"].tolist() == [0.5, 1.0]


# ---- what is logged -------------------------------------------------------------------------------------------------

CP = Layout(cp=2, dp=2, num_microbatches=2)
TWO_STAGES = Layout(pp=2, num_microbatches=2)
EIGHT_RANKS = Layout(tp=2, pp=2, dp=2, sequence_parallel=True, num_microbatches=2)
STEPS = 3
Metrics = dict[str, float]


def _metrics_on_the_way(case: Case) -> list[Metrics]:
    """Everything that callbacks can see, after each training step and after each validation."""
    seen: list[Metrics] = []

    def keep(trainer: Any, *_: Any) -> None:
        seen.append({name: value.item() for name, value in trainer.callback_metrics.items()})

    watch = callback(on_train_batch_end=keep, on_validation_end=keep)
    trainer = trainer_of(case, callbacks=[watch], max_steps=-1, max_epochs=2)
    trainer.fit(module_of(case), loader_of(case), loader_of(replace(case, steps=2)))
    return seen


@pytest.mark.parametrize(
    "layout", [TWO_STAGES, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in (EIGHT_RANKS, CP))], ids=str
)
def test_all_ranks_see_the_same_metrics_as_one_process(layout: Layout) -> None:
    case = Case(layout=layout, labels="uneven", steps=STEPS, clip=1.0)
    split, alone = common_result(_metrics_on_the_way, case), common_result(_metrics_on_the_way, case.on_one_process)
    logged = {"train_loss", "train_lm_loss", "val_loss", "val_lm_loss", "val_perplexity", "lr", "grad_norm"}
    assert set(split[-1]) == logged
    # A loss of 5 has a last place of 5e-7; norms differ more after some steps (comparison.py).
    assert split == [pytest.approx(metrics, rel=5e-5) for metrics in alone]


@pytest.mark.gpu(4)
def test_all_gpus_see_the_same_metrics() -> None:
    layout = Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2)
    case = Case(layout=layout, labels="uneven", steps=STEPS, precision="bf16-mixed", accelerator="gpu")
    assert common_result(_metrics_on_the_way, case)


# ---- callbacks and loggers ------------------------------------------------------------------------------------------


def _with_everything(case: Case, folder: Path) -> dict[str, Any]:
    """What one rank saw of a run with Lightning's own callbacks and loggers."""
    from lightning.pytorch import callbacks, loggers

    stopping = callbacks.EarlyStopping("val_loss", mode="max", patience=2)
    shown = callbacks.TQDMProgressBar(), callbacks.LearningRateMonitor(), callbacks.ModelSummary(max_depth=3)
    trainer = trainer_of(
        case,
        callbacks=[stopping, *shown],
        logger=loggers.CSVLogger(folder, "csv"),
        enable_progress_bar=True,
        enable_model_summary=True,
        log_every_n_steps=1,
        max_steps=-1,
        max_epochs=10,
    )
    summary, log = io.StringIO(), logging.getLogger("lightning.pytorch.callbacks.model_summary")
    log.addHandler(logging.StreamHandler(summary))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer.fit(module_of(case), loader_of(case), loader_of(replace(case, steps=1)))
    return {"printed": printed.getvalue(), "summary": summary.getvalue(), "stopped": stopping.stopped_epoch}


def test_lightnings_callbacks_and_loggers_work_under_pipeline_parallelism(tmp_path: Path) -> None:
    layout = Layout(tp=2, pp=2, num_microbatches=2)
    first, *others = run_ranks(_with_everything, 4, Case(layout=layout, steps=STEPS), tmp_path)
    assert others == [{"printed": "", "summary": "", "stopped": 2}] * 3  # two epochs are waited for after the first
    assert first["stopped"] == 2
    assert "train_loss" in first["printed"]
    assert "val_loss" in first["printed"]
    (file,) = tmp_path.glob("csv/**/*.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [int(row["step"]) for row in rows if row["train_loss"]] == list(range(3 * STEPS))
    assert sum(bool(row["val_loss"]) for row in rows) == 3
    assert {name for name in rows[0] if name.startswith("lr/")} == {"lr/no_weight_decay", "lr/weight_decay"}
    # Both stages, of which the first one has printed them: 12 h^2 + 13 h for a layer, h = 32.
    lines = [[cell.strip() for cell in line.split("|")] for line in first["summary"].splitlines()]
    table = {cells[1]: cells[3:6] for cells in lines if len(cells) > 5}
    assert table["Name"] == ["Params", "Params per Device", "Mode"]
    # 83 tokens and 16 positions; here with half of the 13 rows that pad the vocabulary to a multiple of 16.
    assert table["embedding"] == ["3.2 K", "2.0 K", "train"]
    assert table["decoder"] == ["50.9 K", "12.9 K", "train"]
    assert table["decoder.layers.3"] == ["12.7 K", "0", "train"]
    assert table["output_layer"] == ["0", "0", "train"]
    assert re.search(r"54.0 K +Total params", first["summary"])
