"""Conversion between checkpoint formats through a live model; Hugging Face families as tables.

The options of ``convert`` are here, where they import nothing: the command line is made from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Format = Literal["hf", "megatron", "megatron-legacy", "peft"]


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What ``convert`` is asked for."""

    load_path: Path
    """Checkpoint to read, or org/name; its format is detected."""
    save_path: Path
    """What to write; must not exist, or be an empty folder."""
    to: Format
    """``hf``: a model directory; ``megatron``: a ``*.ckpt`` of ``MegatronStrategy``, which Megatron-Core reads, too;
    ``megatron-legacy``: Megatron-LM's ``mp_rank_TT_PPP/model_optim_rng.pt``; ``peft``: only the adapters (LoRA), which
    ``hf`` and ``megatron-legacy`` merge into the weights."""
    tp: int = 1
    """Tensor parallel size: of the files of ``megatron-legacy``, and of torchrun's processes."""
    pp: int = 1
    """Pipeline stages, likewise; in one process layers need not divide evenly."""
    vpp: int | None = None
    """Model chunks of each stage, likewise; one if left out."""
    dtype: str | None = None
    """``fp32``, ``fp16`` or ``bf16`` (or torch's names) for the weights; as they are if left out."""
    make_vocab_size_divisible_by: int = 128
    """The written vocabulary is padded to a multiple of this times tp (not for ``hf``, which has no padding)."""
    max_shard_size: str | int = "5GB"
    """Largest weight file of ``hf``, e.g. 200MB."""
    tokenizer: Path | None = None
    """Tokenizer to put beside the weights; that of the source if left out."""
    config: Path | None = None
    """A Hugging Face ``config.json``, for checkpoints that do not say their model or instead of what they say."""
    iteration: int | None = None
    """Which of a folder of iterations; the last one saved if left out."""
