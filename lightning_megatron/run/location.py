"""Where the main thread of a rank is, by its Python frames: in which hook and collective, and in whose code."""

from __future__ import annotations

import itertools
import linecache
import os
import re
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Literal, NamedTuple

import torch
from lightning.pytorch.trainer import call

from lightning_megatron.engine import collectives, cpu
from lightning_megatron.engine.progress import progress

Kind = Literal["setup", "step", "checkpoint"]

_LIGHTNING = "lightning.pytorch"
_LOOPS = "lightning.pytorch.loops"
_SAVING_HOOKS = {"on_save_checkpoint", "state_dict"}
"""Hooks from which Lightning collects what it saves."""
_STEP_WORDS = ("batch", "step", "backward")
_NOT_OF_USER = ("lightning_megatron", "megatron.core")
_WAITING = ("torch.distributed", collectives.__name__, "filelock")
_NOT_REPORTED = (
    "torch",
    "lightning",
    "lightning_utilities",
    cpu.__name__,  # around every call of torch
)
_WAITS = re.compile(r"\.wait\(|run_backward")
_WAITS_FOR_GPU = re.compile(
    r"\.wait\(|run_backward|\.(item|tolist|cpu|to|copy_)\(|synchronize\(|\b(float|int|bool)\("
)


class Location(NamedTuple):
    """Where the main thread of a rank is."""

    text: str
    """E.g. "in all_reduce, in Sleeper.on_train_batch_end (train.py:12 in on_train_batch_end)"; the line is that of the
    innermost function outside of Python, torch and Lightning."""
    kind: Kind
    is_waiting: bool
    """Whether it waits for other ranks: in a collective, or for work started earlier."""
    in_user_code: bool
    """Whether Lightning called code that belongs neither to this package nor to Megatron."""


def locate(frames: Sequence[FrameType]) -> Location:
    """Location of the main thread by its frames, the innermost first."""
    hook = next(filter(None, map(_hook, frames)), "")
    worker = next(filter(None, map(_worker_waited_for, frames)), "")
    waiting = _waiting_in(frames)
    place = ", ".join(f"in {each}" for each in (waiting, worker, hook) if each)
    own = next(filter(_is_reported, frames), frames[0])
    code = own.f_code
    file = os.sep.join(code.co_filename.split(os.sep)[-2:])
    called = itertools.takewhile(lambda frame: not _is_of(frame, _LIGHTNING), frames)
    in_user_code = any(_is_reported(each) and not _is_of(each, *_NOT_OF_USER) for each in called)
    return Location(
        text=f"{place or 'at'} ({file}:{_line_number(own)} in {code.co_name})",
        kind=_kind(hook, frames),
        is_waiting=bool(waiting),
        in_user_code=in_user_code,
    )


def _line_number(frame: FrameType) -> int:
    """Line that a frame is at, or the first of its function: Python has none for some instructions."""
    number: int | None = frame.f_lineno
    return frame.f_code.co_firstlineno if number is None else number


def _is_of(frame: FrameType, *modules: str) -> bool:
    """Whether a frame runs code of one of ``modules``, or of a module below them."""
    name = f"{frame.f_globals.get('__name__')}."
    return any(name.startswith(f"{module}.") for module in modules)


def _kind(hook: str, frames: Sequence[FrameType]) -> Kind:
    if progress.is_saving or hook.rpartition(".")[2] in _SAVING_HOOKS:
        return "checkpoint"
    if hook:
        is_step = any(word in hook for word in _STEP_WORDS)
    else:
        is_step = any(_is_of(frame, _LOOPS) for frame in frames)
    return "step" if is_step else "setup"


def _hook(frame: FrameType) -> str:
    """Name of the Lightning hook that a frame calls, with its callback's class if any; empty if it calls none."""
    if not _is_of(frame, call.__name__):
        return ""
    values = frame.f_locals
    name = values.get("hook_name") or frame.f_code.co_name.removeprefix("_call_callbacks_")
    if name.startswith("_call_"):
        return ""
    callback = values.get("callback")
    return str(name) if callback is None else f"{type(callback).__name__}.{name}"


def _worker_waited_for(frame: FrameType) -> str:
    """The worker process whose batch a frame of torch's DataLoader waits for; empty for any other frame."""
    is_waiting = frame.f_code.co_name == "_try_get_data"
    if not is_waiting or not _is_of(frame, "torch.utils.data.dataloader"):
        return ""
    iterator = frame.f_locals.get("self")
    # Worker of each batch that was requested (torch 2.10 to 2.13).
    tasks = getattr(iterator, "_task_info", {})
    task = tasks.get(getattr(iterator, "_rcvd_idx", None), ())
    if not task:
        return "a wait for a DataLoader's worker"
    process = getattr(iterator, "_workers", {})[task[0]]
    return f"a wait for the DataLoader's worker {task[0]} (process {process.pid})"


def _is_reported(frame: FrameType) -> bool:
    """Whether a frame runs a file outside of Python, torch and Lightning."""
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    is_generated = frame.f_code.co_filename.startswith("<")
    is_python = is_generated or package in sys.stdlib_module_names
    return not is_python and not _is_of(frame, *_NOT_REPORTED)


def _waiting_in(frames: Sequence[FrameType]) -> str:
    """Name of the collective, or a description of the wait, that the thread is in; empty if it waits for no rank."""
    innermost = frames[0]
    inside = list(itertools.takewhile(lambda frame: _is_of(frame, *_WAITING), frames))
    if inside:
        names = [each.f_code.co_name for each in reversed(inside)]
        return next((name for name in names if name != "wrapper"), names[-1])
    line = linecache.getline(innermost.f_code.co_filename, _line_number(innermost))
    pattern = _WAITS_FOR_GPU if torch.cuda.is_initialized() else _WAITS
    return "a wait for other ranks or the GPU" if pattern.search(line) else ""
