"""How does a checkpoint become one of another format? Open it, whatever it is, and have a target write it.

Whatever can be wrong without a weight being read is said first (``conversion_checks.py``). The target writes into a
hidden folder beside the final one, which gets its name at the very end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_megatron.convert.conversion_checks import (
    check_model,
    check_options,
    check_paths,
    missing_weights,
)
from lightning_megatron.convert.detection import open_model
from lightning_megatron.convert.options import ConvertOptions
from lightning_megatron.convert.staging import staged
from lightning_megatron.convert.stored.base import StoredModel
from lightning_megatron.convert.watched import Watched
from lightning_megatron.hub import local_folder

__all__ = ["ConvertOptions", "Converted", "convert", "open_model"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What a conversion did."""

    source: str
    """Format of what was read."""
    target: str
    """Format of what was written."""
    path: Path
    """Where it is."""
    num_files: int
    """Files in it."""
    num_bytes: int
    """Their sizes."""
    seconds: float
    """From opening the source to the new name."""


def convert(options: ConvertOptions) -> Converted:
    """Write the weights of one checkpoint as another; one process, no device, and no code from it is run.

    Peak memory stays below twice the largest file of weights, whatever the model's size.

    Raises:
        ConfigError: If the options do not fit together or the model.
        CheckpointError: If the source is missing, damaged, unsafe or of an unknown kind, or the target cannot be
            written; nothing new is at ``save_path`` then.
    """
    start = time.monotonic()
    check_options(options)
    options = located(options)
    save_path = check_paths(options)
    source = open_model(options.load_path, options)
    check_model(source, options)
    if missing := missing_weights(source):
        _log.warning("not in %s and left out: %s", source.path, ", ".join(missing))
    target, write = _target(options)
    with staged(save_path) as folder, Watched(source, options) as watched:
        write(watched, replace(options, save_path=folder))
    files = [each for each in save_path.rglob("*") if each.is_file()]
    return Converted(
        source=source.kind,
        target=target,
        path=options.save_path,
        num_files=len(files),
        num_bytes=sum(each.stat().st_size for each in files),
        seconds=time.monotonic() - start,
    )


def located(options: ConvertOptions) -> ConvertOptions:
    """``options`` with the folders of models and tokenizers that are named as on the Hugging Face hub.

    Raises:
        ConfigError: If one cannot be had.
    """
    return replace(
        options,
        load_path=local_folder(options.load_path, "model"),
        tokenizer=None if options.tokenizer is None else local_folder(options.tokenizer, "tokenizer"),
        config=None if options.config is None else local_folder(options.config, "config"),
    )


def _target(options: ConvertOptions) -> tuple[str, Callable[[StoredModel, ConvertOptions], None]]:
    """What is written, and by whom."""
    if options.to == "hf":
        from lightning_megatron.convert.targets.hugging_face import write_hugging_face

        return "Hugging Face model directory", write_hugging_face
    if options.to == "megatron":
        from lightning_megatron.convert.targets.distributed import write_distributed

        return "checkpoint of MegatronStrategy", write_distributed
    from lightning_megatron.convert.legacy.target import write_legacy

    return "checkpoint of Megatron-LM", write_legacy
