"""Training on every layout equals one process: losses, gradients and weights, tensor by tensor."""

from dataclasses import replace
from typing import Any

import pytest

from tests.parity.comparison import assert_same_run, assert_same_within_rounding
from tests.parity.training import (
    FOUR_RANKS,
    INTERLEAVED,
    PP2_DP2,
    TP2,
    TP2_PP2,
    Case,
    Layout,
    outcome,
)

_RARE = pytest.mark.exhaustive


def _uneven(layout: Layout, ends: int) -> Layout:
    return replace(
        layout, num_layers_in_first_pipeline_stage=ends, num_layers_in_last_pipeline_stage=ends
    )


LAYOUTS: tuple[tuple[Layout, bool], ...] = (
    (Layout(num_microbatches=3), True),
    (TP2, False),
    (Layout(tp=2, sequence_parallel=True, num_microbatches=2), True),
    (Layout(tp=4, sequence_parallel=True), False),
    (Layout(pp=2, num_microbatches=3), True),
    (Layout(pp=4, num_microbatches=4), False),
    (Layout(pp=2, vpp=2, num_microbatches=4), True),
    (Layout(dp=2, num_microbatches=2), False),
    (Layout(dp=2, distributed_optimizer=False), False),
    (Layout(dp=2, overlap_communication=True), False),
    (Layout(dp=2, distributed_optimizer=False, overlap_communication=True), True),
    (Layout(dp=3), True),
    (TP2_PP2, False),
    (Layout(tp=2, dp=2, sequence_parallel=True), True),
    (PP2_DP2, True),
    (_uneven(Layout(pp=3, num_microbatches=3), 1), True),
    (Layout(cp=2, dp=2, num_microbatches=2), True),
    (
        Layout(
            cp=2,
            tp=2,
            sequence_parallel=True,
            cp_comm_type="all_gather",
            distributed_optimizer=False,
        ),
        False,
    ),
    (Layout(cp=4, overlap_communication=True), False),
    (
        Layout(
            cp=2,
            pp=2,
            vpp=2,
            num_microbatches=2,
        ),
        False,
    ),
    (_uneven(INTERLEAVED, 2), True),
)
"""Layout, and whether it is in every test run: those together cover all ways of splitting and communicating."""
WITH_RECOMPUTE = (
    (Layout(recompute="selective"), False),
    (Layout(recompute="full"), False),
    (Layout(recompute="full", recompute_method="block"), False),
    (Layout(tp=2, sequence_parallel=True, recompute="selective"), True),
    (
        Layout(
            pp=2,
            vpp=2,
            num_microbatches=2,
            recompute="full",
        ),
        True,
    ),
)
_ALLGATHER_DISPATCH: dict[str, Any] = {
    "transformer_config_overrides": (("moe_token_dispatcher_type", "allgather"),)
}
WITH_EXPERTS = (
    (
        Layout(
            ep=2,
            dp=2,
            num_microbatches=3,
            overlap_communication=True,
        ),
        True,
    ),
    (Layout(ep=2, dp=2, distributed_optimizer=False), False),
    (
        Layout(
            ep=2,
            tp=2,
            sequence_parallel=True,
            distributed_optimizer=False,
        ),
        True,
    ),
    (
        Layout(
            ep=2,
            tp=2,
            dp=2,
            sequence_parallel=True,
            recompute="full",
        ),
        True,
    ),
    (
        Layout(
            ep=4,
            tp=2,
            dp=2,
            sequence_parallel=True,
        ),
        False,
    ),
    (
        Layout(
            ep=2,
            pp=2,
            dp=2,
            vpp=2,
            num_microbatches=2,
        ),
        False,
    ),
)
WITH_GATHERED_EXPERTS = (
    Layout(ep=2, dp=2, num_microbatches=3),
    Layout(ep=2, tp=2, sequence_parallel=True, recompute="selective"),
    Layout(ep=4, tp=2, dp=2, sequence_parallel=True),
)


def _pipeline_layout(*layers: int) -> tuple[tuple[str, Any], ...]:
    return (("pipeline_model_parallel_layout", layers),)


T5_LAYOUTS = (
    (Layout(tp=2, sequence_parallel=True, num_microbatches=3), True),
    (
        Layout(
            pp=2,
            num_microbatches=3,
            transformer_config_overrides=_pipeline_layout(0, 7),
        ),
        False,
    ),
    (
        Layout(
            pp=2,
            vpp=2,
            num_microbatches=4,
            transformer_config_overrides=_pipeline_layout(1, 3, 2, 1),
        ),
        True,
    ),
    (
        Layout(
            pp=2,
            dp=2,
            transformer_config_overrides=_pipeline_layout(2, 5),
        ),
        False,
    ),
    (
        Layout(
            pp=2,
            vpp=2,
            dp=2,
            num_microbatches=2,
            overlap_communication=True,
        ),
        True,
    ),
    (FOUR_RANKS, False),
)

# Two families and two kinds of labels, which the layouts take in turn.
GPT2 = Case(model="gpt2", labels="uneven")
LLAMA = Case(model="llama", labels="all")
FEW_KEY_VALUE_HEADS = Case(
    model="llama", labels="uneven", model_fields=(("num_key_value_heads", 1),)
)
T5 = Case(model="t5", labels="uneven", steps=4)


def _clipped(case: Case) -> Case:
    """SGD with clipping: unlike Adam it shows a wrong gradient scale, and a wrong norm as every step is clipped."""
    return replace(
        case,
        clip=0.5,
        lr=0.1,
        optimizer=(("name", "sgd"), ("weight_decay", 0.0)),
    )


EXPERTS = _clipped(Case(model="experts", labels="uneven"))
CASES = (
    *(((GPT2, LLAMA)[i // 2 % 2], *each) for i, each in enumerate(LAYOUTS)),
    (
        GPT2,
        Layout(
            tp=2,
            pp=2,
            dp=2,
            sequence_parallel=True,
            num_microbatches=2,
        ),
        True,
    ),
    *((GPT2, *each) for each in WITH_RECOMPUTE),
    (FEW_KEY_VALUE_HEADS, Layout(tp=4, sequence_parallel=True), True),
    (
        replace(GPT2, make_vocab_size_divisible_by=32),
        Layout(tp=4),
        True,
    ),  # the last rank holds vocabulary padding
    *((EXPERTS, *each) for each in WITH_EXPERTS),
    *(
        (replace(EXPERTS, labels="short"), replace(each, **_ALLGATHER_DISPATCH), True)
        for each in WITH_GATHERED_EXPERTS
    ),
    (_clipped(GPT2), TP2_PP2, True),
    *((T5, *each) for each in T5_LAYOUTS),
    (replace(LLAMA, labels="short"), FOUR_RANKS, True),
    (
        replace(T5, labels="short"),
        T5_LAYOUTS[-1][0],
        True,
    ),  # sequence lengths change from step to step
    (
        _clipped(T5),
        INTERLEAVED,
        True,
    ),  # each replicated weight counts once in the norm
)
"""Case, layout, and whether it is in every test run."""


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(c, x, marks=() if y else _RARE, id=f"{c.model}-{x}{'-clipped' * bool(c.clip)}")
        for c, x, y in CASES
    ],
)
def test_layout_equals_one_process(case: Case, layout: Layout) -> None:
    # ``outcome`` also checks that replicated weights are equal on all ranks after training.
    assert_same_run(outcome(replace(case, layout=layout)), outcome(case))
    assert min(outcome(case).grad_norms) > (case.clip or 0.0)


_ON_GPU = [replace(case, accelerator="gpu") for case in (GPT2, LLAMA, T5)]
IN_BF16 = [
    (GPT2, TP2_PP2),
    *(
        (case, layout)
        for case in _ON_GPU[:2]
        for layout, _ in (*LAYOUTS, *WITH_RECOMPUTE)
        if layout.world_size <= 4
    ),
    *((_ON_GPU[2], layout) for layout, _ in T5_LAYOUTS),
]


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(
            *each,
            marks=[pytest.mark.gpu(each[1].world_size)] * (n > 0),
            id=f"{each[0].model}-{each[1]}",
        )
        for n, each in enumerate(IN_BF16)
    ],
)
def test_bf16_layout_equals_one_process(case: Case, layout: Layout) -> None:
    reference = replace(case, precision="bf16-mixed")
    assert_same_within_rounding(
        outcome(replace(reference, layout=layout)),
        outcome(reference),
        outcome(case),
    )
