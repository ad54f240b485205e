"""The reference: the model of the same directory in transformers, without any code of this package's models."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_megatron.convert.expert_files import with_separate_experts
from lightning_megatron.convert.registry import family_of
from lightning_megatron.convert.source import Stored
from lightning_megatron.convert.weight_files import WeightFiles
from lightning_megatron.errors import CheckpointError
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.verify.batch import (
    Batch,
    make_batch,
    make_prompts,
    num_new_tokens,
    on_device,
    sampled,
)
from lightning_megatron.verify.job import DTYPES, Job, Progress, Result
from lightning_megatron.verify.source import hugging_face_class, open_directory

EXACT_RESULT = "exact.pt"
"""File with the result of transformers in fp32, where the job is in another dtype."""
_SELECTION_BIAS = "e_score_correction_bias"
"""End of the names of biases that balance experts, which no loss trains; in ERNIE 4.5 they are parameters."""
_LOGITS = ("logits", "prediction_logits")


def run_reference(folder: Path) -> None:
    """Compute the job of ``folder`` in transformers, in its dtype and, for the spread, in fp32."""
    job = Job.read(folder)
    progress = Progress(folder)
    model = open_directory(Path(job.directory)).model
    if job.dtype != "fp32":
        checks = tuple(check for check in job.checks if check != "speed")
        exact = replace(job, dtype="fp32", checks=checks)
        _compute(exact, model, progress).write(folder, EXACT_RESULT)
    _compute(job, model, progress).write(folder)


def _compute(job: Job, model: ModelConfig, progress: Progress) -> Result:
    result = Result()
    progress.say(f"loads the weights in {job.dtype}")
    reference = load_reference(job, model)
    batch = make_batch(job, model)
    inputs = on_device(batch, reference.device)
    if "logits" in job.checks:
        progress.say("logits and loss")
        with torch.no_grad():
            output = reference(**inputs)
        result.loss = output.loss.item()
        result.logits = _logits(output).float().cpu()
    if "generation" in job.checks:
        progress.say("generates")
        _generate(job, reference, batch, result)
    if "gradients" in job.checks:
        progress.say("gradients")
        reference(**inputs).loss.float().backward()
        _collect_gradients(job, model, reference, result)
    if "speed" in job.checks:
        progress.say(f"speed of {job.steps} steps")
        result.attention = _fastest_attention(reference)
        _time(job, reference, inputs, result)
    return result


def load_reference(job: Job, model: ModelConfig) -> Any:
    """The transformers model of the directory, in evaluation mode; local files only, and no code of the directory.

    Raises:
        CheckpointError: If the directory lacks tensors of the model or its head.
    """
    hf_class = hugging_face_class(model)
    reference, report = hf_class.from_pretrained(
        job.directory,
        dtype=DTYPES[job.dtype],
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    missing = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if missing:
        names = ", ".join(missing[:5])
        raise CheckpointError(
            f"{job.directory} has no {names}, which {hf_class.__name__} needs and would initialize at random; verify a "
            "directory with all weights of its class"
        )
    if getattr(reference.config, "output_router_logits", False):
        # The load-balancing loss depends on which rows share a microbatch, so it is compared on neither side.
        reference.config.output_router_logits = False
    device = "cuda" if job.accelerator == "gpu" else "cpu"
    return reference.to(device).eval()


def _logits(output: Any) -> torch.Tensor:
    for name in _LOGITS:
        if output.get(name) is not None:
            logits: torch.Tensor = output[name]
            return logits
    return torch.stack([output.start_logits, output.end_logits], dim=-1)


def _generate(job: Job, reference: Any, batch: Batch, result: Result) -> None:
    from transformers import GenerationConfig

    config = reference.config
    reference.generation_config = GenerationConfig(
        decoder_start_token_id=getattr(config, "decoder_start_token_id", None)
    )
    output = reference.generate(
        **on_device(make_prompts(batch), reference.device),
        do_sample=False,
        max_new_tokens=num_new_tokens(job),
        eos_token_id=-1,
        pad_token_id=0,
        use_cache=not config.is_encoder_decoder,
        return_dict_in_generate=True,
        output_logits=True,
    )
    result.tokens = output.sequences.cpu()
    result.token_logits = torch.stack(output.logits, dim=1).float().cpu()


def _collect_gradients(job: Job, model: ModelConfig, reference: Any, result: Result) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    # A parameter that does not affect the loss has no gradient in torch, and one of zeros here.
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in reference.named_parameters()
        if not name.endswith(_SELECTION_BIAS)
    }
    base = family_of(model.family).names.base
    # transformers computes with other tensors than it saves: all experts of a layer are one, some have other names.
    # It does not revert what it did not have to convert.
    stored = {
        name: Stored(tuple(gradient.shape), gradient.dtype, gradient)
        for name, gradient in revert_weight_conversion(reference, gradients).items()
    }
    files = with_separate_experts(WeightFiles(stored), model)
    for name in files.tensors:
        gradient = files.read(name, (slice(None),))
        full_name = name
        if base + name in gradients:  # reverted to a file without the prefix of the base model
            full_name = base + name
        result.shapes[full_name] = tuple(gradient.shape)
        result.gradients[full_name] = sampled(full_name, gradient, job.samples)


def _fastest_attention(reference: Any) -> str:
    """Switch to fused attention if the model has it; the name of what it uses."""
    try:
        reference.set_attn_implementation("sdpa")
    except (ValueError, ImportError):
        return "eager"
    return "sdpa"


def _time(job: Job, reference: Any, inputs: Batch, result: Result) -> None:
    is_on_gpu = job.accelerator == "gpu"
    for step in range(job.steps + 1):
        reference.zero_grad(set_to_none=True)
        if is_on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        reference(**inputs).loss.backward()
        if is_on_gpu:
            torch.cuda.synchronize()
        if step:  # the first one warms up
            result.seconds.append(time.perf_counter() - start)
