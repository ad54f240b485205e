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
from lightning_megatron.module import MegatronModule
from lightning_megatron.strategy import MegatronStrategy


@dataclass(frozen=True, kw_only=True)
class GenerateArguments:
    """The arguments of the command line, as they stand there."""

    checkpoint: Path
    prompt: list[str]
    tokenizer: Path | None
    tp: int
    pp: int
    accelerator: str
    precision: Any
    max_new_tokens: int
    min_new_tokens: int
    stop: list[str]
    add_bos: bool
    temperature: float
    top_k: int
    top_p: float
    top_p_decay: float
    top_p_bound: float
    repetition_penalty: float
    seed: int
    num_beams: int
    length_penalty: float
    num_return_sequences: int


class _StoredModule(MegatronModule):
    """A module with the weights of a checkpoint of any format."""

    def __init__(self, stored: StoredModel, generation: GenerationOptions) -> None:
        super().__init__(model=stored.hf_config, generation=generation)
        self._stored = stored

    def _fill_weights(self, chunks: torch.nn.ModuleList) -> None:
        load_stored(chunks, self._stored)


def generate(arguments: GenerateArguments) -> None:
    """Print the prompts with what follows them; on rank 0.

    Raises:
        ConfigError: If an argument is wrong, the tokenizer is that of another model, or a prompt cannot be continued.
        CheckpointError: If the checkpoint cannot be read.
    """
    options = _options(arguments)
    paths = ConvertOptions(load_path=arguments.checkpoint, save_path=arguments.checkpoint, to="hf")
    stored = open_model(arguments.checkpoint, paths)
    if stored.model.architecture != "gpt":
        raise ConfigError(f"{stored.path} is no GPT, whose texts generate continues, but a {stored.model.family}")
    tokenizer = _tokenizer(arguments.tokenizer, stored)
    options = _with_ends(options, arguments.stop, stored, tokenizer)
    rows = _rows(arguments.prompt, tokenizer, arguments.add_bos)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    check_prompts(batch["input_ids"], batch["attention_mask"], stored.model, options)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
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
    loader: DataLoader[Any] = DataLoader(rows, batch_size=len(rows))  # type: ignore[arg-type]
    predicted: Any = trainer.predict(_StoredModule(stored, options), loader)
    _print(predicted[0], batch, tokenizer, arguments)


def _options(arguments: GenerateArguments) -> GenerationOptions:
    names = (
        *("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "top_p_decay", "top_p_bound"),
        *("repetition_penalty", "seed", "num_beams", "length_penalty", "num_return_sequences"),
    )
    return GenerationOptions(**{name: getattr(arguments, name) for name in names})


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


def _rows(prompts: list[str], tokenizer: Any, add_bos: bool) -> list[dict[str, torch.Tensor]]:
    """Tokens of the prompts, with padding on the left."""
    bos = tokenizer.bos_token_id
    if add_bos and bos is None:
        raise ConfigError("--add-bos needs a tokenizer that has a first token (bos_token); leave it out")
    tokens = [tokenizer.encode(prompt) for prompt in prompts]
    if add_bos:
        tokens = [row if row[:1] == [bos] else [bos, *row] for row in tokens]
    for prompt, row in zip(prompts, tokens, strict=True):
        if not row:
            raise ConfigError(f"the prompt {prompt!r} has no token to continue; give it some text, or --add-bos")
    width = max(len(row) for row in tokens)
    return [
        {
            "input_ids": torch.tensor([0] * (width - len(row)) + row),
            "attention_mask": torch.tensor([0] * (width - len(row)) + [1] * len(row)),
        }
        for row in tokens
    ]


@rank_zero_only
def _print(texts: torch.Tensor, batch: dict[str, torch.Tensor], tokenizer: Any, arguments: GenerateArguments) -> None:
    """Each prompt and what follows it, a blank line between two."""
    width, copies = batch["input_ids"].shape[1], arguments.num_return_sequences
    printed = []
    for index, row in enumerate(texts.tolist()):
        mask = batch["attention_mask"][index // copies].tolist()
        prompt = tokenizer.decode([t for t, m in zip(row, mask, strict=False) if m], skip_special_tokens=True)
        whole = [t for t, m in zip(row[:width], mask, strict=True) if m] + row[width:]
        new = tokenizer.decode(whole, skip_special_tokens=True)[len(prompt) :]
        printed.append(prompt + _cut(new, arguments.stop))
    sys.stdout.write("\n\n".join(printed) + "\n")


def _cut(text: str, stop: list[str]) -> str:
    """The text up to the end of the first of the stop texts."""
    ends = [text.index(each) + len(each) for each in stop if each in text]
    return text[: min(ends)] if ends else text
