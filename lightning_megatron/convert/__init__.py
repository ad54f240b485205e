"""Conversion between checkpoint formats through a live model; Hugging Face families as tables.

File formats and names of weights belong here. Imports ``checkpoint``, ``planning`` and what is below them, and never
Lightning; of the engine, whose import takes seconds, most files import nothing but in functions.
``ConvertOptions`` is defined here, without heavy imports, because the command line is generated from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Format = Literal["hf", "megatron", "megatron-legacy", "peft"]
ExpertFormat = Literal["fused", "per_expert"]
"""Form of adapters of experts in the files of an adapter."""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of ``convert``."""

    load_path: Path
    """Checkpoint to read, or org/name of a model on the hub; its format is detected."""
    save_path: Path
    """Path to write; must not exist, or be an empty directory."""
    to: Format
    """``hf``: a model directory; ``megatron``: a ``*.ckpt`` of ``MegatronStrategy``, which Megatron-Core also reads;
    ``megatron-legacy``: Megatron-LM's ``mp_rank_TT_PPP/model_optim_rng.pt``; ``peft``: only the adapters (LoRA), which
    ``hf`` and ``megatron-legacy`` merge into the weights."""
    tp: int = 1
    """Tensor-parallel size of the ``megatron-legacy`` files and of torchrun's processes."""
    pp: int = 1
    """Pipeline-parallel size, likewise; in one process the stages may hold different numbers of layers."""
    vpp: int | None = None
    """Model chunks per pipeline stage, likewise; one if left out."""
    dtype: str | None = None
    """Dtype to write: ``fp32``, ``fp16`` or ``bf16`` (or torch's names); the dtypes of the source if left out."""
    make_vocab_size_divisible_by: int = 128
    """Pad the written vocabulary to a multiple of this times tp (not for ``hf``, which has no padding)."""
    max_shard_size: str | int = "5GB"
    """Largest weight file of ``hf``, e.g. 200MB."""
    tokenizer: Path | None = None
    """Tokenizer to copy beside the weights; that of the source if left out."""
    config: Path | None = None
    """Hugging Face ``config.json`` of the model, if the checkpoint does not describe it or to override it."""
    iteration: int | None = None
    """Iteration to read from a directory of several; the last one saved if left out."""
    ema: bool = False
    """Take the average that the callback ``EMA`` kept, in fp32, instead of the weights with which training goes on."""
    base: Path | None = None
    """Base model of adapters (LoRA), or its name on the hub; the one that they name if left out, which must be a
    directory or in the hub's cache."""
    expert_format: ExpertFormat = "fused"
    """Form of adapters of routed experts in ``peft``: ``fused`` for parameters of all experts of a layer, as in
    transformers 5; ``per_expert`` for modules of each, as in transformers 4."""
