"""How does ``generate`` run? A module whose weights come from any checkpoint predicts one batch of prompts."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from lightning_megatron.cli.generated_text import Continued, TextStream, cut, printed
from lightning_megatron.convert.companions import GENERATION_CONFIG_FILE, tokenizer_files
from lightning_megatron.convert.conversion import open_model
from lightning_megatron.convert.load_stored import load_stored
from lightning_megatron.convert.options import ConvertOptions
from lightning_megatron.convert.stored.base import StoredModel
from lightning_megatron.data.corpus.tokenizer import largest_id, load_tokenizer
from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.end_tokens import end_tokens
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.generate.prompts import check_prompts
from lightning_megatron.generate.texts import decoder_texts, encoded, new_texts
from lightning_megatron.module import MegatronModule
from lightning_megatron.strategy import MegatronStrategy


@dataclass(frozen=True, kw_only=True)
class GenerateArguments:
    """The arguments of the command line, as they stand there."""

    checkpoint: Path
    prompt: list[str] | None
    prompt_file: Path | None
    tokenizer: Path | None
    tp: int
    pp: int
    accelerator: str
    precision: Any
    batch_size: int
    json: bool
    stream: bool | None
    max_new_tokens: int
    min_new_tokens: int
    stop: list[str]
    add_bos: bool
    sample: bool
    temperature: float
    top_k: int
    top_p: float
    top_p_decay: float
    top_p_bound: float
    repetition_penalty: float
    seed: int
    num_beams: int
    length_penalty: float
    early_stopping: str
    num_return_sequences: int


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What is to be continued."""

    prompts: list[str]
    is_answer: bool
    """Whether texts answer the prompts, as an encoder-decoder's, instead of continuing them."""
    tokenizer: Any
    input_ids: torch.Tensor
    """[b, s]."""
    attention_mask: torch.Tensor
    """[b, s]."""

    @property
    def between(self) -> str:
        """What stands between a prompt and a text that is shown with it."""
        return "\n" if self.is_answer else ""

    def stream(self, stop: list[str]) -> TextStream:
        """For the text of the only prompt."""
        given = [] if self.is_answer else self.input_ids[0].tolist()
        return TextStream(self.tokenizer, self.prompts[0] + self.between, given, stop)

    def texts(self, written: torch.Tensor, rows: slice) -> list[str]:
        """What was written behind the prompts of ``rows``."""
        if self.is_answer:
            return decoder_texts(self.tokenizer, written)
        return new_texts(self.tokenizer, written, self.input_ids[rows], self.attention_mask[rows])

    def loader(self, batch_size: int) -> DataLoader[Any]:
        """The rows in batches."""
        rows = [
            {"input_ids": tokens, "attention_mask": mask}
            for tokens, mask in zip(self.input_ids, self.attention_mask, strict=True)
        ]
        return DataLoader(rows, batch_size=batch_size)  # type: ignore[arg-type]


class _StoredModule(MegatronModule):
    """A module with the weights of a checkpoint of any format."""

    def __init__(self, stored: StoredModel, generation: GenerationOptions, stream: TextStream | None) -> None:
        super().__init__(model=stored.hf_config, generation=generation)
        self._stored = stored
        self._stream = stream

    def _fill_weights(self, chunks: torch.nn.ModuleList) -> None:
        load_stored(chunks, self._stored)

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        """As ever, or shown by rank 0 while it grows."""
        if self._stream is None:
            return super().predict_step(batch, batch_idx, dataloader_idx)
        on_tokens = None
        if self.trainer.is_global_zero:
            self._stream.begin()
            on_tokens = self._stream.add
        options = vars(self.generation)
        return self.generate(batch["input_ids"], batch.get("attention_mask"), on_tokens=on_tokens, **options)


def generate(arguments: GenerateArguments) -> None:
    """Print the prompts with what follows them; on rank 0.

    Raises:
        ConfigError: If an argument is wrong, the tokenizer is that of another model, or a prompt cannot be continued.
        CheckpointError: If the checkpoint cannot be read.
    """
    options, prompts = _options(arguments), _prompts(arguments)
    streams = _streams(arguments, prompts)
    if arguments.batch_size < 1:
        raise ConfigError(f"--batch-size {arguments.batch_size} must be at least 1; correct it")
    paths = ConvertOptions(load_path=arguments.checkpoint, save_path=arguments.checkpoint, to="hf")
    stored = open_model(arguments.checkpoint, paths)
    if stored.model.architecture not in ("gpt", "t5"):
        raise ConfigError(
            f"{stored.path} is a {stored.model.family}, and generate needs a GPT or T5, which write texts"
        )
    if stored.model.architecture == "t5" and arguments.add_bos:
        raise ConfigError("--add-bos is for texts that are continued, and a T5 starts its own; leave it out")
    tokenizer = _tokenizer(arguments.tokenizer, stored)
    options = _with_ends(options, arguments.stop, stored, tokenizer)
    input_ids, mask = encoded(prompts, tokenizer, add_bos=arguments.add_bos)
    check_prompts(input_ids, mask, stored.model, options)
    is_answer = stored.model.architecture == "t5"
    job = _Job(prompts=prompts, is_answer=is_answer, tokenizer=tokenizer, input_ids=input_ids, attention_mask=mask)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    trainer = Trainer(
        accelerator=arguments.accelerator,
        devices=arguments.tp * arguments.pp,
        strategy=MegatronStrategy(tp=arguments.tp, pp=arguments.pp),
        precision=arguments.precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    stream = job.stream(arguments.stop) if streams else None
    module = _StoredModule(stored, options, stream)
    predicted: Any = trainer.predict(module, job.loader(arguments.batch_size))
    if stream is None:
        _print(predicted, job, arguments)
    elif trainer.is_global_zero:
        stream.end()


def _options(arguments: GenerateArguments) -> GenerationOptions:
    names = (
        *("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "top_p_decay", "top_p_bound"),
        *("repetition_penalty", "seed", "num_beams", "length_penalty", "num_return_sequences"),
    )
    early_stopping: Any = {"true": True, "false": False}.get(arguments.early_stopping, arguments.early_stopping)
    return GenerationOptions(
        do_sample=True if arguments.sample else None,
        early_stopping=early_stopping,
        **{name: getattr(arguments, name) for name in names},
    )


def _tokenizer(folder: Path | None, stored: StoredModel) -> Any:
    folder = folder or stored.companions
    if folder is None or not tokenizer_files(folder):
        raise ConfigError(f"{stored.path} comes with no tokenizer; give --tokenizer DIR of one")
    tokenizer = load_tokenizer(folder)
    if (largest := largest_id(tokenizer)) >= stored.model.vocab_size:
        raise ConfigError(
            f"the tokenizer {folder} has tokens up to {largest}, and the vocabulary of {stored.path} ends at "
            f"{stored.model.vocab_size - 1}; give the tokenizer of this model"
        )
    return tokenizer


def _with_ends(options: GenerationOptions, stop: list[str], stored: StoredModel, tokenizer: Any) -> GenerationOptions:
    """The options with the tokens that end a text: the generation config's, the model's, else the tokenizer's."""
    folder = stored.companions
    has_file = folder is not None and (folder / GENERATION_CONFIG_FILE).is_file()
    ends = end_tokens(folder if has_file else stored.hf_config)
    eos = tuple(token for token in ends.eos if token < stored.model.vocab_size)
    if not eos and tokenizer.eos_token_id is not None:
        eos = (tokenizer.eos_token_id,)
    # The common spelling of a stop text ends a row at once; others are found in the text afterwards.
    sequences = tuple(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in stop)
    if any(not sequence for sequence in sequences):
        raise ConfigError("--stop has an empty text, which every text ends with; remove it")
    pad = ends.pad if ends.pad is not None else tokenizer.pad_token_id
    return replace(options, eos_token_id=eos, pad_token_id=pad, stop_sequences=sequences)


def _prompts(arguments: GenerateArguments) -> list[str]:
    """The texts of the command line or of the file, of which empty lines are none."""
    if arguments.prompt_file is None:
        return arguments.prompt or []
    try:
        lines = arguments.prompt_file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--prompt-file {arguments.prompt_file} cannot be read: {reason}; give a text file") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompt-file {arguments.prompt_file} has no text; write a prompt on each line")
    return prompts


def _streams(arguments: GenerateArguments, prompts: list[str]) -> bool:
    """Whether the text is shown while it grows.

    Raises:
        ConfigError: If it was asked to be, and cannot.
    """
    can = len(prompts) == arguments.num_beams == arguments.num_return_sequences == 1 and not arguments.json
    if arguments.stream and not can:
        raise ConfigError("--stream shows one text of one prompt, without beams and --json; leave it out, or these")
    return can and (sys.stdout.isatty() if arguments.stream is None else arguments.stream)


@rank_zero_only
def _print(predicted: list[torch.Tensor], job: _Job, arguments: GenerateArguments) -> None:
    """All texts, in the order of the prompts."""
    found, first = [], 0
    for written in predicted:
        rows = slice(first, first + len(written) // arguments.num_return_sequences)
        first = rows.stop
        for index, new in enumerate(job.texts(written, rows)):
            prompt = job.prompts[rows][index // arguments.num_return_sequences]
            found.append(Continued(prompt=prompt, text=cut(new, arguments.stop)))
    sys.stdout.write(printed(found, as_json=arguments.json, between=job.between))
