"""Parallel layout: sizes of the parallel axes, and checks of them against world, model and sequence length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_megatron.errors import (
    LARGEST_BATCH,
    LARGEST_WORLD,
    ConfigError,
    divisors,
    require_choice,
    require_kind,
    require_number,
)

CPCommType = Literal["auto", "a2a", "all_gather"]
"""Exchange heads for tokens (``a2a``), all-gather keys and values, or choose the first of these that is possible."""

UNEVEN_STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
"""Fields that give a stage a number of layers of its own."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the axes along which a model is split; data parallelism takes the rest of the world."""

    tp: int = 1
    """Tensor parallel size: each layer's matrices are split over this many ranks."""
    pp: int = 1
    """Pipeline parallel size: the layers are split into this many stages."""
    vpp: int | None = None
    """Virtual pipeline size: model chunks per stage (interleaved schedule); None for one chunk."""
    cp: int = 1
    """Context parallel size: each sequence is split over this many ranks."""
    cp_comm_type: CPCommType = "auto"
    """What the ranks of a cp group exchange in attention."""
    sequence_parallel: bool = False
    """Whether norms and dropouts are split along the sequence over tp ranks; no effect at tp=1."""
    num_microbatches: int = 1
    """Microbatches per optimizer step and data-parallel rank."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first stage of a GPT or BERT; other stages share the rest evenly. None: as many as these have."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last stage. An output layer of 128,256 tokens takes the time of two layers of Llama-3-8B."""
    ep: int = 1
    """Expert parallel size: a layer's experts, each unsplit, are spread over this many ranks of its stage."""

    def __post_init__(self) -> None:
        """Check everything that depends on neither the world size nor the model.

        Raises:
            ConfigError: If a size is no positive integer, a choice is unknown, or the interleaved schedule cannot run.
        """
        for name in ("tp", "pp", "cp", "ep", "num_microbatches"):
            require_kind(name, getattr(self, name), "int")
            at_most = LARGEST_BATCH if name == "num_microbatches" else LARGEST_WORLD
            require_number(name, getattr(self, name), at_least=1, at_most=at_most)
        require_kind("vpp", self.vpp, "int | None")
        require_choice("cp_comm_type", self.cp_comm_type, ("auto", "a2a", "all_gather"))
        if self.vpp is not None:
            require_number("vpp", self.vpp, at_least=2, at_most=LARGEST_WORLD)
            if self.pp < 2:
                raise ConfigError(
                    f"vpp={self.vpp} interleaves pipeline stages, but pp={self.pp}; raise pp, or omit vpp"
                )
            # megatron-core 0.16.1, pipeline_parallel/schedules.py: it schedules groups of pp microbatches.
            if self.num_microbatches % self.pp != 0:
                raise ConfigError(
                    f"num_microbatches={self.num_microbatches} is not a multiple of pp={self.pp}, which vpp={self.vpp} "
                    f"needs; choose num_microbatches from {self.pp}, {2 * self.pp}, {3 * self.pp}, ..."
                )
        for name in UNEVEN_STAGES:
            require_kind(name, getattr(self, name), "int | None")
            if getattr(self, name) is not None and self.pp < 2:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is for pipelines, but pp={self.pp}; raise pp"
                )

    @property
    def model_parallel_size(self) -> int:
        """Ranks of one replica, which work on the same rows."""
        return self.tp * self.pp * self.cp

    @property
    def ep_is_within_replica(self) -> bool:
        """Whether a replica holds all experts; otherwise replicas communicate in each layer with experts."""
        return self.tp * self.cp % self.ep == 0

    @property
    def num_model_chunks(self) -> int:
        """Model chunks on each stage."""
        return self.vpp or 1

    @property
    def uses_sequence_parallel(self) -> bool:
        """Whether activations are split along the sequence: ``sequence_parallel`` at tp > 1."""
        return self.sequence_parallel and self.tp > 1

    @property
    def sequence_divisor(self) -> int:
        """Number that every sequence length must be a multiple of."""
        shards = self.tp if self.uses_sequence_parallel else 1
        if self.cp == 1:
            return shards
        return math.lcm(2 * self.cp, self.cp * shards)

    def data_parallel_size(self, world_size: int) -> int:
        """Number of replicas in a world of ``world_size`` ranks.

        Raises:
            ConfigError: If the world size is not a multiple of a replica's size, or ep does not divide a stage's ranks.
        """
        size = self.model_parallel_size
        if world_size % size != 0:
            axes = ("tp", "pp", "cp") if self.cp > 1 else ("tp", "pp")
            sizes = " x ".join(f"{axis}={getattr(self, axis)}" for axis in axes)
            choices = ", ".join(str(divisor) for divisor in divisors(world_size))
            raise ConfigError(
                f"world size {world_size} (devices x num_nodes) is not a multiple of {sizes} = {size}; use "
                f"{math.ceil(world_size / size) * size} devices, or a {' x '.join(axes)} from {choices}"
            )
        replicas = world_size // size
        ranks = replicas * self.tp * self.cp
        if ranks % self.ep != 0:
            raise ConfigError(
                f"ep={self.ep}: expected a divisor of the {ranks} ranks of a stage; choose from {divisors(ranks)}"
            )
        return replicas

    def layers_per_chunk(self, num_layers: int) -> tuple[int, ...]:
        """Number of layers of each model chunk of a GPT or BERT, in pipeline order.

        Virtual stage v of stage p is chunk v * pp + p, and has as many layers as the other chunks of its stage.

        Raises:
            ConfigError: If the other stages cannot share the layers that the first and last stage leave evenly.
        """
        first = self.num_layers_in_first_pipeline_stage
        last = self.num_layers_in_last_pipeline_stage
        chunks = self.num_model_chunks
        ends = [each for each in (first, last) if each is not None]
        others = self.pp - len(ends)
        rest = num_layers - sum(ends)
        share = rest // others if others else 0
        is_even = share * others == rest and rest >= 0 and min(ends, default=1) >= 1
        if not is_even or any(count % chunks for count in (*ends, share)):
            sizes = ", ".join(f"{name}={getattr(self, name)}" for name in UNEVEN_STAGES)
            raise ConfigError(
                f"{sizes}: expected to leave {others} of pp={self.pp} stages equal shares of the {num_layers} layers, "
                f"multiples of vpp={chunks}, got a rest of {rest}; correct them"
            )
        stages = [share] * self.pp
        stages[0] = first or share
        stages[-1] = last or share
        return tuple(count // chunks for count in stages) * chunks

    def check_sequence(
        self,
        seq_length: int,
        max_position_embeddings: int | None = None,
        *,
        name: str = "seq_length",
    ) -> None:
        """Raise unless sequences of ``seq_length`` tokens can be split this way and the model has positions for them.

        Args:
            seq_length: Tokens per sequence.
            max_position_embeddings: Number of positions of the model; None if unlimited.
            name: Name of the length in errors.

        Raises:
            ConfigError: If context or sequence parallelism cannot split the sequence evenly, or it is too long for the
                model.
        """
        divisor = self.sequence_divisor
        rest = seq_length % divisor
        if rest != 0:
            reasons = []
            if self.cp > 1:
                reasons.append(f"cp={self.cp} splits it into 2 x cp runs")
            if self.uses_sequence_parallel:
                reasons.append(f"tp={self.tp} splits it with sequence_parallel=True")
            raise ConfigError(
                f"{name}={seq_length}: expected a multiple of {divisor}, because {' and '.join(reasons)}; use "
                f"{seq_length - rest + divisor}"
            )
        if max_position_embeddings is not None and seq_length > max_position_embeddings:
            raise ConfigError(
                f"seq_length={seq_length} is longer than max_position_embeddings={max_position_embeddings}; lower it"
            )
