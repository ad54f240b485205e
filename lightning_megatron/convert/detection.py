"""What kind of checkpoint is at a path, and which of its iterations is meant?"""

from __future__ import annotations

import re
from pathlib import Path

from lightning_megatron.convert.hugging_face_files import has_weights
from lightning_megatron.convert.options import ConvertOptions
from lightning_megatron.convert.stored.base import StoredModel
from lightning_megatron.engine.checkpoint_safety import META, is_distributed
from lightning_megatron.errors import CheckpointError, ConfigError

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""Megatron's: the number of the last iteration that was saved, or ``release``."""

_ITERATION = re.compile(r"iter_(\d{7,})")
_RELEASE = "release"
_MOST_NAMED = 5


def open_model(path: Path, options: ConvertOptions) -> StoredModel:
    """Open the checkpoint at ``path``, whatever its format.

    Args:
        path: A folder or file.
        options: Of which ``config`` and ``iteration`` say more about it.

    Raises:
        CheckpointError: If there is none, or it is damaged or unsafe.
        ConfigError: If an option would do nothing.
    """
    if not path.exists():
        raise CheckpointError(f"load_path={path} does not exist; give a checkpoint or a Hugging Face model directory")
    folder = iteration_folder(path, options.iteration)
    if folder.is_dir() and ((folder / META).is_file() or is_distributed(folder)):
        from lightning_megatron.convert.stored.distributed import open_distributed

        return open_distributed(folder, options.config)
    if folder.is_file() and folder.name.endswith((".safetensors", ".bin", ".index.json")) and has_weights(path.parent):
        folder = folder.parent
    if folder.is_dir() and has_weights(folder):
        from lightning_megatron.convert.stored.hugging_face import CONFIG_FILE, open_hugging_face

        if options.config is not None and (folder / CONFIG_FILE).is_file():
            raise ConfigError(f"config={options.config} would do nothing: {folder} has a {CONFIG_FILE}; leave it out")
        return open_hugging_face(folder, options.config)
    from lightning_megatron.convert.legacy.reading import is_legacy, open_legacy

    if is_legacy(folder):
        return open_legacy(folder, options.config, None)
    raise _unknown(folder)


def iteration_folder(path: Path, iteration: int | None) -> Path:
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
    there = _named(sorted(found)) or "none"
    if iteration is not None:
        wanted = f"iter_{iteration:07}"
    elif tracker.is_file():
        wanted = _tracked(tracker)
    elif len(found) == 1:
        (wanted,) = found
    else:
        raise CheckpointError(
            f"{path} has several iterations and no {TRACKER_FILE}; choose one ({there}) with iteration"
        )
    if wanted not in found:
        origin = f"iteration={iteration}" if iteration is not None else f"the iteration that {tracker} names"
        raise CheckpointError(f"{origin} is not there: there is no folder {wanted} in {path}; there are: {there}")
    return path / wanted


def _iterations(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    return [
        each.name
        for each in path.iterdir()
        if each.is_dir() and (each.name == _RELEASE or _ITERATION.fullmatch(each.name))
    ]


def _tracked(tracker: Path) -> str:
    text = tracker.read_text(errors="replace").strip()
    if text == _RELEASE:
        return _RELEASE
    if not (text.isascii() and text.isdecimal()):
        raise CheckpointError(f"{tracker} says {text[:40]!r}, which is no iteration; correct it, or give iteration")
    return f"iter_{int(text):07}"


def _unknown(path: Path) -> CheckpointError:
    known = (
        "a Hugging Face model directory, a *.ckpt of MegatronStrategy, a checkpoint of Megatron-Core (torch_dist) or "
        "of Megatron-LM (mp_rank_*/model_optim_rng.pt), or NVIDIA's .zip of one"
    )
    if path.is_file():
        return CheckpointError(f"load_path={path} is a file of another kind; give {known}")
    checkpoints = _named(sorted(each.name for each in path.glob("*.ckpt")))
    if checkpoints:
        return CheckpointError(f"load_path={path} is a folder of checkpoints; give one of them: {checkpoints}")
    if (path / "config.json").is_file():
        return CheckpointError(f"load_path={path} has a config.json and no weights beside it; fetch them")
    inside = _named(sorted(each.name for each in path.iterdir())) or "nothing"
    return CheckpointError(f"load_path={path} is no checkpoint (it has {inside}); give {known}")


def _named(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")
