"""How is a run saved while it goes on? Training waits only while the shards are copied into host memory.

Threads write the copy (checkpoint_files.py). Everything that ranks must do together happens in ``begin_save`` and
``PendingSave.finish``, both called where every rank has come to the same step: no collective runs in a thread. Nothing
has the final name before every rank's files, their checksums and ``meta.pt`` are on the disk (files.py).
"""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from lightning_megatron.engine.checkpoint_checksums import (
    FileChecksums,
    checksums_of,
    checksums_of_file,
    write_known_checksums,
)
from lightning_megatron.engine.checkpoint_failures import failures_as_errors
from lightning_megatron.engine.checkpoint_files import FileWriter, Shards, torch_bytes
from lightning_megatron.engine.checkpoint_safety import COMMON, META, check_complete
from lightning_megatron.engine.checkpoint_staging import HostMemory
from lightning_megatron.engine.checkpoint_state import SHARDING, RunState, own_meta, rng_file, sharded_state
from lightning_megatron.engine.checkpoint_swap import start_partial
from lightning_megatron.engine.collectives import on_all_ranks_alike
from lightning_megatron.engine.pickles import more_than_data
from lightning_megatron.engine.wrap import finish_parameter_gathers
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files import PARTIAL, FolderLock, publish, sync

_UNFINISHED_META = "meta.tmp"

_FILES_PER_RANK = 4
"""Each has a thread; one H100 host wrote 1.5 GB/s to its disk with two and 1.8 with four, 3.5 and 4.7 to memory."""

_host_memory = HostMemory()


def save(run: RunState, meta: dict[str, Any], path: Path) -> None:
    """Write a checkpoint; every rank must call with the same ``path``.

    Args:
        run: What to save; without an optimizer the checkpoint holds only weights.
        meta: Plain data of rank 0 that goes into ``meta.pt``.
        path: The final name, by convention ``*.ckpt``; an existing checkpoint of that name is replaced at the end.

    Raises:
        CheckpointError: If ``meta`` holds something that could not be loaded again as plain data, or the files cannot
            be written; ``path`` is then as it was.
    """
    # On a CPU the shards can be written from where they are, because nothing changes them meanwhile.
    _begin(run, meta, path, keep_copy=False).finish()


def begin_save(run: RunState, meta: dict[str, Any], path: Path) -> PendingSave:
    """Copy the run into host memory and begin to write it; every rank must call, and ``finish`` what it returns.

    Training may go on when this returns. A save that is still pending is finished first, and raises what it raises.
    Host memory: one copy of this rank's shards, pinned on a GPU and kept for the next save.

    Args:
        run: As for ``save``.
        meta: As for ``save``; copied at once.
        path: As for ``save``.

    Raises:
        CheckpointError: As ``save``, for what is known by now.
    """
    return _begin(run, meta, path, keep_copy=True)


def release_host_memory() -> None:
    """Give back the memory that is kept for the next save, of which there will be none soon; does not communicate."""
    if _pending is None:
        _host_memory.release()


class PendingSave:
    """A checkpoint that threads are writing. It has its final name only after ``finish``."""

    def __init__(self, path: Path, partial: Path, writer: FileWriter) -> None:
        """Made by ``begin_save``."""
        self.path = path
        """The final name."""
        self._partial = partial
        self._writer = writer
        self._refusal = f"checkpoint {path} is not written"
        self._is_beside_training = False
        self._meta: bytes | None = None
        self._lock: FolderLock | None = None
        self._plan: _Plan | None = None
        self._is_over = False

    def is_written(self) -> bool:
        """Whether this rank's files are on the disk, or have failed; costs nothing and does not communicate.

        Ranks differ: ``finish`` waits for all of them, so ask all ranks first if training should not wait.
        """
        return self._writer.is_done

    def finish(self) -> None:
        """Wait for all ranks' files, complete the checkpoint and give it its name; every rank must call.

        Inside the engine (``Runtime.active``), as ``begin_save``. A second call does nothing.

        Raises:
            CheckpointError: On all ranks alike if any rank could not write; ``path`` is then as it was, and nothing
                half-written is left.
        """
        if self._is_over:
            return
        try:
            results, checksums = _on_all_ranks(self._writer.wait, self._refusal)
            gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object((results, checksums), gathered)
            _on_rank_0(lambda: self._complete(gathered or []), self._refusal)
        except BaseException:
            self.abandon()
            raise
        self._end()

    def abandon(self) -> None:
        """Stop writing and delete what is there; does not communicate, and a second call does nothing."""
        if not self._is_over:
            self._writer.abandon()
            if dist.get_rank() == 0:
                shutil.rmtree(self._partial, ignore_errors=True)
            self._end()

    def _complete(self, gathered: list[tuple[list[Any], dict[str, FileChecksums]]]) -> None:
        """Write what only rank 0 writes, ``meta.pt`` last, which says that all the rest is there."""
        assert self._plan is not None
        assert self._meta is not None
        partial = self._partial
        self._plan.writer.finish(self._plan.metadata, [results for results, _ in gathered])
        save_config(CheckpointingConfig("torch_dist", 1), str(partial))
        checksums = {name: each for _, of_rank in gathered for name, each in of_rank.items()}
        for name, each in checksums.items():
            if not (partial / name).is_file() or (partial / name).stat().st_size != each.size:
                raise CheckpointError(
                    f"rank 0 does not see {name}, as another rank has written it, in {partial}; keep checkpoints "
                    "(dirpath, default_root_dir) on a file system that all hosts share, and let nobody else change them"
                )
        for file in partial.iterdir():
            if file.name not in checksums:
                sync(file)
                checksums[file.name] = checksums_of_file(file)
        write_known_checksums(partial, {**checksums, META: checksums_of(self._meta)})
        unfinished = partial / _UNFINISHED_META
        unfinished.write_bytes(self._meta)
        sync(unfinished)
        unfinished.rename(partial / META)
        check_complete(partial)
        publish(partial, self.path, in_background=self._is_beside_training)

    def _end(self) -> None:
        global _pending
        self._is_over = True
        self._plan = self._meta = None  # they hold on to the model
        if self._lock is not None:
            self._lock.release()
        if _pending is self:
            _pending = None


_pending: PendingSave | None = None


class _Plan(TorchDistSaveShardedStrategy):
    """Megatron's strategy up to the point where it knows what each rank writes where; writing is ours."""

    writer: Any = None
    """Megatron's ``FileSystemWriterAsync``, with the buckets of this rank."""
    metadata: Any = None
    """Torch's table of contents without the places in files; on rank 0."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> AsyncRequest:
        self.writer, self.metadata = writer, save_state_dict_ret[1]
        return AsyncRequest(None, (), [])

    def shards(self, *, keep_copy: bool) -> dict[str, Shards]:
        """What this rank writes, by file name, in host memory."""
        buckets = self.writer.write_buckets
        tensors = [tensor for _, _, (_, entries) in buckets for _, tensor in entries]
        if keep_copy or any(tensor.is_cuda for tensor in tensors):
            tensors = _host_memory.copy(tensors)
        copies = iter(tensors)
        return {
            name: (of_bytes, [(item, next(copies)) for item, _ in of_tensors])
            for _, name, (of_bytes, of_tensors) in buckets
        }


def _begin(run: RunState, meta: dict[str, Any], path: Path, *, keep_copy: bool) -> PendingSave:
    global _pending
    if _pending is not None:
        _pending.finish()
    refusal = f"checkpoint {path} is not written"
    # First, because it is the only part that a user's own state can spoil.
    meta_bytes = _on_rank_0(lambda: plain_bytes({**meta, **own_meta(run)}), refusal)
    started = _on_rank_0(lambda: start_partial(path), refusal)
    partial = path.with_name(path.name + PARTIAL)
    try:
        finish_parameter_gathers(run.chunks)
        plan = _Plan("torch_dist", 1, thread_count=_FILES_PER_RANK)
        # megatron-core 0.16.1, dist_checkpointing/serialization.py:save does this, and leaves the ranks without each
        # other where the folder is gone or the disk full.
        sharded, common = save_preprocess({**sharded_state(run), "content_metadata": dict(SHARDING)})
        _on_all_ranks(lambda: partial.mkdir(parents=True, exist_ok=True), refusal)
        _on_rank_0(lambda: torch.save(common, partial / COMMON), refusal)
        with failures_as_errors(refusal):
            _spread_over_replicas(plan, run).async_save(sharded, str(partial))
        shards = _on_all_ranks(lambda: plan.shards(keep_copy=keep_copy), refusal)
        random_states = {rng_file(dist.get_rank()): torch_bytes(run.rng.state_dict())}
        pending = PendingSave(path, partial, FileWriter(partial, shards, random_states))
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            started[1].release()
        raise
    pending._plan, pending._meta, pending._is_beside_training = plan, meta_bytes, keep_copy
    pending._lock = started[1] if started is not None else None
    _pending = pending
    return pending


def _spread_over_replicas(plan: _Plan, run: RunState) -> Any:
    """What all data-parallel ranks have alike is written in parts by all of them, not by the first one."""
    if run.topology.dp * run.topology.parallel.cp == 1:
        return plan
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return FullyParallelSaveStrategyWrapper(plan, group)


T = TypeVar("T")


def _on_all_ranks(work: Callable[[], T], refusal: str) -> T:
    """The result of ``work``; what it raises on one rank is raised on all of them."""

    def with_refusal() -> T:
        with failures_as_errors(refusal):
            return work()

    return on_all_ranks_alike(with_refusal)


def _on_rank_0(work: Callable[[], T], refusal: str) -> T:
    """The result of ``work`` on rank 0 (None elsewhere); what it raises there is raised on all ranks."""
    return _on_all_ranks(work if dist.get_rank() == 0 else lambda: None, refusal)  # type: ignore[return-value]


def plain_bytes(meta: Mapping[str, Any]) -> bytes:
    """``meta.pt`` of ``meta``.

    Raises:
        CheckpointError: If it could not be loaded again as plain data.
    """
    stream = io.BytesIO()
    try:
        torch.save(meta, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        reason = more_than_data(error) if isinstance(error, pickle.UnpicklingError) else str(error)
        raise CheckpointError(
            f"its state must be plain data (numbers, strings, containers, tensors), but {reason}; correct the "
            "hyper-parameters or the state_dict of the callback, module or datamodule in question"
        ) from None
    return stream.getvalue()
