"""SpikeGuard: a rollback equals a run without the skipped samples. ReplicaCheck: replicas that differ end all ranks."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import GLOBAL_BATCH, Run, Trace, callback, checkpoints_at, differences, fit, rows_dataset
from tests.parity.training import refusal
from tests.ranks import run_ranks

STEPS, SPIKE = 12, 6
LEFT_OUT = (5, 6, 7)
"""Steps that are skipped: the newest checkpoint is of step 4, and the spike is noticed when step 7 is queued."""


def _spiky_step() -> Any:
    from lightning_megatron import GPTTrainStep
    from lightning_megatron.steps.base import LossTerm

    rows = torch.stack([row["input_ids"] for row in rows_dataset(STEPS * GLOBAL_BATCH)])
    bad = rows[(SPIKE - 1) * GLOBAL_BATCH : SPIKE * GLOBAL_BATCH]

    class SpikyStep(GPTTrainStep):
        def loss_func(self, batch: dict[str, torch.Tensor], output: torch.Tensor) -> dict[str, LossTerm]:
            term = super().loss_func(batch, output)["lm_loss"]
            is_bad = (batch["tokens"][:, None] == bad.to(output.device)).all(-1).any()
            return {"lm_loss": LossTerm(term.sum * 30, term.targets) if is_bad else term}

    return SpikyStep()


def _loader_without(steps: tuple[int, ...], tp: int) -> Any:
    """Loader of this replica's batches, in order, without those of ``steps``."""
    from torch.utils.data import DataLoader

    rows = torch.stack([row["input_ids"] for row in rows_dataset(STEPS * GLOBAL_BATCH)]).split(GLOBAL_BATCH)
    replica = int(os.environ["RANK"]) // tp % 2
    batches = [{"input_ids": batch.chunk(2)[replica]} for step, batch in enumerate(rows, 1) if step not in steps]
    return lambda dp: DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def _guarded(strategy: dict[str, Any], folder: Path) -> tuple[tuple[Trace, ...], list[dict[str, Any]], list[str], str]:
    """Traces of the guarded, the reference and the resumed run; states of the guards; warnings; the refusal."""
    from lightning_megatron import LRSchedule, SpikeGuard

    schedule = LRSchedule(style="linear", warmup_steps=2, decay_steps=20)
    tp = strategy.get("tp", 1)
    run = Run(
        strategy=strategy,
        module={"train_step": _spiky_step(), "lr_schedule": schedule},
        loader=_loader_without((), tp),
        trainer={"max_steps": STEPS, "use_distributed_sampler": False},
    )
    guards = [SpikeGuard(window=4, threshold=100, max_rollbacks=rollbacks) for rollbacks in (1, 1, 0)]
    often = {"every_n_train_steps": 2}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guarded = fit(run, guards[0], checkpoints_at(folder, **often))[1]
    reference = fit(run.but(loader=_loader_without(LEFT_OUT, tp), trainer={"max_steps": STEPS - len(LEFT_OUT)}))[1]
    resumed = fit(run.but(ckpt_path=str(folder / "step=8.ckpt")), guards[1], checkpoints_at(folder / "b", **often))[1]
    message = refusal(fit, run, guards[2], checkpoints_at(folder / "c", **often))
    warned = [str(warning.message) for warning in caught if "SpikeGuard" in str(warning.message)]
    return (guarded, reference, resumed), [guard.state_dict() for guard in guards[:2]], warned, message


@pytest.mark.parametrize(
    "strategy",
    [
        {},
        pytest.param({"tp": 2, "pp": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"pp": 2, "async_save": True, "distributed_optimizer": False}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_rollback_equals_run_without_skipped_samples(tmp_path: Path, strategy: dict[str, Any]) -> None:
    ranks = 2 * strategy.get("tp", 1) * strategy.get("pp", 1)
    for rank, (traces, states, warned, message) in enumerate(run_ranks(_guarded, ranks, strategy, tmp_path)):
        guarded, reference, resumed = traces
        assert differences({**guarded.state, "global_step": 0}, {**reference.state, "global_step": 0}) == []
        for step in range(8, STEPS + 1):
            assert guarded.steps[step] == reference.steps[step - len(LEFT_OUT)]
        assert guarded.steps[SPIKE]["loss"] > 10 * guarded.steps[SPIKE - 1]["loss"]
        assert differences(guarded.state, resumed.state) == []
        assert states[0] == states[1]
        assert states[0]["rollbacks"] == 1
        assert states[0]["last"] == [STEPS, guarded.steps[STEPS]["loss"]]
        assert message.startswith("SpikeGuard: the loss of step 6 is ")
        assert "after max_rollbacks=0 rollbacks" in message
        if rank == 0:
            (line,) = warned
            assert "restored from step 4, and the samples of steps 5 to 7 are skipped; rollback 1 of 1" in line


def _flip_bits(strategy: dict[str, Any], flips: list[tuple[int, str]]) -> list[str]:
    """Messages of runs in which a bit flips, one for each (rank, weight name); a run without flips passes first."""
    from lightning_megatron import ReplicaCheck

    run = Run(strategy=strategy, trainer={"max_steps": 4})
    fit(run, ReplicaCheck(every_n_steps=2))
    messages = []
    for rank, suffix in flips:

        def flip(trainer: Any, module: Any, *_: Any, rank: int = rank, suffix: str = suffix) -> None:
            for name, weight in module.model_chunks[0].named_parameters():
                if trainer.global_step == 2 and int(os.environ["RANK"]) == rank and name.endswith(suffix):
                    weight.data.view(torch.int32).view(-1)[5] ^= 1

        messages.append(refusal(fit, run, callback(on_train_batch_end=flip), ReplicaCheck(every_n_steps=2)))
    return messages


def test_replica_check_reports_flipped_bit_on_all_ranks() -> None:
    flips = [(2, "final_layernorm.weight"), (3, "layers.1.mlp.linear_fc1.weight")]
    for norm, sharded in run_ranks(_flip_bits, 4, {"tp": 2}, flips):
        assert norm.startswith("ReplicaCheck, step 2: decoder.final_layernorm.weight at (0,): expected equal bits")
        assert "got one on ranks 2 and another on ranks 0, 1, 3; suspect memory" in norm
        # Only two ranks hold this shard of a weight that is split over tp.
        assert sharded.startswith("ReplicaCheck, step 2: decoder.layers.mlp.linear_fc1.weight at (1, ")
        assert "got one on ranks 1 and another on ranks 3; suspect memory" in sharded
