"""SpikeGuard: a rollback equals a run without the skipped samples. ReplicaCheck: replicas that differ end all ranks."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.runs import (
    GLOBAL_BATCH,
    Run,
    Trace,
    callback,
    checkpoints_at,
    differences,
    fit,
    rows_dataset,
)
from tests.marks import exhaustive
from tests.parity.training import Case, Layout, loader_of, module_of, refusal, trainer_of
from tests.ranks import run_ranks
from tests.recording import recorded_warnings

STEPS = 12
SPIKE = 6
LEFT_OUT = (5, 6, 7)
"""Steps that are skipped: the newest checkpoint is of step 4, and the spike is noticed when step 7 is queued."""


def _batches() -> tuple[Tensor, ...]:
    """Tokens of each step's global batch."""
    rows = [row["input_ids"] for row in rows_dataset(STEPS * GLOBAL_BATCH)]
    batches: tuple[Tensor, ...] = torch.stack(rows).split(GLOBAL_BATCH)
    return batches


def _spiky_step() -> Any:
    from lightning_megatron import GPTTrainStep
    from lightning_megatron.steps.base import Batch, LossTerm

    bad = _batches()[SPIKE - 1]

    class SpikyStep(GPTTrainStep):
        def loss_func(
            self,
            batch: Batch,
            output: Tensor,
        ) -> dict[str, LossTerm]:
            term = super().loss_func(batch, output)["lm_loss"]
            is_token_bad = batch["tokens"][:, None] == bad.to(output.device)
            if is_token_bad.all(-1).any():
                term = LossTerm(term.sum * 30, term.targets)
            return {"lm_loss": term}

    return SpikyStep()


def _loader_without(steps: tuple[int, ...], tp: int) -> Any:
    """Loader of this replica's batches, in order, without those of ``steps``."""
    from torch.utils.data import DataLoader

    replica = int(os.environ["RANK"]) // tp % 2
    batches = [
        {"input_ids": batch.chunk(2)[replica]}
        for step, batch in enumerate(_batches(), 1)
        if step not in steps
    ]
    return lambda dp: DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def _guarded(
    strategy: dict[str, Any], folder: Path
) -> tuple[tuple[Trace, ...], list[dict[str, Any]], list[str], str]:
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
    guards = [
        SpikeGuard(window=4, threshold=100, max_rollbacks=rollbacks) for rollbacks in (1, 1, 0)
    ]
    often = {"every_n_train_steps": 2}
    with recorded_warnings("SpikeGuard") as warned:
        _, guarded = fit(run, guards[0], checkpoints_at(folder, **often))
    shorter = run.but(
        loader=_loader_without(LEFT_OUT, tp),
        trainer={"max_steps": STEPS - len(LEFT_OUT)},
    )
    _, reference = fit(shorter)
    again = run.but(ckpt_path=str(folder / "step=8.ckpt"))
    _, resumed = fit(again, guards[1], checkpoints_at(folder / "b", **often))
    message = refusal(
        fit,
        run,
        guards[2],
        checkpoints_at(folder / "c", **often),
    )
    states = [guard.state_dict() for guard in guards[:2]]
    return (guarded, reference, resumed), states, warned, message


@pytest.mark.parametrize(
    "strategy",
    [
        {},
        exhaustive({"tp": 2, "pp": 2}),
        exhaustive({"pp": 2, "async_save": True, "distributed_optimizer": False}),
    ],
    ids=str,
)
def test_rollback_equals_run_without_skipped_samples(
    tmp_path: Path, strategy: dict[str, Any]
) -> None:
    ranks = 2 * strategy.get("tp", 1) * strategy.get("pp", 1)
    for rank, (traces, states, warned, message) in enumerate(
        run_ranks(_guarded, ranks, strategy, tmp_path)
    ):
        guarded, reference, resumed = traces
        assert differences(guarded.state, reference.state) == ["global_step"]
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
            assert (
                "restored from step 4, and the samples of steps 5 to 7 are skipped; rollback 1 of 1"
                in line
            )


@dataclass(frozen=True, kw_only=True)
class Flip:
    """One bit of one rank that flips in the forward and backward pass of step 3, before the check."""

    rank: int
    suffix: str
    """Of the weight's name."""
    tensor: str = "weight"
    """``weight``, or the name of its optimizer state: ``param``, ``exp_avg`` or ``exp_avg_sq``."""
    element: int = 5
    bit: int = 0
    hook: str = "on_before_zero_grad"
    """``on_train_batch_end`` of step 2 for one that has flipped before the step with the check."""


def _flip(trainer: Any, module: Any, flip: Flip) -> bool:
    """Flip the bit on its rank; whether the rank holds the element."""
    from lightning_megatron.engine.optimizer_state import param_states

    if int(os.environ["RANK"]) != flip.rank:
        return False
    (parameter,) = (
        weight
        for name, weight in module.model_chunks[0].named_parameters()
        if name.endswith(flip.suffix)
    )
    tensor = parameter.data
    start = 0
    if flip.tensor != "weight":
        for held in param_states(trainer.strategy.megatron_optimizer.parts):
            if held.parameter is parameter:
                tensor = held.tensors[flip.tensor]
                start = held.start
                break
        else:
            return False
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    flat = tensor.view(-1).view(integers)
    if not start <= flip.element < start + len(flat):
        return False
    flat[flip.element - start] ^= 1 << flip.bit
    return True


def _flip_bits(
    strategy: dict[str, Any], precision: str, flips: list[Flip]
) -> list[tuple[str, bool]]:
    """Message of a run in which a bit flips, "" if it ends well, and whether this rank's flipped, for each flip.

    A run without flips passes first.
    """
    from lightning_megatron import ReplicaCheck
    from lightning_megatron.errors import NumericsError

    run = Run(
        strategy=strategy,
        trainer={"max_steps": 3, "precision": precision},
        model={"n_layer": 2},
    )
    fit(run, ReplicaCheck(every_n_steps=1))
    outcomes = []
    for flip in flips:
        flipped: list[bool] = []

        hook = partial(_flip_once, flip, flipped)
        message = ""
        try:
            fit(run, callback(**{flip.hook: hook}), ReplicaCheck(every_n_steps=2))
        except NumericsError as error:
            message = str(error)
        outcomes.append((message, any(flipped)))
    return outcomes


def _flip_once(
    flip: Flip,
    flipped: list[bool],
    trainer: Any,
    module: Any,
    *_: Any,
) -> None:
    """Hook that flips the bit in step 3, and appends whether this rank has it."""
    if trainer.global_step == 2 and not flipped:
        flipped.append(_flip(trainer, module, flip))


SPLIT = "layers.1.mlp.linear_fc1.weight"
NORM = "final_layernorm.weight"
BIAS = "layers.0.mlp.linear_fc2.bias"
WEIGHTS = [
    Flip(rank=0, suffix=SPLIT, element=5, bit=0),
    Flip(rank=1, suffix=SPLIT, element=900, bit=14),
    Flip(rank=2, suffix=NORM, element=31, bit=1),
    Flip(rank=3, suffix="word_embeddings.weight", element=77, bit=9),
]
STATE = [
    Flip(rank=rank, suffix=suffix, tensor=tensor, element=element, bit=3)
    for rank, element, of_bias in (
        (0, 2, "param"),
        (1, 30, "exp_avg"),
        (2, 3, "exp_avg_sq"),
        (3, 20, "param"),
    )
    for suffix, tensor in ((BIAS, of_bias), (SPLIT, "exp_avg"))
]


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        exhaustive({"tp": 2}, "32-true"),
        ({"cp": 2}, "bf16-mixed"),
        exhaustive({"cp": 2, "distributed_optimizer": False}, "32-true"),
        exhaustive({"distributed_optimizer": False}, "bf16-mixed"),
        exhaustive({}, "bf16-mixed"),
        exhaustive({"overlap_communication": True}, "bf16-mixed"),
        exhaustive({"tp": 2, "sequence_parallel": True}, "bf16-mixed"),
    ],
    ids=str,
)
def test_replica_check_finds_every_bit_that_flips_in_a_step(
    strategy: dict[str, Any], precision: str
) -> None:
    flips = [*WEIGHTS, *STATE]
    num_flipped = 0
    ranks = run_ranks(_flip_bits, 4, strategy, precision, flips)
    for flip, *of_ranks in zip(flips, *ranks, strict=True):
        messages = {message for message, _ in of_ranks}
        assert len(messages) == 1, flip
        is_flipped = any(has_flipped for _, has_flipped in of_ranks)
        num_flipped += is_flipped
        assert bool(messages.pop()) == is_flipped, flip
    if strategy.get("distributed_optimizer") is False:
        assert num_flipped == len(flips)
    else:
        # A rank holds only a part of a sharded state.
        assert num_flipped >= 6


def _check_each_step(cases: list[Case]) -> None:
    from lightning_megatron import ReplicaCheck

    for case in cases:
        trainer = trainer_of(case, callbacks=[ReplicaCheck(every_n_steps=1)])
        trainer.fit(module_of(case), loader_of(case))


def test_replica_check_passes_a_run_without_faults() -> None:
    layouts = [
        (
            "gpt2",
            Layout(
                pp=2,
                dp=2,
                overlap_communication=True,
            ),
            "bf16-mixed",
        ),
        ("gpt2", Layout(tp=2, pp=2), "32-true"),
        ("experts", Layout(ep=2, dp=4), "bf16-mixed"),
        ("t5", Layout(pp=2, dp=2), "bf16-mixed"),
        (
            "gpt2",
            Layout(
                tp=2,
                dp=2,
                offload_optimizer=0.5,
            ),
            "bf16-mixed",
        ),
    ]
    cases = [
        Case(model=model, layout=layout, precision=precision)
        for model, layout, precision in layouts
    ]
    run_ranks(_check_each_step, 4, cases)


def test_replica_check_finds_what_flipped_before_the_step() -> None:
    before = "on_train_batch_end"
    flips = [
        Flip(rank=2, suffix=NORM, hook=before),
        Flip(rank=3, suffix=SPLIT, hook=before),
        Flip(
            rank=1,
            suffix=BIAS,
            tensor="exp_avg",
            element=9,
            hook=before,
        ),
    ]
    strategy = {"tp": 2, "distributed_optimizer": False}
    for norm, split, moment in run_ranks(_flip_bits, 4, strategy, "32-true", flips):
        assert norm[0].startswith("ReplicaCheck, step 2: ")
        assert "decoder.final_layernorm.weight at (0,)" in norm[0]
        assert "got one on ranks 2 and another on ranks 0, 1, 3; suspect memory" in norm[0]
        # Only two ranks hold this shard of a weight that is split over tp.
        assert "decoder.layers.mlp.linear_fc1.weight at (1, " in split[0]
        assert "got one on ranks 1 and another on ranks 3; suspect memory" in split[0]
        assert moment[0].startswith(
            "ReplicaCheck, step 2: optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.bias"
        )
