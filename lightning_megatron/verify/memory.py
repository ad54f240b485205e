"""Memory that a verification takes, before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.planning.devices import GIB
from lightning_megatron.planning.host import host_memory
from lightning_megatron.planning.memory import memory
from lightning_megatron.planning.parameters import total_parameters
from lightning_megatron.planning.run import PlannedRun
from lightning_megatron.verify.job import DTYPES, Job
from lightning_megatron.verify.layouts import Layout

_PROCESS_BYTES = 0.7 * GIB
"""Of a process with torch and Megatron-Core, before it has a model."""
_CUDA_BYTES = 0.8 * GIB
"""Of a GPU, for CUDA and NCCL."""
_COPIES_OF_LOGITS = 4
"""Logits of all rows in fp32, their gradient, and what gathers and compares them."""
_LESS = "give --checks round-trip logits generation, which need no gradients, a smaller --batch-size, or more memory"


@dataclass(frozen=True, kw_only=True)
class Need:
    """Peak memory of the processes of one part of a verification, which run one after another."""

    what: str
    """``transformers``, or the name of a layout."""
    num_bytes: float
    """On the host for a CPU, on the fullest GPU otherwise."""


def needs(job: Job, model: ModelConfig, layouts: Sequence[Layout]) -> list[Need]:
    """Peak memory of transformers and of each layout.

    Args:
        job: What is computed.
        model: The model.
        layouts: The layouts.
    """
    found = []
    if job.needs_reference:
        found.append(Need(what="transformers", num_bytes=_reference_bytes(job, model)))
    for layout in layouts:
        found.append(Need(what=layout.name, num_bytes=_layout_bytes(job, model, layout)))
    return found


def _reference_bytes(job: Job, model: ModelConfig) -> float:
    # In bf16 the model is computed in fp32, too, before.
    parameters = total_parameters(model)
    copies = 1
    if job.trains:
        copies = 2
        if model.experts is not None:  # gradients of single experts are copies of the stacked ones
            copies = 3
    run = PlannedRun(
        model=model,
        lengths=_lengths(job, model),
        world_size=1,
        micro_batch_size=job.batch_size,
        precision="32-true",
    )
    activations = memory(run).activations if job.trains else 0.0
    scores = 4.0 * job.batch_size * model.num_attention_heads * job.seq_length**2
    if job.trains:
        # Eager attention stores scores and probabilities of each layer.
        scores *= 2 * (model.num_layers + 2 * model.num_decoder_layers)
    overhead = _CUDA_BYTES if job.accelerator == "gpu" else _PROCESS_BYTES
    return 4.0 * copies * parameters + activations + scores + _logits_bytes(job, model) + overhead


def _layout_bytes(job: Job, model: ModelConfig, layout: Layout) -> float:
    itemsize = DTYPES[job.dtype].itemsize
    run = PlannedRun(
        model=model,
        lengths=_lengths(job, model),
        world_size=layout.world_size,
        parallel=layout.parallel,
        micro_batch_size=job.batch_size // (layout.dp * layout.parallel.num_microbatches),
        distributed_optimizer=False,
        precision="32-true" if itemsize == 4 else "bf16-mixed",
    )
    planned = memory(run)
    rank_bytes = planned.weights + _logits_bytes(job, model)
    if job.trains:
        rank_bytes += planned.gradients + planned.activations
        if itemsize == 2:  # fp32 master weights
            rank_bytes += 4 / itemsize * planned.weights
    if job.accelerator == "gpu":
        return rank_bytes + _CUDA_BYTES
    return layout.world_size * (rank_bytes + _PROCESS_BYTES)


def _lengths(job: Job, model: ModelConfig) -> tuple[int, ...]:
    if model.architecture == "t5":
        return (job.seq_length, job.seq_length)
    return (job.seq_length,)


def _logits_bytes(job: Job, model: ModelConfig) -> float:
    width = model.vocab_size if model.has_output_layer else model.num_labels
    return 4.0 * _COPIES_OF_LOGITS * job.batch_size * job.seq_length * width


def check_memory(found: Sequence[Need], accelerator: str) -> str:
    """State the needs beside what there is.

    Args:
        found: The needs.
        accelerator: ``cpu`` or ``gpu``.

    Returns:
        The line to show; it warns if more is needed than is free now.

    Raises:
        ConfigError: If the device cannot hold the largest.
    """
    largest = max(found, key=lambda need: need.num_bytes)
    free: float
    total: float
    if accelerator == "gpu":
        free, total = torch.cuda.mem_get_info()
        device = "each GPU"
    else:
        host = host_memory()
        free = host.free
        total = host.total
        device = "this host"
    shown = ", ".join(f"{need.what} {need.num_bytes / GIB:,.1f} GiB" for need in found)
    if largest.num_bytes > total:
        raise ConfigError(
            f"memory: expected {device} to have about {largest.num_bytes / GIB:,.1f} GiB for {largest.what}, got"
            f" {total / GIB:,.1f} GiB; {_LESS}"
        )
    line = f"memory, one after another: {shown}; {device} has {total / GIB:,.1f} GiB, {free / GIB:,.1f} GiB free"
    if largest.num_bytes > free:
        line += f". Warning: that may be too little; end other programs, or {_LESS}"
    return line
