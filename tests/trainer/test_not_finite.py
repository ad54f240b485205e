"""A step with a NaN or infinite loss or gradient never changes the weights, whichever rank it comes from."""

import itertools
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.checkpoint.runs import callback, checkpoints_at, names_in
from tests.marks import exhaustive, on_gpus
from tests.parity.comparison import all_equal
from tests.parity.sharding import shards
from tests.parity.training import (
    DP2,
    Case,
    Layout,
    Sentences,
    common_result,
    loader_of,
    metrics_of,
    module_of,
    recorded_rates,
    trainer_of,
)
from tests.ranks import run_ranks
from tests.recording import recorded_warnings

Kind = Literal["nan", "infinite loss", "nan gradient"]
BAD_STEP = 2
BAD_ROW = 9
STAGES_AND_REPLICAS = Layout(pp=2, dp=2, num_microbatches=3)
UNSHARDED = Layout(tp=2, dp=2, distributed_optimizer=False)
SOURCES = {
    # Rank 3 is stage 1 of replica 1, whose rows 6 to 11 are three microbatches of two.
    STAGES_AND_REPLICAS: "microbatch 1 on rank 3 (data-parallel rank 1)",
    UNSHARDED: "microbatch 0 on rank 2 (data-parallel rank 1)",
    Layout(pp=2, num_microbatches=3): "microbatch 2 on rank 1 (data-parallel rank 0)",
    Layout(dp=2, num_microbatches=3): "microbatch 1 on rank 1 (data-parallel rank 1)",
}


def _bad_step(kind: Kind | None) -> Any:
    """GPT train step in which one row of one step gives NaN or infinite values."""
    from lightning_megatron import GPTTrainStep
    from lightning_megatron.steps.base import Batch, LossTerm

    bad = Sentences(5 * 12).tokens[BAD_STEP * 12 + BAD_ROW]

    class BadStep(GPTTrainStep):
        def loss_func(
            self,
            batch: Batch,
            output: Tensor,
        ) -> dict[str, LossTerm]:
            is_bad = (batch["tokens"] == bad.to(output.device)).all(-1).any()
            if kind is None or not is_bad:
                return super().loss_func(batch, output)
            if kind == "nan gradient":
                output.register_hook(lambda gradient: gradient * math.nan)
            term = super().loss_func(batch, output)["lm_loss"]
            total = {
                "nan": term.sum * math.nan,
                "infinite loss": term.sum + math.inf,
                "nan gradient": term.sum,
            }[kind]
            return {"lm_loss": LossTerm(total, term.targets)}

    return BadStep()


@dataclass(frozen=True, kw_only=True)
class Run:
    """Result of one run on this rank."""

    error: str
    global_step: int
    warnings: list[str]
    skipped_steps: float
    rates: list[float]
    first_weights: list[Tensor]
    weights: list[Tensor]


def _run(
    case: Case,
    kind: Kind | None,
    on_nan: str,
    *,
    leave_out: bool = False,
    ckpt_path: Any = None,
    **options: Any,
) -> Run:
    """Train five steps, or with ``leave_out`` all but the bad one; ``options`` are the Trainer's."""
    from lightning_megatron import LRSchedule
    from lightning_megatron.errors import NonFiniteError

    rates: list[float] = []
    first_weights: list[Tensor] = []

    def begin(trainer: Any, module: Any) -> None:
        first_weights.extend(_weights(module))

    replica = int(os.environ["RANK"]) // case.layout.tp % case.layout.dp
    batches = list(Sentences(5 * 12).tokens.split(12))
    if leave_out:
        del batches[BAD_STEP]
    inputs = [{"input_ids": batch.chunk(case.layout.dp)[replica]} for batch in batches]
    module = module_of(
        case,
        train_step=_bad_step(kind),
        lr_schedule=LRSchedule(warmup_steps=3, init_lr=case.lr / 10),
    )
    recorders = [callback(on_train_start=begin), recorded_rates(rates)]
    options["callbacks"] = recorders + options.pop("callbacks", [])
    trainer = trainer_of(
        replace(case, steps=len(inputs)),
        use_distributed_sampler=False,
        **options,
    )
    trainer.strategy.on_nan = on_nan
    error = ""
    with recorded_warnings("step ") as warned:
        try:
            trainer.fit(module, DataLoader(inputs, batch_size=None), ckpt_path=ckpt_path)  # type: ignore[arg-type]
        except NonFiniteError as raised:
            error = str(raised)
    return Run(
        error=error,
        global_step=trainer.global_step,
        warnings=[text for text in warned if text.startswith("step ")],
        skipped_steps=metrics_of(trainer).get("skipped_steps", math.nan),
        rates=rates,
        first_weights=first_weights,
        weights=_weights(module),
    )


def _weights(module: Any) -> list[Tensor]:
    return [shard.data for shard in shards(module)]


def _decide_on_device() -> None:
    """Make this process work as on a GPU: the host reads a step's outcome after the next step's gradients."""
    from lightning_megatron.engine.optimizer import MegatronOptimizer

    MegatronOptimizer._settles_late = property(lambda self: not self._context.may_skip)  # type: ignore[assignment, method-assign]


def _all_kinds(case: Case, late: bool) -> tuple[Run, Run, list[tuple[Kind, Run, Run]]]:
    """Runs that stop at the bad step and that leave it out; then each kind with ``raise`` and with ``skip``."""
    two_steps = _run(case, "nan", "raise")
    without_step = _run(case, None, "raise", leave_out=True)
    kinds: list[Kind] = ["nan", "nan gradient"]
    if late:
        _decide_on_device()
    else:
        kinds.append("infinite loss")
    runs = [
        (
            kind,
            _run(case, kind, "raise"),
            _run(case, kind, "skip"),
        )
        for kind in kinds
    ]
    return two_steps, without_step, runs


@pytest.mark.parametrize(
    ("layout", "clip", "optimizer", "accelerator", "is_late"),
    [
        (STAGES_AND_REPLICAS, 0.5, "adamw", "cpu", False),
        exhaustive(UNSHARDED, None, "sgd", "cpu", False),
        exhaustive(STAGES_AND_REPLICAS, 0.5, "adamw", "cpu", True),
        exhaustive(UNSHARDED, 0.5, "sgd", "cpu", True),
        on_gpus(
            2,
            Layout(pp=2, num_microbatches=3),
            0.5,
            "adamw",
            "gpu",
            True,
        ),
        on_gpus(
            2,
            Layout(dp=2, num_microbatches=3),
            0.5,
            "adamw",
            "gpu",
            True,
        ),
    ],
    ids=str,
)
def test_bad_step_ends_or_is_skipped_on_all_ranks(
    layout: Layout,
    clip: float | None,
    optimizer: str,
    accelerator: Any,
    is_late: bool,
) -> None:
    options: tuple[tuple[str, Any], ...] = (("name", optimizer), ("weight_decay", 0.1))
    if optimizer != "sgd":
        options += (("eps", 1e-3),)
    case = Case(
        layout=layout,
        clip=clip,
        optimizer=options,
        accelerator=accelerator,
        lr=5e-3,
    )
    ranks = run_ranks(_all_kinds, layout.world_size, case, is_late and accelerator == "cpu")
    loss = f"{SOURCES[layout]} is"
    reasons = {
        "nan": f"{loss} nan",
        "infinite loss": f"{loss} inf",
        "nan gradient": "a gradient is NaN",
    }
    # On the device clipping divides.
    tolerance = 0 if accelerator == "cpu" and not is_late else 1e-6
    for two_steps, without_step, runs in ranks:
        rates = without_step.rates
        for kind, raised, skipped in runs:
            assert raised.error.startswith(f"step {BAD_STEP}: ")
            assert reasons[kind] in raised.error
            assert raised.global_step == BAD_STEP + is_late
            assert skipped.error == ""
            assert skipped.global_step == 5
            assert skipped.skipped_steps == 1.0
            assert reasons[kind] in "".join(skipped.warnings) or not skipped.warnings
            # The bad step changes neither the weights nor the schedule.
            assert skipped.rates == rates[: BAD_STEP + 1] + rates[BAD_STEP:]
            for run, reference in ((raised, two_steps), (skipped, without_step)):
                torch.testing.assert_close(
                    run.weights,
                    reference.weights,
                    rtol=0,
                    atol=tolerance,
                )


def _fail_and_resume(
    case: Case,
    folder: Path,
    late: bool,
) -> tuple[Run, Run, list[str]]:
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    if late:
        _decide_on_device()
    savers = [OnExceptionCheckpoint(folder, "failed"), checkpoints_at(folder)]
    run = _run(case, "nan", "raise", callbacks=savers, enable_checkpointing=True)
    saved = names_in(folder)
    for name in ("failed.ckpt", "step=2.ckpt"):
        resumed = _run(case, "nan", "skip", ckpt_path=folder / name)
        assert all_equal(resumed.first_weights, run.weights)
    skipping = checkpoints_at(folder, filename="skipping-{step}")
    first = _run(
        case,
        "nan",
        "skip",
        callbacks=[skipping],
        enable_checkpointing=True,
        max_steps=4,
    )
    again = _run(case, "nan", "skip", ckpt_path=folder / "skipping-step=4.ckpt")
    return first, again, saved


@pytest.mark.parametrize("late", [exhaustive(False), True])
def test_checkpoints_are_exact_and_count_skipped_steps(tmp_path: Path, late: bool) -> None:
    case = Case(layout=DP2)
    for first, again, saved in run_ranks(_fail_and_resume, 2, case, tmp_path, late):
        assert saved == ["failed.ckpt", "step=1.ckpt", "step=2.ckpt"]
        assert first.skipped_steps == again.skipped_steps == 1.0


def _in_fp16(case: Case, scale: float) -> list[Run]:
    case = replace(case, optimizer=(*case.optimizer, ("initial_loss_scale", scale)))
    kinds: tuple[Kind, ...] = ("nan", "infinite loss")
    pairs = itertools.product(kinds, ("raise", "skip"))
    return [_run(case, kind, on_nan) for kind, on_nan in pairs]


def test_loss_scale_overflow_is_not_an_error() -> None:
    # Gradients times 2**22 exceed fp16's maximum of 65504: the first steps overflow, with finite losses.
    case = Case(layout=Layout(pp=2), precision="16-mixed")
    for runs in run_ranks(_in_fp16, 2, case, 2.0**22):
        assert [run.error[:7] for run in runs] == ["step 2:", "", "step 2:", ""]
        assert [run.skipped_steps for run in runs if not run.error] == [1.0, 1.0]


def _overflow_for_ever(case: Case, options: dict[str, Any]) -> tuple[str, int]:
    """Error and steps of a run in fp16 of which each gradient is NaN."""
    from lightning_megatron import GPTTrainStep, MegatronStrategy
    from lightning_megatron.errors import NonFiniteError

    class NaNGradients(GPTTrainStep):
        def loss_func(self, batch: Any, output: Tensor) -> Any:
            output.register_hook(lambda gradient: gradient * math.nan)
            return super().loss_func(batch, output)

    strategy = MegatronStrategy(
        pp=2, optimizer_config_overrides=options.pop("overrides", None), max_skips_in_a_row=2
    )
    trainer = trainer_of(case, strategy=strategy)
    case = replace(case, optimizer=(*case.optimizer, *options.items()))
    try:
        trainer.fit(module_of(case, train_step=NaNGradients()), loader_of(case))
    except NonFiniteError as error:
        return str(error), trainer.global_step
    return "", trainer.global_step


@pytest.mark.parametrize(
    ("options", "scale", "steps"),
    [
        # The scale is halved after three steps, and then after each: 8, 8, 4, 2, ...
        ({"initial_loss_scale": 4.0, "min_loss_scale": 1.0}, "1", 4),
        ({"overrides": {"loss_scale": 64.0}}, "64", 2),
    ],
    ids=["dynamic", "constant"],
)
def test_overflows_that_no_loss_scale_can_mend_end_the_run(
    options: dict[str, Any], scale: str, steps: int
) -> None:
    case = Case(layout=Layout(pp=2), steps=12, precision="16-mixed")
    for message, global_step in run_ranks(_overflow_for_ever, 2, case, options):
        assert message.startswith("gradients of 3 steps in a row are NaN or infinite")
        assert (
            f"with the smallest loss scale, {scale}; expected at most max_skips_in_a_row=2"
            in message
        )
        assert global_step == steps


def _count_device_reads(case: Case) -> list[int]:
    """Number of scalars that each optimizer step copies from the device to the host."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from lightning_megatron import MegatronModule

    counts: list[int] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self,
            func: Any,
            types: Any,
            args: Any = (),
            kwargs: Any = None,
        ) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                counts[-1] += args[0].device.type == trainer.strategy.root_device.type
            return func(*args, **(kwargs or {}))

    class Counted(MegatronModule):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            counts.append(0)
            with Count():  # type: ignore[no-untyped-call]
                super().optimizer_step(*args, **kwargs)

    loader = DataLoader(Sentences(24), batch_size=12 // case.layout.dp)
    trainer = trainer_of(replace(case, steps=2))
    trainer.fit(module_of(case, Counted), loader)
    return counts


@pytest.mark.gpu(2)
def test_optimizer_step_never_synchronizes_with_gpu() -> None:
    case = Case(
        layout=Layout(pp=2, num_microbatches=3),
        accelerator="gpu",
    )
    assert common_result(_count_device_reads, case) == [0, 0]
