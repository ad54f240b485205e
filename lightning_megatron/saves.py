"""What becomes of a save after it has begun? It is completed at a step boundary, or has failed, and others wait for it.

A checkpoint that replaces an older one is worth nothing before it is complete, so what Lightning asks to remove in the
meantime stays until then. A save that fails costs nothing but itself: the older checkpoints are still there, and the
next save is tried as if nothing had happened.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_megatron.checkpoint_io import check_plain, plain_state
from lightning_megatron.ckpt_path import Found
from lightning_megatron.engine import checkpoint
from lightning_megatron.engine.checkpoint import RunState
from lightning_megatron.errors import ConfigError

_GIGABYTE = 1e9


@dataclass(frozen=True, kw_only=True)
class _Saving:
    """The save that is under way."""

    path: Path
    run: RunState
    pending: checkpoint.PendingSave
    begin: float
    """``time.monotonic()`` before the state was taken."""
    stall: float
    """Seconds until training could go on."""


class Saves:
    """The saves of one run, one at a time, and the removals that wait for them. Every rank makes the same calls."""

    def __init__(self, *, asynchronous: bool) -> None:
        """Begin without any.

        Args:
            asynchronous: Whether training goes on while the files are written.
        """
        self._asynchronous = asynchronous
        self._saving: _Saving | None = None
        self._asked_about: _Saving | None = None
        self._removals: list[tuple[Path, tuple[Path, ...]]] = []
        self._written: set[Path] = set()
        self.failure: ConfigError | None = None
        """Why the last save has failed; None if it has not."""
        self.newest: Path | None = None
        """The last checkpoint that a run can go on from; None before the first."""

    def begin(self) -> None:
        """Forget what became of the saves of an earlier run; its checkpoints stay."""
        self.failure, self._removals = None, []

    def end(self) -> None:
        """Give up what is still under way, and give back what saves have taken. Does not communicate."""
        self.abandon()
        checkpoint.wait_for_deletions()
        checkpoint.release_host_memory()

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._saving is not None

    def save(self, run: RunState, lightning_state: Mapping[str, Any], path: Path, *, is_final: bool) -> None:
        """Save to ``path``, after the save that is still under way.

        Args:
            run: The live model, and the optimizer unless only weights are saved.
            lightning_state: Lightning's dict.
            path: The final name, the same on all ranks.
            is_final: Whether the run ends with this save, so that a failure would never be made good.

        Raises:
            CheckpointError: If the dict holds more than plain data; if the save fails and would not be tried again.
        """
        self.finish()
        self._removals = [removal for removal in self._removals if removal[0] != path]
        meta = {"lightning": plain_state(lightning_state)}
        start = time.monotonic()
        with self._failures(is_final, lambda: check_plain(meta)):
            if self._asynchronous and not is_final:
                pending = checkpoint.begin_save(run, meta, path)
                stall = time.monotonic() - start
                self._saving = _Saving(path=path, run=run, pending=pending, begin=start, stall=stall)
            else:
                checkpoint.save(run, meta, path)
                self._succeeded(path, run)
        if is_final:
            checkpoint.release_host_memory()

    def remove(self, path: Path, folders: Iterable[Path]) -> None:
        """Remove ``path``, as soon as no save that may replace it is under way or has failed.

        Args:
            path: A checkpoint, which Lightning may know from a state that it has loaded.
            folders: Where checkpoints are kept. What is elsewhere stays unless this process has written it.
        """
        self._removals.append((path, tuple(folders)))
        if self._saving is None and self.failure is None:
            self._remove_what_is_replaced()

    def is_written_everywhere(self, agree: Callable[[bool], bool]) -> bool:
        """Whether ``finish`` would not have to wait; costs no waiting itself, and is to be asked at every step.

        Args:
            agree: Tells the other ranks whether this one has written its files, and returns whether all ranks had said
                so when they were asked at the step before.
        """
        asked_about, self._asked_about = self._asked_about, self._saving
        all_written = agree(self._saving is not None and self._saving.pending.is_written())
        return all_written and asked_about is not None and asked_about is self._saving

    def finish(self, *, is_final: bool = False) -> None:
        """Complete the save that is under way, if there is one; waits for the files of all ranks.

        Raises:
            CheckpointError: As ``save`` does.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        with self._failures(is_final):
            saving.pending.finish()
            self._report(saving)
            self._succeeded(saving.path, saving.run)

    def is_newest(self, found: Found | None, step: int) -> bool:
        """Whether ``found`` is the last checkpoint of these saves, and of ``step``."""
        if found is None or self.newest is None or found.step != step:
            return False
        return found.path.resolve() == self.newest.resolve()

    def _succeeded(self, path: Path, run: RunState) -> None:
        self.failure = None
        self._written.add(path)
        if run.optimizer is not None:
            self.newest = path
        elif path == self.newest:
            self.newest = None
        self._remove_what_is_replaced()

    def abandon(self) -> None:
        """Give the save that is under way up: other ranks may never come to complete it. Does not communicate."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        saving.pending.abandon()
        rank_zero_warn(
            f"checkpoint {saving.path} is not written: the run failed before all ranks had finished it. Older "
            "checkpoints stay"
        )

    def raise_failure(self) -> None:
        """Say at the end of a run that its last save has failed.

        Raises:
            CheckpointError: If it has.
        """
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    @contextlib.contextmanager
    def _failures(self, is_final: bool, blame: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Warn of what goes wrong, where that is enough.

        Args:
            is_final: Whether it is not.
            blame: Raises if it is not the disk's fault.
        """
        try:
            yield
        except ConfigError as error:
            blame()
            if is_final:
                raise
            self.failure = error
            rank_zero_warn(f"{error}. The run goes on, older checkpoints stay, and the next save is tried as usual")

    def _remove_what_is_replaced(self) -> None:
        removals, self._removals = self._removals, []
        if dist.get_rank() != 0:
            return
        for path, folders in removals:
            try:
                if path in self._written or checkpoint.is_own_within(path, folders):
                    checkpoint.remove(path, in_background=self._asynchronous)
                elif os.path.lexists(path):
                    where = " or ".join(map(str, folders))
                    rank_zero_warn(f"{path} stays: it is no complete checkpoint within {where}; remove it by hand")
            except OSError as error:
                rank_zero_warn(f"checkpoint {path} could not be removed: {error}; remove it by hand")

    def _report(self, saving: _Saving) -> None:
        if not self._asynchronous or dist.get_rank() != 0:
            return
        seconds = time.monotonic() - saving.begin
        size = 0
        with contextlib.suppress(OSError):  # this is news, not a check
            size = sum(file.stat().st_size for file in saving.path.iterdir())
        rank_zero_info(
            f"checkpoint {saving.path} is complete: {size / _GIGABYTE:.3g} GB in {seconds:.3g} s, "
            f"{size / _GIGABYTE / seconds:.3g} GB/s; training stood still for {saving.stall:.3g} s"
        )
