"""A training run that is planned: model, batch and layout."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.t5_layout import OVERRIDE
from lightning_megatron.planning.devices import Device, peak_flops_per_s
from lightning_megatron.planning.matrices import layer_matrices
from lightning_megatron.planning.parameters import (
    chunk_layout,
    expert_adapter_parameters,
    expert_parameters,
    rank_parameters,
    trained_with_lora,
)

if TYPE_CHECKING:
    from lightning_megatron.engine.settings import EngineSettings


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Model, batch and layout of a training run."""

    model: ModelConfig
    lengths: tuple[int, ...]
    """Tokens of a row; for a T5 those of the encoder and of the decoder."""
    world_size: int
    """Number of GPUs."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    micro_batch_size: int = 1
    """Rows of a microbatch."""
    distributed_optimizer: bool = True
    """Whether the optimizer's state is sharded over data-parallel ranks."""
    recompute: Literal["selective", "full"] | None = None
    """What the backward pass recomputes: norms and activation functions of MLPs, or full layers."""
    precision: str = "bf16-mixed"
    """The Trainer's precision."""
    uses_muon: bool = False
    """Whether Muon updates the matrices of the layers, and AdamW the rest; otherwise AdamW updates all."""
    cuda_graphs: bool = False
    """Whether microbatches are replayed as CUDA graphs, without launches from Python."""
    ema: bool = False
    """Whether the GPUs also keep an average of the weights."""
    num_moments: int = 2
    """Moments of a weight: AdamW has two, SGD has one."""
    offload_optimizer: float = 0.0
    """Share of the optimizer's state that is in host memory."""
    layout: tuple[int, ...] = field(default=())
    """Number of layers of each model chunk; empty for the default of ``parallel``."""

    @property
    def dp(self) -> int:
        """Number of replicas."""
        return self.parallel.data_parallel_size(self.world_size)

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one weight or activation."""
        return 4 if self.precision == "32-true" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks, padding included."""
        rows = self.micro_batch_size * self.parallel.num_microbatches * self.dp
        return rows * sum(self.lengths)

    @property
    def tokens_per_rank(self) -> float:
        """Tokens of a microbatch per context-parallel rank, padding included."""
        return self.micro_batch_size * sum(self.lengths) / self.parallel.cp

    @property
    def chunks(self) -> tuple[int, ...]:
        """Number of layers of each model chunk in pipeline order."""
        return self.layout or chunk_layout(self.model, self.parallel)

    def layers(self, pp_rank: int) -> list[int]:
        """Indices in the whole model of a stage's layers, a T5's decoder after its encoder."""
        bounds = itertools.pairwise(itertools.accumulate(self.chunks, initial=0))
        chunks = [range(*pair) for pair in bounds]
        return list(itertools.chain(*chunks[pp_rank :: self.parallel.pp]))

    def parameters(self, pp_rank: int) -> dict[int, int]:
        """Number of parameters on one rank of a stage, by the size of the group that replicates them."""
        return {**self._parameters[pp_rank]}

    @functools.cached_property
    def _parameters(self) -> list[dict[int, int]]:
        """``parameters`` of each stage: a plan reads them fifteen times, and they are most of its time."""
        return [self._count_parameters(stage) for stage in range(self.parallel.pp)]

    def _count_parameters(self, pp_rank: int) -> dict[int, int]:
        parallel = self.parallel
        count = rank_parameters(self.model, self.chunks, parallel, pp_rank)
        layers = self.layers(pp_rank)
        experts = sum(expert_parameters(self.model, layer) for layer in layers)
        experts //= parallel.ep
        replicas = self.dp * parallel.cp
        expert_replicas = replicas * parallel.tp // parallel.ep
        return Counter({replicas: count - experts}) + Counter({expert_replicas: experts})

    def matrices(self, pp_rank: int) -> dict[int, int]:
        """Number of parameters on one rank of a stage that Muon updates, by the size of the group that has them."""
        parallel = self.parallel
        replicas = self.dp * parallel.cp
        counts: Counter[int] = Counter()
        if self.uses_muon:
            for layer in self.layers(pp_rank):
                for shape in layer_matrices(self.model, layer):
                    ranks = replicas
                    if shape.spread_over == "ep":
                        ranks = replicas * parallel.tp // parallel.ep
                    counts[ranks] += shape.num_on_rank(parallel)
        return counts

    def trained(self, pp_rank: int) -> dict[int, float]:
        """``parameters`` with gradients; LoRA adapters are assumed to be spread evenly."""
        if self.model.lora is not None:
            return self.adapters
        return {**self.parameters(pp_rank)}

    @property
    def adapters(self) -> dict[int, float]:
        """What LoRA trains on one rank of each stage, by the size of the group that replicates it; empty without."""
        if self.model.lora is None:
            return {}
        parallel = self.parallel
        replicas = self.dp * parallel.cp
        experts = expert_adapter_parameters(self.model)
        others = trained_with_lora(self.model) - experts
        counts = {replicas: others / (parallel.tp * parallel.pp)}
        expert_replicas = replicas * parallel.tp // parallel.ep
        counts.setdefault(expert_replicas, 0.0)
        counts[expert_replicas] += experts / (parallel.ep * parallel.pp)
        return counts

    def optimizer_parameters(self, pp_rank: int) -> float:
        """Number of parameters whose optimizer state one rank of a stage holds."""
        return self._on_one_rank(self.trained(pp_rank))

    def optimizer_matrices(self, pp_rank: int) -> float:
        """How many of ``optimizer_parameters`` Muon updates: they have one moment instead of two."""
        return self._on_one_rank(self.matrices(pp_rank))

    def _on_one_rank(self, counts: Mapping[int, float]) -> float:
        """Of parameters by the size of the group that replicates them, those whose optimizer state a rank holds."""
        if not self.distributed_optimizer:
            return sum(counts.values())
        return sum(count / ranks for ranks, count in counts.items())

    def peak_flops_per_s(self, device: Device) -> float | None:
        """Peak FLOP/s of one device for matrix products; None if the datasheet does not give it."""
        is_fp32 = self.precision == "32-true"
        return peak_flops_per_s(device.name, "tf32" if is_fp32 else "bf16")


class Breakdown:
    """Base of dataclasses whose fields add up to a total."""

    @property
    def total(self) -> float:
        """Sum of all fields."""
        return float(sum(vars(self).values()))


def make_run(
    model: ModelConfig,
    settings: EngineSettings,
    *,
    rows: int,
    lengths: tuple[int, ...],
    world_size: int,
    uses_muon: bool = False,
) -> PlannedRun:
    """Build a ``PlannedRun`` from the settings of a strategy.

    Args:
        model: Model config.
        settings: Settings of the strategy.
        rows: Rows of a microbatch; 0 if unknown, which leaves out activations.
        lengths: Tokens of a row; for a T5 those of the encoder and of the decoder.
        world_size: Number of GPUs.
        uses_muon: As in ``PlannedRun``.
    """
    recompute = settings.recompute.granularity
    if recompute == "full" and settings.recompute.method == "block":
        recompute = None
    override = settings.overrides.transformer.get(OVERRIDE)
    return PlannedRun(
        model=model,
        parallel=settings.parallel,
        micro_batch_size=rows,
        lengths=lengths,
        world_size=world_size,
        distributed_optimizer=settings.distributed_optimizer,
        recompute=recompute,
        precision="32-true" if settings.params_dtype.itemsize == 4 else "bf16-mixed",
        uses_muon=uses_muon,
        cuda_graphs=settings.cuda_graphs,
        offload_optimizer=settings.offload_optimizer,
        layout=chunk_layout(model, settings.parallel, override),
    )
