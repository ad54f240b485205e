"""Effects of optimizer options, overridden Megatron config fields, and learning-rate schedulers on training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.comparison import assert_same_tensors
from tests.parity.sharding import shards
from tests.parity.training import (
    PP2,
    PP2_DP2,
    Case,
    Layout,
    Outcome,
    common_result,
    join_outcomes,
    loader_of,
    metrics_of,
    module_of,
    recorded_rates,
    refusal,
    train,
    train_module,
    trainer_of,
)
from tests.ranks import run_ranks

LR = 5e-3
WEIGHT_DECAY = 0.3


def _train_with_multipliers(case: Case) -> tuple[Outcome, list[str]]:
    """Train with factors; the outcome, and the messages of globs that no weight follows."""
    from lightning_megatron.engine.optimizer_options import GroupMultipliers

    multipliers = {
        "*position_embeddings*": GroupMultipliers(lr_mult=0.0),
        "*linear_fc1.weight": GroupMultipliers(lr_mult=0.5, wd_mult=2.0),
        "decoder.layers.1.*": GroupMultipliers(lr_mult=0.25),
        "*layernorm.weight": GroupMultipliers(wd_mult=1.0),
    }
    messages = []
    for useless in ("*word_embedings*", "decoder.layers.1.mlp.*"):
        globs = {**multipliers, useless: GroupMultipliers(lr_mult=0.5)}
        messages.append(refusal(train, replace(case, optimizer=(("multipliers", globs),))))
    outcome = train(replace(case, optimizer=(*case.optimizer, ("multipliers", multipliers))))
    return outcome, messages


def test_multipliers_scale_lr_and_weight_decay_of_matching_weights() -> None:
    """Compared with one step of gradient descent computed here."""
    optimizer = (("name", "sgd"), ("weight_decay", WEIGHT_DECAY))
    case = Case(layout=PP2_DP2, steps=1, lr=LR, optimizer=optimizer)
    ranks = run_ranks(_train_with_multipliers, 4, case)
    for _, messages in ranks:
        for message, useless in zip(messages, ("word_embedings", "mlp"), strict=True):
            assert useless in message
            assert message == ranks[0][1][messages.index(message)]
    run = join_outcomes([outcome for outcome, _ in ranks])
    expected = {}
    for name, weight in run.initial_weights.items():
        # Layers are stacked along the first axis.
        is_stacked = name.startswith("decoder.layers.")
        is_matrix = weight.dim() - is_stacked > 1
        lr = torch.full_like(weight, LR)
        decay = torch.full_like(weight, float(is_matrix))
        if name.endswith(("layer_norm_weight", "layernorm.weight")):
            decay[:] = 1.0
        if is_stacked:
            lr[1] = 0.25 * LR
            decay[1] = float(is_matrix)
        if "position_embeddings" in name:
            lr[:] = 0.0
        if name.endswith("linear_fc1.weight"):
            lr[:] = 0.5 * LR
            decay[:] = 2.0
        step = run.gradients[name] + decay * WEIGHT_DECAY * weight
        expected[name] = weight - lr * step
    assert_same_tensors(run.weights, expected, atol=1e-6)


# ---- overridden fields of Megatron's configs ------------------------------------------------------------------------

_DEFAULTS = Case(
    layout=Layout(dp=2, num_microbatches=2, overlap_communication=True),
    steps=3,
)
_OVERRIDDEN = replace(
    _DEFAULTS.layout,
    optimizer_config_overrides=(("loss_scale", 1024.0),),
    ddp_config_overrides=(("bucket_size", 1000),),
)


def _train(case: Case) -> tuple[Outcome, dict[str, Any]]:
    settings: dict[str, Any] = {}

    def collect(module: Any) -> Any:
        (chunk,) = module.model_chunks
        report = module.trainer.strategy.optimizer_report
        settings["scale"] = None if report is None else float(report.loss_scale)
        settings["buckets"] = sum(len(buffer.buckets) for buffer in chunk.buffers)
        settings["gradients"] = {parameter.main_grad.dtype for parameter in chunk.parameters()}
        return shards(module)

    outcome = train_module(module_of(case), case, loader_of(case), collect=collect)
    return outcome, settings


def test_overridden_loss_scale_and_bucket_size_are_used_exactly() -> None:
    """A loss scale that is a power of two is exact, and buckets do not change sums over two ranks."""
    default = run_ranks(_train, 2, _DEFAULTS)
    overridden = run_ranks(_train, 2, replace(_DEFAULTS, layout=_OVERRIDDEN))
    assert default[0][1] == {"scale": 1.0, "buckets": 1, "gradients": {torch.float32}}
    assert overridden[0][1]["scale"] == 1024.0
    assert overridden[0][1]["buckets"] > 3
    for (expected, _), (actual, _) in zip(default, overridden, strict=True):
        assert actual.losses == expected.losses
        # A different summation order.
        assert actual.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)
        for ours, theirs in zip(actual.weights, expected.weights, strict=True):
            assert torch.equal(ours.data, theirs.data)


def test_bf16_gradients_are_close_to_fp32() -> None:
    in_32 = replace(_DEFAULTS, precision="bf16-mixed")
    overrides = (("grad_reduce_in_fp32", False),)
    in_16 = replace(in_32, layout=replace(_DEFAULTS.layout, ddp_config_overrides=overrides))
    expected, _ = run_ranks(_train, 2, in_32)[0]
    actual, settings = run_ranks(_train, 2, in_16)[0]
    assert settings["gradients"] == {torch.bfloat16}
    # Sums of two microbatches and two ranks, each rounded to 8 bits.
    assert actual.grad_norms == pytest.approx(expected.grad_norms, rel=2**-7)
    assert actual.losses == pytest.approx(expected.losses, rel=2**-9)


def _reduce_scatters(case: Case) -> tuple[Any, Any]:
    """The engine's function before and after a run."""
    from megatron.core.distributed import param_and_grad_buffer

    before = param_and_grad_buffer.dist_reduce_scatter_func
    train_module(module_of(case), case, loader_of(case))
    return before.__name__, param_and_grad_buffer.dist_reduce_scatter_func.__name__


def test_accumulation_in_fp32_ends_with_its_run() -> None:
    overrides = (("grad_reduce_in_fp32", False), ("reduce_scatter_with_fp32_accumulation", True))
    layout = Layout(dp=2, ddp_config_overrides=overrides)
    case = Case(layout=layout, steps=1, precision="bf16-mixed")
    for before, after in run_ranks(_reduce_scatters, 2, case):
        assert after == before == "reduce_scatter_tensor"


# ---- schedulers -----------------------------------------------------------------------------------------------------


def _one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)


def _rates(
    case: Case,
    kind: str,
    epochs: int,
) -> tuple[list[float], float]:
    """Learning rate of each step, and the last one logged."""
    from lightning_megatron import LRSchedule, MegatronModule

    class WithScheduler(MegatronModule):
        def configure_optimizers(self) -> Any:
            optimizer = self.megatron.build_optimizer(self.optimizer_options, self.lr)
            schedule: dict[str, Any]
            if kind == "one_cycle":
                schedule = {"scheduler": _one_cycle(optimizer), "interval": "step"}
            else:
                # No epoch improves by 100, so the rate drops after every epoch but the first.
                plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                    optimizer,
                    factor=0.1,
                    patience=0,
                    threshold=100.0,
                    threshold_mode="abs",
                )
                schedule = {"scheduler": plateau, "monitor": "val_loss"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    if kind == "linear":
        schedule = LRSchedule(style="linear", warmup_steps=2, min_lr=LR / 10)
        module = module_of(case, lr_schedule=schedule)
    else:
        module = module_of(case, WithScheduler)
    limits = {"max_steps": -1, "max_epochs": epochs}
    if kind == "linear" and epochs == 1:
        limits = {}
    rates: list[float] = []
    trainer = trainer_of(case, callbacks=[recorded_rates(rates)], **limits)
    val_loader = loader_of(replace(case, steps=1))
    trainer.fit(module, loader_of(case), val_loader)
    return rates, metrics_of(trainer)["lr"]


def test_torch_schedulers_set_the_learning_rate() -> None:
    optimizer = torch.optim.AdamW(
        [torch.nn.Parameter(torch.zeros(1))],
        lr=LR,
    )
    scheduler = _one_cycle(optimizer)
    expected = []
    for _ in range(4):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    case = Case(layout=PP2, steps=4, lr=LR)
    rates, _ = common_result(_rates, case, "one_cycle", 1)
    assert rates == pytest.approx(expected)
    rates, _ = common_result(
        _rates,
        replace(case, steps=1),
        "plateau",
        4,
    )
    assert rates == pytest.approx([LR, LR, 0.1 * LR, 0.01 * LR])


@pytest.mark.parametrize("epochs", [1, 2])
def test_modules_lr_schedule_ends_with_the_run(epochs: int) -> None:
    # Warm-up 0, 1/2, then from 1 to a tenth, which would be the rate of step 7.
    expected = [
        LR * share
        for share in (
            0,
            0.5,
            1,
            0.775,
            0.55,
            0.325,
        )
    ]
    case = Case(layout=PP2, steps=6 // epochs, lr=LR)
    used, logged = common_result(_rates, case, "linear", epochs)
    assert used == pytest.approx(expected)
    assert logged == pytest.approx(expected[-1])  # of the step that it stands beside


def test_first_logged_learning_rate_is_that_of_the_first_step() -> None:
    # One cycle begins at a 25th of its highest rate, and the second value is far above it.
    case = Case(layout=PP2, steps=1, lr=LR)
    used, logged = common_result(_rates, case, "one_cycle", 1)
    assert [logged] == pytest.approx(used)


def _find_rate(case: Case, folder: Path) -> tuple[list[float], float]:
    """Learning rate of each step after Lightning's LearningRateFinder, and its suggestion."""
    from lightning.pytorch.callbacks import LearningRateFinder

    rates: list[float] = []
    finder = LearningRateFinder(min_lr=1e-5, max_lr=0.3, num_training_steps=30)
    trainer = trainer_of(
        case,
        callbacks=[finder, recorded_rates(rates)],
        max_steps=3,
        default_root_dir=folder,
    )
    trainer.fit(module_of(case), loader_of(replace(case, steps=32)))
    found: Any = finder.optimal_lr
    return rates, found.suggestion()


def test_learning_rate_finders_suggestion_is_used(tmp_path: Path) -> None:
    rates, suggestion = common_result(_find_rate, Case(layout=PP2, lr=LR), tmp_path)
    assert rates == pytest.approx([suggestion] * 3)
    assert suggestion != LR
