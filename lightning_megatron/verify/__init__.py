"""Comparison of a Hugging Face model directory with transformers, on the user's machine: the command ``verify``.

The reference and each layout run in processes of their own. May import everything but ``cli``. ``VerifyOptions`` is
defined here, without heavy imports, because the command line is generated from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

Check = Literal["round-trip", "logits", "generation", "gradients", "speed"]
"""What can be compared; the loss belongs to ``logits``."""
DtypeName = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class VerifyOptions:
    """Options of ``verify``."""

    model_dir: Path
    """Hugging Face model directory, or org/name of a model on the hub."""
    _: KW_ONLY
    layouts: Sequence[str] = ("1",)
    """Layouts to check, each in processes of its own: 1, or sizes such as tp2 or tp2,pp2 (of tp, pp, vpp, cp, ep, dp);
    tp comes with sequence parallelism, pp with a microbatch for each stage."""
    checks: Sequence[Check] | None = None
    """What to compare (default: all that the model can do); round-trip, logits and generation need no gradients."""
    dtype: DtypeName = "fp32"
    """Dtype to compute in."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Device to run on; auto takes GPUs if there are enough for every layout."""
    seq_length: int | None = None
    """Tokens of a row (default: 64, or as many as the model has positions)."""
    batch_size: int = 4
    """Rows of the batch."""
    steps: int = 5
    """Timed steps, of which the median counts."""
    seed: int = 1
    """Seed of the tokens."""
    output: Path | None = None
    """Directory to write verify.md and verify.json, and the output of processes that failed."""
    json: bool = False
    """Print JSON instead of Markdown."""
