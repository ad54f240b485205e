"""What commands need of a stored model: its weights, tokenizer and special tokens, and a Trainer.

Slow imports are inside the functions.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_megatron.convert.companions import generation_config, tokenizer_files
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.generate.options import GenerationOptions
from lightning_megatron.storage.hub import local_folder

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Trainer

    from lightning_megatron.convert.source import ModelSource
    from lightning_megatron.strategy import MegatronStrategy


def trainer_for(
    stored: ModelSource,
    strategy: MegatronStrategy,
    *,
    accelerator: str,
    devices: int,
    precision: Any,
) -> Trainer:
    """A Trainer that computes with a stored model, and prints and writes nothing itself.

    Args:
        stored: The model.
        strategy: With the layout.
        accelerator: As the command line names it.
        devices: Number of processes.
        precision: The Trainer's; None for that of the weights.
    """
    from lightning.pytorch import Trainer

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return Trainer(
        accelerator=accelerator,
        devices=devices,
        strategy=strategy,
        precision=precision or default_precision(stored, accelerator),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def fill_from(stored: ModelSource, chunks: torch.nn.ModuleList) -> None:
    """Load the weights of a stored model into this rank's model chunks.

    Raises:
        CheckpointError: If it lacks some.
    """
    from lightning_megatron.convert.weight_loader import WeightLoader

    loading = WeightLoader(chunks, stored.model, stored.parts)
    if loading.missing:
        names = ", ".join(map(str, sorted(loading.missing)))
        raise CheckpointError(
            f"{stored.path} has no {names}, needed by the model; use a complete checkpoint"
        )
    loading.fill()


def default_precision(stored: ModelSource, accelerator: str) -> Any:
    """Precision for the dtype of the stored weights on GPUs; float32 on CPUs, most of which compute faster in it."""
    import torch

    if accelerator == "cpu" or not torch.cuda.is_available():
        return "32-true"
    by_dtype = {torch.bfloat16: "bf16-true", torch.float16: "16-mixed"}
    return by_dtype.get(stored.dtype, "32-true")


def tokenizer_for(stored: ModelSource, given: Path | None) -> Any:
    """Load the tokenizer in ``given``, or without it that of the model.

    Raises:
        ConfigError: If there is none, or it has more tokens than the model.
    """
    from lightning_megatron.data.tokenizer import check_vocabulary, load_tokenizer

    source = given or stored.path
    folder = stored.companions
    if given is not None:
        folder = local_folder(given, "tokenizer")
    if folder is None or not folder.is_dir() or not tokenizer_files(folder):
        raise ConfigError(f"{source} has no tokenizer; give --tokenizer DIR")
    tokenizer = load_tokenizer(folder)
    check_vocabulary(tokenizer, folder, stored.model.vocab_size)
    return tokenizer


def with_special_tokens(
    generation: GenerationOptions, stored: ModelSource, tokenizer: Any
) -> GenerationOptions:
    """Set end-of-sequence and padding tokens: of the generation config, else of the model config or tokenizer."""
    from lightning_megatron.generate.special_tokens import special_token_ids

    has_config = generation_config(stored.companions)
    tokens = special_token_ids(stored.companions if has_config else stored.hf_config)
    eos = tuple(token for token in tokens.eos if token < stored.model.vocab_size)
    if not eos and tokenizer.eos_token_id is not None:
        eos = (tokenizer.eos_token_id,)
    pad = tokens.pad
    if pad is None:
        pad = tokenizer.pad_token_id
    return replace(generation, eos_token_id=eos, pad_token_id=pad, tokenizer=tokenizer)
