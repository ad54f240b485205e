"""Muon equals ``torch.optim.Muon`` on the matrices of the Hugging Face model, at every layout."""

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_megatron.engine.optimizer_options import OptimizerOptions
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.matrices import matrices_of
from tests.checkpoint.runs import callback
from tests.marks import exhaustive, on_gpus
from tests.parity.comparison import all_equal, assert_same_run, relative_error
from tests.parity.hugging_face import hugging_face_model, tensors_of, train_hugging_face
from tests.parity.sharding import Tensors
from tests.parity.training import (
    CP2,
    DP2,
    FOUR_RANKS,
    INTERLEAVED,
    TP2_DP2,
    TP2_SP,
    Case,
    Layout,
    Outcome,
    loader_of,
    module_of,
    refused_fit,
    train_module,
    trainer_of,
)
from tests.ranks import run_ranks

MUON: dict[str, Any] = {
    "name": "muon",
    "weight_decay": 0.3,
    "beta1": 0.8,
    "beta2": 0.95,
    "eps": 1e-3,
}
"""Options of the optimizer, those of AdamW with a large epsilon."""
LLAMA = Case(
    model="llama",
    labels="uneven",
    steps=6,
    lr=5e-3,
    clip=0.5,
    optimizer=tuple(MUON.items()),
)
EXPERTS = replace(LLAMA, model="experts")
EP2 = Layout(ep=2, dp=2, num_microbatches=3)
EP2_TP2 = Layout(ep=2, tp=2, dp=2, sequence_parallel=True)
UNSHARDED = Layout(tp=2, dp=2, distributed_optimizer=False)

# ---- the reference --------------------------------------------------------------------------------------------------


def matrices(model: Any) -> list[tuple[torch.nn.Parameter, Tensor]]:
    """Parameters of a Hugging Face model's layers, and views of the matrices in each."""
    found = []
    for name, parameter in model.named_parameters():
        if ".layers." not in name or parameter.dim() == 1 or name.endswith(_NO_MATRICES):
            continue
        views = [parameter.data]
        if parameter.dim() == 3:  # experts
            views = list(parameter.data)
        if name.endswith("gate_up_proj"):
            views = [half for view in views for half in view.chunk(2)]
        found += [(parameter, view) for view in views]
    return found


_NO_MATRICES = ("mlp.gate.weight", "shared_expert_gate.weight")


def _orthogonalize(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """What torch does in bf16, in the matrix's own dtype."""
    a, b, c = coefficients
    x: Tensor = matrix / matrix.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class MuonAndAdamW:
    """``torch.optim.Muon`` for the matrices of a Hugging Face model, AdamW for the rest."""

    def __init__(self, model: Any, case: Case) -> None:
        options = dict(case.optimizer)
        self._views = [(p, v, torch.nn.Parameter(v)) for p, v in matrices(model)]
        in_matrices = {id(p) for p, _, _ in self._views}
        rest = [p for p in model.parameters() if id(p) not in in_matrices]
        groups = [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": options["weight_decay"]},
            {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=case.lr,
            betas=(options["beta1"], options["beta2"]),
            eps=options["eps"],
        )
        self._muon = torch.optim.Muon(
            [own for _, _, own in self._views],
            lr=case.lr,
            weight_decay=options["weight_decay"],
            momentum=options.get("momentum", 0.95),
            nesterov=options.get("nesterov", True),
            ns_steps=options.get("ns_steps", 5),
            adjust_lr_fn=options.get("adjust_lr"),
        )
        self._model = model

    def zero_grad(self) -> None:
        self._model.zero_grad()

    def step(self) -> None:
        for parameter, view, own in self._views:
            assert parameter.grad is not None
            own.grad = parameter.grad.as_strided(view.size(), view.stride(), view.storage_offset())
        self._adamw.step()
        self._muon.step()


def _reference(case: Case, initial_weights: Tensors) -> Outcome:
    """Train the Hugging Face model, orthogonalizing in fp32."""
    with (
        mock.patch("torch.optim._muon._zeropower_via_newtonschulz", _orthogonalize),
        mock.patch("tests.parity.hugging_face.torch_optimizer", MuonAndAdamW),
    ):
        return train_hugging_face(case, initial_weights)


def _stacked(tensors: Tensors) -> Tensors:
    """Tensors with those of the experts of a layer in two, as in the live model of transformers 5."""
    stacked = {}
    for name, tensor in tensors.items():
        if not name.endswith("mlp.experts.0.gate_proj.weight"):
            if ".mlp.experts." not in name:
                stacked[name] = tensor
            continue
        prefix = name.removesuffix("0.gate_proj.weight")
        count = sum(
            other.startswith(prefix) and other.endswith("gate_proj.weight") for other in tensors
        )

        def of_experts(
            linear: str,
            prefix: str = prefix,
            count: int = count,
        ) -> list[Tensor]:
            return [tensors[f"{prefix}{expert}.{linear}.weight"] for expert in range(count)]

        halves = zip(of_experts("gate_proj"), of_experts("up_proj"), strict=True)
        stacked[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in halves])
        stacked[f"{prefix}down_proj"] = torch.stack(of_experts("down_proj"))
    return stacked


# ---- ours -----------------------------------------------------------------------------------------------------------


def _train(case: Case, dtype: torch.dtype) -> Outcome:
    """Train ``case``, orthogonalizing in ``dtype``; rank 0 has full tensors with Hugging Face's names."""
    ops = "lightning_megatron.engine.ops"
    with (
        mock.patch(f"{ops}.muon.ITERATION_DTYPE", dtype),
        # Several rounds, some of several parameters.
        mock.patch(f"{ops}.matrix_shards.ROUND_ELEMENTS", 3000),
    ):
        return train_module(module_of(case), case, loader_of(case), collect=tensors_of)


def _on_ranks(case: Case, dtype: torch.dtype) -> Outcome:
    first: Outcome
    first, *others = run_ranks(
        _train,
        case.layout.world_size,
        case,
        dtype,
        timeout=240,
    )
    assert all(other.losses == first.losses for other in others)
    return replace(
        first,
        initial_weights=_stacked(first.initial_weights),
        gradients=_stacked(first.gradients),
        weights=_stacked(first.weights),
    )


WITHOUT_NESTEROV = replace(
    LLAMA,
    optimizer=tuple({**MUON, "adjust_lr": "match_rms_adamw", "nesterov": False}.items()),
)
ONE_KEY = replace(
    LLAMA,
    model_fields=(("num_key_value_heads", 1),),
    optimizer=tuple({**MUON, "momentum": 0.5, "ns_steps": 3}.items()),
)


@pytest.mark.parametrize(
    "case",
    [
        replace(LLAMA, layout=TP2_SP),
        replace(LLAMA, layout=INTERLEAVED),
        replace(WITHOUT_NESTEROV, layout=replace(DP2, overlap_communication=True)),
        replace(EXPERTS, layout=EP2),
        on_gpus(1, replace(LLAMA, accelerator="gpu")),
        on_gpus(1, replace(EXPERTS, accelerator="gpu")),
        exhaustive(LLAMA),
        exhaustive(replace(LLAMA, layout=CP2)),
        exhaustive(replace(LLAMA, layout=FOUR_RANKS)),
        exhaustive(replace(LLAMA, layout=UNSHARDED)),
        exhaustive(replace(ONE_KEY, layout=Layout(tp=4, sequence_parallel=True))),
        exhaustive(replace(EXPERTS, layout=EP2_TP2)),
        exhaustive(replace(EXPERTS, layout=replace(EP2_TP2, distributed_optimizer=False))),
    ],
    ids=lambda case: f"{case.model}-{case.layout}-{case.accelerator}",
)
def test_training_equals_torch_on_hugging_face_matrices(case: Case) -> None:
    """With iterations in fp32, which no layout changes by more than the order of sums."""
    ours = _on_ranks(case, torch.float32)
    (theirs,) = run_ranks(_reference, 1, case, ours.initial_weights)
    assert_same_run(ours, theirs)
    assert min(ours.grad_norms) > (case.clip or 0.0)


def _one_step(
    case: Case,
    gradients: Tensors,
    weights: Tensors,
) -> tuple[Tensors, float]:
    """Weights of the Hugging Face model after torch's step, and the error of its iterations in bf16.

    The error is that to iterations in fp32, relative to the step of a matrix, the largest of all. (Another order of
    sums in bf16 errs as much on some processors, and not at all on those that add exactly in fp32.)
    """
    model = hugging_face_model(case, weights)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    orthogonalize = torch.optim._muon._zeropower_via_newtonschulz
    errors = []

    def in_both_dtypes(matrix: Tensor, *options: Any) -> Tensor:
        rounded = orthogonalize(matrix, *options)
        errors.append(relative_error(rounded.float(), _orthogonalize(matrix, *options)))
        return rounded

    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", in_both_dtypes):
        MuonAndAdamW(model, case).step()
    return {name: p.detach() for name, p in model.named_parameters()}, max(errors)


def test_step_equals_torch_within_rounding() -> None:
    """With iterations in bf16, torch's dtype and the default."""
    options = tuple({**MUON, "weight_decay": 0.0}.items())
    case = replace(LLAMA, steps=1, clip=None, layout=TP2_DP2, optimizer=options)
    ours = _on_ranks(case, torch.bfloat16)
    ((theirs, rounding),) = run_ranks(
        _one_step,
        1,
        case,
        ours.gradients,
        ours.initial_weights,
    )
    assert 1e-3 < rounding < 0.1
    errors = {}
    for name, expected in theirs.items():
        step = expected - ours.initial_weights[name]
        errors[name] = float((ours.weights[name] - expected).norm() / step.norm())
    assert max(errors.values()) < rounding, (rounding, errors)


def _skipped_step(case: Case) -> tuple[bool, bool]:
    """Whether a step with a gradient that is not finite leaves weights and momenta as they are, and a finite one."""
    module = module_of(case)
    same = []

    def before(trainer: Any, pl_module: Any, optimizer: Any) -> None:
        states = list(param_states(optimizer.parts))
        state[:] = [tensor.clone() for each in states for tensor in each.tensors.values()]
        if trainer.global_step == 1:
            parameter = next(pl_module.model_chunks.parameters())
            parameter.main_grad.fill_(torch.inf)

    def after(trainer: Any, pl_module: Any, *_: Any) -> None:
        optimizer = trainer.strategy.megatron_optimizer
        states = list(param_states(optimizer.parts))
        now = [tensor for each in states for tensor in each.tensors.values()]
        same.append(all_equal(state, now))

    from lightning_megatron import MegatronStrategy
    from lightning_megatron.engine.optimizer_state import param_states

    state: list[Tensor] = []
    watching = callback(on_before_optimizer_step=before, on_train_batch_end=after)
    strategy = MegatronStrategy(on_nan="skip")
    trainer_of(
        case,
        strategy=strategy,
        callbacks=[watching],
    ).fit(module, loader_of(case))
    return same[0], same[1]


def test_step_that_is_not_finite_changes_nothing() -> None:
    case = replace(LLAMA, layout=DP2, steps=2)
    assert run_ranks(_skipped_step, 2, case) == [(False, True)] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_training_in_16_bits_is_close_to_fp32(precision: str) -> None:
    """Also with loss scaling, which Megatron undoes before the update."""
    case = replace(LLAMA, layout=TP2_DP2, optimizer=tuple(MUON.items()))
    exact = _on_ranks(case, torch.bfloat16)
    case = replace(case, precision=precision)
    if precision == "16-mixed":
        options = {**MUON, "initial_loss_scale": 2.0**9}
        case = replace(case, optimizer=tuple(options.items()))
    ours = _on_ranks(case, torch.bfloat16)
    assert ours.losses == pytest.approx(exact.losses, rel=1e-2)
    moved = sum(
        float((exact.weights[name] - weight).norm() ** 2)
        for name, weight in exact.initial_weights.items()
    )
    apart = sum(
        float((exact.weights[name] - weight).norm() ** 2) for name, weight in ours.weights.items()
    )
    assert apart < 0.05 * moved


def _cycled_momentum(case: Case) -> list[list[float]]:
    """Momentum and beta1 of each step under a schedule of torch that cycles a momentum."""
    from lightning_megatron import MegatronModule

    class CycledModule(MegatronModule):
        def configure_optimizers(self) -> Any:
            optimizer = self.megatron.build_optimizer(self.optimizer_options, self.lr)
            cycle = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.01, total_steps=4, base_momentum=0.5, max_momentum=0.75
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": cycle, "interval": "step"},
            }

    used = []

    def record(trainer: Any, *_: Any) -> None:
        group = trainer.optimizers[0].param_groups[0]
        used.append([group["momentum"], group["betas"][0]])

    watching = callback(on_before_optimizer_step=record)
    trainer_of(case, callbacks=[watching]).fit(module_of(case, CycledModule), loader_of(case))
    return used


def test_schedules_of_a_momentum_change_that_of_matrices() -> None:
    (used,) = run_ranks(_cycled_momentum, 1, replace(LLAMA, steps=3))
    momenta, betas = zip(*used, strict=True)
    assert momenta[0] == 0.75
    assert min(momenta) < 0.6
    assert set(betas) == {MUON["beta1"]}


# ---- what is refused ------------------------------------------------------------------------------------------------


def _refused_adapters(case: Case) -> str:
    module = module_of(case, lora={"rank": 2})
    return refused_fit(case, module)


def test_adapters_are_refused() -> None:
    (message,) = run_ranks(_refused_adapters, 1, LLAMA)
    assert message.startswith("optimizer muon: expected a model without adapters, got lora; use")


def test_weights_of_unknown_kind_are_refused() -> None:
    """As Transformer Engine's linears in a layer of a ``model_provider``."""
    layer = torch.nn.ModuleDict({"mlp": torch.nn.Linear(2, 3)})
    chunk = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
    with pytest.raises(ConfigError, match=r"got layers\.0\.mlp\.weight of a Linear, which may be"):
        matrices_of([chunk])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nesterov": False}, "nesterov=False is an option of muon, but the optimizer is adamw"),
        ({"name": "sgd", "ns_steps": 4}, "ns_steps=4 is an option of muon, but the optimizer is s"),
        ({"name": "adam", "adjust_lr": "match_rms_adamw"}, "adjust_lr='match_rms_adamw' is an op"),
        (
            {"momentum": 0.8},
            "momentum=0.8 is an option of sgd and muon, but the optimizer is adamw",
        ),
        ({"name": "sgd", "beta1": 0.8}, "beta1=0.8 is an option of adamw, adam and muon, but the "),
        ({"name": "muon", "ns_steps": 0}, "ns_steps=0 must be at least 1"),
        ({"name": "muon", "momentum": 1.0}, "momentum=1.0 must be in"),
        ({"name": "muon", "adjust_lr": "rms"}, "adjust_lr='rms' is unknown; choose from original"),
    ],
)
def test_options_of_other_optimizers_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        OptimizerOptions(**options)


def test_defaults_depend_on_the_optimizer() -> None:
    used = {
        name: (options.used_momentum, options.used_weight_decay)
        for name in ("adamw", "sgd", "muon")
        for options in [OptimizerOptions(name=name)]
    }
    assert used["adamw"][1] == 0.01
    assert used["sgd"] == (0.9, 0.01)
    assert used["muon"] == (0.95, 0.1)
