"""``MemoryEstimate``: the expected memory of training, logged before the model is built."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_megatron.callbacks.ema import EMA
from lightning_megatron.planning.devices import GIB
from lightning_megatron.planning.memory import host_bytes, memory
from lightning_megatron.planning.run import make_run


class MemoryEstimate(Callback):
    """Logs the expected memory of training before the model is built, and warns if a GPU has less."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log the estimate on rank 0; activations are included for data modules with a ``seq_length`` only."""
        strategy: Any = trainer.strategy
        if stage != "fit" or strategy.root_device.type != "cuda":
            return
        model: Any = pl_module.model_config
        data: Any = getattr(trainer, "datamodule", None)
        rows = 0
        lengths = [1, 1]
        if hasattr(data, "seq_length"):
            rows = data.micro_batch_size
            options = data.lengths(model)
            lengths = [options[name] for name in options if name.startswith("seq_length")]
        run = make_run(
            model,
            strategy.settings,
            rows=rows,
            lengths=tuple(lengths),
            world_size=trainer.world_size,
            uses_muon=pl_module.optimizer_options.name == "muon",  # type: ignore[union-attr]
        )
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set in Trainer.__init__
        has_average = any(isinstance(each, EMA) and each.device is None for each in callbacks)
        expected = memory(replace(run, ema=has_average))
        available = torch.cuda.get_device_properties(strategy.root_device).total_memory
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in asdict(expected).items())
        line = f"Expected memory of the fullest GPU: {expected.total / GIB:.1f} of {available / GIB:.1f} GiB ({parts})"
        if run.offload_optimizer:
            on_host = max(host_bytes(run, stage) for stage in range(run.parallel.pp))
            line += f", and {on_host / GIB:.1f} GiB of host memory for its optimizer state"
        if expected.total > available:
            rank_zero_warn(f"{line}; raise tp, pp or dp, lower micro_batch_size, or set recompute")
        elif rows:
            rank_zero_info(line)
        else:
            rank_zero_info(f"{line}, plus activations")
