"""What ``meta.pt`` and Lightning's dict in it must hold: a file with the right checksums may still be forged.

Readers index these dicts freely after the check. Keys that are not listed are those of users, and are not read here.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from packaging.version import InvalidVersion, Version

from lightning_megatron.errors import CheckpointError, ConfigError, type_of

_NUMBER = (int, float)
_OPTIONAL_TEXT = (str, type(None))
_OPTIONAL_DICT = (Mapping, type(None))

_Kinds = tuple[type, ...]

_REQUIRED: dict[str, _Kinds] = {
    "layout": (Mapping,),
    "has_optimizer": (bool,),
    "optimizer_format": _OPTIONAL_DICT,
    "model_description": (Mapping,),
    "lightning": (Mapping,),
}
"""Keys that ``meta.pt`` always has, beside ``format_version``."""
_OPTIONAL: dict[str, _Kinds] = {
    "time": _NUMBER,
    "part": (str,),
    "num_averaged": (int,),
    "base": _OPTIONAL_TEXT,
    "hugging_face_config": _OPTIONAL_DICT,
}
"""Keys of ``meta.pt``; the first checkpoints lack the optional ones."""
_LIGHTNING: dict[str, _Kinds] = {
    "epoch": (int,),
    "global_step": (int,),
    "pytorch-lightning_version": (str,),
    "state_dict": (Mapping,),
    "loops": (Mapping,),
    "callbacks": (Mapping,),
    "optimizer_states": (list,),
    "lr_schedulers": (list,),
    "hyper_parameters": _OPTIONAL_DICT,
}
"""Keys of Lightning's dict, if they are there."""
_NEEDED_TO_RUN = ("epoch", "global_step", "pytorch-lightning_version", "state_dict")
_NEEDED_TO_RESUME = ("loops", "callbacks", "optimizer_states", "lr_schedulers")
_LIBRARIES = {"lightning", "lightning_megatron", "torch", "torchmetrics"}
"""Packages in which an exception while a run is restored is due to the checkpoint."""
_FIRST_LIGHTNING = 2
"""Major version of Lightning of the first checkpoints; Lightning would rewrite the dict of an older one."""


def is_meta(content: Any) -> TypeGuard[dict[str, Any]]:
    """Whether ``content`` has the keys that ``meta.pt`` of any version has."""
    return isinstance(content, dict) and content.keys() >= {"format_version", *_REQUIRED}


def check_meta(meta: Mapping[str, Any], path: Path) -> None:
    """Check the types in ``meta.pt``, whose required keys are there.

    Raises:
        CheckpointError: If a value has another type; names the key.
    """
    for name, kinds in (_REQUIRED | _OPTIONAL).items():
        if name in meta or name in _REQUIRED:
            _require(meta, name, kinds, path, "meta.pt")
    for name in ("layout", "model_description", "lightning"):
        _require_names(meta[name], name, path)
    if meta.get("part", "all") not in ("all", "base", "adapters"):
        raise _damaged(path, "meta.pt", "part", "all, base or adapters", meta["part"])
    if meta.get("part") == "adapters":
        _require(meta, "base", (str,), path, "meta.pt")
    if meta["has_optimizer"]:
        _require(meta, "optimizer_format", (Mapping,), path, "meta.pt")
    for name, size in meta["layout"].items():
        if type(size) not in (int, type(None)):
            raise _damaged(path, "layout", name, "a number", size)
    for name, kinds in _LIGHTNING.items():
        if name in meta["lightning"]:
            _require(meta["lightning"], name, kinds, path, "lightning")


def check_lightning_state(
    state: Mapping[str, Any],
    path: Path,
    loop: Mapping[str, Any],
    *,
    resumes: bool,
) -> None:
    """Check Lightning's dict before a run uses it.

    Args:
        state: The dict of a checkpoint, after ``check_meta``.
        path: The checkpoint, for messages.
        loop: State of the run's own training loop, which that of the checkpoint must be like.
        resumes: Whether the run goes on with loops, callbacks and schedules of the checkpoint.

    Raises:
        CheckpointError: If a key is missing, or a value has another type; names the key.
    """
    needed: tuple[str, ...] = _NEEDED_TO_RUN
    if resumes:
        needed += _NEEDED_TO_RESUME
    for name in needed:
        _require(state, name, _LIGHTNING[name], path, "lightning")
    version = state["pytorch-lightning_version"]
    try:
        is_known = Version(version).major >= _FIRST_LIGHTNING
    except InvalidVersion:
        is_known = False
    if not is_known:
        expected = f"{_FIRST_LIGHTNING}.0 or newer"
        raise _damaged(path, "lightning", "pytorch-lightning_version", expected, version)
    for name in ("callbacks", "lr_schedulers", "optimizer_states"):
        entries = state.get(name, {})
        if not isinstance(entries, Mapping):
            entries = dict(enumerate(entries))
        for key, entry in entries.items():
            if not isinstance(entry, Mapping):
                raise _damaged(path, name, str(key), "a dict", entry)
    if not resumes:
        return
    _require(state["loops"], "fit_loop", (Mapping,), path, "loops")
    fit_loop = state["loops"]["fit_loop"]
    for name in ("state_dict", "epoch_progress", "epoch_loop.batch_progress"):
        _require(fit_loop, name, (Mapping,), path, "fit_loop")
    _check_loaders(fit_loop["state_dict"].get("combined_loader", []), path)
    for name, expected in loop.items():
        if name in fit_loop and not name.endswith("state_dict"):
            _check_like(fit_loop[name], expected, path, name)


def restore_error(error: Exception, path: object) -> CheckpointError | None:
    """The error of a run that Lightning could not restore from ``path``; None if the run failed in any other way.

    The states of callbacks, schedules and data modules have no schema here: theirs is in their own methods.
    """
    is_of_data = isinstance(error, (LookupError, TypeError, AttributeError, ValueError))
    if isinstance(error, ConfigError) or not is_of_data:
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    restores = any(
        module.endswith(".checkpoint_connector") and frame.f_code.co_name.startswith("restore")
        for frame, module in zip(frames, modules, strict=True)
    )
    raised_in = modules[-1].partition(".")[0]
    if not restores or raised_in not in _LIBRARIES:  # a bug of the user keeps its traceback
        return None
    reason = " ".join(str(error).split())[:100]
    return CheckpointError(
        f"checkpoint {path} does not fit this run, or is damaged: {type(error).__name__}: {reason}; use another"
    )


def _check_loaders(states: Any, path: Path) -> None:
    if not isinstance(states, list) or not all(isinstance(each, Mapping) for each in states):
        raise _damaged(path, "fit_loop", "combined_loader", "a list of dicts", states)


def _check_like(
    found: Any,
    expected: Any,
    path: Path,
    name: str,
) -> None:
    """Check that a value has the keys of an expected one, with numbers where that has numbers."""
    if not isinstance(expected, Mapping):
        if isinstance(expected, int) and not isinstance(found, int):
            raise _damaged(path, "fit_loop", name, "a number", found)
        return
    if not isinstance(found, Mapping):
        raise _damaged(path, "fit_loop", name, "a dict", found)
    for key, value in expected.items():
        if key not in found:
            raise _damaged(path, "fit_loop", f"{name}.{key}", "a value", None)
        _check_like(found[key], value, path, f"{name}.{key}")


def _require_names(
    content: Mapping[Any, Any],
    name: str,
    path: Path,
) -> None:
    for key in content:
        if not isinstance(key, str):
            raise _damaged(path, "meta.pt", name, "names as keys", key)


def _require(
    content: Mapping[str, Any],
    name: str,
    kinds: _Kinds,
    path: Path,
    where: str,
) -> None:
    value = content.get(name)
    is_other = isinstance(value, bool) and bool not in kinds  # a bool is an int
    if name not in content or not isinstance(value, kinds) or is_other:
        names = [kind.__name__.removesuffix("Type") for kind in kinds]
        expected = " or ".join(names)
        raise _damaged(path, where, name, expected, value)


def _damaged(
    path: Path,
    where: str,
    name: str,
    expected: str,
    value: Any,
) -> CheckpointError:
    got = repr(value)[:50]
    if isinstance(value, (Mapping, list, torch.Tensor)):
        got = type_of(value)
    return CheckpointError(
        f"checkpoint {path} is damaged: expected {expected} for {name} in {where}, got {got}; use another"
    )
