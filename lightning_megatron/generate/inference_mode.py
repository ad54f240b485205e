"""Inference mode: model chunks of a run in training as generation and logits need them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lightning_megatron.engine.wrap import finish_parameter_gathers, unwrap

_INFERENCE_SETTINGS = {
    "training": False,  # the engine recomputes activations in training only
    "sequence_parallel": False,
    "scatter_to_sequence_parallel": False,
    "reduce_scatter_embeddings": False,
    "context_parallel_size": 1,
}
"""Attributes of modules and configs that are set for training or a split sequence, with their values for inference; a
single token cannot be split."""


@contextlib.contextmanager
def inference_mode(
    chunks: Sequence[torch.nn.Module],
) -> Iterator[list[Any]]:
    """Context manager: inference mode for a model in training, restored on exit; every rank must enter.

    Yields this rank's unwrapped chunks with all parameters gathered, without dropout, recomputation, sequence and
    context parallelism (the ranks of a cp group compute the same). Wrappers, gradients, optimizer and random states are
    left alone.

    Args:
        chunks: Wrapped or not.
    """
    finish_parameter_gathers(list(chunks))
    models = [unwrap(chunk) for chunk in chunks]
    modules = [module for model in models for module in model.modules()]
    # Some modules have a copy of the config (megatron-core 0.16.1, transformer/attention.py).
    configs = [module.config for module in modules if hasattr(module, "config")]
    # Training reuses what the engine caches meanwhile (rotary angles), so no tensors of torch's inference mode.
    with contextlib.ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
        for holder in (*modules, *configs):
            for name, value in _INFERENCE_SETTINGS.items():
                before = getattr(holder, name, value)
                if before != value:
                    stack.callback(setattr, holder, name, before)
                    setattr(holder, name, value)
        yield models
