"""Settings of a run that the engine needs: layout, precision, memory and communication, independent of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from lightning_megatron.engine.overrides import Overrides
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import ConfigError, require_choice, require_number

Recipe = Literal["tensorwise"]
"""How linears are scaled to fp8; see ``ops/fp8.py``."""


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Activation recomputation (activation checkpointing)."""

    granularity: Literal["selective", "full"] | None = None
    """``selective`` recomputes norms and MLP activations, ``full`` entire layers, None nothing."""
    method: Literal["uniform", "block"] = "uniform"
    """For ``full``: all layers in groups (uniform), or only the first ``num_layers`` of each model chunk (block)."""
    num_layers: int = 1
    """For ``full``: layers per recomputed group (uniform), or recomputed layers per model chunk (block)."""

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            ConfigError: If a field is not one of its choices.
        """
        if self.granularity is not None:
            require_choice("recompute", self.granularity, ("selective", "full"))
        require_choice("recompute_method", self.method, ("uniform", "block"))
        require_number("recompute_num_layers", self.num_layers, at_least=1)
        if self.granularity != "full" and (self.method, self.num_layers) != ("uniform", 1):
            raise ConfigError(
                f"recompute_method={self.method!r}, recompute_num_layers={self.num_layers}: expected recompute='full', "
                f"whose options they are, got {self.granularity!r}; leave them out, or set recompute='full'"
            )


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Run settings that determine how model chunks are built, but not what they compute."""

    parallel: ParallelConfig
    params_dtype: torch.dtype
    device: torch.device
    distributed_optimizer: bool = True
    """Whether the optimizer state is sharded over data-parallel ranks (ZeRO-1)."""
    overlap_communication: bool = False
    """Whether gradient reduction overlaps the backward pass, and parameter all-gathers the next forward pass."""
    recompute: Recompute = field(default_factory=Recompute)
    overrides: Overrides = field(default_factory=Overrides)
    fp8: Recipe | None = None
    """fp8 recipe of the linear layers; None to compute them in ``params_dtype``."""
    cuda_graphs: bool = False
    """Whether training microbatches are captured in CUDA graphs and replayed."""
    offload_optimizer: float = field(default=0.0, compare=False)
    """Share of the optimizer's state that is in host memory, from 0 to 1; model chunks do not depend on it."""

    @property
    def overlaps_gathers(self) -> bool:
        """Whether parameter all-gathers overlap computation, which needs the distributed optimizer."""
        return self.overlap_communication and self.distributed_optimizer
