"""Penalties on weights: terms of a loss that read weights by themselves, not through the model's output.

The engine's linears and embeddings add their gradients to DDP's buffers, and give autograd a placeholder of undefined
values in their place. Autograd adds the gradient of a penalty to it, and Megatron's DDP discards the sum. Megatron's
``zero_out_wgrad``, made for tied embeddings, has the layers return zeros and DDP add what autograd got; it costs a pass
over the gradient in each microbatch, so it is set where it is needed only.

A layout that splits the model would give a penalty another meaning: ``loss_func`` runs on the last stage, weights there
are shards, and with sequence parallelism gradients of norms and biases are summed over tp. Such terms are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

from lightning_megatron.engine.objective import Output


class Read(NamedTuple):
    """A weight that a loss reads by itself."""

    weight: Any
    is_penalized: bool
    """Whether the loss depends on the weight alone there. Otherwise a layer may have been called within the loss, such
    as the last norm on hidden states, which a layout does not change."""


def last_node(output: Output) -> int:
    """Number of the last node of autograd's graph that the model has made; before a loss is computed."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    return max((node._sequence_nr() for node in nodes), default=-1)


def weights_read(losses: Iterable[Tensor], last_of_model: int) -> list[Read]:
    """Weights with gradient buffers that losses read by themselves.

    A loss may also read what the model computes within, as a term on hidden states does: the search ends at the model's
    nodes, and at layers that are functions of their own, which linears and embeddings are.

    Args:
        losses: Terms of a loss, [], with or without a graph.
        last_of_model: See ``last_node``.
    """
    reads = []
    seen = {None}
    pending: list[Any] = [loss.grad_fn for loss in losses]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction) or node._sequence_nr() <= last_of_model:
            continue
        inputs = [each for each, _ in node.next_functions if each is not None]
        weights = [each.variable for each in inputs if hasattr(each, "variable")]
        is_penalized = len(weights) == len(inputs) or any(each.dim() > 1 for each in weights)
        reads += [Read(each, is_penalized) for each in weights if hasattr(each, "main_grad")]
        pending += [each for each in inputs if not hasattr(each, "variable")]
    return reads


def keep_gradients(weights: Iterable[Any]) -> None:
    """Have the backward pass add what autograd computes for ``weights`` to what layers have added themselves."""
    for weight in weights:
        if not getattr(weight, "zero_out_wgrad", False):
            weight.zero_out_wgrad = True
            weight.is_penalized = True
