"""Callbacks and settings that cannot take effect are refused before anything is built."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parity.training import Case, loader_of, module_of, trainer_of
from tests.ranks import RankError, run_ranks


def _fit_with(name: str) -> int:
    from lightning.pytorch import LightningModule, callbacks

    class Unfreezing(callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module: LightningModule) -> None: ...

        def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: object) -> None: ...

    callback = {
        "accumulating": lambda: callbacks.GradientAccumulationScheduler({0: 1, 4: 2}),
        "not accumulating": lambda: callbacks.GradientAccumulationScheduler({0: 1}),
        "swa": lambda: callbacks.StochasticWeightAveraging(1e-2),
        "ema": lambda: callbacks.EMAWeightAveraging(),
        "finetuning": Unfreezing,
    }[name]()
    trainer = trainer_of(Case(steps=1), callbacks=[callback])
    trainer.fit(module_of(Case()), loader_of(Case(steps=1)))
    return trainer.global_step


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("accumulating", "GradientAccumulationScheduler does not work with MegatronStrategy.*num_microbatches"),
        ("swa", "StochasticWeightAveraging copies the module.*remove it"),
        ("ema", "EMAWeightAveraging copies the module.*remove it"),
        ("finetuning", "Unfreezing adds parameters to the optimizer.*requires_grad_"),
    ],
)
def test_a_callback_that_cannot_take_effect_is_refused(name: str, message: str) -> None:
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(_fit_with, 1, name)
    assert caught.value.error_type == "ConfigError"


def _fit_by_hand() -> None:
    module = module_of(Case())
    module.automatic_optimization = False
    trainer_of(Case(steps=1)).fit(module, loader_of(Case(steps=1)))


def _fit_wide() -> None:
    trainer_of(Case(steps=1)).fit(module_of(Case(model_fields=(("n_embd", 10**9),))), loader_of(Case(steps=1)))


@pytest.mark.parametrize(
    ("fit", "message"),
    [
        (_fit_by_hand, "automatic_optimization=False does not work.*leave it True"),
        (_fit_wide, r"the weights of this model \(48,.* parameters\) take .* GiB on the 1 ranks of this host"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_built(fit: Callable[[], None], message: str) -> None:
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(fit, 1)
    assert caught.value.error_type == "ConfigError"


def test_a_schedule_that_never_accumulates_is_accepted() -> None:
    assert run_ranks(_fit_with, 1, "not accumulating") == [1]
