"""What a run tells and checks before it builds a model: its parameters, its engine's ops, the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_megatron.engine.ops.report import ops_report
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.t5_layout import OVERRIDE
from lightning_megatron.planning.devices import GIB
from lightning_megatron.planning.host import host_memory
from lightning_megatron.planning.parameters import (
    active_parameters,
    adapter_parameters,
    chunk_layout,
    expert_adapter_parameters,
    expert_parameters,
    rank_parameters,
    total_parameters,
    trained_with_lora,
)

if TYPE_CHECKING:
    from lightning_megatron.engine.settings import EngineSettings


def startup_lines(model: ModelConfig, settings: EngineSettings) -> list[str]:
    """Lines that rank 0 logs at start-up: padded vocabulary, parameters of each rank, implementations of the ops."""
    parallel = settings.parallel
    padded = model.padded_vocab_size(parallel.tp)
    lines = [
        f"Padded vocabulary: {model.vocab_size} tokens + {padded - model.vocab_size} dummy tokens = {padded} "
        f"(a multiple of make_vocab_size_divisible_by={model.make_vocab_size_divisible_by} x tp={parallel.tp})",
        f"Number of parameters of the model: {total_parameters(model)}",
    ]
    if model.experts is not None:
        lines.append(
            f"Number of active parameters (used for one token): {active_parameters(model)}"
        )
    layout = chunk_layout(model, parallel, settings.overrides.transformer.get(OVERRIDE))
    if model.architecture == "t5" and len(layout) > 1:
        lines.append(
            f"Layers of each chunk, in the order of the pipeline: {', '.join(map(str, layout))} "
            f"(the first {model.num_layers} are the encoder's)"
        )
    for pp_rank in range(parallel.pp):
        count = rank_parameters(model, layout, parallel, pp_rank)
        for tp_rank in range(parallel.tp):
            rank = f"({tp_rank}, {pp_rank})"
            lines.append(f"Number of parameters on (tensor, pipeline) rank {rank}: {count}")
    if model.lora is not None:
        trained = trained_with_lora(model)
        lines.append(
            f"LoRA of rank {model.lora.rank}: {trained} parameters are trained, and all others are frozen"
        )
    ops = ops_report("cuda" if settings.device.type == "cuda" else "cpu")
    used = [f"{op}: {implementation}" for op, implementation, _ in ops]
    if settings.fp8:
        used.append(f"linears of layers: fp8, {settings.fp8}")
    lines.append(f"Engine ops: {'; '.join(used)}")
    return lines


def check_host_memory(model: ModelConfig, settings: EngineSettings, ranks: int) -> None:
    """Check that the weights of the ``ranks`` on this host fit its memory, before Linux kills a process.

    Raises:
        ConfigError: If they do not.
    """
    count = total_parameters(model) + adapter_parameters(model)
    parallel = settings.parallel
    experts = sum(expert_parameters(model, layer) for layer in range(model.num_layers))
    experts += expert_adapter_parameters(model)
    per_rank = (count - experts) // (parallel.tp * parallel.pp)
    per_rank += experts // (parallel.ep * parallel.pp)
    needed = per_rank * ranks * settings.params_dtype.itemsize
    host = host_memory()
    if needed > host.total:
        raise ConfigError(
            f"the weights of this model ({count:,} parameters) take {needed / GIB:,.0f} GiB on {ranks} "
            f"rank{'s' * (ranks > 1)} of this host, which has {host.total / GIB:,.0f} GiB; correct the model's sizes, "
            "or use more hosts"
        )
