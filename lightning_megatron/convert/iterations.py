"""Which iteration of a folder of several is meant? The one that Megatron's tracker file names, or the only one."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_megatron.errors import CheckpointError, ConfigError

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""Megatron's: the number of the last iteration that was saved, or ``release``."""

_ITERATION = re.compile(r"iter_(\d{7,})")
_RELEASE = "release"
_LONGEST_TEXT = 40
_MOST_NAMED = 5


def iteration_folder(path: Path, iteration: int | None = None) -> Path:
    """``path``, or the folder in it of ``iteration``, or if that is None of the one that the tracker file names.

    Raises:
        CheckpointError: If there is no such iteration, or several and nothing says which.
        ConfigError: If ``iteration`` is given, and ``path`` does not hold several.
    """
    found = _iterations(path)
    tracker = path / TRACKER_FILE
    if not found and not tracker.is_file():
        if iteration is not None:
            raise ConfigError(
                f"iteration={iteration} would do nothing: {path} has no folders iter_{iteration:07}; leave it out"
            )
        return path
    there = named(found) or "none"
    if iteration is not None:
        wanted, origin = f"iter_{iteration:07}", f"iteration={iteration} is not there:"
    elif tracker.is_file():
        text = tracker.read_text(errors="replace").strip()
        wanted, origin = _tracked(tracker, text), f"{tracker} names iteration {text[:_LONGEST_TEXT]!r}, and"
    elif len(found) == 1:
        return path / found[0]
    else:
        raise CheckpointError(f"{path} has several iterations and no {TRACKER_FILE}; give the folder of one: {there}")
    if wanted not in found:
        raise CheckpointError(f"{origin} there is no folder {wanted[:_LONGEST_TEXT]} in {path}; there are: {there}")
    return path / wanted


def named(names: list[str]) -> str:
    """The first of the names of files, for messages."""
    return ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")


def _iterations(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    return sorted(
        each.name
        for each in path.iterdir()
        if each.is_dir() and (each.name == _RELEASE or _ITERATION.fullmatch(each.name))
    )


def _tracked(tracker: Path, text: str) -> str:
    if text == _RELEASE:
        return _RELEASE
    if not (text.isascii() and text.isdecimal()):
        raise CheckpointError(
            f"{tracker} says {text[:_LONGEST_TEXT]!r}, which is no iteration; correct it, or give the folder of one"
        )
    return f"iter_{text.lstrip('0').zfill(7)}"
