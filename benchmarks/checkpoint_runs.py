"""Parts of the checkpoint benchmark: saves by this package or by Lightning's FSDP, and a resume."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy
from typing_extensions import override

from benchmarks.cases import Case
from benchmarks.checkpoint_measurement import CheckpointMeasurement
from benchmarks.checkpoint_recorder import SavePlan, SaveRecorder
from benchmarks.runs import CLIP, LR, device_name, installed_versions, make_trainer
from benchmarks.tokens import loader
from lightning_megatron import MegatronModule, MegatronStrategy
from lightning_megatron.convert.registry import model_config


class _TimedStrategy(MegatronStrategy):
    """Knows how long its checkpoint took to load."""

    load_seconds: float | None = None

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self.barrier()
        began = time.perf_counter()
        loaded = super().load_checkpoint(checkpoint_path, weights_only)
        self.barrier()
        self.load_seconds = time.perf_counter() - began
        return loaded


def run_saves(case: Case, plan: SavePlan, asynchronous: bool) -> CheckpointMeasurement:
    """Save with ``MegatronStrategy`` while training goes on or stands still, and load at the same layout."""
    strategy = MegatronStrategy(num_microbatches=case.num_microbatches, async_save=asynchronous, **case.layout)
    module = MegatronModule(model=dict(case.model), lr=LR)
    recorder = SaveRecorder(plan)
    trainer = make_trainer(case, strategy, recorder, max_steps=plan.max_steps, gradient_clip_val=CLIP)
    # As runs have one that save; it saves nothing, but says that there will be saves, for which memory is pinned early.
    trainer.callbacks.append(ModelCheckpoint(plan.folder, every_n_train_steps=sys.maxsize))  # type: ignore[attr-defined]
    data = loader(case, module.model_config, case.rows)
    label = f"lightning-megatron{', async' if asynchronous else ''}"
    return _fit(case, recorder, label, lambda: trainer.fit(module, data))


def run_resume(case: Case, plan: SavePlan, layout: Mapping[str, Any]) -> CheckpointMeasurement:
    """Resume from the checkpoint that a run of ``case`` left, at another layout, and train two steps."""
    there = replace(case, layout=dict(layout))
    strategy = _TimedStrategy(num_microbatches=there.num_microbatches, **there.layout)
    module = MegatronModule(model=dict(case.model), lr=LR)
    recorder = SaveRecorder(replace(plan, saves=0, warmup_steps=1, plain_steps=1))
    trainer = make_trainer(there, strategy, recorder, max_steps=plan.max_steps, gradient_clip_val=CLIP)
    data = loader(there, module.model_config, there.rows)
    measured = _fit(
        case, recorder, "lightning-megatron, resume", lambda: trainer.fit(module, data, ckpt_path=str(plan.path))
    )
    return replace(measured, load_seconds=strategy.load_seconds, load_layout=_layout(there), plain_step=None)


def run_peer(case: Case, plan: SavePlan) -> CheckpointMeasurement:
    """Save with Lightning's FSDP, sharded, and the Hugging Face model; it runs on GPUs only."""
    from benchmarks.peer import LAYERS, PeerModule

    per_device = case.rows * case.data_parallel_size // case.num_devices
    accumulated = max(1, per_device // case.micro_batch_size)
    module = PeerModule(dict(case.model), lr=LR, clip=CLIP, compiled=False)
    strategy = FSDPStrategy(
        auto_wrap_policy={LAYERS[case.model["model_type"]]},
        sharding_strategy="FULL_SHARD",
        use_orig_params=True,
        state_dict_type="sharded",
    )
    recorder = SaveRecorder(plan)
    trainer = make_trainer(case, strategy, recorder, max_steps=plan.max_steps, accumulate_grad_batches=accumulated)
    data = loader(case, model_config(case.model), per_device // accumulated)
    measured = _fit(case, recorder, "Lightning FSDP, sharded", lambda: trainer.fit(module, data))
    return replace(measured, load_layout=f"{case.num_devices} ranks")


def _fit(case: Case, recorder: SaveRecorder, label: str, fit: Callable[[], None]) -> CheckpointMeasurement:
    fit()
    return CheckpointMeasurement(
        case=case.name,
        implementation=label,
        description=str(case),
        device=device_name(case),
        num_devices=case.num_devices,
        gigabytes=recorder.gigabytes,
        saves=tuple(recorder.saves),
        plain_step=recorder.plain_step,
        load_seconds=recorder.load_seconds,
        load_layout=_layout(case),
        host_gib_before=recorder.host_gib_before,
        host_gib_peak=recorder.host_gib_peak,
        gpu_gib_peak=recorder.gpu_gib_peak,
        loss_first=recorder.losses[0],
        loss_last=recorder.losses[-1],
        versions=installed_versions(),
    )


def _layout(case: Case) -> str:
    sizes = [f"{name}={case.layout[name]}" for name in ("tp", "pp", "vpp") if name in case.layout]
    return " ".join([*sizes, f"dp={case.data_parallel_size}"])
