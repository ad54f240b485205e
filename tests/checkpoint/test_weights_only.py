"""Checkpoints of weights only, and new runs from the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import (
    GLOBAL_BATCH,
    Run,
    callback,
    fit,
    live_state,
    make_module,
    make_trainer,
    read_tensors,
    rows_dataset,
    train,
)
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def _evaluation_loader(rank_rows: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(rows_dataset(12), batch_size=rank_rows)


def _train_and_save_both_ways(run: Run, folder: Path) -> float:
    """``full.ckpt`` and ``weights.ckpt`` of the same moment, and the loss there."""
    trainer, _ = fit(run)
    trainer.save_checkpoint(folder / "full.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    rows = GLOBAL_BATCH // trainer.strategy.data_parallel_size
    (metrics,) = trainer.validate(trainer.lightning_module, _evaluation_loader(rows), verbose=False)
    return float(metrics["val_loss"])


def _evaluate(run: Run, path: Path) -> list[float]:
    trainer, module = make_trainer(run), make_module(run)
    loader = _evaluation_loader(GLOBAL_BATCH // trainer.strategy.data_parallel_size)
    (validated,) = trainer.validate(module, loader, ckpt_path=path, verbose=False)
    (tested,) = trainer.test(module, loader, ckpt_path=path, verbose=False)
    return [validated["val_loss"], tested["test_loss"]]


def test_both_kinds_of_checkpoint_evaluate_to_the_loss_of_their_moment(tmp_path: Path) -> None:
    run = Run(strategy={"tp": 2}, trainer={"max_steps": 3, "precision": "bf16-mixed"})
    loss, _ = run_ranks(_train_and_save_both_ways, 2, run, tmp_path)

    for name in ("full.ckpt", "weights.ckpt"):
        assert run_ranks(_evaluate, 2, run, tmp_path / name) == [[loss, loss]] * 2


def test_resuming_from_weights_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run = Run(trainer={"max_steps": 1})
    run_ranks(_train_and_save_both_ways, 1, run, tmp_path)

    with pytest.raises(RankError, match="holds only weights; resume from a full one") as caught:
        run_ranks(train, 2, run.but(ckpt_path=str(tmp_path / "weights.ckpt")))

    assert caught.value.error_type == "CheckpointError"
    assert "load_weights_only=True" in str(caught.value)
    weights, full = read_tensors(tmp_path / "weights.ckpt"), read_tensors(tmp_path / "full.ckpt")
    assert weights.keys() == {name for name in full if not name.startswith("optimizer.")}
    assert all(tensor.equal(full[name]) for name, tensor in weights.items())


def _weights_around_a_step_at_rate_zero(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights as they were loaded, and after an optimizer step that must not move them."""
    before: dict[str, Any] = {}
    watch = callback(on_train_start=lambda trainer, _: before.update(_weights(live_state(trainer))))
    return before, _weights(fit(run.but(module={"lr": 0.0}), watch)[1].state)


def _weights(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name.startswith("weights.")}


def test_the_optimizers_own_copy_of_the_weights_follows_what_was_loaded(tmp_path: Path) -> None:
    """An optimizer that keeps fp32 masters of the random weights would bring those back at its first step."""
    run = Run(trainer={"max_steps": 1, "precision": "bf16-mixed"})
    run_ranks(_train_and_save_both_ways, 1, run, tmp_path)
    (trained,) = run_ranks(_final_weights, 1, run)

    fresh = run.but(strategy={"load_weights_only": True}, seed=99, ckpt_path=str(tmp_path / "weights.ckpt"))
    for before, after in run_ranks(_weights_around_a_step_at_rate_zero, 2, fresh):
        assert all(before[name].equal(trained[name]) for name in trained)
        assert all(after[name].equal(trained[name]) for name in trained)


def _final_weights(run: Run) -> dict[str, Any]:
    return _weights(fit(run)[1].state)
