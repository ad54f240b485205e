"""Every layout trains as one process does: losses, gradients and weights, tensor by tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parity.comparison import assert_same_run, assert_same_within_rounding
from tests.parity.training import Case, Labels, Layout, outcome

LAYOUTS = (
    Layout(num_microbatches=3),
    Layout(tp=2),
    Layout(tp=2, sequence_parallel=True, num_microbatches=2),
    Layout(tp=4, sequence_parallel=True),
    Layout(pp=2, num_microbatches=3),
    Layout(pp=4, num_microbatches=4),
    Layout(pp=2, vpp=2, num_microbatches=4),
    Layout(dp=2, num_microbatches=2),
    Layout(dp=2, distributed_optimizer=False),
    Layout(dp=2, overlap_communication=True),
    Layout(dp=2, distributed_optimizer=False, overlap_communication=True),
    Layout(dp=3),
    Layout(tp=2, pp=2, num_microbatches=2),
    Layout(tp=2, dp=2, sequence_parallel=True),
    Layout(pp=2, dp=2, num_microbatches=2),
    Layout(pp=3, num_microbatches=3, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=1),
    Layout(cp=2, dp=2, num_microbatches=2),
    Layout(cp=2, tp=2, sequence_parallel=True, cp_comm_type="all_gather", distributed_optimizer=False),
    Layout(cp=4, overlap_communication=True),
    Layout(cp=2, pp=2, vpp=2, num_microbatches=2),
)
EIGHT_RANKS = Layout(tp=2, pp=2, dp=2, sequence_parallel=True, num_microbatches=2)
WITH_RECOMPUTE = (
    Layout(recompute="selective"),
    Layout(recompute="full"),
    Layout(recompute="full", recompute_method="block"),
    Layout(tp=2, sequence_parallel=True, recompute="selective"),
    Layout(pp=2, vpp=2, num_microbatches=2, recompute="full"),
)

# What differs most between the families, and what labels differ in, is spread over the two.
GPT2 = Case(model="gpt2", labels="uneven")
LLAMA = Case(model="llama", labels="all")
FEW_KEY_VALUE_HEADS = Case(model="llama", labels="uneven", model_fields=(("num_key_value_heads", 1),))


IN_EVERY_RUN = (0, 2, 4, 6, 10, 11, 13, 14, 15, 16)
"""Layouts that have all ways of splitting and of communicating between them."""


def _in_turn(index: int, layout: Layout) -> object:
    """Every second layout with one of the families, the others with the other."""
    case, rare = (GPT2, LLAMA)[index // 2 % 2], index not in IN_EVERY_RUN
    return pytest.param(case, layout, marks=[pytest.mark.exhaustive] * rare, id=f"{case.model}-{layout}")


@pytest.mark.parametrize(("case", "layout"), [_in_turn(*each) for each in enumerate(LAYOUTS)])
def test_a_layout_trains_as_one_process(case: Case, layout: Layout) -> None:
    assert_same_run(outcome(replace(case, layout=layout)), outcome(case))


def test_all_axes_together_on_eight_ranks_train_as_one_process() -> None:
    assert_same_run(outcome(replace(GPT2, layout=EIGHT_RANKS)), outcome(GPT2))


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=[pytest.mark.exhaustive] * (x.world_size == 1), id=str(x)) for x in WITH_RECOMPUTE],
)
def test_recomputed_activations_give_the_same_run(layout: Layout) -> None:
    assert_same_run(outcome(replace(GPT2, layout=layout)), outcome(GPT2))


_DESCENT = (("name", "sgd"), ("weight_decay", 0.0))


def test_more_tensor_parallel_ranks_than_key_value_heads_train_as_one_process() -> None:
    layout = Layout(tp=4, sequence_parallel=True)
    assert_same_run(outcome(replace(FEW_KEY_VALUE_HEADS, layout=layout)), outcome(FEW_KEY_VALUE_HEADS))


_GATHERING = (("moe_token_dispatcher_type", "allgather"),)
WITH_EXPERTS = (
    Layout(ep=2, dp=2, num_microbatches=3, overlap_communication=True),
    Layout(ep=2, dp=2, distributed_optimizer=False),
    Layout(ep=2, tp=2, sequence_parallel=True, distributed_optimizer=False),
    Layout(ep=2, tp=2, dp=2, sequence_parallel=True, recompute="full"),
    Layout(ep=4, tp=2, dp=2, sequence_parallel=True),
    Layout(ep=2, pp=2, dp=2, vpp=2, num_microbatches=2),
    Layout(ep=2, dp=2, num_microbatches=3, transformer_config_overrides=_GATHERING),
    Layout(ep=2, tp=2, sequence_parallel=True, recompute="selective", transformer_config_overrides=_GATHERING),
    Layout(ep=4, tp=2, dp=2, sequence_parallel=True, transformer_config_overrides=_GATHERING),
)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=[pytest.mark.exhaustive] * (i in (1, 4, 5)), id=str(x)) for i, x in enumerate(WITH_EXPERTS)],
)
def test_spread_experts_train_as_one_process(layout: Layout) -> None:
    # Plain gradient descent and clipping in every step: a wrong gradient or norm of experts would show.
    labels: Labels = "short" if layout.transformer_config_overrides else "uneven"
    experts = Case(model="experts", labels=labels, clip=0.5, lr=0.1, optimizer=_DESCENT)
    assert_same_run(outcome(replace(experts, layout=layout)), outcome(experts))
    assert min(outcome(experts).grad_norms) > 0.5


def test_clipping_uses_the_norm_over_all_shards() -> None:
    # Adam would hide a wrong factor; plain gradient descent shows it. The norms are about 3: every step is clipped.
    descent = replace(GPT2, clip=0.5, lr=0.1, optimizer=_DESCENT)
    layout = Layout(tp=2, pp=2, num_microbatches=2)
    assert_same_run(outcome(replace(descent, layout=layout)), outcome(descent))
    assert min(outcome(descent).grad_norms) > 0.5


def _on_gpus(layout: Layout) -> object:
    return pytest.param(layout, marks=pytest.mark.gpu(layout.world_size), id=str(layout))


@pytest.mark.parametrize("layout", [_on_gpus(x) for x in (*LAYOUTS, *WITH_RECOMPUTE) if x.world_size <= 4])
@pytest.mark.parametrize("case", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_layout_trains_on_gpus_in_bf16_as_on_one(case: Case, layout: Layout) -> None:
    exact = replace(case, accelerator="gpu")
    reference = replace(exact, precision="bf16-mixed")
    assert_same_within_rounding(outcome(replace(reference, layout=layout)), outcome(reference), outcome(exact))


def test_a_layout_trains_in_bf16_as_one_process() -> None:
    reference = replace(GPT2, precision="bf16-mixed")
    layout = Layout(tp=2, pp=2, num_microbatches=2)
    assert_same_within_rounding(outcome(replace(reference, layout=layout)), outcome(reference), outcome(GPT2))
