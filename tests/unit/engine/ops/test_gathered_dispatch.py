"""Exchange of experts' rows without host waits, on two ranks, beside all experts applied to all tokens on one."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from lightning_megatron.engine.ops.experts import GroupedExperts
from lightning_megatron.engine.ops.gathered_dispatch import (
    HALVES_FROM,
    AllGatherDispatcher,
    _Exchange,
    equal_rows,
)
from lightning_megatron.engine.ops.token_dispatch import AllToAllDispatcher, Dispatcher
from tests.ranks import run_ranks

HIDDEN = 8
WIDTH = 16
NUM_EXPERTS = 6
TOPK = 2
ROWS = (5, 3)
"""Tokens of each rank."""


class Layer(NamedTuple):
    """All tokens and weights of a layer of experts, and what the loss is."""

    tokens: Tensor
    """[8, h]."""
    experts: Tensor
    """[8, topk]."""
    probs: Tensor
    """[8, topk]."""
    weights: tuple[Tensor, ...]
    """Of both linears and, with biases, those of both: [experts, ...]."""
    upstream: Tensor
    """[8, h]: gradient of the outputs."""


def make_layer(routing: str, *, has_biases: bool) -> Layer:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    count = sum(ROWS)
    scores = random(count, NUM_EXPERTS)
    if routing == "one rank":
        scores[:, NUM_EXPERTS // 2 :] = -torch.inf
    weights = [random(NUM_EXPERTS, 2 * WIDTH, HIDDEN), random(NUM_EXPERTS, HIDDEN, WIDTH)]
    if has_biases:
        weights += [random(NUM_EXPERTS, 2 * WIDTH), random(NUM_EXPERTS, HIDDEN)]
    return Layer(
        random(count, HIDDEN),
        scores.topk(TOPK).indices,
        random(count, TOPK),
        tuple(weights),
        random(count, HIDDEN),
    )


def expected(layer: Layer) -> tuple[Tensor, ...]:
    """Outputs, and gradients of tokens, probabilities and weights, in float64."""
    tokens, probs = (x.double().requires_grad_() for x in (layer.tokens, layer.probs))
    weights = [x.double().requires_grad_() for x in layer.weights]
    biases = weights[2:]
    rows = []
    for token, experts, factors in zip(tokens, layer.experts, probs, strict=True):
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, factor in zip(experts.tolist(), factors, strict=True):
            hidden = weights[0][expert] @ token
            if biases:
                hidden = hidden + biases[0][expert]
            gate, up = hidden.chunk(2)
            output = weights[1][expert] @ (F.silu(gate) * up)
            if biases:
                output = output + biases[1][expert]
            total = total + factor * output
        rows.append(total)
    outputs = torch.stack(rows)
    inputs = [tokens, probs, *weights]
    return outputs.detach(), *torch.autograd.grad(outputs, inputs, layer.upstream.double())


def build(
    kind: type[Dispatcher],
    layer: Layer,
    local: range,
    recompute: str | None = None,
) -> tuple[GroupedExperts, Dispatcher]:
    """Experts of this rank, ``local``, and their dispatcher over the world, as with ep=2."""
    group: Any = dist.group.WORLD
    groups: Any = SimpleNamespace(ep=group, expt_dp=group, expt_tp=None, tp_ep=None)
    weights = [weight[local.start : local.stop] for weight in layer.weights]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=TOPK,
        moe_ffn_hidden_size=WIDTH,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=weights[0].is_cuda,
        params_dtype=weights[0].dtype,
        add_bias_linear=False,
        expert_model_parallel_size=2,
        moe_token_dispatcher_type="allgather" if kind is AllGatherDispatcher else "alltoall",
        recompute_granularity=recompute,
        recompute_modules=["layernorm"],
    )
    with patch("torch.cuda.current_device", lambda: weights[0].device):
        experts = GroupedExperts(
            len(local), config, groups, has_biases=len(weights) > 2, activation=None
        )
    with torch.no_grad():
        for parameter, weight in zip(experts.parameters(), weights, strict=True):
            parameter.copy_(weight)
    return experts, kind(len(local), list(local), config, groups)


def forward(
    experts: GroupedExperts,
    dispatcher: Dispatcher,
    tokens: Tensor,
    indices: Tensor,
    probs: Tensor,
) -> Tensor:
    """Outputs of tokens, [n, 1, h], in the order of calls of Megatron's layer."""
    prepared = dispatcher.dispatch_preprocess(tokens, indices, probs)
    dispatched = dispatcher.token_dispatch(*prepared)
    if isinstance(dispatcher, AllGatherDispatcher):
        sums = dispatcher.compute(experts, *dispatched)
    else:
        outputs, _ = experts(*dispatcher.dispatch_postprocess(*dispatched))
        sums = dispatcher.combine_preprocess(outputs)
    return dispatcher.combine_postprocess(dispatcher.token_combine(sums))


def compute(
    kind: type[Dispatcher],
    layer: Layer,
    num_parts: int,
    recompute: str | None,
) -> tuple[tuple[Tensor, ...], int]:
    """Outputs of this rank's tokens and gradients as ``expected``, and bytes that are kept between the passes."""
    dist.init_process_group("gloo")
    # Memory that is not initialized holds NaN: nothing may read it.
    torch.use_deterministic_algorithms(True)
    rank = dist.get_rank()
    local = range(rank * NUM_EXPERTS // 2, (rank + 1) * NUM_EXPERTS // 2)
    own = slice(sum(ROWS[:rank]), sum(ROWS[: rank + 1]))
    experts, dispatcher = build(kind, layer, local, recompute)
    module: Any = torch.nn.Module()
    module.token_dispatcher = dispatcher
    if isinstance(dispatcher, AllGatherDispatcher):
        dispatcher.num_parts = num_parts
    tokens = layer.tokens[own, None].clone().requires_grad_()
    probs = layer.probs[own].clone().requires_grad_()
    saved: dict[int, Any] = {}
    with ExitStack() as stack:
        stack.enter_context(patch("torch.cuda.current_device", lambda: torch.device("cpu")))
        stack.enter_context(equal_rows(experts.config, [module], ROWS[rank], experts._ep))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_note(saved), lambda x: x))
        outputs = forward(experts, dispatcher, tokens, layer.experts[own], probs)
        kept = sum(storage.nbytes() for storage in saved.values())
        inputs = [tokens, probs, *experts.parameters()]
        gradients = torch.autograd.grad(outputs, inputs, layer.upstream[own, None])
    return (outputs.detach()[:, 0], gradients[0][:, 0], *gradients[1:]), kept


def compute_looped_back(recompute: str | None, num_parts: int) -> list[list[Tensor]]:
    """Outputs and gradients on a GPU in bf16, by each exchange; this rank has half of the experts, nobody the others.

    The host may not wait in the passes of the all-gather.
    """
    dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
    layer = make_layer("random", has_biases=False)
    wide = [x.cuda().bfloat16() for x in (layer.tokens, *layer.weights, layer.upstream)]
    tokens, *weights, upstream = wide
    layer = Layer(tokens, layer.experts.cuda(), layer.probs.cuda(), tuple(weights), upstream)
    results = []
    for kind in (AllToAllDispatcher, AllGatherDispatcher):
        experts, dispatcher = build(kind, layer, range(NUM_EXPERTS // 2), recompute)
        if isinstance(dispatcher, AllGatherDispatcher):
            dispatcher.num_parts = num_parts
        for mode in ("default", "error"):
            if mode == "error" and kind is AllGatherDispatcher:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode(mode)
            inputs = [layer.tokens[:, None].clone().requires_grad_(), layer.probs.clone()]
            probs = inputs[1].requires_grad_()
            outputs = forward(experts, dispatcher, inputs[0], layer.experts, probs)
            weights = [*experts.parameters()]
            gradients = torch.autograd.grad(outputs, [*inputs, *weights], layer.upstream[:, None])
            torch.cuda.set_sync_debug_mode("default")
        results.append([x.detach().cpu() for x in (outputs, *gradients)])
    return results


def _note(saved: dict[int, Any]) -> Any:
    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        saved[storage._cdata] = storage
        return x

    return note


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("routing", ["random", "one rank"])
@pytest.mark.parametrize(
    ("kind", "num_parts", "recompute"),
    [
        (AllGatherDispatcher, 1, None),
        (AllGatherDispatcher, 2, "selective"),
        (AllToAllDispatcher, 1, None),
    ],
)
def test_exchange_equals_all_experts_on_one_rank(
    kind: type[Dispatcher],
    num_parts: int,
    recompute: str | None,
    routing: str,
    has_biases: bool,
) -> None:
    layer = make_layer(routing, has_biases=has_biases)
    ranks = [each for each, _ in run_ranks(compute, 2, kind, layer, num_parts, recompute)]
    for ours, theirs in zip(zip(*ranks, strict=True), expected(layer), strict=True):
        torch.testing.assert_close(torch.cat(ours).double(), theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("routing", ["random", "one rank"])
def test_exchange_of_two_ranks_equals_all_to_all_bit_for_bit(routing: str) -> None:
    layer = make_layer(routing, has_biases=True)
    ours, theirs = (
        run_ranks(compute, 2, kind, layer, 1, None)
        for kind in (AllGatherDispatcher, AllToAllDispatcher)
    )
    for (of_rank, _), (reference, _) in zip(ours, theirs, strict=True):
        assert all(torch.equal(*each) for each in zip(of_rank, reference, strict=True))


def test_rows_of_one_half_are_exchanged_under_the_experts_of_the_other(world: Any) -> None:
    layer = make_layer("random", has_biases=False)
    log: list[str] = []
    launch = _Exchange.launch
    wait = _Exchange.wait

    def logged_launch(exchange: _Exchange, x: Tensor, *, backward: bool) -> Tensor:
        log.append("start")
        return launch(exchange, x, backward=backward)

    def logged_wait(exchange: _Exchange) -> Tensor:
        log.append("wait")
        return wait(exchange)

    def note_forward(*_: Any) -> None:
        log.append("experts")

    def note_gradient(module: torch.nn.Module, inputs: Any, outputs: tuple[Tensor, None]) -> None:
        outputs[0].register_hook(note_forward)

    with ExitStack() as stack:
        stack.enter_context(patch("torch.cuda.current_device", lambda: torch.device("cpu")))
        stack.enter_context(patch.object(_Exchange, "launch", logged_launch))
        stack.enter_context(patch.object(_Exchange, "wait", logged_wait))
        experts, dispatcher = build(AllGatherDispatcher, layer, range(NUM_EXPERTS))
        assert isinstance(dispatcher, AllGatherDispatcher)
        dispatcher.num_parts = 2
        experts.register_forward_pre_hook(note_forward)
        experts.register_forward_hook(note_gradient)
        tokens = layer.tokens[:, None].clone().requires_grad_()
        outputs = forward(experts, dispatcher, tokens, layer.experts, layer.probs)
        first_half = ["wait", "experts", "start"]
        both_halves = ["start", "start", *first_half, *first_half, "wait", "wait"]
        assert log == both_halves
        log.clear()
        outputs.sum().backward()
        assert log == both_halves


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("recompute", "num_parts"), [(None, 1), ("selective", 2)])
def test_host_does_not_wait_for_the_gpu(recompute: str | None, num_parts: int) -> None:
    ((theirs, ours),) = run_ranks(compute_looped_back, 1, recompute, num_parts)
    for each, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(each, reference, rtol=1.6e-2, atol=1e-2)


def test_recomputation_keeps_the_gathered_rows_alone() -> None:
    layer = make_layer("random", has_biases=False)
    kept = []
    for recompute in (None, "selective"):
        (_, each), _ = run_ranks(compute, 2, AllGatherDispatcher, layer, 1, recompute)
        kept.append(each)
    rows_of_experts = 2 * max(ROWS) * TOPK
    assert kept[0] - kept[1] == rows_of_experts * 4 * (HIDDEN + 3 * WIDTH)


def test_halves_are_for_many_ranks(world: Any) -> None:
    config: Any = SimpleNamespace()
    for size, num_parts in ((2, 1), (HALVES_FROM, 2)):
        ep: Any = SimpleNamespace(size=lambda size=size: size, rank=lambda: 0)
        groups: Any = SimpleNamespace(ep=ep, expt_tp=None, tp_ep=None)
        assert AllGatherDispatcher(1, [0], config, groups).num_parts == num_parts
