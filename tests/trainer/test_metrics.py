"""Metrics of objectives count every row once on any layout; gathers and averages between the copies of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.checkpoint.runs import callback
from tests.parity.training import Case, Layout, Sentences, module_of, trainer_of
from tests.ranks import run_ranks

LAYOUTS = [
    Layout(),
    Layout(pp=2, dp=2, num_microbatches=2),
    Layout(tp=2, pp=2, sequence_parallel=True, num_microbatches=2),
]
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


def _validate_twice(case: Case, on_epoch: Callable[[], None] = lambda: None) -> list[dict[str, float]]:
    watch = callback(on_validation_epoch_end=lambda *_: on_epoch(), on_test_epoch_end=lambda *_: on_epoch())
    module = module_of(case, train_step=_counting_step())
    loader: DataLoader[Any] = DataLoader(Sentences(ROWS), batch_size=4)
    trainer = trainer_of(case, callbacks=[watch])
    first = trainer.validate(module, loader, verbose=False)[0]
    second = trainer.validate(module, loader, verbose=False)[0]
    tested = trainer.test(module, loader, verbose=False)[0]
    return [dict(first), dict(second), dict(tested)]


def test_metrics_are_the_same_on_any_layout_every_rank_and_every_epoch() -> None:
    results = {layout: run_ranks(_validate_twice, layout.world_size, Case(layout=layout)) for layout in LAYOUTS}
    expected = results[LAYOUTS[0]][0][0]
    assert expected["val_rows"] == ROWS
    for layout, ranks in results.items():
        for first, second, tested in ranks:
            assert first == pytest.approx(expected, rel=1e-5), layout  # sums in another order
            assert second == first
            assert tested["test_rows"] == ROWS
            assert tested["test_first_loss"] == pytest.approx(expected["val_first_loss"], rel=1e-5)


def _gather_in_validation(case: Case) -> dict[str, Any]:
    from lightning_megatron import (
        MegatronModule,
        avg_losses_across_data_parallel_group,
        gather_across_data_parallel_groups,
    )

    class Gathering(MegatronModule):
        gathered: dict[str, Any]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
            loss = super().validation_step(batch, batch_idx)
            rank = self.megatron.data_parallel_rank
            tokens = batch["input_ids"][: rank + 1]  # another number of rows on each rank
            self.gathered = gather_across_data_parallel_groups(
                {"tokens": tokens, "pair": (torch.tensor(float(rank)), [torch.full((2, 1), rank)])}
            )
            losses = [torch.tensor(float(rank)), torch.tensor([2.0 * rank])]
            self.gathered["mean"] = avg_losses_across_data_parallel_group(losses)
            return loss

    module = module_of(case, Gathering)
    loader: DataLoader[Any] = DataLoader(Sentences(8), batch_size=4)
    trainer_of(case).validate(module, loader, verbose=False)
    return module.gathered


def test_rows_and_losses_travel_between_the_copies_of_the_model() -> None:
    rows = Sentences(8).tokens
    for gathered in run_ranks(_gather_in_validation, 4, Case(layout=Layout(tp=2, dp=2))):
        # Evaluation deals rows out in turn: rank 0 has rows 0, 2, 4, 6.
        torch.testing.assert_close(gathered["tokens"], torch.stack([rows[0], rows[1], rows[3]]))
        assert gathered["pair"][0].tolist() == [0.0, 1.0]
        assert gathered["pair"][1][0].flatten().tolist() == [0, 0, 1, 1]
        assert gathered["mean"].tolist() == [0.5, 1.0]


def test_without_groups_there_is_one_clear_error() -> None:
    from lightning_megatron import ConfigError, gather_across_data_parallel_groups

    with pytest.raises(ConfigError, match="no data-parallel group yet; call this within Trainer.fit"):
        gather_across_data_parallel_groups(torch.zeros(2))


def _validate_twice_in_inference_mode() -> list[dict[str, float]]:
    """As on GPUs; where the backend is gloo Lightning turns inference mode off."""
    from unittest.mock import patch

    seen = []

    with patch("lightning.pytorch.loops.utilities._distributed_is_initialized", lambda: False):
        results = _validate_twice(Case(), on_epoch=lambda: seen.append(torch.is_inference_mode_enabled()))
    assert seen == [True] * 3
    return results


def test_metrics_of_a_second_epoch_begin_anew_in_inference_mode_too() -> None:
    (first, second, _) = run_ranks(_validate_twice_in_inference_mode, 1)[0]
    assert first == second
