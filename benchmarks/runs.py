"""Run a training case with this package or with the peer."""

from __future__ import annotations

import platform
import statistics
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.cases import Case
from benchmarks.data import indexed_data, loader
from benchmarks.recorder import Plan, StepRecorder
from lightning_megatron import (
    ConfigError,
    LoRA,
    MegatronModule,
    MegatronStrategy,
    OptimizerOptions,
)
from lightning_megatron.convert.peft import with_adapters
from lightning_megatron.convert.registry import model_config
from lightning_megatron.planning.devices import peak_flops_per_s
from lightning_megatron.planning.flops import AttentionCount, model_flops

CLIP = 1.0
LR = 1e-4
_PACKAGES = (
    "torch",
    "lightning",
    "megatron-core",
    "flash-attn-4",
    "transformer-engine",
    "transformers",
    "triton",
)


def run_megatron(
    case: Case, plan: Plan, indexed_workers: int | None = None
) -> tuple[SimpleNamespace, str]:
    """Measure ``MegatronStrategy``; returns the record and the profile, empty if ``plan`` has none.

    Args:
        case: Training case.
        plan: Steps to time.
        indexed_workers: Train on an indexed dataset with this number of DataLoader workers; None: on rows in memory.
    """
    strategy = MegatronStrategy(num_microbatches=case.num_microbatches, **case.layout)
    module = MegatronModule(
        model=dict(case.model),
        lr=LR,
        optimizer=OptimizerOptions(**case.optimizer),
        lora=None if case.lora is None else LoRA(**case.lora),
    )
    recorder = StepRecorder(plan)
    trainer = make_trainer(
        case, strategy, recorder, max_steps=plan.trainer_steps, gradient_clip_val=CLIP
    )
    if indexed_workers is None:
        trainer.fit(module, loader(case, module.model_config, case.rows))
        return _measurement(case, "lightning-megatron", recorder), recorder.profile_text
    trainer.fit(module, datamodule=indexed_data(case, module.model_config, indexed_workers))
    label = f"lightning-megatron, indexed dataset, {indexed_workers} workers"
    return _measurement(case, label, recorder), recorder.profile_text


def run_peer(case: Case, plan: Plan, compiled: bool) -> tuple[SimpleNamespace, str]:
    """Measure Lightning's FSDP (DDP if the model fits on one GPU) with the Hugging Face model on all devices.

    Microbatches become accumulated batches; each device trains on as many tokens per step as in the case.
    """
    from benchmarks.peer import PeerModule, peer_strategy

    if case.optimizer:
        raise ConfigError(f"case {case.name}: expected AdamW for a peer; choose another case")
    rows, accumulated = accumulated_batches(case)
    module = PeerModule(dict(case.model), lr=LR, clip=CLIP, compiled=compiled)
    recorder = StepRecorder(plan)
    strategy, name = peer_strategy(case)
    trainer = make_trainer(
        case, strategy, recorder, max_steps=plan.trainer_steps, accumulate_grad_batches=accumulated
    )
    trainer.fit(module, loader(case, model_config(case.model), rows))
    label = f"Lightning {name} + transformers{' + torch.compile' if compiled else ''}"
    return _measurement(case, label, recorder), recorder.profile_text


def accumulated_batches(case: Case) -> tuple[int, int]:
    """Batch size per device and accumulated batches with which a peer trains on as many tokens per step as the case."""
    per_device = case.rows * case.data_parallel_size // case.num_devices
    accumulated = max(1, per_device // case.micro_batch_size)
    return per_device // accumulated, accumulated


def make_trainer(case: Case, strategy: Any, recorder: pl.Callback, **options: Any) -> pl.Trainer:
    """Create a Trainer on the case's devices with ``recorder`` as its only callback, without logger and checkpoints."""
    pl.seed_everything(1234, verbose=False)
    return pl.Trainer(
        accelerator=case.accelerator,
        devices=case.num_devices,
        strategy=strategy,
        precision=case.precision,  # type: ignore[arg-type]
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def _measurement(case: Case, implementation: str, recorder: StepRecorder) -> SimpleNamespace:
    """Build the record of a run. Memory is the maximum over ranks; all other measurements are rank 0's."""
    seconds = statistics.median(recorder.seconds)
    bare = statistics.median(recorder.bare_seconds) if recorder.bare_seconds else None
    peak = peak_flops_per_s(device_name(case), "bf16")
    causal, full = (_flops_per_s(case, seconds, attention) for attention in ("causal", "full"))
    return SimpleNamespace(
        **case_fields(case, implementation),
        tokens_per_step=case.tokens,
        steps=recorder.seconds,
        step_seconds=seconds,
        tokens_per_s=case.tokens / seconds,
        tokens_per_s_per_gpu=case.tokens / seconds / case.num_devices,
        bare_steps=recorder.bare_seconds,
        bare_step_seconds=bare,
        trainer_overhead=bare and seconds / bare - 1,
        tflops_causal=causal / 1e12,
        mfu_causal=peak and causal / peak,
        mfu_full=peak and full / peak,
        peak_allocated_gib=recorder.peak_allocated_gib,
        peak_reserved_gib=recorder.peak_reserved_gib,
        loss_first=recorder.losses[0],
        loss_last=recorder.losses[1],
        host_waits_ours=recorder.host_waits_ours,
        host_waits_trainer=recorder.host_waits_trainer,
        host_wait_places=recorder.host_wait_places,
        versions=installed_versions(),
    )


def case_fields(case: Case, implementation: str) -> dict[str, Any]:
    """Fields of a record that describe the run."""
    names = {"case": case.name, "implementation": implementation, "description": str(case)}
    return {**names, "device": device_name(case), "num_devices": case.num_devices}


def _flops_per_s(case: Case, step_seconds: float, attention: AttentionCount) -> float:
    """Model FLOP/s per device."""
    model = model_config(case.model)
    if case.lora is not None:
        model = with_adapters(model, LoRA(**case.lora))
    padded = model.padded_vocab_size(case.layout.get("tp", 1))
    lengths = (
        (case.seq_length, case.decoder_seq_length)
        if case.decoder_seq_length
        else (case.seq_length,)
    )
    per_row = model_flops(model, lengths, padded, attention)
    return case.rows * case.data_parallel_size * per_row / step_seconds / case.num_devices


def device_name(case: Case) -> str:
    """Vendor's name of the device that the case ran on."""
    return (
        torch.cuda.get_device_name()
        if case.accelerator == "gpu"
        else platform.processor() or platform.machine()
    )


def installed_versions() -> dict[str, str]:
    """Versions of all packages that may affect the measurements."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())
    return versions
