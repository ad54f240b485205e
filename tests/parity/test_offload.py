"""Training with the optimizer's state in host memory equals training without, bit for bit."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.checkpoint.runs import LLAMA, Run, callback, fit, read_plain_state, read_tensors
from tests.marks import exhaustive, on_gpus
from tests.parity.comparison import all_equal
from tests.parity.training import (
    CP2,
    DP2,
    FOUR_RANKS,
    INTERLEAVED,
    TP2,
    TP2_DP2,
    Case,
    Layout,
    loader_of,
    module_of,
    refused_fit,
    trainer_of,
)
from tests.ranks import run_ranks

BUCKET = 1024
"""Elements of a bucket: parameters are cut into several, and several share one."""
ADAMW = (("eps", 1e-3), ("weight_decay", 0.1))
MUON = (("name", "muon"), ("eps", 1e-3))
BF16 = Case(model="llama", labels="uneven", steps=2, clip=0.5, precision="bf16-mixed")
FP16 = replace(BF16, precision="16-mixed", optimizer=(*ADAMW, ("initial_loss_scale", 2.0**9)))
EXPERTS = replace(BF16, model="experts", optimizer=MUON, layout=Layout(ep=2, dp=2))
UNSHARDED = Layout(dp=2, distributed_optimizer=False)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A rank at the end of a run."""

    steps: list[tuple[float, float]]
    """Loss and gradient norm of each step."""
    tensors: list[Tensor]
    """Weights, master weights and moments."""
    host_bytes: int
    num_elements: int
    """Of all states, without master weights that are the weights."""
    devices: set[bool]
    """Whether a master weight of 16-bit weights has memory on the device."""


@contextlib.contextmanager
def _small_buckets() -> Iterator[None]:
    """Many buckets, and rounds of several matrices."""
    package = "lightning_megatron.engine"
    with (
        mock.patch(f"{package}.host_state.BUCKET_ELEMENTS", BUCKET),
        mock.patch(f"{package}.ops.matrix_shards.ROUND_ELEMENTS", 3000),
    ):
        yield


def _train(
    case: Case,
    share: bool | float,
    module_options: dict[str, Any],
) -> Ended:
    from lightning_megatron import MegatronStrategy
    from lightning_megatron.engine.host_state import is_placeholder
    from lightning_megatron.engine.optimizer_state import master_weights, param_states
    from lightning_megatron.engine.wrap import finish_parameter_gathers

    steps: list[tuple[float, float]] = []

    def end(trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        steps.append((outputs["loss"].item(), trainer.strategy.optimizer_report.grad_norm))

    layout = {name: value for name, value in asdict(case.layout).items() if name != "dp"}
    strategy = MegatronStrategy(**{**layout, "offload_optimizer": share})
    trainer = trainer_of(
        case,
        strategy=strategy,
        callbacks=[callback(on_train_batch_end=end)],
    )
    with _small_buckets():
        trainer.fit(module_of(case, **module_options), loader_of(case))
    optimizer = strategy.megatron_optimizer
    assert optimizer is not None
    with strategy.engine():
        finish_parameter_gathers(strategy.chunks)
        held = list(param_states(optimizer.parts))
        states = [state for each in held for state in each.tensors.values()]
        own = sum(each.parameter.numel() for each in held if each.is_own_master)
        masters = [
            is_placeholder(master)
            for part in optimizer.parts
            for parameter, master, _ in master_weights(part)
            if parameter.dtype is not torch.float32
        ]
    weights = [weight.detach() for chunk in strategy.chunks for weight in chunk.parameters()]
    return Ended(
        steps=steps,
        tensors=[each.cpu().clone() for each in (*weights, *states)],
        host_bytes=optimizer.host_bytes,
        num_elements=sum(state.numel() for state in states) - own,
        devices={not is_empty for is_empty in masters},
    )


@pytest.mark.parametrize(
    ("case", "share", "module"),
    [
        pytest.param(replace(BF16, layout=DP2), True, {}, id="dp2"),
        pytest.param(replace(BF16, layout=INTERLEAVED, optimizer=MUON), True, {}, id="vpp2-muon"),
        pytest.param(replace(FP16, layout=TP2), 0.5, {}, id="tp2-half-fp16"),
        exhaustive(EXPERTS, True, {}, id="ep2-muon"),
        exhaustive(EXPERTS, 0.5, {}, id="ep2-muon-half"),
        exhaustive(replace(EXPERTS, optimizer=ADAMW), True, {}, id="ep2"),
        exhaustive(replace(BF16, layout=UNSHARDED), True, {}, id="unsharded"),
        exhaustive(replace(BF16, layout=UNSHARDED, optimizer=MUON), 0.3, {}, id="unsharded-muon"),
        exhaustive(replace(BF16, layout=TP2, precision="32-true"), True, {}, id="tp2-fp32"),
        exhaustive(replace(BF16, layout=CP2), True, {}, id="cp2"),
        exhaustive(replace(BF16, layout=replace(DP2, fp8="tensorwise")), True, {}, id="fp8"),
        exhaustive(replace(BF16, layout=FOUR_RANKS), True, {}, id="tp2-pp2"),
        exhaustive(replace(BF16, layout=TP2_DP2), True, {"lora": {"rank": 2}}, id="lora"),
        exhaustive(replace(BF16, layout=DP2, optimizer=(("name", "sgd"),)), True, {}, id="sgd"),
        exhaustive(
            replace(BF16, layout=replace(DP2, overlap_communication=True)), True, {}, id="overlap"
        ),
        exhaustive(
            replace(
                BF16,
                layout=replace(DP2, ddp_config_overrides=(("grad_reduce_in_fp32", False),)),
            ),
            True,
            {},
            id="bf16-gradients",
        ),
    ],
)
def test_training_equals_that_with_state_on_the_device(
    case: Case, share: bool | float, module: dict[str, Any]
) -> None:
    num_ranks = case.layout.world_size
    expected = run_ranks(_train, num_ranks, case, False, module)
    found = run_ranks(_train, num_ranks, case, share, module)
    for plain, offloaded in zip(expected, found, strict=True):
        assert offloaded.steps == plain.steps
        assert all_equal(offloaded.tensors, plain.tensors)
        assert plain.host_bytes == 0
        if share is True:
            # Parameters begin at multiples of 64 elements.
            assert 4 * plain.num_elements <= offloaded.host_bytes < 5.5 * plain.num_elements
            assert True not in offloaded.devices
        else:
            assert 0.4 * share < offloaded.host_bytes / (4 * plain.num_elements) < share + 0.4
            assert offloaded.devices == {True, False}


@pytest.mark.exhaustive
def test_step_that_is_not_finite_changes_nothing() -> None:
    assert run_ranks(_skipped_step, 2, replace(BF16, layout=DP2, steps=2)) == [(False, True)] * 2


def _skipped_step(case: Case) -> tuple[bool, bool]:
    """Whether a finite step leaves the state as it is, and one with an infinite gradient."""
    from lightning_megatron import MegatronStrategy
    from lightning_megatron.engine.optimizer_state import param_states

    same: list[bool] = []
    before: list[Tensor] = []

    def states(trainer: Any) -> list[Tensor]:
        held = param_states(trainer.strategy.megatron_optimizer.parts)
        return [state.clone() for each in held for state in each.tensors.values()]

    def begin(trainer: Any, module: Any, optimizer: Any) -> None:
        before[:] = states(trainer)
        if trainer.global_step == 1:
            next(module.model_chunks.parameters()).main_grad.fill_(torch.inf)

    def end(trainer: Any, *_: Any) -> None:
        same.append(all_equal(before, states(trainer)))

    watching = callback(on_before_optimizer_step=begin, on_train_batch_end=end)
    strategy = MegatronStrategy(on_nan="skip", offload_optimizer=True)
    with _small_buckets():
        trainer_of(case, strategy=strategy, callbacks=[watching]).fit(
            module_of(case), loader_of(case)
        )
    return same[0], same[1]


def _fit_twice(case: Case, shares: tuple[float, float]) -> tuple[list[Tensor], int]:
    """Weights after two fits of one module, and host memory that is used then."""
    from lightning_megatron import MegatronStrategy

    module = module_of(case)
    for share in shares:
        strategy = MegatronStrategy(offload_optimizer=share)
        with _small_buckets():
            trainer_of(case, strategy=strategy).fit(module, loader_of(case))
    assert strategy.megatron_optimizer is not None
    weights = [weight.detach().clone() for weight in module.model_chunks.parameters()]
    return weights, strategy.megatron_optimizer.host_bytes


@pytest.mark.exhaustive
def test_another_fit_of_the_module_may_have_its_state_elsewhere() -> None:
    case = replace(BF16, layout=DP2, steps=2)
    expected = run_ranks(_fit_twice, 2, case, (0.0, 0.0))
    for shares in ((1.0, 1.0), (1.0, 0.0), (0.0, 0.5)):
        for (ours, used), (theirs, _) in zip(
            run_ranks(_fit_twice, 2, case, shares), expected, strict=True
        ):
            assert all_equal(ours, theirs)
            assert (used > 0) == (shares[1] > 0)


def test_memory_is_freed_before_another_fit_allocates_its_own() -> None:
    assert run_ranks(_used_by_second_fit, 1, replace(BF16, steps=1)) == [(True, 0)]


def _used_by_second_fit(case: Case) -> tuple[bool, int]:
    """Whether the first optimizer has state in host memory after its fit, and how much after the second."""
    from lightning_megatron import MegatronStrategy

    module = module_of(case)
    trainer = trainer_of(case, strategy=MegatronStrategy(offload_optimizer=True))
    trainer.fit(module, loader_of(case))
    first: Any = trainer.strategy.megatron_optimizer
    has_state = first.host_bytes > 0
    trainer.fit(module, loader_of(case))
    return has_state, first.host_bytes


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def _fit(
    run: Run,
    path: Path,
    ema: bool = False,
) -> list[float]:
    """Train, save, and return the losses."""
    from lightning_megatron import EMA

    callbacks = [EMA(decay=0.5)] if ema else []
    with _small_buckets():
        trainer, trace = fit(run, *callbacks)
        trainer.save_checkpoint(path)
    return [step["loss"] for step in trace.steps.values()]


def _same_files(one: Path, other: Path) -> None:
    tensors = read_tensors(one)
    others = read_tensors(other)
    assert tensors.keys() == others.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []
    assert read_plain_state(one) == read_plain_state(other)


def test_checkpoints_are_the_same_and_resume_with_or_without_at_another_layout(
    tmp_path: Path,
) -> None:
    """With an average of the weights, which follows the master weights."""
    run = Run(
        strategy={"num_microbatches": 1},
        trainer={"max_steps": 2, "precision": "bf16-mixed"},
        model=LLAMA,
    )
    offloaded = run.but(strategy={"offload_optimizer": True})
    assert run_ranks(_fit, 2, offloaded, tmp_path / "on.ckpt", True) == run_ranks(
        _fit, 2, run, tmp_path / "off.ckpt", True
    )
    _same_files(tmp_path / "on.ckpt", tmp_path / "off.ckpt")
    tp2 = {"strategy": {"tp": 2}, "trainer": {"max_steps": 4}}
    resumed = run.but(**tp2, ckpt_path=str(tmp_path / "on.ckpt"))
    half = offloaded.but(**tp2, ckpt_path=str(tmp_path / "off.ckpt"))
    half = half.but(strategy={"offload_optimizer": 0.5})
    assert run_ranks(_fit, 2, resumed, tmp_path / "off4.ckpt", True) == run_ranks(
        _fit, 2, half, tmp_path / "on4.ckpt", True
    )
    _same_files(tmp_path / "on4.ckpt", tmp_path / "off4.ckpt")


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", [False, True])
def test_new_run_begins_with_the_weights_of_a_checkpoint(tmp_path: Path, optimizer: bool) -> None:
    first = Run(trainer={"max_steps": 1, "precision": "bf16-mixed"}, model=LLAMA)
    run_ranks(_fit, 2, first, tmp_path / "first.ckpt")
    source = {"path": str(tmp_path / "first.ckpt"), "optimizer": optimizer}
    run = first.but(strategy={"load_from": source, "async_save": True}, seed=8)
    offloaded = run.but(strategy={"offload_optimizer": True})
    assert run_ranks(_fit, 2, offloaded, tmp_path / "on.ckpt") == run_ranks(
        _fit, 2, run, tmp_path / "off.ckpt"
    )
    _same_files(tmp_path / "on.ckpt", tmp_path / "off.ckpt")


# ---- what is refused ------------------------------------------------------------------------------------------------


def _refusal(case: Case, total: float) -> str:
    from lightning_megatron import MegatronStrategy
    from lightning_megatron.planning import host

    memory = host.HostMemory(total=total, free=total / 2)
    with mock.patch.object(host, "host_memory", return_value=memory):
        return refused_fit(case, module_of(case), strategy=MegatronStrategy(offload_optimizer=1.0))


def test_host_without_enough_memory_is_refused_before_the_model_is_built() -> None:
    case = replace(BF16, layout=DP2)
    (message, other) = run_ranks(_refusal, 2, case, 2.0**18)
    assert message == other
    assert message.startswith("offload_optimizer=1: expected 0.0 GiB of host memory for 2 ranks (")


@pytest.mark.parametrize("share", [-0.1, 1.5, "half", float("nan")])
def test_share_is_a_number_from_0_to_1(share: Any) -> None:
    from lightning_megatron import ConfigError, MegatronStrategy

    with pytest.raises(ConfigError, match=r"offload_optimizer=.* must be .*correct offload_optim"):
        MegatronStrategy(offload_optimizer=share)


# ---- on GPUs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "graphs"),
    [
        on_gpus(1, ADAMW, False, id="adamw"),
        on_gpus(1, ADAMW, True, id="adamw-graphs"),
        on_gpus(1, MUON, False, id="muon"),
    ],
)
def test_update_on_a_gpu_equals_that_of_state_on_it(
    optimizer: tuple[tuple[str, Any], ...], graphs: bool
) -> None:
    """Each step is computed once more from its gradients, as those of two runs differ."""
    layout = Layout(cuda_graphs=graphs)
    case = replace(BF16, accelerator="gpu", optimizer=optimizer, steps=5, layout=layout)
    ((are_equal, is_pinned),) = run_ranks(_updated_twice, 1, case)
    assert are_equal == [True] * 5
    assert is_pinned


def _updated_twice(case: Case) -> tuple[list[bool], bool]:
    from lightning_megatron import MegatronStrategy
    from lightning_megatron.engine.optimizer_state import param_states

    are_equal = []
    inside = mock.patch.object  # the optimizer's own step is wrapped

    def states(part: Any) -> dict[Any, dict[str, Tensor]]:
        part.optimizer.host.wait()
        masters = (m for group in part.optimizer.param_groups for m in group["params"])
        held = (each.tensors for each in param_states([part]))
        by_address = {each["param"].data_ptr(): each for each in held}
        return {
            master: {
                name: tensor.cuda(non_blocking=False).clone()
                for name, tensor in by_address[part.optimizer.master_of(master).data_ptr()].items()
            }
            for master in masters
        }

    def fitted(trainer: Any, *_: Any) -> None:
        (part,) = trainer.strategy.megatron_optimizer.parts
        step = part.optimizer.step

        def both() -> None:
            before = states(part)
            step()
            after = states(part)
            reference = _on_device(part, before)
            reference.step()
            same = []
            for (master, found), copied in zip(after.items(), _parameters(reference), strict=True):
                assert master.shape == copied.shape
                same.append(torch.equal(found.pop("param").view(-1), copied.view(-1)))
                same += [
                    torch.equal(moment.view(-1), reference.state[copied][name].view(-1))
                    for name, moment in found.items()
                ]
            are_equal.append(all(same))

        undo.enter_context(inside(part.optimizer, "step", both))

    with _small_buckets(), contextlib.ExitStack() as undo:
        strategy = MegatronStrategy(offload_optimizer=True, cuda_graphs=case.layout.cuda_graphs)
        trainer = trainer_of(
            case,
            strategy=strategy,
            callbacks=[callback(on_train_start=fitted)],
        )
        trainer.fit(module_of(case), loader_of(case))
        (part,) = trainer.strategy.megatron_optimizer.parts
        held = [state for each in param_states([part]) for state in each.tensors.values()]
    return are_equal, all(state.is_pinned() for state in held)


def _parameters(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _on_device(part: Any, before: dict[Any, dict[str, Tensor]]) -> Any:
    """A copy of the optimizer, whose state is on the device, before its last step."""
    from lightning_megatron.engine.ops.adam import FusedAdam
    from lightning_megatron.engine.ops.matrix_shards import MatrixGroup
    from lightning_megatron.engine.ops.muon import MatrixUpdates

    ours = part.optimizer
    copies = {}
    for master, tensors in before.items():
        copies[master] = tensors["param"].view(master.shape)
        copies[master].grad = master.grad
    groups = [
        {**group, "params": [copies[master] for master in group["params"]]}
        for group in ours.param_groups
    ]
    reference = FusedAdam(groups, adam_w_mode=ours.adam_w_mode)
    for group in reference.param_groups:
        group["step"] -= 1
    for master, tensors in before.items():
        for name, tensor in tensors.items():
            if name != "param":
                reference.state[copies[master]][name] = tensor.view(master.shape)
    reference.grad_scale = ours.grad_scale
    reference.found_inf = ours.found_inf
    if ours.matrices is not None:
        shards = [shard._replace(master=copies[shard.master]) for shard in ours.matrices._shards]
        reference.matrices = MatrixUpdates(
            shards,
            MatrixGroup(None, 0),
            torch.device("cuda"),
            nesterov=True,
            iterations=5,
            adjust_lr="original",
        )
    return reference


@pytest.mark.parametrize("share", [on_gpus(1, True), on_gpus(1, 0.5)])
def test_state_leaves_the_gpu_as_a_checkpoint_and_comes_back(
    share: bool | float, tmp_path: Path
) -> None:
    run = Run(
        trainer={"max_steps": 2, "precision": "bf16-mixed", "accelerator": "gpu"}, model=LLAMA
    )
    run_ranks(_fit, 1, run, tmp_path / "off.ckpt", True)
    again = {"ckpt_path": str(tmp_path / "off.ckpt"), "strategy": {"offload_optimizer": share}}
    run_ranks(_fit, 1, run.but(**again), tmp_path / "on.ckpt", True)
    _same_files(tmp_path / "off.ckpt", tmp_path / "on.ckpt")


def _peak_bytes(case: Case, share: float) -> tuple[int, int]:
    """Device memory of weights, gradients and state, at most while they are built and then; and parameters."""
    from lightning_megatron import MegatronStrategy

    found = []

    def begin(trainer: Any, module: Any) -> None:
        parameters = sum(weight.numel() for weight in module.model_chunks.parameters())
        found.extend([torch.cuda.max_memory_allocated(), parameters])

    torch.cuda.reset_peak_memory_stats()
    strategy = MegatronStrategy(offload_optimizer=share)
    trainer_of(
        case,
        strategy=strategy,
        callbacks=[callback(on_train_start=begin)],
    ).fit(module_of(case), loader_of(case))
    return found[0], found[1]


@pytest.mark.gpu
def test_master_weights_and_moments_take_no_memory_of_a_gpu() -> None:
    """Not even while they are made, but for two slots of two matrices' states at most."""
    wide = (("hidden_size", 1024), ("intermediate_size", 8192))
    case = replace(BF16, accelerator="gpu", model_fields=wide, steps=1)
    ((plain, parameters),) = run_ranks(_peak_bytes, 1, case, 0.0)
    ((offloaded, _),) = run_ranks(_peak_bytes, 1, case, 1.0)
    assert parameters > 100e6
    assert plain > 18 * parameters
    assert offloaded < 6.5 * parameters + 5 * 2**23 * 12
