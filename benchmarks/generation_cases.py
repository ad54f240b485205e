"""Cases of the generation benchmark: models, prompts and implementations as data; loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.cases import LLAMA_8B


@dataclass(frozen=True, kw_only=True)
class GenerationCase:
    """Prompts of one length that all get the same number of new tokens."""

    name: str
    """By which it is chosen on the command line."""
    model: Mapping[str, Any]
    """Fields of a Hugging Face config."""
    batch_size: int
    """Prompts that are continued together."""
    prompt_length: int = 512
    """Tokens of each prompt."""
    new_tokens: int = 256
    """Tokens that each prompt gets; nothing ends a text before."""
    num_devices: int = 1
    """GPUs (or CPU processes) of the run."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``MegatronStrategy``."""
    precision: str = "bf16-true"
    """Of the Trainer."""
    accelerator: Literal["gpu", "cpu"] = "gpu"
    """Of the Trainer."""

    def shares_model_with(self, other: GenerationCase) -> bool:
        """Whether one process can measure both with the model that it has built once."""
        names = ("model", "num_devices", "layout", "precision", "accelerator")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def __str__(self) -> str:
        layout = " ".join(f"{name}={value}" for name, value in self.layout.items())
        rows = f"{self.batch_size} x ({self.prompt_length} in + {self.new_tokens} out)"
        return f"{self.num_devices} {self.accelerator}, {rows} {layout}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to generate."""

    name: str
    """By which it is chosen on the command line."""
    label: str
    """In the table."""
    is_peer: bool
    """Whether it is transformers' own ``generate``, on one device."""
    has_static_cache: bool
    """Whether keys and values have fixed places from the beginning, so that a decoding step can be recorded."""


PEER_STATIC = "transformers, static cache, compiled"
"""The label of what the others are compared with."""

VARIANTS: tuple[Variant, ...] = (
    Variant(name="eager", label="lightning-megatron, growing cache", is_peer=False, has_static_cache=False),
    Variant(name="static", label="lightning-megatron, static cache", is_peer=False, has_static_cache=True),
    Variant(name="peer", label="transformers, dynamic cache", is_peer=True, has_static_cache=False),
    Variant(name="peer-static", label=PEER_STATIC, is_peer=True, has_static_cache=True),
)

_TINY: Mapping[str, Any] = {
    **LLAMA_8B,
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
_ON_CPU: Mapping[str, Any] = {"prompt_length": 12, "new_tokens": 10, "precision": "32-true", "accelerator": "cpu"}
_TP2: Mapping[str, Any] = {"num_devices": 2, "layout": {"tp": 2}}

GENERATION_CASES: tuple[GenerationCase, ...] = (
    GenerationCase(name="llama-8b-b1", model=LLAMA_8B, batch_size=1),
    GenerationCase(name="llama-8b-b32", model=LLAMA_8B, batch_size=32),
    GenerationCase(name="llama-8b-b1-tp2", model=LLAMA_8B, batch_size=1, **_TP2),
    GenerationCase(name="llama-8b-b32-tp2", model=LLAMA_8B, batch_size=32, **_TP2),
    GenerationCase(name="smoke", model=_TINY, batch_size=2, **_ON_CPU),
    GenerationCase(name="smoke-tp2", model=_TINY, batch_size=2, **_ON_CPU, **_TP2),
)
"""Every case; those called ``smoke`` only prove that the program runs."""
