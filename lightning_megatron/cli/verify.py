"""The command ``verify``: a card that compares a Hugging Face model directory with transformers.

Slow imports are inside the function.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_megatron.errors import ConfigError
from lightning_megatron.storage.failures import failures_as_errors
from lightning_megatron.storage.paths import open_new
from lightning_megatron.verify import VerifyOptions

if TYPE_CHECKING:
    from lightning_megatron.verify.card import Card

_NAME = "verify"
_DIFFERENT = 1


def verify(options: VerifyOptions) -> None:
    """Compare a Hugging Face model directory with transformers, at parallel layouts.

    Prints a card: logits, loss, gradients of every weight and generated tokens beside those of transformers, the round
    trip of the weights bit for bit, and the speed of both. Starts the ranks of each layout on this machine, on GPUs or
    as processes on the CPU. States its memory before it starts. Local files only, and no code of the directory is run.
    Exit codes: 0 if all is equal, 1 if something differs or failed, 2 for wrong arguments.

    Example:
        lightning-megatron verify path/to/llama --layouts 1 tp2 tp2,pp2
        lightning-megatron verify path/to/mixtral --layouts ep2 --dtype bf16 --output card
        lightning-megatron verify path/to/llama --checks round-trip logits --accelerator cpu

    Raises:
        ConfigError: If an argument is wrong, the model is not supported, or the memory is too small.
        SystemExit: With code 1, if something differs or failed.
    """
    for name in ("RANK", "LOCAL_RANK", "SLURM_NTASKS"):
        if name in os.environ:
            raise ConfigError(
                f"verify: expected no other launcher, got {name} in the environment; verify starts ranks itself"
            )
    _check_output(options.output)

    from lightning_megatron.storage.publish import exit_on_sigterm
    from lightning_megatron.verify.processes import ProcessError
    from lightning_megatron.verify.run import verify

    try:
        with exit_on_sigterm():
            card = verify(options)
    except ProcessError as error:
        print(f"error: transformers failed: {error}", file=sys.stderr)
        sys.exit(_DIFFERENT)
    _write(card, options)
    if card.verdict != "equal":
        sys.exit(_DIFFERENT)


def _check_output(folder: Path | None) -> None:
    """Check that the directory of the card can be written, before hours of work.

    Raises:
        ConfigError: If not.
    """
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output {folder} is a file; give a directory")
    for name in (f"{_NAME}.md", f"{_NAME}.json"):
        if (folder / name).exists():
            raise ConfigError(f"--output {folder}: {name} exists there; give another directory")
    with failures_as_errors(f"--output {folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)


def _write(card: Card, options: VerifyOptions) -> None:
    markdown = card.to_markdown()
    data = json.dumps(card.to_json(), indent=2)
    print(data if options.json else markdown)
    if options.output is None:
        return
    with failures_as_errors(f"--output {options.output} cannot be written"):
        for suffix, text in (("md", markdown), ("json", data)):
            with open_new(options.output / f"{_NAME}.{suffix}") as file:
                file.write(f"{text}\n")
