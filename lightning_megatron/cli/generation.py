"""How does ``generate`` run? A module whose weights come from any checkpoint predicts one batch of prompts."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_megatron.cli.generated_text import TextPrinter, show_what_can_be_shown
from lightning_megatron.cli.prompts import read_prompts
from lightning_megatron.cli.writing_module import BatchTexts, Job, WritingModule
from lightning_megatron.convert.convert import open_source
from lightning_megatron.convert.hugging_face_files import GENERATION_CONFIG_FILE, tokenizer_files
from lightning_megatron.convert.shards import Source
from lightning_megatron.data.tokenizer import check_vocabulary, load_tokenizer
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.inputs import Inputs, check_prompts
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.texts import encoded, end_tokens
from lightning_megatron.hub import local_folder
from lightning_megatron.strategy import MegatronStrategy

_PRECISIONS = {torch.bfloat16: "bf16-true", torch.float16: "16-mixed"}
"""Of the Trainer, for weights that are not in float32."""

_EARLY_STOPPING: dict[str, Any] = {"true": True, "false": False, "never": "never"}


@dataclass(frozen=True, kw_only=True)
class GenerateArguments:
    """The arguments of the command line, as they stand there."""

    load_path: Path
    config: Path | None
    iteration: int | None
    prompt: list[str] | None
    prompt_file: Path | None
    tokenizer: Path | None
    tp: int
    pp: int
    accelerator: str
    precision: Any
    """Of the Trainer; None for that of the weights on GPUs, and float32 elsewhere."""
    batch_size: int
    json: bool
    stream: bool | None
    add_bos: bool
    stop_strings: list[str]
    early_stopping: str
    options: dict[str, Any]
    """The others, fields of ``GenerationOptions``."""


def arguments_from(parsed: dict[str, Any]) -> GenerateArguments:
    """The arguments by the names that the parser gives them."""
    names = {field.name for field in fields(GenerateArguments)}
    own = {name: value for name, value in parsed.items() if name in names}
    return GenerateArguments(**own, options={name: value for name, value in parsed.items() if name not in names})


def generate(arguments: GenerateArguments) -> None:
    """Print the prompts with what follows them; on rank 0.

    Raises:
        ConfigError: If an argument is wrong, the tokenizer is that of another model, or a prompt cannot be continued.
        CheckpointError: If the checkpoint cannot be read.
    """
    options = GenerationOptions(early_stopping=_EARLY_STOPPING[arguments.early_stopping], **arguments.options)
    prompts = read_prompts(arguments.prompt, arguments.prompt_file, arguments.tp * arguments.pp)
    streams = _streams(arguments, len(prompts), options)
    if arguments.batch_size < 1:
        raise ConfigError(f"batch_size={arguments.batch_size} must be at least 1; correct it")
    stored = _opened(arguments)
    if stored.model.architecture not in ("gpt", "t5"):
        raise ConfigError(
            f"{stored.path} is a {stored.model.family}, and generate needs a GPT or T5, which write texts"
        )
    if stored.model.architecture == "t5" and arguments.add_bos:
        raise ConfigError("--add-bos is for texts that are continued, and a T5 starts its own; leave it out")
    tokenizer = _tokenizer(arguments.tokenizer, stored)
    options = _with_ends(options, arguments.stop_strings, stored, tokenizer)
    input_ids, mask = encoded(prompts, tokenizer, add_bos=arguments.add_bos)
    check_prompts(Inputs(input_ids=input_ids, attention_mask=mask), stored.model, options)
    is_answer = stored.model.architecture == "t5"
    job = Job(prompts=prompts, is_answer=is_answer, tokenizer=tokenizer, input_ids=input_ids, attention_mask=mask)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    trainer = Trainer(
        accelerator=arguments.accelerator,
        devices=arguments.tp * arguments.pp,
        strategy=MegatronStrategy(tp=arguments.tp, pp=arguments.pp),
        precision=arguments.precision or _own_precision(stored, arguments.accelerator),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    show_what_can_be_shown()
    printer = TextPrinter(as_json=arguments.json, between=job.between)
    stream = job.stream(arguments.stop_strings)
    show = stream if streams else BatchTexts(job, printer, arguments.stop_strings, options.num_return_sequences)
    trainer.predict(WritingModule(stored, options, show), job.loader(arguments.batch_size), return_predictions=False)
    if trainer.is_global_zero:
        stream.end() if streams else printer.end()


def _own_precision(stored: Source, accelerator: str) -> Any:
    """What computes with weights as they are stored; a CPU computes in float32, in which most are faster."""
    if accelerator == "cpu" or not torch.cuda.is_available():
        return "32-true"
    return _PRECISIONS.get(stored.dtype, "32-true")


def _opened(arguments: GenerateArguments) -> Source:
    config = None if arguments.config is None else local_folder(arguments.config, "config")
    return open_source(local_folder(arguments.load_path, "model"), config, arguments.iteration)


def _tokenizer(folder: Path | None, stored: Source) -> Any:
    asked = folder or stored.path
    folder = stored.companions if folder is None else local_folder(folder, "tokenizer")
    if folder is None or not folder.is_dir() or not tokenizer_files(folder):
        raise ConfigError(f"{asked} comes with no tokenizer; give --tokenizer DIR of one")
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, folder, stored.model.vocab_size)
    return tokenizer


def _with_ends(options: GenerationOptions, stop: list[str], stored: Source, tokenizer: Any) -> GenerationOptions:
    """The options with the tokens that end a text: the generation config's, the model's, else the tokenizer's."""
    folder = stored.companions
    has_file = folder is not None and (folder / GENERATION_CONFIG_FILE).is_file()
    ends = end_tokens(folder if has_file else stored.hf_config)
    eos = tuple(token for token in ends.eos if token < stored.model.vocab_size)
    if not eos and tokenizer.eos_token_id is not None:
        eos = (tokenizer.eos_token_id,)
    pad = ends.pad if ends.pad is not None else tokenizer.pad_token_id
    return replace(options, eos_token_id=eos, pad_token_id=pad, stop_strings=tuple(stop), tokenizer=tokenizer)


def _streams(arguments: GenerateArguments, num_prompts: int, options: GenerationOptions) -> bool:
    """Whether the text is shown while it grows.

    Raises:
        ConfigError: If it was asked to be, and cannot.
    """
    can = num_prompts == options.num_beams == options.num_return_sequences == 1 and not arguments.json
    if arguments.stream and not can:
        raise ConfigError("--stream shows one text of one prompt, without beams and --json; leave it out, or these")
    return can and (sys.stdout.isatty() if arguments.stream is None else arguments.stream)
