"""Fields of Megatron's configs that are set by hand reach the engine. What is refused: test_refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

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
