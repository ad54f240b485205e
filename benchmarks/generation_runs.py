"""Timed generation, by this package under the Trainer or by transformers alone.

The model is built once, at random, where it computes; each case and variant is reported as soon as it is known, and one
that fails does not keep the others from running.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.generation_cases import GenerationCase, Variant
from benchmarks.generation_measurement import GenerationMeasurement
from benchmarks.recorder import most_gib
from benchmarks.runs import installed_versions
from lightning_megatron import MegatronModule, MegatronStrategy

_TIMEOUT = timedelta(minutes=3)
"""A rank that fails alone leaves the others waiting; no step takes longer."""
_DTYPES = {"bf16-true": torch.bfloat16, "32-true": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process measures, and who hears of it."""

    cases: Sequence[GenerationCase]
    """All of one model and layout."""
    variants: Sequence[Variant]
    """All of one implementation."""
    calls: int
    """Timed calls of each case and variant."""
    report: Callable[[GenerationMeasurement], None]
    """Gets each result, on rank 0."""


@dataclass(frozen=True, kw_only=True)
class _Engine:
    """A model that was built, and how it is asked."""

    device: torch.device
    is_first: bool
    """Whether this is rank 0."""
    continued: Callable[[bool, Tensor, int], Tensor]
    """Whether the cache is static, the prompts, how many tokens they get: the rows, [b, s + n]."""
    wait: Callable[[], None]
    """Until every rank and device has done what it was told."""


def run_megatron(job: Job) -> int:
    """Measure ``MegatronModule.generate`` in ``Trainer.predict``; returns how many cases and variants failed."""
    case = job.cases[0]
    module = _Asked(job)
    trainer = pl.Trainer(
        accelerator=case.accelerator,
        devices=case.num_devices,
        strategy=MegatronStrategy(timeout=_TIMEOUT, **case.layout),
        precision=case.precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = [{"input_ids": torch.zeros(1, dtype=torch.long)}]
    trainer.predict(module, DataLoader(rows), return_predictions=False)  # type: ignore[arg-type]
    return module.failures


class _Asked(MegatronModule):
    """Is asked for the texts of all cases in its only prediction step."""

    def __init__(self, job: Job) -> None:
        super().__init__(model=dict(job.cases[0].model))
        self._job = job
        self.failures = 0

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        engine = _Engine(
            device=self.megatron.root_device,
            is_first=self.trainer.is_global_zero,
            continued=self._continued,
            wait=self._wait,
        )
        self.failures = _measure_all(self._job, engine)
        return batch["input_ids"]

    def _continued(self, static: bool, prompts: Tensor, new_tokens: int) -> Tensor:
        return self.generate(
            prompts,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            eos_token_id=(),
            static_cache=static,
        )

    def _wait(self) -> None:
        self.megatron.barrier()
        _synchronize(self.megatron.root_device)


def run_peer(job: Job) -> int:
    """Measure transformers' ``generate`` on one device; returns how many cases and variants failed.

    With a static cache it compiles the decoding step by itself on GPUs.
    """
    case = job.cases[0]
    device = torch.device("cuda", 0) if case.accelerator == "gpu" else torch.device("cpu")
    fields = {key: value for key, value in case.model.items() if key != "model_type"}
    config = CONFIG_MAPPING[case.model["model_type"]](**fields, eos_token_id=None, pad_token_id=0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=_DTYPES[case.precision]).eval()

    def continued(static: bool, prompts: Tensor, new_tokens: int) -> Tensor:
        options: dict[str, Any] = {"cache_implementation": "static"} if static else {}
        rows: Tensor = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            **options,
        )
        return rows

    engine = _Engine(device=device, is_first=True, continued=continued, wait=lambda: _synchronize(device))
    return _measure_all(job, engine)


def _measure_all(job: Job, engine: _Engine) -> int:
    failures = 0
    # The plain variant of every case first: what breaks the device while steps are recorded comes after it.
    for variant in job.variants:
        for case in job.cases:
            try:
                measurement = _measured(job, engine, case, variant)
                if engine.is_first:
                    job.report(measurement)
            except Exception:
                failures += 1
                print(f"FAILED: {case.name}, {variant.label}\n{traceback.format_exc()}", flush=True)
    return failures


def _measured(job: Job, engine: _Engine, case: GenerationCase, variant: Variant) -> GenerationMeasurement:
    # What was compiled for another batch would be compiled anew for batches of any size, which is slower.
    torch.compiler.reset()
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
    prompts = random_prompts(case, engine.device)

    def seconds(new_tokens: int) -> float:
        engine.wait()
        began = time.perf_counter()
        rows = engine.continued(variant.has_static_cache, prompts, new_tokens)
        engine.wait()
        taken = time.perf_counter() - began
        if rows.shape != (case.batch_size, case.prompt_length + new_tokens):
            raise RuntimeError(f"{new_tokens} new tokens were asked for, and the rows are {list(rows.shape)}")
        return taken

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # again, if an earlier case was warned of the same
        warmup = seconds(case.new_tokens)
        if engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(engine.device)
        calls = tuple(seconds(case.new_tokens) for _ in range(job.calls))
        first_tokens = tuple(seconds(1) for _ in range(job.calls + 1))[1:]
    ours = {str(warning.message) for warning in caught if "lightning_megatron" in str(warning.filename)}
    allocated, reserved = _peaks(engine.device)
    return GenerationMeasurement(
        case=case.name,
        implementation=variant.label,
        description=str(case),
        device=torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "cpu",
        num_devices=case.num_devices,
        batch_size=case.batch_size,
        prompt_length=case.prompt_length,
        new_tokens=case.new_tokens,
        warmup_seconds=warmup,
        call_seconds=calls,
        first_token_seconds=first_tokens,
        peak_allocated_gib=allocated,
        peak_reserved_gib=reserved,
        warnings=tuple(sorted(ours)),
        versions=installed_versions(),
    )


def random_prompts(case: GenerationCase, device: torch.device) -> Tensor:
    """The same in every process: [b, s]."""
    shape = (case.batch_size, case.prompt_length)
    tokens = torch.randint(0, case.model["vocab_size"], shape, generator=torch.Generator().manual_seed(0))
    return tokens.to(device)


def _peaks(device: torch.device) -> tuple[float | None, float | None]:
    """Allocated and reserved GiB, the most of all ranks; None on a CPU. Every rank must call."""
    if device.type != "cuda":
        return None, None
    return (
        most_gib(torch.cuda.max_memory_allocated(device), device),
        most_gib(torch.cuda.max_memory_reserved(device), device),
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
