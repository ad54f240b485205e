"""Log-probabilities of preference pairs under a reference model: computed once, and cached with what they depend on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info
from numpy.typing import NDArray
from torch import Tensor

from lightning_megatron.convert.frozen_model import FrozenWeights
from lightning_megatron.data.broadcast import broadcast_batch
from lightning_megatron.data.build_once import build_once, is_built
from lightning_megatron.data.preferences import PreferenceSamples
from lightning_megatron.data.samples import SavedArrays
from lightning_megatron.engine.collectives import all_gather_rows, raise_on_all_ranks
from lightning_megatron.engine.objective import Batch, Output
from lightning_megatron.engine.schedule import Schedule
from lightning_megatron.errors import DataError
from lightning_megatron.steps.dpo import PreferencePairs, answer_logps

_FORMAT_VERSION = 1
"""Version of the cached files and of what they depend on; a change invalidates existing directories."""
_DEPENDS_ON = "depends_on.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Cached(SavedArrays):
    logps: NDArray[np.float32]
    """[pairs, 2]."""


@dataclass(frozen=True, kw_only=True)
class ReferencePass:
    """The reference model's pass over the pairs of a split, on a strategy's ranks."""

    weights: FrozenWeights
    """The reference model."""
    strategy: Any
    """``MegatronStrategy``, after its process groups exist and before the trained model does."""
    rows_per_batch: int
    """Pairs of one batch of one data-parallel rank, a multiple of ``num_microbatches``."""
    cache: Path
    """Directory of the cache."""

    def logps(self, samples: PreferenceSamples | None, num_pairs: int) -> NDArray[np.float32]:
        """Sums of the log-probabilities of the answers' tokens: [num_pairs, 2], on every rank.

        They are read from the cache if it has those of these pairs under this model, else computed and cached.
        Collective over the world.

        Args:
            samples: The pairs, on ranks that read data.
            num_pairs: Their number.
        """
        strategy = self.strategy
        folder = ""
        depends_on: dict[str, Any] = {}
        cached: NDArray[np.float32] | None = None
        with raise_on_all_ranks():
            if strategy.global_rank == 0:
                assert samples is not None
                depends_on = self._depends_on(samples)
                key = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode())
                folder = str(self.cache.absolute() / f"reference-{key.hexdigest()[:24]}")
                if is_built(folder):
                    cached = _Cached.load(folder).logps
                    if cached.shape != (num_pairs, 2) or cached.dtype != np.float32:
                        raise DataError(
                            f"{folder}: expected log-probabilities of {num_pairs} pairs, got {cached.dtype} of the "
                            f"shape {list(cached.shape)}; delete it"
                        )
        cached = strategy.broadcast(cached)
        if cached is not None:
            rank_zero_info(
                f"Reference log-probabilities of {num_pairs:,} pairs are those of {folder}"
            )
            return cached
        rank_zero_info(
            f"Computing the reference log-probabilities of {num_pairs:,} pairs with {self.weights.path}, for {folder}"
        )
        logps = self._compute(samples, num_pairs)
        with raise_on_all_ranks():
            if strategy.global_rank == 0:
                self._write(folder, logps, depends_on)
        return logps

    def _depends_on(self, samples: PreferenceSamples) -> dict[str, Any]:
        """What the log-probabilities depend on, as plain data."""
        settings = self.strategy.settings
        return {
            "format_version": _FORMAT_VERSION,
            "tokens_and_labels": samples.fingerprint,
            "num_pairs": len(samples),
            "weights_and_config": self.weights.identity,
            "dtype": str(settings.params_dtype),
            "fp8": settings.fp8,
        }

    def _write(
        self,
        folder: str,
        logps: NDArray[np.float32],
        depends_on: dict[str, Any],
    ) -> None:
        text = json.dumps({**depends_on, "weights": str(self.weights.path)}, indent=1)

        def write(staging: str) -> str:
            _Cached(logps=logps).save(staging)
            Path(staging, _DEPENDS_ON).write_text(f"{text}\n", encoding="utf-8")
            return str(depends_on["tokens_and_labels"])

        subject = "reference log-probabilities"
        build_once(folder, write, subject, option="reference_cache")

    def _compute(self, samples: PreferenceSamples | None, num_pairs: int) -> NDArray[np.float32]:
        """Build the model, run the pairs through it in order, and drop it."""
        strategy = self.strategy
        topology = strategy.topology
        step = PreferencePairs()
        step.bind(self.weights.model)
        rows = self.rows_per_batch
        gathered: list[Tensor] = []
        devices = []
        if strategy.root_device.type == "cuda":
            devices.append(strategy.root_device)
        with (
            strategy.engine(),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.random.fork_rng(devices),
        ):
            chunks = list(self.weights.build(strategy.settings, topology))
            schedule = Schedule(chunks, topology)
            for begin in range(0, num_pairs, rows * topology.dp):
                first = begin + rows * topology.dp_rank
                # The last pairs are repeated, so that all replicas compute as many rows.
                indices = [min(index, num_pairs - 1) for index in range(first, first + rows)]
                batch: Batch | None = None
                if samples is not None:
                    batch = samples.rows(indices)
                moved = broadcast_batch(batch, topology, strategy.root_device, step.check_batch)
                values = _batch_logps(schedule, step, moved)
                if topology.parallel.pp > 1:
                    dist.broadcast(values, topology.last_stage, group=topology.pp_group)
                counts = [rows] * topology.dp
                gathered.append(all_gather_rows(values, counts, topology.dp_group).cpu())
            del chunks, schedule
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return torch.cat(gathered)[:num_pairs].numpy()


def _batch_logps(
    schedule: Schedule,
    step: PreferencePairs,
    batch: Batch,
) -> Tensor:
    """[rows, 2]: sums of the log-probabilities of a batch's answers; not filled before the last stage."""
    parts: list[Tensor] = []

    def observe(microbatch: Batch, output: Output) -> None:
        parts.append(answer_logps(microbatch, output))

    schedule.evaluate(batch, step, observe)
    if parts:
        return torch.cat(parts)
    tokens = batch["chosen_input_ids"]
    return torch.empty((len(tokens), 2), device=tokens.device)
