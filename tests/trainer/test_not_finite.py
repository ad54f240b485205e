"""A step whose loss or gradients are NaN or infinite never reaches the weights, whichever rank it comes from."""

import math
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.utils.data import DataLoader

from tests.checkpoint.runs import callback
from tests.parity.sharding import shards
from tests.parity.training import Case, Layout, Sentences, common_result, module_of, trainer_of
from tests.ranks import run_ranks

Kind = Literal["nan", "infinite loss", "nan gradient"]
BAD_STEP, BAD_ROW = 2, 9
STAGES_AND_COPIES = Layout(pp=2, dp=2, num_microbatches=3)
PLACES = {
    # Rank 3 is stage 1 of copy 1, whose rows 6 to 11 are three microbatches of two.
    STAGES_AND_COPIES: "microbatch 1 on rank 3 (data-parallel rank 1)",
    Layout(tp=2, dp=2, distributed_optimizer=False): "microbatch 0 on rank 2 (data-parallel rank 1)",
    Layout(pp=2, num_microbatches=3): "microbatch 2 on rank 1 (data-parallel rank 0)",
    Layout(dp=2, num_microbatches=3): "microbatch 1 on rank 1 (data-parallel rank 1)",
}


def _bad_step(kind: Kind | None) -> Any:
    """GPT's objective, which one row of one step makes NaN or infinite."""
    from lightning_megatron import GPTTrainStep
    from lightning_megatron.steps.base import LossTerm

    rows = Sentences(5 * 12).tokens
    bad = rows[BAD_STEP * 12 + BAD_ROW]

    class BadStep(GPTTrainStep):
        def loss_func(self, batch: dict[str, torch.Tensor], output: torch.Tensor) -> dict[str, LossTerm]:
            if kind is None or not (batch["tokens"] == bad.to(output.device)).all(-1).any():
                return super().loss_func(batch, output)
            if kind == "nan gradient":
                output.register_hook(lambda gradient: gradient * math.nan)
            term = super().loss_func(batch, output)["lm_loss"]
            total = {"nan": term.sum * math.nan, "infinite loss": term.sum + math.inf, "nan gradient": term.sum}[kind]
            return {"lm_loss": LossTerm(total, term.targets)}

    return BadStep()


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run did on this rank."""

    error: str
    global_step: int
    warnings: list[str]
    skipped_steps: float
    rates: list[float]
    first_weights: list[torch.Tensor]
    weights: list[torch.Tensor]


def _run(
    case: Case, kind: Kind | None, on_nan: str, *, leave_out: bool = False, ckpt_path: Any = None, **options: Any
) -> Run:
    """Five steps, or those but the bad one; ``options`` are the Trainer's."""
    from lightning_megatron import LRSchedule
    from lightning_megatron.errors import NonFiniteError

    rates: list[float] = []
    first_weights: list[torch.Tensor] = []
    watch = callback(
        on_train_start=lambda _, module: first_weights.extend(shard.data for shard in shards(module)),
        on_train_batch_start=lambda trainer, *_: rates.append(trainer.optimizers[0].param_groups[0]["lr"]),
    )
    copy = int(os.environ["RANK"]) // case.layout.tp % case.layout.dp
    batches = [part.chunk(case.layout.dp)[copy] for part in Sentences(5 * 12).tokens.split(12)]
    given = [{"input_ids": rows} for step, rows in enumerate(batches) if not (leave_out and step == BAD_STEP)]
    module = module_of(case, train_step=_bad_step(kind), lr_schedule=LRSchedule(warmup_steps=3, init_lr=case.lr / 10))
    options["callbacks"] = [watch, *options.pop("callbacks", [])]
    trainer = trainer_of(replace(case, steps=len(given)), use_distributed_sampler=False, **options)
    trainer.strategy.on_nan = on_nan
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, DataLoader(given, batch_size=None), ckpt_path=ckpt_path)  # type: ignore[arg-type]
        except NonFiniteError as raised:
            error = str(raised)
    return Run(
        error=error,
        global_step=trainer.global_step,
        warnings=[text for text in (str(w.message) for w in caught) if text.startswith("step ")],
        skipped_steps=float(trainer.callback_metrics.get("skipped_steps", math.nan)),
        rates=rates,
        first_weights=first_weights,
        weights=[shard.data for shard in shards(module)],
    )


def _decide_on_device() -> None:
    """Have this process work as with a GPU: the host reads a step's outcome behind the next step's gradients."""
    from lightning_megatron.engine.optimizer import MegatronOptimizer

    MegatronOptimizer._settles_late = property(lambda self: not self._context.may_skip)  # type: ignore[assignment, method-assign]


def _all_kinds(case: Case, late: bool) -> tuple[Run, Run, list[tuple[Kind, Run, Run]]]:
    """The run up to the step and the one that never meets it; then each kind raised and skipped."""
    without = _run(case, "nan", "raise"), _run(case, None, "raise", leave_out=True)
    if late:
        _decide_on_device()
    kinds: tuple[Kind, ...] = ("nan", "nan gradient") if late else ("nan", "infinite loss", "nan gradient")
    return *without, [(kind, _run(case, kind, "raise"), _run(case, kind, "skip")) for kind in kinds]


@pytest.mark.parametrize(
    ("layout", "clip", "optimizer", "accelerator", "is_late"),
    [
        (STAGES_AND_COPIES, 0.5, "adamw", "cpu", False),
        pytest.param(
            *(Layout(tp=2, dp=2, distributed_optimizer=False), None, "sgd", "cpu", False), marks=pytest.mark.exhaustive
        ),
        pytest.param(STAGES_AND_COPIES, 0.5, "adamw", "cpu", True, marks=pytest.mark.exhaustive),
        (Layout(tp=2, dp=2, distributed_optimizer=False), 0.5, "sgd", "cpu", True),
        pytest.param(Layout(pp=2, num_microbatches=3), 0.5, "adamw", "gpu", True, marks=pytest.mark.gpu(2)),
        pytest.param(Layout(dp=2, num_microbatches=3), 0.5, "adamw", "gpu", True, marks=pytest.mark.gpu(2)),
    ],
    ids=str,
)
def test_the_step_ends_all_ranks_or_is_left_out_by_all(
    layout: Layout, clip: float | None, optimizer: str, accelerator: Any, is_late: bool
) -> None:
    options = (("name", optimizer), ("eps", 1e-3), ("weight_decay", 0.1))
    case = Case(layout=layout, clip=clip, optimizer=options, accelerator=accelerator, lr=5e-3)
    found = run_ranks(_all_kinds, layout.world_size, case, is_late and accelerator == "cpu")
    for two_steps, never, of_rank in found:
        for kind, raised, skipped in of_rank:
            place = PLACES[layout]
            where = {"nan": f"{place} is nan", "infinite loss": f"{place} is inf", "nan gradient": "a gradient is NaN"}
            assert raised.error.startswith(f"step {BAD_STEP}: ")
            assert where[kind] in raised.error
            assert raised.global_step == BAD_STEP + is_late
            assert skipped.error == ""
            assert skipped.global_step == 5
            assert skipped.skipped_steps == 1.0
            assert where[kind] in "".join(skipped.warnings) or not skipped.warnings
            tolerance = 0 if accelerator == "cpu" and not is_late else 1e-6  # the device clips by a division
            for mine, expected in zip(raised.weights, two_steps.weights, strict=True):
                torch.testing.assert_close(mine, expected, rtol=0, atol=tolerance)
            # The bad step moves neither the weights nor the schedule.
            assert skipped.rates == never.rates[: BAD_STEP + 1] + never.rates[BAD_STEP:]
            for mine, expected in zip(skipped.weights, never.weights, strict=True):
                torch.testing.assert_close(mine, expected, rtol=0, atol=tolerance)


def _ended_and_resumed(case: Case, folder: Path, late: bool) -> tuple[Run, Run, list[str]]:
    from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

    if late:
        _decide_on_device()
    every_step = {"every_n_train_steps": 1, "save_top_k": -1}
    keepers = [OnExceptionCheckpoint(folder, "failed"), ModelCheckpoint(folder, "{step}", **every_step)]
    run = _run(case, "nan", "raise", callbacks=keepers, enable_checkpointing=True)
    saved = sorted(path.name for path in folder.iterdir())
    for name in ("failed.ckpt", "step=2.ckpt"):
        resumed = _run(case, "nan", "skip", ckpt_path=folder / name)
        assert all(torch.equal(a, b) for a, b in zip(resumed.first_weights, run.weights, strict=True))
    skipping = ModelCheckpoint(folder, "skipping-{step}", **every_step)
    first = _run(case, "nan", "skip", callbacks=[skipping], enable_checkpointing=True, max_steps=4)
    return first, _run(case, "nan", "skip", ckpt_path=folder / "skipping-step=4.ckpt"), saved


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_checkpoints_are_whole_and_keep_count_of_skipped_steps(tmp_path: Path, late: bool) -> None:
    for first, again, saved in run_ranks(_ended_and_resumed, 2, Case(layout=Layout(dp=2)), tmp_path, late):
        assert saved == ["failed.ckpt", "step=1.ckpt", "step=2.ckpt"]
        assert first.skipped_steps == again.skipped_steps == 1.0


def _in_fp16(case: Case, scale: float) -> list[Run]:
    from lightning_megatron import MegatronPrecision

    options = {"precision": None, "plugins": [MegatronPrecision("16-mixed")]}
    case = replace(case, optimizer=(*case.optimizer, ("initial_loss_scale", scale)))
    kinds: tuple[Kind, ...] = ("nan", "infinite loss")
    return [_run(case, kind, on_nan, **options) for kind in kinds for on_nan in ("raise", "skip")]


def test_an_overflow_of_the_loss_scale_is_none() -> None:
    # Times 2**22 gradients are beyond fp16's 65504: the first steps overflow, with finite losses.
    for runs in run_ranks(_in_fp16, 2, Case(layout=Layout(pp=2)), 2.0**22):
        assert [run.error[:7] for run in runs] == ["step 2:", "", "step 2:", ""]
        assert [run.skipped_steps for run in runs if not run.error] == [1.0, 1.0]


def _waits(case: Case) -> list[int]:
    """How often each step copies a number from the device to the host."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from lightning_megatron import MegatronModule

    counts: list[int] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_read = func is torch.ops.aten._local_scalar_dense.default
            counts[-1] += is_read and args[0].device.type == trainer.strategy.root_device.type
            return func(*args, **(kwargs or {}))

    class Counted(MegatronModule):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            counts.append(0)
            with Count():
                super().optimizer_step(*args, **kwargs)

    loader = DataLoader(Sentences(24), batch_size=12 // case.layout.dp)
    trainer = trainer_of(replace(case, steps=2))
    trainer.fit(module_of(case, Counted), loader)
    return counts


@pytest.mark.gpu(2)
def test_the_host_waits_for_no_gpu() -> None:
    assert common_result(_waits, Case(layout=Layout(pp=2, num_microbatches=3), accelerator="gpu")) == [0, 0]
