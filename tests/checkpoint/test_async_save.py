"""An asynchronous save is an exact snapshot of the step at which it began, and can be abandoned."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import (
    Run,
    begin_save,
    callback,
    differences,
    engine_run,
    fit,
    live_state,
    names_in,
    save,
)
from tests.marks import on_gpus
from tests.ranks import run_ranks

SAVED_AT = 2
LAST = 4

TP2_SP = {"tp": 2, "sequence_parallel": True}


def _state_on_host(trainer: Any) -> dict[str, Any]:
    state = live_state(trainer)
    return {name: value.cpu() if hasattr(value, "cpu") else value for name, value in state.items()}


def _save_then_resume(run: Run, path: Path) -> tuple[list[str], list[float], list[float]]:
    """Differences between the saved and the resumed state, and the later losses of both runs."""
    from lightning_megatron.checkpoint import host_buffer

    host_buffer._PINNED_AT_ONCE = 2**12  # split tensors into several pieces, as for large models
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}

    def save_once(trainer: Any, *_: Any) -> None:
        if trainer.global_step == SAVED_AT:
            # Save first: it waits for the all-gather of new weights, which may overlap with the next step.
            trainer.save_checkpoint(path)
            before.update(_state_on_host(trainer))

    def record_start(trainer: Any, module: Any) -> None:
        after.update(_state_on_host(trainer))

    saving = run.but(strategy={"async_save": True})
    _, uninterrupted = fit(saving, callback(on_train_batch_end=save_once))
    _, resumed = fit(run.but(ckpt_path=str(path)), callback(on_train_start=record_start))
    later = range(SAVED_AT + 1, LAST + 1)
    return (
        differences(before, after),
        [uninterrupted.steps[step]["loss"] for step in later],
        [resumed.steps[step]["loss"] for step in later],
    )


@pytest.mark.parametrize(
    ("accelerator", "world_size", "strategy", "precision"),
    [
        ("cpu", 2, TP2_SP, "32-true"),
        ("cpu", 2, {"overlap_communication": True}, "bf16-mixed"),
        on_gpus(1, "gpu", 1, {}, "32-true"),
        on_gpus(1, "gpu", 1, {}, "bf16-mixed"),
        on_gpus(1, "gpu", 1, {}, "16-mixed"),
        on_gpus(2, "gpu", 2, TP2_SP, "bf16-mixed"),
        on_gpus(2, "gpu", 2, {"pp": 2}, "bf16-mixed"),
        on_gpus(2, "gpu", 2, {}, "bf16-mixed"),
        on_gpus(2, "gpu", 2, {"distributed_optimizer": False}, "bf16-mixed"),
    ],
)
def test_async_save_is_an_exact_snapshot(
    accelerator: str,
    world_size: int,
    strategy: dict[str, Any],
    precision: str,
    tmp_path: Path,
) -> None:
    run = Run(
        strategy=strategy,
        trainer={"accelerator": accelerator, "max_steps": LAST, "precision": precision},
    )
    # The restored state is bitwise equal; later GPU steps may differ by the summation order of some kernels.
    rel = 0.0 if accelerator == "cpu" else 1e-3
    ranks = run_ranks(_save_then_resume, world_size, run, tmp_path / "saved.ckpt")
    for differing, losses, resumed in ranks:
        assert differing == []
        assert resumed == pytest.approx(losses, rel=rel, abs=0.0)


def _abandon(path: Path) -> list[Any]:
    import torch.distributed as dist

    from lightning_megatron.checkpoint import save as module
    from lightning_megatron.checkpoint.load import read_meta

    original = module._ChecksummedFile.write
    with engine_run() as state, pytest.MonkeyPatch.context() as patch:
        save(state, {"save": "old"}, path)
        slow = lambda *args: time.sleep(0.1) or original(*args)  # type: ignore[func-returns-value]  # noqa: E731
        patch.setattr(module._ChecksummedFile, "write", slow)
        saving = begin_save(state, {"save": "new"}, path)
        start = time.monotonic()
        saving.abandon()
        seconds = time.monotonic() - start
        dist.barrier()
        return [
            names_in(path.parent),
            read_meta(path)["lightning"]["save"],
            seconds,
        ]


def test_abandoned_save_ends_quickly_and_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    for names, content, seconds in run_ranks(_abandon, 2, tmp_path / "a.ckpt"):
        assert names == ["a.ckpt"]
        assert content == "old"
        assert seconds < 2  # time for one piece out of dozens
