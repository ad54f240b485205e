"""Penalties on weights: terms of a loss that read weights by themselves, not through the model's output.

The engine's linears and embeddings add their gradients to DDP's buffers, and give autograd a placeholder of undefined
values in their place. Autograd adds the gradient of a penalty to it, and Megatron's DDP discards the sum. Megatron's
``zero_out_wgrad``, made for tied embeddings, has the layers return zeros and DDP add what autograd got; it costs a pass
over the gradient in each microbatch, so it is set where it is needed only.

A layout that splits the model would give a penalty another meaning: ``loss_func`` runs on the last stage, and weights
there are shards. Such terms are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

from lightning_megatron.engine.objective import Output

_LOOKUPS = ("EmbeddingBackward0",)
"""Nodes of autograd's graph that read rows of a weight for the model's input."""


def output_nodes(output: Output) -> set[Any]:
    """Nodes of autograd's graph that end in the model's output; before a loss is computed, which may change it."""
    return {leaf.grad_fn for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)}


def weights_read(losses: Iterable[Tensor], model_nodes: set[Any]) -> list[Any]:
    """Weights with gradient buffers that losses read by themselves.

    A loss may also read what the model computes within, as a term on hidden states does: the search ends at layers that
    are functions of their own, which linears and embeddings are. It then finds weights of norms, never a matrix.

    Args:
        losses: Terms of a loss, [], with or without a graph.
        model_nodes: Where the model's own graph begins (``output_nodes``).
    """
    weights = []
    seen = {None, *model_nodes}
    pending: list[Any] = [loss.grad_fn for loss in losses]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction) or node.name() in _LOOKUPS:
            continue
        weight = getattr(node, "variable", None)
        if hasattr(weight, "main_grad"):
            weights.append(weight)
        pending += [following for following, _ in node.next_functions]
    return weights


def keep_gradients(weights: Iterable[Any]) -> None:
    """Have the backward pass add what autograd computes for ``weights`` to what layers have added themselves."""
    for weight in weights:
        weight.zero_out_wgrad = True
