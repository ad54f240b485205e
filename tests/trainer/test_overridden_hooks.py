"""Every hook of Lightning that a module may override is honoured, or refused with the reason."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.comparison import all_equal
from tests.parity.training import (
    DP2,
    TP2,
    Case,
    Layout,
    common_result,
    loader_of,
    module_of,
    refusal,
    refused_fit,
    trainer_of,
)
from tests.ranks import run_ranks
from tests.recording import recorded_warnings

LAYOUTS = (TP2, Layout(pp=2), DP2)
CASE = Case(steps=3)

REFUSED = {
    "backward",
    "manual_backward",
    "on_after_batch_transfer",
    "optimizer_zero_grad",
    "toggle_optimizer",
    "toggled_optimizer",
    "transfer_batch_to_device",
    "untoggle_optimizer",
}
"""Hooks without effect under the engine. Those of manual optimization are refused with it."""
ON_REQUEST = {
    "forward": "predict",
    "on_load_checkpoint": "resume",
    "on_save_checkpoint": "save",
}
"""Hooks that a plain fit does not call; other tests of this file do."""
NOT_HOOKS = {
    "all_gather",
    "clip_gradients",
    "freeze",
    "load_from_checkpoint",
    "log",
    "log_dict",
    "lr_schedulers",
    "optimizers",
    "print",
    "to_onnx",
    "to_tensorrt",
    "to_torchscript",
    "unfreeze",
}
"""Methods of a LightningModule that its user calls."""
DEPRECATED = {"configure_sharded_model"}
"""Lightning itself refuses it beside ``configure_model``."""


def _overridable() -> set[str]:
    """Public methods that LightningModule and its hook classes define."""
    import lightning.pytorch as pl
    from lightning.pytorch.core import hooks

    classes = (pl.LightningModule, hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks)
    return {
        name
        for kind in classes
        for name, value in vars(kind).items()
        if inspect.isroutine(value) and not name.startswith("_")
    }


def _honoured() -> set[str]:
    return _overridable() - REFUSED - set(ON_REQUEST) - NOT_HOOKS - DEPRECATED


# ---- what training_step returns --------------------------------------------------------------------------------------


Change = Callable[[Any, Tensor], Any]
"""What ``training_step`` returns for a module and the engine's loss."""
OTHER_LOSSES: dict[str, Change] = {
    "times zero": lambda module, loss: loss * 0,
    "penalized": lambda module, loss: loss + sum(w.square().sum() for w in module.parameters()),
    "equal but with gradients": lambda module, loss: loss.detach().requires_grad_(),
    "changed in place": lambda module, loss: loss.mul_(0.5),
    "nothing": lambda module, loss: None,
    "a number": lambda module, loss: loss.item(),
    "a dict of another": lambda module, loss: {"loss": loss / 2, "logits": loss},
    "a dict without loss": lambda module, loss: {"logits": loss},
    "another on one rank": lambda module, loss: loss * (module.global_rank != 1),
    "nothing on one rank": lambda module, loss: loss if module.global_rank else None,
}
SAME_LOSS: tuple[Change, ...] = (
    lambda module, loss: loss,
    lambda module, loss: loss.detach(),
    lambda module, loss: {"loss": loss, "logits": loss * 2},
)


def _returning(change: Change) -> type:
    from lightning_megatron import MegatronModule

    class Own(MegatronModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return change(self, super().training_step(batch, batch_idx))

    return Own


def _refusals(case: Case) -> list[str]:
    """Message for each other loss; asserts that no weight has changed."""
    messages = []
    for change in OTHER_LOSSES.values():
        module = module_of(case, _returning(change))
        trainer = trainer_of(case)
        before: list[Tensor] = []

        def remember(
            *_: Any,
            kept: Any = before,
            owner: Any = module,
        ) -> None:
            kept.extend(weight.clone() for weight in owner.parameters())

        module.on_train_start = remember
        messages.append(refusal(trainer.fit, module, loader_of(case)))
        assert trainer.global_step == 0
        assert before
        assert all_equal(before, module.parameters())
    return messages


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_loss_that_is_not_the_engines_is_refused_on_all_ranks(layout: Layout) -> None:
    expected = "Own.training_step: expected the loss that super().training_step(...)"
    for messages in run_ranks(
        _refusals,
        2,
        Case(layout=layout, steps=2),
        timeout=240,
    ):
        for change, message in zip(OTHER_LOSSES, messages, strict=True):
            assert expected in message, change
            assert "loss_func of a TrainStep" in message


def _losses_of(case: Case, module_class: type | None) -> list[float]:
    losses: list[float] = []
    module = module_of(case, module_class)
    module.on_train_batch_end = lambda outputs, *_: losses.append(outputs["loss"].item())
    trainer_of(case).fit(module, loader_of(case))
    return losses


def _all_losses(case: Case) -> list[list[float]]:
    kinds = [_returning(change) for change in SAME_LOSS]
    return [_losses_of(case, kind) for kind in (None, *kinds)]


def test_the_engines_loss_may_be_returned_in_any_form() -> None:
    plain, *others = common_result(_all_losses, Case(layout=DP2, steps=2))
    assert len(plain) == 2
    assert others == [plain] * len(others)


def _steps_without_one_pass(case: Case) -> list[str]:
    from lightning_megatron import MegatronModule

    class OwnCrossEntropy(MegatronModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self(batch["input_ids"]).flatten(0, 1)
            return torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())

    class Twice(MegatronModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            super().training_step(batch, batch_idx)
            return super().training_step(batch, batch_idx)

    class StepsWithoutGradients(MegatronModule):
        def optimizer_step(
            self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            optimizer.step()

    kinds = (OwnCrossEntropy, Twice, StepsWithoutGradients)
    return [refused_fit(case, module_of(case, kind)) for kind in kinds]


def test_a_step_needs_exactly_one_pass_of_the_engine() -> None:
    case = Case(layout=TP2, steps=2)
    own, twice, without = common_result(_steps_without_one_pass, case)
    assert "OwnCrossEntropy.training_step: expected one call of super().training_step" in own
    assert "got 0; call it once" in own
    assert "got 2; call it once" in twice
    assert "optimizer.step: expected gradients of a new batch" in without


# ---- all hooks -------------------------------------------------------------------------------------------------------


def _recording(
    base: type,
    names: set[str],
    called: list[str],
) -> type:
    """Subclass of ``base`` that records calls of the hooks ``names``, and does what ``base`` does."""

    def hook(name: str) -> Callable[..., Any]:
        def record(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return getattr(super(kind, self), name)(*args, **kwargs)

        return record

    kind = type("Own", (base,), {name: hook(name) for name in names})
    return kind


def _run_all(trainer: Any, module: Any) -> None:
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    trainer.predict(module)


def _with_loaders(base: type, case: Case) -> type:
    phases = ("train", "val", "test", "predict")
    loaders = {f"{phase}_dataloader": lambda self: loader_of(case) for phase in phases}
    return type("WithLoaders", (base,), loaders)


def _calls_under_lightning(case: Case, names: set[str]) -> list[str]:
    """Hooks that Lightning calls on one CPU for a linear model."""
    import lightning.pytorch as pl

    from tests.models import QUIET

    class Plain(pl.LightningModule):
        def configure_model(self) -> None:
            self.layer = torch.nn.Linear(1, 1)

        def _loss(self, batch: Any) -> Tensor:
            outputs: Tensor = self.layer(batch["input_ids"][:, :1].float())
            return outputs.mean()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self._loss(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self._loss(batch)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self._loss(batch)

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self._loss(batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    called: list[str] = []
    module = _recording(_with_loaders(Plain, case), names, called)()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=case.steps,
        **QUIET,
    )
    _run_all(trainer, module)
    return called


def _calls(case: Case, names: set[str]) -> list[str]:
    """Hooks that are called under the strategy."""
    from lightning_megatron import MegatronModule
    from lightning_megatron.generate.options import GenerationOptions

    called: list[str] = []
    kind = _recording(_with_loaders(MegatronModule, case), names, called)
    generation = GenerationOptions(max_new_tokens=1)
    _run_all(
        trainer_of(case),
        module_of(
            case,
            kind,
            generation=generation,
            return_logits=True,
        ),
    )
    return called


def test_hooks_are_called_as_lightning_calls_them() -> None:
    names = _honoured()
    (expected,) = run_ranks(_calls_under_lightning, 1, CASE, names)
    assert names == set(expected)
    # Lightning calls prepare_data on one rank of each node.
    on_other_ranks = [name for name in expected if name != "prepare_data"]
    sharded = replace(CASE, layout=TP2)
    assert run_ranks(_calls, 1, CASE, names) == [expected]
    assert run_ranks(_calls, 2, sharded, names) == [expected, on_other_ranks]


def _logged(case: Case, hooks: dict[str, Any]) -> dict[str, list[tuple[int | None, float]]]:
    """Each logged value with its step, of a module with ``hooks`` in all phases that log."""
    from lightning.pytorch.loggers.logger import DummyLogger

    from lightning_megatron import MegatronModule

    values: dict[str, list[tuple[int | None, float]]] = {}

    class Recorder(DummyLogger):
        def log_metrics(
            self,
            metrics: dict[str, float],
            step: int | None = None,
        ) -> None:
            for name, value in metrics.items():
                values.setdefault(name, []).append((step, float(value)))

    kind = type("Own", (_with_loaders(MegatronModule, case),), hooks)
    trainer = trainer_of(case, logger=Recorder(), log_every_n_steps=1)
    module = module_of(case, kind)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    trainer.test(module, verbose=False)
    return values


def _logged_without_super(case: Case) -> list[dict[str, Any]]:
    """What is logged: by the module itself, with each of its ``on_*`` hooks replaced, and without its callbacks."""
    # Others return a batch, or set the model's mode.
    kinds = ("transfer", "_model_")
    replaced = {
        name: lambda *_: None
        for name in _overridable()
        if name.startswith("on_") and not any(kind in name for kind in kinds)
    }
    no_callbacks: dict[str, Any] = {"configure_callbacks": lambda self: []}
    return [_logged(case, hooks) for hooks in ({}, replaced, no_callbacks)]


def test_overridden_hooks_without_super_lose_no_logged_value() -> None:
    plain, replaced, no_callbacks = common_result(_logged_without_super, Case(layout=DP2, steps=2))
    assert {"lr", "grad_norm", "val_perplexity", "test_perplexity", "train_loss"} <= set(plain)
    assert list(replaced) == list(plain)
    assert replaced == plain
    assert no_callbacks == plain


def _refused_hooks(case: Case, names: list[str]) -> list[str]:
    from lightning_megatron import MegatronModule

    kinds = [
        type(
            "Own",
            (MegatronModule,),
            {name: lambda *_: None},
        )
        for name in names
    ]
    return [refused_fit(case, module_of(case, kind)) for kind in kinds]


def test_hooks_that_would_have_no_effect_are_refused() -> None:
    assert _overridable() >= REFUSED
    of_manual_optimization = {name for name in REFUSED if "toggle" in name or "manual" in name}
    names = sorted(REFUSED - of_manual_optimization)
    (messages,) = run_ranks(_refused_hooks, 1, CASE, names)
    for name, message in zip(names, messages, strict=True):
        assert f"Own.{name} would" in message


def _other_refusals(case: Case) -> dict[str, str]:
    from lightning_megatron import MegatronModule

    class OwnForward(MegatronModule):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch)

    class OwnOptimizer(MegatronModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class NoOptimizer(MegatronModule):
        def configure_optimizers(self) -> Any:
            return None

    class OwnWeight(MegatronModule):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.temperature = torch.nn.Parameter(torch.ones(()))

    messages = {
        kind.__name__: refused_fit(case, module_of(case, kind))
        for kind in (OwnOptimizer, NoOptimizer, OwnWeight)
    }
    predict = trainer_of(case).predict
    messages["OwnForward"] = refusal(predict, module_of(case, OwnForward), loader_of(case))
    return messages


def test_other_optimizers_weights_and_an_uncalled_forward_are_refused() -> None:
    messages = common_result(_other_refusals, Case(layout=TP2, steps=1))
    assert "forward would not be called" in messages["OwnForward"]
    assert "configure_optimizers: expected Megatron's optimizer" in messages["OwnOptimizer"]
    assert "configure_optimizers: expected Megatron's optimizer" in messages["NoOptimizer"]
    assert "OwnWeight.temperature: expected all trained weights" in messages["OwnWeight"]


def _clipped_by_torch(case: Case) -> list[str]:
    from lightning_megatron import MegatronModule

    class Clipping(MegatronModule):
        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    with recorded_warnings("clip") as messages:
        trainer_of(case).fit(module_of(case, Clipping), loader_of(case))
    return messages


def test_a_clipping_hook_that_clips_nothing_is_reported_once() -> None:
    (messages,) = run_ranks(_clipped_by_torch, 1, CASE)
    (message,) = messages
    assert "Clipping.configure_gradient_clipping: expected a call of self.clip_gradients" in message
