"""A run that goes back behind a loss spike equals one that never met its samples; copies that differ end all ranks."""

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
"""The newest checkpoint before the spike is of step 4, and the spike is noticed when step 7 is queued."""


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
    """This rank's batches, in their order."""
    from torch.utils.data import DataLoader

    rows = torch.stack([row["input_ids"] for row in rows_dataset(STEPS * GLOBAL_BATCH)]).split(GLOBAL_BATCH)
    copy = int(os.environ["RANK"]) // tp % 2
    given = [{"input_ids": batch.chunk(2)[copy]} for step, batch in enumerate(rows, 1) if step not in steps]
    return lambda dp: DataLoader(given, batch_size=None)  # type: ignore[arg-type]


def _guarded(strategy: dict[str, Any], folder: Path) -> tuple[tuple[Trace, ...], list[dict[str, Any]], list[str], str]:
    """The run, the one without the samples and the resumed one; states of guards; warnings; and the refusal."""
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
    keeper = {"every_n_train_steps": 2}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = fit(run, guards[0], checkpoints_at(folder, **keeper))[1]
    never = fit(run.but(loader=_loader_without(LEFT_OUT, tp), trainer={"max_steps": STEPS - len(LEFT_OUT)}))[1]
    resumed = fit(run.but(ckpt_path=str(folder / "step=8.ckpt")), guards[1], checkpoints_at(folder / "b", **keeper))[1]
    message = refusal(fit, run, guards[2], checkpoints_at(folder / "c", **keeper))
    warned = [str(each.message) for each in caught if "SpikeGuard" in str(each.message)]
    return (whole, never, resumed), [guard.state_dict() for guard in guards[:2]], warned, message


@pytest.mark.parametrize(
    "strategy",
    [
        {},
        pytest.param({"tp": 2, "pp": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"pp": 2, "async_save": True, "distributed_optimizer": False}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_the_run_behind_a_spike_equals_one_that_had_left_its_samples_out(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    ranks = 2 * strategy.get("tp", 1) * strategy.get("pp", 1)
    for rank, (traces, states, warned, message) in enumerate(run_ranks(_guarded, ranks, strategy, tmp_path)):
        whole, never, resumed = traces
        assert differences({**whole.state, "global_step": 0}, {**never.state, "global_step": 0}) == []
        for step in range(8, STEPS + 1):
            assert whole.steps[step] == never.steps[step - len(LEFT_OUT)]
        assert whole.steps[SPIKE]["loss"] > 10 * whole.steps[SPIKE - 1]["loss"]
        assert differences(whole.state, resumed.state) == []
        assert states[0] == states[1]
        assert states[0]["rollbacks"] == 1
        assert states[0]["last"] == [STEPS, whole.steps[STEPS]["loss"]]
        assert message.startswith("SpikeGuard: the loss of step 6 is ")
        assert "after max_rollbacks=0 rollbacks" in message
        if rank == 0:
            (line,) = warned
            assert "restored from step 4, and the samples of steps 5 to 7 are skipped; rollback 1 of 1" in line


def _with_a_bit_flipped(strategy: dict[str, Any], flips: list[tuple[int, str]]) -> list[str]:
    """What a run says in which a rank's bit flips, for each rank and name of a weight; one runs without before."""
    from lightning_megatron import ReplicaCheck

    run = Run(strategy=strategy, trainer={"max_steps": 4})
    fit(run, ReplicaCheck(every_n_steps=2))
    said = []
    for rank, end in flips:

        def flip(trainer: Any, module: Any, *_: Any, rank: int = rank, end: str = end) -> None:
            for name, weight in module.model_chunks[0].named_parameters():
                if trainer.global_step == 2 and int(os.environ["RANK"]) == rank and name.endswith(end):
                    weight.data.view(torch.int32).view(-1)[5] ^= 1

        said.append(refusal(fit, run, callback(on_train_batch_end=flip), ReplicaCheck(every_n_steps=2)))
    return said


def test_a_flipped_bit_is_told_with_rank_and_tensor_on_all_ranks() -> None:
    flips = [(2, "final_layernorm.weight"), (3, "layers.1.mlp.linear_fc1.weight")]
    for norm, split in run_ranks(_with_a_bit_flipped, 4, {"tp": 2}, flips):
        assert norm.startswith("ReplicaCheck, step 2: decoder.final_layernorm.weight at (0,): expected equal bits")
        assert "got one on ranks 2 and another on ranks 0, 1, 3; suspect memory" in norm
        # Only two ranks hold that part of a weight that is split over tp.
        assert split.startswith("ReplicaCheck, step 2: decoder.layers.mlp.linear_fc1.weight at (1, ")
        assert "got one on ranks 1 and another on ranks 3; suspect memory" in split
