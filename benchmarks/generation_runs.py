"""Timed generation with this package in the Trainer, or with transformers alone.

The model is built once, with random weights, on the device. Each case and variant is reported as soon as it is
measured; the others run even if one fails.
"""

from __future__ import annotations

import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.cases import GenerationCase
from benchmarks.generation import VARIANTS
from benchmarks.measurement import report
from benchmarks.recorder import peak_gib
from benchmarks.runs import installed_versions
from lightning_megatron import MegatronModule, MegatronStrategy

_TIMEOUT = timedelta(minutes=3)
"""Collective timeout, for ranks that wait for a failed rank; longer than any step."""
_DTYPES = {"bf16-true": torch.bfloat16, "32-true": torch.float32}
_Generate = Callable[[bool, Tensor, int], Tensor]
"""From (static cache, prompts [b, s], number n of new tokens) to sequences [b, s + n]."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Measurements of one process."""

    cases: Sequence[GenerationCase]
    """Cases with the same model and layout."""
    variants: Sequence[str]
    """Variants of one implementation."""
    calls: int
    """Timed calls per case and variant."""
    output: Path | None
    """JSON lines file that records are appended to."""


def run_megatron(job: Job) -> int:
    """Measure ``MegatronModule.generate`` in ``Trainer.predict``; returns the number of failed measurements."""
    case = job.cases[0]
    module = _GenerationModule(job)
    trainer = pl.Trainer(
        accelerator=case.accelerator,
        devices=case.tp,
        strategy=MegatronStrategy(tp=case.tp, timeout=_TIMEOUT),
        precision=case.precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = [{"input_ids": torch.zeros(1, dtype=torch.long)}]
    trainer.predict(module, DataLoader(rows), return_predictions=False)  # type: ignore[arg-type]
    return module.failures


class _GenerationModule(MegatronModule):
    """Runs all measurements in its only prediction step."""

    def __init__(self, job: Job) -> None:
        super().__init__(model=dict(job.cases[0].model))
        self._job = job
        self.failures = 0

    def predict_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> Tensor:
        self.failures = _measure_all(
            self._job, self.megatron.root_device, self._generate, self.megatron.barrier
        )
        return batch["input_ids"]

    def _generate(self, static: bool, prompts: Tensor, new_tokens: int) -> Tensor:
        return self.generate(
            prompts,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            eos_token_id=(),
            static_cache=static,
        )


def run_peer(job: Job) -> int:
    """Measure transformers' ``generate`` on one device; returns the number of failed measurements.

    With a static cache transformers compiles the decoding step on GPUs.
    """
    case = job.cases[0]
    device = torch.device("cuda", 0) if case.accelerator == "gpu" else torch.device("cpu")
    fields = {key: value for key, value in case.model.items() if key != "model_type"}
    config = CONFIG_MAPPING[case.model["model_type"]](**fields, eos_token_id=None, pad_token_id=0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=_DTYPES[case.precision]).eval()

    def generate(static: bool, prompts: Tensor, new_tokens: int) -> Tensor:
        options: dict[str, Any] = {"cache_implementation": "static"} if static else {}
        sequences: Tensor = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            **options,
        )
        return sequences

    return _measure_all(job, device, generate, lambda: None)


def _measure_all(
    job: Job, device: torch.device, generate: _Generate, barrier: Callable[[], None]
) -> int:
    failures = 0
    # Eager variants of all cases first: a failed CUDA graph capture may leave the device unusable.
    for variant in job.variants:
        for case in job.cases:
            try:
                _measure(job, case, variant, _Clock(case, device, generate, barrier))
            except Exception:
                failures += 1
                print(
                    f"FAILED: {case.name}, {VARIANTS[variant]}\n{traceback.format_exc()}",
                    flush=True,
                )
    return failures


class _Clock:
    """Times calls until all ranks and devices are done, with random prompts that are the same in every process."""

    def __init__(
        self,
        case: GenerationCase,
        device: torch.device,
        generate: _Generate,
        barrier: Callable[[], None],
    ) -> None:
        shape = (case.batch_size, case.prompt_length)
        generator = torch.Generator().manual_seed(0)
        self._prompts = torch.randint(0, case.model["vocab_size"], shape, generator=generator).to(
            device
        )
        self._generate, self._barrier = generate, barrier
        self.device = device

    def seconds(self, is_static: bool, new_tokens: int) -> float:
        """Time one call that generates ``new_tokens`` per prompt."""
        start = self._now()
        sequences = self._generate(is_static, self._prompts, new_tokens)
        seconds = self._now() - start
        if sequences.shape != (len(self._prompts), self._prompts.shape[1] + new_tokens):
            raise RuntimeError(
                f"expected sequences with {new_tokens} new tokens, got shape {list(sequences.shape)}"
            )
        return seconds

    def _now(self) -> float:
        self._barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _measure(job: Job, case: GenerationCase, variant: str, clock: _Clock) -> None:
    """Report one case and variant. Memory is the maximum over ranks; all other measurements are rank 0's."""
    # Otherwise a second batch size would be recompiled with dynamic shapes, which is slower.
    torch.compiler.reset()
    is_static, on_gpu = "static" in variant, clock.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # repeats warnings of earlier cases
        warmup = clock.seconds(is_static, case.new_tokens)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(clock.device)
        calls = [clock.seconds(is_static, case.new_tokens) for _ in range(job.calls)]
        first_tokens = [clock.seconds(is_static, 1) for _ in range(job.calls + 1)][1:]
    median, prefill = statistics.median(calls), statistics.median(first_tokens)
    allocated, reserved = peak_gib(clock.device)
    record = SimpleNamespace(
        case=case.name,
        implementation=VARIANTS[variant],
        description=str(case),
        device=torch.cuda.get_device_name(clock.device) if on_gpu else "cpu",
        num_devices=case.tp,
        batch_size=case.batch_size,
        prompt_length=case.prompt_length,
        new_tokens=case.new_tokens,
        warmup_seconds=warmup,
        call_seconds=calls,
        first_token_seconds=first_tokens,
        seconds=median,
        tokens_per_s=case.batch_size * case.new_tokens / median,
        prefill_seconds=prefill,
        token_seconds=(median - prefill) / (case.new_tokens - 1),
        peak_allocated_gib=allocated,
        peak_reserved_gib=reserved,
        warnings=sorted(
            {str(w.message) for w in caught if "lightning_megatron" in str(w.filename)}
        ),
        versions=installed_versions(),
    )
    report(record, job.output)
