"""Fields of Megatron's configs that are set by hand: they reach the engine, or are refused with what to write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_megatron import ConfigError, MegatronStrategy
from tests.parity.sharding import shards
from tests.parity.training import Case, Layout, RankOutcome, loader_of, module_of, train_module
from tests.ranks import run_ranks

_PLAIN = Case(layout=Layout(dp=2, num_microbatches=2, overlap_communication=True), steps=3)
_BY_HAND = replace(
    _PLAIN.layout,
    optimizer_config_overrides=(("loss_scale", 1024.0),),
    ddp_config_overrides=(("bucket_size", 1000),),
)


def _train(case: Case) -> tuple[RankOutcome, dict[str, Any]]:
    seen: dict[str, Any] = {}

    def collect(module: Any) -> Any:
        (chunk,) = module.model_chunks
        report = module.trainer.strategy.optimizer_report
        seen["scale"] = None if report is None else float(report.loss_scale)
        seen["buckets"] = sum(len(buffer.buckets) for buffer in chunk.buffers)
        seen["gradients"] = {parameter.main_grad.dtype for parameter in chunk.parameters()}
        return shards(module)

    return train_module(module_of(case), case, loader_of(case), collect=collect), seen


def test_what_is_set_by_hand_is_used_and_changes_no_number_that_it_should_not() -> None:
    """A loss scale that is a power of two is exact; two ranks' gradients are added in one way, whatever the buckets."""
    plain, by_hand = (run_ranks(_train, 2, case) for case in (_PLAIN, replace(_PLAIN, layout=_BY_HAND)))
    assert plain[0][1] == {"scale": 1.0, "buckets": 1, "gradients": {torch.float32}}
    assert by_hand[0][1]["scale"] == 1024.0
    assert by_hand[0][1]["buckets"] > 3
    for (expected, _), (got, _) in zip(plain, by_hand, strict=True):
        assert got.losses == expected.losses
        assert got.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)  # added in another order
        for ours, theirs in zip(got.weights, expected.weights, strict=True):
            assert torch.equal(ours.data, theirs.data)


def test_gradients_in_16_bits_train_nearly_as_those_in_32() -> None:
    in_32 = replace(_PLAIN, precision="bf16-mixed")
    in_16 = replace(in_32, layout=replace(_PLAIN.layout, ddp_config_overrides=(("grad_reduce_in_fp32", False),)))
    (expected, _), (got, seen) = (run_ranks(_train, 2, case)[0] for case in (in_32, in_16))
    assert seen["gradients"] == {torch.bfloat16}
    # Sums of two microbatches and two ranks, each rounded to 8 bits.
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=2**-7)
    assert got.losses == pytest.approx(expected.losses, rel=2**-9)


@pytest.mark.parametrize(
    ("option", "given", "says"),
    [
        ("optimizer", {"lr": 0.1}, r"expected no 'lr', got lr=0\.1; use MegatronModule\(lr=\)$"),
        ("optimizer", {"loss_scal": 1.0}, "expected fields of Megatron's OptimizerConfig, got 'loss_scal'; did you"),
        ("optimizer", {"loss_scale": "1e3"}, r"loss_scale='1e3' must be a number, and is a str"),
        ("optimizer", {"optimizer_cpu_offload": True}, "leave it out: megatron-core 0.16.1 keeps offloaded masters"),
        ("optimizer", {"exp_avg_dtype": torch.bfloat16}, "leave it out: it is Transformer Engine's Adam"),
        ("ddp", {"overlap_grad_reduce": True}, r"use MegatronStrategy\(overlap_communication=\)$"),
        ("transformer", {"tensor_model_parallel_size": 2}, r"use MegatronStrategy\(tp=\)$"),
        ("transformer", {"moe_z_loss_coeff": 0.1}, "nothing reads it here"),
        ("transformer", {"moe_aux_loss_coeff": 0.1}, "set it in the model's config"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_set_by_hand_is_told_at_once(option: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option}_config_overrides: .*{says}"):
        MegatronStrategy(**{f"{option}_config_overrides": given})
