"""Files that accompany weights: tokenizer and generation config."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from lightning_megatron.storage.hub import TOKENIZER_FILES

GENERATION_CONFIG_FILE = "generation_config.json"


def generation_config(folder: Path | None) -> list[Path]:
    """Path of the generation config in ``folder``, as a list; empty if there is none."""
    return _matching_files(folder, (GENERATION_CONFIG_FILE,))


def tokenizer_files(folder: Path | None) -> list[Path]:
    """Tokenizer files in ``folder``, including a directory of chat templates; empty if there are none."""
    return _matching_files(folder, TOKENIZER_FILES)


def companion_files(
    companions: Path | None,
    tokenizer: Path | None = None,
) -> list[Path]:
    """Generation config and tokenizer files to copy beside converted weights.

    Args:
        companions: ``Source.companions``.
        tokenizer: Directory of another tokenizer; None: the one in ``companions``.
    """
    return generation_config(companions) + tokenizer_files(tokenizer or companions)


def _matching_files(folder: Path | None, globs: Collection[str]) -> list[Path]:
    if folder is None:
        return []
    return [
        path
        for path in sorted(folder.iterdir())
        if any(fnmatchcase(path.name, glob) for glob in globs)
    ]


def copy_companions(files: Iterable[Path], folder: Path) -> None:
    """Copy files, and the files directly in directories, into ``folder``, which is created if there are any.

    Symbolic links to directories are skipped: their target may contain ``folder``.
    """
    for path in files:
        is_folder = path.is_dir() and not path.is_symlink()
        for file in sorted(path.iterdir()) if is_folder else [path]:
            if not file.is_file():
                continue
            target = folder / file.relative_to(path.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
