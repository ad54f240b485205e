"""Callbacks and settings that cannot take effect are refused before anything is built."""

from __future__ import annotations

import pytest

from tests.parity.training import Case, loader_of, module_of, trainer_of
from tests.ranks import RankError, run_ranks

_WIDE = Case(steps=1, model_fields=(("n_embd", 10**9),))


def _fit_with(what: str) -> int:
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
    }.get(what, callbacks.Timer)()
    module = module_of(_WIDE if what == "wide" else Case())
    module.automatic_optimization = what != "by hand"
    trainer = trainer_of(Case(steps=1), callbacks=[callback])
    trainer.fit(module, loader_of(Case(steps=1)))
    return trainer.global_step


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("accumulating", "GradientAccumulationScheduler does not work with MegatronStrategy.*num_microbatches"),
        ("swa", "StochasticWeightAveraging copies the module.*remove it"),
        ("ema", "EMAWeightAveraging copies the module.*remove it"),
        ("finetuning", "Unfreezing adds parameters to the optimizer.*requires_grad_"),
        ("by hand", "automatic_optimization=False does not work.*leave it True"),
        ("wide", r"the weights of this model \(48,.* parameters\) take .* GiB on 1 ranks of this host"),
    ],
)
def test_what_cannot_take_effect_is_refused(what: str, message: str) -> None:
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(_fit_with, 1, what)
    assert caught.value.error_type == "ConfigError"


def test_a_schedule_that_never_accumulates_is_accepted() -> None:
    assert run_ranks(_fit_with, 1, "not accumulating") == [1]
