"""Weights that a callback changes while training: the change counts in every precision, or is refused."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import prune

from tests.checkpoint.runs import callback, checkpoints_at
from tests.marks import exhaustive
from tests.parity.training import (
    DP2,
    PP2,
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

OVERLAPPED = Layout(dp=2, overlap_communication=True)
OFFLOADED = Layout(dp=2, offload_optimizer=True)
CASE = Case(steps=3, lr=1e-4, precision="bf16-mixed")
LAYOUTS = [
    DP2,
    exhaustive(PP2),
    exhaustive(OVERLAPPED),
    exhaustive(OFFLOADED),
    exhaustive(Layout(dp=2, distributed_optimizer=False)),
]


def _halve(module: Any) -> None:
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(0.5)


def _copies(module: Any) -> list[torch.Tensor]:
    return [weight.detach().float().clone() for weight in module.parameters()]


def _fit(case: Case, *callbacks: Any, **options: Any) -> list[torch.Tensor]:
    module = module_of(case)
    saves = any(hasattr(each, "dirpath") for each in callbacks)
    trainer = trainer_of(case, callbacks=list(callbacks), enable_checkpointing=saves)
    trainer.fit(module, loader_of(case), **options)
    return _copies(module)


def _halved_at_start(case: Case) -> bool:
    """Whether weights that ``on_train_start`` halves end as those that were halved before ``fit``."""
    for_all = callback(on_train_start=lambda trainer, module: _halve(module))
    in_hook = _fit(case, for_all)
    module = module_of(case)
    trainer_of(case).validate(module, loader_of(case), verbose=False)
    _halve(module)
    trainer_of(case).fit(module, loader_of(case))
    return all(map(torch.equal, in_hook, _copies(module)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_change_before_training_equals_other_initial_weights(layout: Layout) -> None:
    assert run_ranks(_halved_at_start, 2, replace(CASE, layout=layout)) == [True, True]


def _halved_after_second_step(case: Case, folder: Path) -> tuple[float, bool]:
    """How far the third step moved weights that were halved before it, and whether a resumed run ends alike."""
    halved: list[torch.Tensor] = []

    def halve(trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            _halve(module)
            halved.extend(_copies(module))

    ended = _fit(case, callback(on_train_batch_end=halve), checkpoints_at(folder))
    pairs = zip(ended, halved, strict=True)
    moved = max(float((after - before).abs().max()) for after, before in pairs)
    resumed = _fit(case, ckpt_path=folder / "step=2.ckpt")
    return moved, all(map(torch.equal, ended, resumed))


@pytest.mark.parametrize("layout", LAYOUTS[:1] + LAYOUTS[-2:])
def test_change_within_training_is_trained_on_and_saved(layout: Layout, tmp_path: Path) -> None:
    case = replace(CASE, layout=layout)
    moved, is_resumed = common_result(_halved_after_second_step, case, tmp_path)
    # A step is 1e-4; the largest weights are about 1, which bf16 rounds by up to 2**-8.
    assert moved < 0.01
    assert is_resumed


def _refusals(case: Case) -> tuple[str, str]:
    def clamp(trainer: Any, module: Any, *_: Any) -> None:
        for weight in module.parameters():
            weight.data.clamp_(-0.01, 0.01)

    def replace_data(trainer: Any, module: Any, *_: Any) -> None:
        for weight in module.parameters():
            weight.data = weight.data * 0.5

    in_data = refused_fit(case, module_of(case), callbacks=[callback(on_train_batch_end=clamp)])
    in_32 = replace(case, precision="32-true")
    replacing = callback(on_train_start=replace_data)
    return in_data, refused_fit(in_32, module_of(in_32), callbacks=[replacing])


def test_changes_that_the_next_update_would_undo_are_refused() -> None:
    in_data, replaced = common_result(_refusals, replace(CASE, layout=DP2))
    assert "expected changes in place, got one through parameter.data" in in_data
    assert "word_embeddings.weight: expected the memory that the optimizer updates" in replaced


def _fc1(module: Any) -> Any:
    (first, *_) = [
        layer for name, layer in module.model_chunks.named_modules() if name.endswith("linear_fc1")
    ]
    return first


_COMPUTED: dict[str, Any] = {
    "weight_orig": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    "bias_orig": lambda layer: prune.random_unstructured(layer, "bias", amount=0.5),
    "parametrizations": torch.nn.utils.parametrizations.weight_norm,
    "weight_g": torch.nn.utils.weight_norm,
}
"""By what a weight is then computed from: functions of ``torch.nn.utils``."""


def _refused_computed(case: Case) -> tuple[dict[str, str], list[bool]]:
    """Messages about weights that are computed; whether zeros of a pruning that was made permanent are trained."""
    messages = {}
    for source, compute in _COMPUTED.items():
        module = module_of(case)
        begin = callback(on_fit_start=lambda _, module, compute=compute: compute(_fc1(module)))
        messages[source] = refused_fit(case, module, callbacks=[begin])
    later = callback(
        on_train_batch_end=lambda _, module, *rest: prune.identity(_fc1(module), "weight")
    )
    messages["weight_orig"] += refused_fit(case, module_of(case), callbacks=[later])
    trainer_of(case).validate(module := module_of(case), loader_of(case), verbose=False)
    pruned = _fc1(module)
    prune.l1_unstructured(pruned, "weight", amount=0.5)
    prune.remove(pruned, "weight")
    zeros = [bool((pruned.weight == 0).any())]
    trainer_of(case).fit(module, loader_of(case))
    return messages, [*zeros, bool((_fc1(module).weight == 0).any())]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_weights_that_torch_computes_from_others_are_refused() -> None:
    ((messages, zeros),) = run_ranks(_refused_computed, 1, replace(CASE, precision="32-true"))
    for source, message in messages.items():
        assert "linear_fc1: expected weights of its own, got some that torch.nn.utils" in message
        times = 1 + (source == "weight_orig")
        assert message.count(f"computes from {source} (pruning") == times
    assert zeros == [True, False]


def _copied(case: Case) -> tuple[bool, str]:
    """Whether a copy of a module trains as the module; the message about a copy of one that has run."""
    module = module_of(case)
    copied = copy.deepcopy(module)
    for each in (module, copied):
        trainer_of(case).fit(each, loader_of(case))
    is_same = all(map(torch.equal, _copies(module), _copies(copied)))
    return is_same, refusal(copy.deepcopy, module)


def test_modules_are_copied_before_they_run() -> None:
    ((is_same, message),) = run_ranks(_copied, 1, CASE)
    assert is_same
    assert message.startswith("copy.deepcopy of a MegatronModule: expected one without a model")


def _refused_dtypes(case: Case) -> list[str]:
    messages = []
    for cast in (torch.nn.Module.half, torch.nn.Module.double):
        module = module_of(case)
        trainer_of(case).validate(module, loader_of(case), verbose=False)
        cast(module)
        messages.append(refused_fit(case, module))
    return messages


def test_weights_in_another_dtype_than_the_precisions_are_refused() -> None:
    (messages,) = run_ranks(_refused_dtypes, 1, replace(CASE, precision="32-true"))
    for message, got in zip(messages, ("float16", "float64"), strict=True):
        assert "expected a weight in torch.float32, as Trainer(precision=...) says" in message
        assert f"got torch.{got}; leave out module.half()" in message


def _losses_of_second_fits(case: Case) -> list[float]:
    """Last loss of a second fit, of weights as the first has left them and with other memory."""
    losses = []
    for is_moved in (False, True):
        module = module_of(case)
        trainer_of(case).fit(module, loader_of(case))
        for weight in module.parameters():
            if is_moved:
                weight.data = weight.data.clone()
        trainer = trainer_of(case)
        trainer.fit(module, loader_of(case))
        losses.append(trainer.callback_metrics["train_loss"].item())
    return losses


def test_weights_that_got_other_memory_between_fits_are_trained() -> None:
    case = replace(CASE, layout=DP2, lr=5e-3, steps=2)
    kept, moved = common_result(_losses_of_second_fits, case)
    assert kept == moved


def _loaded_again(case: Case) -> tuple[bool, bool]:
    """Whether a module loads its own state dict after a fit, and trains from it if ``on_fit_start`` loads it."""
    module = module_of(case)
    trainer_of(case).validate(module, loader_of(case), verbose=False)
    initial = copy.deepcopy(module.state_dict())
    trainer_of(case).fit(module, loader_of(case))
    trained = _copies(module)
    module.load_state_dict(initial)
    is_changed = not any(map(torch.equal, trained, _copies(module)))
    trainer_of(case).fit(module, loader_of(case))
    restart = callback(on_fit_start=lambda trainer, module: module.load_state_dict(initial))
    trainer_of(case, callbacks=[restart]).fit(module, loader_of(case))
    return is_changed, all(map(torch.equal, trained, _copies(module)))


@pytest.mark.parametrize("layout", [DP2, exhaustive(PP2)])
def test_module_loads_its_own_state_dict(layout: Layout) -> None:
    assert run_ranks(_loaded_again, 2, replace(CASE, layout=layout, lr=5e-3)) == [(True, True)] * 2


def _averaged_and_clamped(case: Case) -> tuple[float, bool]:
    """The largest element of an average of weights that a callback clamps after each step, before ``EMA``."""
    from lightning_megatron import EMA

    def clamp(trainer: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            for weight in module.parameters():
                weight.clamp_(-0.0625, 0.0625)

    average = EMA(decay=0.5)
    trainer = trainer_of(case, callbacks=[callback(on_train_batch_end=clamp), average])
    module = module_of(case)
    trainer.fit(module, loader_of(case))
    with average.average_parameters():
        largest = max(float(weight.abs().max()) for weight in module.parameters())
    return largest, average.num_updates == case.steps


def test_changed_weights_are_averaged() -> None:
    assert common_result(_averaged_and_clamped, replace(CASE, layout=DP2)) == (0.0625, True)
