"""NaN and infinite gradients are found on whichever rank and in whichever copy they are; so are such weights."""

import itertools
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import callback, checkpoints_at
from tests.marks import exhaustive
from tests.parity.comparison import all_equal
from tests.parity.training import (
    DP2,
    TP2,
    TP2_DP2,
    Case,
    Layout,
    loader_of,
    module_of,
    refusal,
    trainer_of,
)
from tests.ranks import run_ranks

WEIGHTS = (
    "final_layernorm.weight",  # a copy on each tp rank
    "layers.0.mlp.linear_fc2.bias",  # likewise, as its input is split
    "layers.0.mlp.linear_fc1.weight",  # split over tp
    "word_embeddings.weight",  # with pp=2 also on the last stage, as output layer
    "output_layer.weight",
)


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One step in which one rank's gradient of one weight is not finite."""

    suffix: str
    rank: int

    @property
    def value(self) -> float:
        return math.nan if self.rank % 2 else math.inf


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one rank saw of a step."""

    planted: Planted
    is_here: bool
    """Whether it was this rank's gradient."""
    is_skipped: bool
    is_unchanged: bool
    is_finite: bool


def _weights(module: Any) -> list[tuple[str, Any]]:
    return [named for chunk in module.model_chunks for named in chunk.named_parameters()]


def _plant(plan: Planted, module: Any) -> bool:
    """Spoil the gradient on its rank; whether it is there."""
    found = [weight for name, weight in _weights(module) if name.endswith(plan.suffix)]
    if plan.rank != int(os.environ["RANK"]):
        return False
    for weight in found:
        weight.main_grad.fill_(plan.value)
    return bool(found)


def _train_with_bad_gradients(case: Case, planted: list[Planted]) -> list[Step]:
    """Spoil a gradient in each step: before it is reduced if shards of it are used, else afterwards, in one copy."""
    from megatron.core.distributed import finalize_model_grads

    from lightning_megatron.engine import schedule

    is_sharded = case.layout.distributed_optimizer
    steps: list[Step] = []
    before: list[torch.Tensor] = []
    is_here: list[bool] = []

    def spoil(trainer: Any) -> None:
        is_here[-1] = _plant(planted[trainer.global_step], trainer.lightning_module)

    def finalize(*args: Any, **options: Any) -> None:
        if is_sharded:
            spoil(trainer)
        finalize_model_grads(*args, **options)

    def begin_step(trainer: Any, module: Any, *_: Any) -> None:
        before[:] = [weight.detach().clone() for _, weight in _weights(module)]
        is_here.append(False)

    def spoil_reduced(trainer: Any, module: Any, *_: Any) -> None:
        if not is_sharded:
            spoil(trainer)

    def end_step(trainer: Any, module: Any, *_: Any) -> None:
        after = [weight.detach() for _, weight in _weights(module)]
        steps.append(
            Step(
                planted=planted[trainer.global_step - 1],
                is_here=is_here[-1],
                is_skipped=trainer.strategy.optimizer_report.skipped,
                is_unchanged=all_equal(before, after),
                is_finite=all(weight.isfinite().all().item() for weight in after),
            )
        )

    hooks = {"on_train_batch_start": begin_step}
    hooks |= {"on_before_optimizer_step": spoil_reduced, "on_train_batch_end": end_step}
    trainer = trainer_of(case, callbacks=[callback(**hooks)])
    trainer.strategy.on_nan = "skip"
    trainer.strategy.max_skips_in_a_row = len(planted)
    schedule.finalize_model_grads = finalize  # type: ignore[attr-defined]
    trainer.fit(module_of(case), loader_of(case))
    return steps


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        (TP2_DP2, "32-true"),
        (Layout(tp=2, dp=2, distributed_optimizer=False), "bf16-mixed"),
        exhaustive(Layout(tp=2, pp=2), "32-true"),
        (Layout(pp=2, dp=2, distributed_optimizer=False), "32-true"),
        exhaustive(Layout(cp=2, tp=2, distributed_optimizer=False), "32-true"),
    ],
    ids=str,
)
def test_bad_gradient_of_any_copy_is_skipped_by_all_ranks(layout: Layout, precision: str) -> None:
    suffixes = WEIGHTS if layout.pp > 1 else WEIGHTS[:-1]
    places = itertools.product(suffixes, range(layout.world_size))
    planted = [Planted(suffix=suffix, rank=rank) for suffix, rank in places]
    case = Case(layout=layout, precision=precision, steps=len(planted))
    ranks = run_ranks(_train_with_bad_gradients, layout.world_size, case, planted)
    for of_ranks in zip(*ranks, strict=True):
        plan = of_ranks[0].planted
        is_planted = any(step.is_here for step in of_ranks)  # not on a stage without the weight
        assert is_planted or layout.pp > 1
        for step in of_ranks:
            assert step.is_finite, plan
            assert step.is_skipped == is_planted, plan
            assert step.is_unchanged == is_planted, plan


def _raise_for_bad_copies(case: Case, planted: list[Planted]) -> list[tuple[str, bool]]:
    """For each: the message of the run that ends, and whether the weights are as before the step."""
    return [_raise_for_bad_copy(case, plan) for plan in planted]


def _raise_for_bad_copy(case: Case, plan: Planted) -> tuple[str, bool]:
    before: list[torch.Tensor] = []

    def spoil(trainer: Any, module: Any, *_: Any) -> None:
        before[:] = [weight.detach().clone() for _, weight in _weights(module)]
        _plant(plan, module)

    module = module_of(case)
    trainer = trainer_of(case, callbacks=[callback(on_before_optimizer_step=spoil)])
    message = refusal(trainer.fit, module, loader_of(case))
    return message, all_equal(before, [weight for _, weight in _weights(module)])


def test_run_ends_with_the_weights_of_before() -> None:
    case = Case(
        layout=Layout(tp=2, pp=2, distributed_optimizer=False),
        steps=2,
    )
    planted = [
        Planted(suffix="layers.0.self_attention.linear_proj.bias", rank=1),
        Planted(suffix="output_layer.weight", rank=3),
    ]
    for results in run_ranks(_raise_for_bad_copies, 4, case, planted):
        for message, is_unchanged in results:
            assert message.startswith("step 0: a gradient is NaN or infinite (the loss is not)")
            assert "The weights are as before the step" in message
            assert is_unchanged


# ---- the end of skipping ---------------------------------------------------------------------------------------------


def _skip_to_the_end(case: Case, folder: Path) -> tuple[str, str, list[int]]:
    """Messages of a run, and of one that resumes between its skipped steps; skipped steps in a row of a good run."""
    bad_steps = {2, 4, 5, 6, 7, 8}
    in_a_row: list[int] = []

    def spoil(trainer: Any, module: Any, *more: Any) -> None:
        for _, weight in _weights(module):
            if trainer.global_step in bad_steps:
                weight.main_grad.fill_(math.nan)

    def count(trainer: Any, *_: Any) -> None:
        in_a_row.append(trainer.strategy.megatron_optimizer.skips_in_a_row)

    def run(**options: Any) -> Any:
        callbacks = [callback(on_before_optimizer_step=spoil, on_train_batch_end=count)]
        if options:
            callbacks.append(checkpoints_at(folder))
        trainer = trainer_of(
            replace(case, **options),
            callbacks=callbacks,
            enable_checkpointing=bool(options),
        )
        trainer.strategy.on_nan = "skip"
        trainer.strategy.max_skips_in_a_row = 3
        return trainer

    message = refusal(run().fit, module_of(case), loader_of(case))
    del in_a_row[:]
    run(steps=6).fit(module_of(case), loader_of(case))
    in_first_run = list(in_a_row)
    resumed = refusal(
        run().fit,
        module_of(case),
        loader_of(case),
        ckpt_path=folder / "step=6.ckpt",
    )
    return message, resumed, in_first_run


def test_skipping_ends_after_steps_in_a_row(tmp_path: Path) -> None:
    case = Case(layout=DP2, steps=12)
    for message, resumed, in_a_row in run_ranks(_skip_to_the_end, 2, case, tmp_path):
        assert in_a_row == [0, 0, 1, 0, 1, 2]
        assert message == resumed
        assert message.startswith("step 7: a gradient is NaN or infinite")
        assert "after 3 skipped steps in a row; expected at most max_skips_in_a_row=3." in message


# ---- weights that are not finite -------------------------------------------------------------------------------------


def _write_bad_models(folder: Path) -> None:
    """A model directory with a NaN and an infinite weight, in several files."""
    import transformers

    from tests.parity.training import MODELS

    config = dict(MODELS["gpt2"])
    del config["model_type"]
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[3, 5] = math.nan
        model.transformer.h[0].ln_2.bias[0] = math.inf
    model.save_pretrained(folder / "model", max_shard_size="20KB")


def _begin_with_bad_weights(folder: Path) -> list[str]:
    """Messages of runs that begin with weights that are not finite."""
    from lightning_megatron import MegatronModule, MegatronStrategy

    case = Case(layout=TP2, steps=2)
    messages = []

    def run(
        module: Any,
        on_nan: Any = "raise",
        *,
        load_from: Any = None,
        **options: Any,
    ) -> None:
        strategy = MegatronStrategy(tp=2, on_nan=on_nan, load_from=load_from)
        trainer = trainer_of(replace(case, steps=4), strategy=strategy)
        messages.append(
            refusal(
                trainer.fit,
                module,
                loader_of(case),
                **options,
            )
        )

    for on_nan in ("raise", "skip"):
        run(MegatronModule(model=str(folder / "model"), pretrained=True), on_nan)
    trainer = trainer_of(case)
    module = module_of(case)
    trainer.fit(module, loader_of(case))
    for part in trainer.strategy.megatron_optimizer.parts:
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                master.data[-1:] = math.nan
    with torch.no_grad():
        for name, weight in _weights(module):
            if name.endswith("final_layernorm.bias") and os.environ["RANK"] == "1":
                weight[2] = math.inf
    trainer.save_checkpoint(folder / "bad.ckpt")
    run(module_of(case), load_from=str(folder / "bad.ckpt"))
    run(module_of(case), ckpt_path=str(folder / "bad.ckpt"))
    validated = module_of(case)
    strategy = MegatronStrategy(tp=2, load_from=str(folder / "bad.ckpt"))
    trainer_of(case, strategy=strategy).validate(
        validated,
        loader_of(case),
        verbose=False,
    )
    run(validated)
    return messages


def test_weights_that_are_not_finite_are_named_with_their_file(tmp_path: Path) -> None:
    _write_bad_models(tmp_path)
    for messages in run_ranks(_begin_with_bad_weights, 2, tmp_path):
        for message in messages[:2]:
            assert message.startswith(
                "step 0: weight decoder.layers.0.mlp.linear_fc1.layer_norm_bias: expected finite"
            )
            assert f"as transformer.h.0.ln_2.bias in {tmp_path}/model/model-0000" in message
            assert message.endswith("(1 more weights are not finite either)")
        for message in messages[2:]:
            assert message.startswith("step ")
            assert (
                ": expected finite numbers, got NaN or infinite ones, as in checkpoint" in message
            )
            assert f"{tmp_path}/bad.ckpt; begin with another one" in message
