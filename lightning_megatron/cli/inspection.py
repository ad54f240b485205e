"""What is at a path, and how is it shown?

``_KINDS`` lists what can be there; the first kind that recognises the path describes it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.cli.failure import printable
from lightning_megatron.data.describe import as_text, dataset_prefix, describe_dataset
from lightning_megatron.errors import ConfigError, DataError

_DOCUMENTS_WITH_A_TOKENIZER = 3
_MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """What ``inspect`` is asked for."""

    path: str
    """What to describe."""
    json: bool = False
    """Print JSON instead of text."""
    tokenizer: Path | None = None
    """Folder of the tokenizer that decodes documents."""
    documents: int | None = None
    """How many of the first documents to show; 3 if there is a tokenizer, else none."""

    def __post_init__(self) -> None:
        """Check what can be known before anything is read.

        Raises:
            ConfigError: If ``documents`` is negative.
        """
        if self.documents is not None and self.documents < 0:
            raise ConfigError(f"documents={self.documents} must be at least 0; correct it")


def inspect(options: InspectOptions) -> str:
    """What is at a path, as text to print.

    Raises:
        DataError: If nothing is there, or something that no kind recognises or that is damaged.
    """
    for describe in _KINDS:
        report = describe(options)
        if report is not None:
            return report
    path = options.path
    if not os.path.exists(path):
        raise DataError(
            f"path={path} does not exist, nor do {path}.bin and .idx; give the prefix of a dataset, or a checkpoint"
        )
    if os.path.isdir(path):
        found = sorted({str(each.with_suffix("")) for each in Path(path).glob("*.idx")})
        found += sorted(map(str, Path(path).glob("*.ckpt")))
        names = ", ".join(found[:_MOST_NAMED]) + (", …" if len(found) > _MOST_NAMED else "")
        fix = (
            f"give one of these in it: {names}"
            if found
            else "give the prefix of a dataset, e.g. data/corpus_document, a *.ckpt or a model directory"
        )
        raise DataError(f"path={path} is a folder, and neither a dataset nor a checkpoint that is read; {fix}")
    raise DataError(
        f"path={path} is no indexed dataset (.bin and .idx) and no checkpoint; give the prefix of a dataset, one of its"
        " files, a *.ckpt or a model directory"
    )


def _describe_dataset(options: InspectOptions) -> str | None:
    prefix = dataset_prefix(options.path)
    if prefix is None or _is_of_a_model(Path(options.path)):
        return None
    tokenizer = None
    if options.tokenizer is not None:
        from lightning_megatron.data.corpus.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(options.tokenizer)
    default = 0 if tokenizer is None else _DOCUMENTS_WITH_A_TOKENIZER
    report = describe_dataset(prefix, default if options.documents is None else options.documents, tokenizer)
    return json.dumps(report, indent=2) if options.json else as_text(report)


def _is_of_a_model(path: Path) -> bool:
    """Whether ``path`` is a pickled weight file, which ends in .bin like a dataset's."""
    if path.suffix != ".bin" or path.with_suffix(".idx").exists():
        return False
    from lightning_megatron.convert.hugging_face_files import directory_of

    return directory_of(path) is not None


def _describe_checkpoint(options: InspectOptions) -> str | None:
    if not os.path.exists(options.path):
        return None
    from lightning_megatron.cli import checkpoint_report
    from lightning_megatron.convert.contents import checkpoint_contents

    contents = checkpoint_contents(Path(options.path))
    if contents is None:
        return None
    for name in ("tokenizer", "documents"):
        if (value := getattr(options, name)) is not None:
            raise ConfigError(f"{name}={value} is for datasets, and {options.path} is a checkpoint; leave it out")
    if options.json:
        return json.dumps(checkpoint_report.as_json(contents), indent=2, default=str)
    return checkpoint_report.as_text(contents)


_KINDS: tuple[Callable[[InspectOptions], str | None], ...] = (_describe_dataset, _describe_checkpoint)
"""Each gives None for a path that is of another kind."""


def show(text: str) -> None:
    """Print in characters that the terminal has; whoever reads a part only (``| head``) has read what they want."""
    text = "\n".join(map(printable, text.split("\n")))
    encoding = sys.stdout.encoding or "ascii"
    text = text.encode(encoding, errors="replace").decode(encoding)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is left in the buffer would raise again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
