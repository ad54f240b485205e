"""Which files belong to a model beside its config and weights? Its generation config and its tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from lightning_megatron.hub import TOKENIZER_FILES

GENERATION_CONFIG_FILE = "generation_config.json"


def generation_config(folder: Path | None) -> list[Path]:
    """The generation config in ``folder``, if it has one."""
    return [] if folder is None else _existing([folder / GENERATION_CONFIG_FILE])


def tokenizer_files(folder: Path | None) -> list[Path]:
    """The tokenizer's files in ``folder``, a folder of chat templates among them; none if it has no tokenizer."""
    if folder is None:
        return []
    return _existing(each for each in folder.iterdir() if any(fnmatchcase(each.name, glob) for glob in TOKENIZER_FILES))


def companion_files(companions: Path | None, tokenizer: Path | None) -> list[Path]:
    """What to copy beside converted weights.

    Args:
        companions: ``StoredModel.companions``.
        tokenizer: ``ConvertOptions.tokenizer``, instead of that among the companions.
    """
    return generation_config(companions) + tokenizer_files(companions if tokenizer is None else tokenizer)


def _existing(paths: Iterable[Path]) -> list[Path]:
    return sorted(path for path in paths if path.exists())


def copy_companions(files: Iterable[Path], folder: Path) -> None:
    """Copy them into ``folder``."""
    for path in files:
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)
