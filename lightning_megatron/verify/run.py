"""The verification: checks of the arguments, memory, the reference, each layout, and the card."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from lightning_megatron.convert.source import ModelSource
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.errors import LARGEST_SEED, ConfigError, require_number
from lightning_megatron.models.config import CLASSIFICATION, ModelConfig
from lightning_megatron.planning.parameters import total_parameters
from lightning_megatron.verify import Check, VerifyOptions
from lightning_megatron.verify.batch import make_batch
from lightning_megatron.verify.card import Card, LayoutReport, tokens_per_s
from lightning_megatron.verify.comparison import Reference
from lightning_megatron.verify.job import Job, Result
from lightning_megatron.verify.layouts import Layout, parse_layout
from lightning_megatron.verify.memory import check_memory, needs
from lightning_megatron.verify.processes import (
    OUTPUT,
    ProcessError,
    Start,
    say,
    start_processes,
)
from lightning_megatron.verify.reference import EXACT_RESULT
from lightning_megatron.verify.source import hugging_face_class, open_directory

_DEFAULT_SEQ_LENGTH = 64
_LEAST_SEQ_LENGTH = 8
_MOST_SAMPLES = 10_000
_LEAST_SAMPLES = 64
_SAMPLES_OF_ALL = 20_000_000
"""Elements of all gradients together that are compared, about."""


def verify(options: VerifyOptions, start: Start = start_processes) -> Card:
    """Compare a Hugging Face model directory with transformers at each layout.

    Args:
        options: Options of the command.
        start: Runs a job on its ranks.

    Raises:
        ConfigError: If an argument is wrong, the model is not supported, or the memory is too small.
        ProcessError: If transformers itself failed.
    """
    source = open_directory(options.model_dir)
    model = source.model
    layouts = [parse_layout(name) for name in options.layouts]
    job = _job(options, source, layouts)
    for layout in layouts:
        layout.check(model, job.seq_length, job.batch_size, trains=job.trains)
    found = needs(job, model, layouts)
    names = ", ".join(layout.name for layout in layouts)
    say(f"verify {job.directory}: {model.family}, {total_parameters(model):,} parameters")
    say(f"layouts {names} on {job.accelerator} in {job.dtype}: {', '.join(job.checks)}")
    say(check_memory(found, job.accelerator))
    card = Card(
        job=job,
        hf_class=hugging_face_class(model).__name__,
        num_parameters=total_parameters(model),
        stored_dtype=str(source.dtype).removeprefix("torch."),
        device=_device_name(job),
        memory=found,
    )
    with tempfile.TemporaryDirectory(prefix="lightning_megatron_verify_") as folder:
        _compute(job, model, layouts, card, Path(folder), options.output, start)
    return card


def _job(options: VerifyOptions, source: ModelSource, layouts: Sequence[Layout]) -> Job:
    model = source.model
    require_number("batch_size", options.batch_size, at_least=1)
    require_number("steps", options.steps, at_least=1)
    require_number("seed", options.seed, at_most=LARGEST_SEED)
    longest = model.max_position_embeddings if model.has_position_table else None
    seq_length = options.seq_length
    if seq_length is None:
        seq_length = min(_DEFAULT_SEQ_LENGTH, longest or _DEFAULT_SEQ_LENGTH)
    require_number("seq_length", seq_length, at_least=_LEAST_SEQ_LENGTH)
    ParallelConfig().check_sequence(seq_length, longest)
    pad_token_id = getattr(source.hf_config, "pad_token_id", None)
    is_pooled = model.architecture == "gpt" and model.task == "sequence_classification"
    if is_pooled and pad_token_id is None:
        raise ConfigError(
            f"{source.path}/config.json: expected pad_token_id, by which transformers finds the last token of a row, "
            "got none; add it"
        )
    num_tensors = max(1, len(source.parts[0].stored))
    return Job(
        directory=str(source.path),
        layout=None,
        accelerator=_accelerator(options, layouts),
        dtype=options.dtype,
        checks=_checks(options, model),
        batch_size=options.batch_size,
        seq_length=seq_length,
        steps=options.steps,
        seed=options.seed,
        pad_token_id=pad_token_id,
        samples=max(_LEAST_SAMPLES, min(_MOST_SAMPLES, _SAMPLES_OF_ALL // num_tensors)),
    )


def _checks(options: VerifyOptions, model: ModelConfig) -> tuple[Check, ...]:
    """What to compare, in the order of ``Check``."""
    can_generate = model.architecture != "bert" and model.task not in CLASSIFICATION
    possible = [each for each in get_args(Check) if can_generate or each != "generation"]
    if options.checks is None:
        return tuple(possible)
    if not can_generate and "generation" in options.checks:
        raise ConfigError(
            f"checks=generation: expected a GPT or T5, got a {model.family} for task={model.task!r}; leave it out"
        )
    return tuple(each for each in possible if each in options.checks)


def _accelerator(options: VerifyOptions, layouts: Sequence[Layout]) -> str:
    if options.accelerator == "cpu":
        return "cpu"
    largest = max(layouts, key=lambda layout: layout.world_size)
    num_gpus = torch.cuda.device_count()
    if largest.world_size <= num_gpus:
        return "gpu"
    if options.accelerator == "auto":
        return "cpu"
    raise ConfigError(
        f"accelerator=gpu: expected a GPU for each of the {largest.world_size} ranks of layouts={largest.name}, got "
        f"{num_gpus}; give --accelerator cpu, or smaller layouts"
    )


def _device_name(job: Job) -> str:
    if job.accelerator == "gpu":
        return torch.cuda.get_device_name()
    return f"a CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def _compute(
    job: Job,
    model: ModelConfig,
    layouts: Sequence[Layout],
    card: Card,
    folder: Path,
    output: Path | None,
    start: Start,
) -> None:
    """Run transformers and each layout, and enter into the card what came out."""
    reference = _reference(job, model, card, folder / "transformers", start)
    for index, layout in enumerate(layouts):
        say(f"layout {layout.name} ({index + 1} of {len(layouts)})")
        report = LayoutReport(name=layout.name)
        own_folder = folder / f"layout_{index}"
        try:
            ours = _run(
                replace(job, layout=layout.name),
                own_folder,
                layout.world_size,
                start,
            )
        except ProcessError as error:
            report.failure = str(error)
            _keep_output(own_folder, output, layout.name)
        else:
            report.outcomes = reference.compare(ours, job.checks)
            report.tokens_per_s = tokens_per_s(job, ours.seconds)
            card.left_out = ours.left_out
        card.layouts.append(report)
        say(f"  {report.verdict}{f': {report.failure}' if report.failure else ''}")


def _reference(job: Job, model: ModelConfig, card: Card, folder: Path, start: Start) -> Reference:
    """Results of transformers; empty ones if the round trip is all that was asked for."""
    theirs = Result()
    exact = theirs
    if job.needs_reference:
        say("transformers")
        theirs = _run(job, folder, 1, start)
        exact = theirs if job.dtype == "fp32" else Result.read(folder, EXACT_RESULT)
    card.reference_tokens_per_s = tokens_per_s(job, theirs.seconds)
    card.reference_attention = theirs.attention
    return Reference(
        exact=exact,
        rounded=None if job.dtype == "fp32" else theirs,
        batch=make_batch(job, model),
        model=model,
    )


def _run(job: Job, folder: Path, num_ranks: int, start: Start) -> Result:
    folder.mkdir()
    job.write(folder)
    start(folder, num_ranks)
    return Result.read(folder)


def _keep_output(folder: Path, output: Path | None, name: str) -> None:
    """Keep what the processes of a failed layout have printed."""
    text = folder / OUTPUT
    if output is None or not text.exists():
        return
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{name}.txt").write_bytes(text.read_bytes())
