"""Is a callback refused that would do something else here than it promises?"""

from __future__ import annotations

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


def test_a_schedule_that_never_accumulates_is_accepted() -> None:
    assert run_ranks(_fit_with, 1, "not accumulating") == [1]
