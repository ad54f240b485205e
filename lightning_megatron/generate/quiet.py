"""How is a model in training made to generate, and left as if nothing had happened? Switches, put back in any case."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lightning_megatron.engine.wrap import finish_parameter_gathers, unwrap

_SEQUENCE_PARALLEL = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
"""What layers and their config remember of sequence parallelism, which cannot split a single token."""


@contextlib.contextmanager
def generating(chunks: Sequence[torch.nn.Module]) -> Iterator[list[Any]]:
    """This rank's plain models with whole weights, without dropout, recomputation and sequence parallelism.

    Wrappers, gradients, optimizer and random streams are left alone. Every rank must enter.

    Args:
        chunks: Wrapped or not.
    """
    finish_parameter_gathers(list(chunks))
    models = [unwrap(chunk) for chunk in chunks]
    modules = [module for model in models for module in model.modules()]
    were_training = [module.training for module in modules]
    # Some modules have a copy of the config (megatron-core 0.16.1, transformer/attention.py).
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    holders: list[Any] = [*modules, *configs.values()]
    switched = [(x, name) for x in holders for name in _SEQUENCE_PARALLEL if getattr(x, name, False) is True]
    try:
        for holder, name in switched:
            setattr(holder, name, False)
        for module in modules:
            # The engine recomputes only what is in training.
            module.training = False
        # What the engine caches meanwhile (rotary angles) is for training, too: no tensors of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            yield models
    finally:
        for holder, name in switched:
            setattr(holder, name, True)
        for module, was_training in zip(modules, were_training, strict=True):
            module.training = was_training
