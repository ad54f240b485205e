"""Saving a checkpoint: training waits while shards are copied into host memory; threads write the copies to disk.

The sharded part is described to Megatron's ``dist_checkpointing``. The rest is plain data in ``meta.pt``: Lightning's
own dict, and the model, optimizer and layout that the sharded part belongs to.

Megatron and torch plan which rank writes which part of which tensor; copying, writing and naming are ours. Megatron's
own writer forks the trainer, starts a manager process that runs the user's script again, and writes tensors on a CPU
from memory that training changes. Here threads of this process write the copies and compute their checksums. All
collectives are in ``Save.start`` and ``Save.finish``, called when every rank has reached the same step: none runs in a
thread. Nothing gets the final name before every rank's files, their checksums and ``meta.pt`` are on the disk.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import pickle
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.filesystem_async import _split_by_size_and_type
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import (
    FileSystemWriter,
    SerializationFormat,
    _StorageWriterTransforms,
    _write_item,
)
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as save_at_once

from lightning_megatron.checkpoint.host_buffer import HostBuffer
from lightning_megatron.checkpoint.meta import (
    BACKENDS,
    COMMON,
    FORMAT_VERSION,
    KNOWN_BACKENDS,
    META,
    TABLE,
)
from lightning_megatron.checkpoint.plain_data import plain_state, torch_bytes
from lightning_megatron.checkpoint.state import (
    SHARDING,
    AllPageable,
    RunState,
    layout_of,
    rng_file,
    sharded_average,
    sharded_state,
    sharded_weights,
)
from lightning_megatron.engine.collectives import raise_on_all_ranks
from lightning_megatron.engine.progress import progress
from lightning_megatron.errors import CheckpointError
from lightning_megatron.storage.checksums import FileChecksums, write_checksums
from lightning_megatron.storage.failures import failures_as_errors, pickle_refusal
from lightning_megatron.storage.locks import FolderLock
from lightning_megatron.storage.paths import as_path, file_sizes, is_remote, synced_file
from lightning_megatron.storage.publish import (
    PARTIAL,
    lock_partial,
    publish,
    remove_leftovers,
    wait_for_deletions,
)
from lightning_megatron.storage.stores import delete_from_store

T = TypeVar("T")


class Save:
    """One checkpoint being saved. Every rank must make the same calls, except where methods say otherwise.

    Training may continue after ``start``: threads write a copy of the run. A fork would double the memory of a trainer
    with its GPU context, and a spawned process would run the user's script again. Threads leave the interpreter to the
    trainer, because nearly all of their time passes in system calls and in zlib, on large pieces; torch's own checksum
    of an archive's entries, which holds the interpreter lock, is off meanwhile.
    """

    def __init__(
        self,
        run: RunState,
        lightning_state: Mapping[str, Any],
        path: str | Path,
    ) -> None:
        """Describe the checkpoint, before anything is written.

        Args:
            run: All of the run, even if only weights are saved.
            lightning_state: Lightning's dict; without ``optimizer_states`` only weights are saved.
            path: The final name, the same on all ranks.

        Raises:
            CheckpointError: On all ranks, if Lightning's dict holds more than plain data.
            NonFiniteError: If the last step ends the run.
        """
        run.settle()
        if "optimizer_states" not in lightning_state:
            run = run.weights_only()
        self._run = run
        self.path = as_path(path)
        self._refusal = f"checkpoint {self.path} is not written"
        self._meta = b""
        with _errors_on_all_ranks(self._refusal):
            if dist.get_rank() == 0:
                self._meta = meta_bytes(run, lightning_state)
        self._partial = self.path.with_name(self.path.name + PARTIAL)
        """Where the files are written."""
        self._table: Any = None
        """On rank 0 torch's table of contents."""
        self._lock: FolderLock | None = None
        self._jobs: list[Future[_Written]] = []
        self._is_abandoned = threading.Event()
        self._has_archive_checksums = torch.serialization.get_crc32_options()

    def start(self, buffer: HostBuffer) -> None:
        """Copy the run and start to write.

        Args:
            buffer: For the copy; used until ``finish`` or ``abandon``.

        Raises:
            CheckpointError: On all ranks, if the files cannot be written; ``path`` is then unchanged.
        """
        self._begin = time.monotonic()
        with _errors_on_all_ranks(self._refusal):
            if dist.get_rank() == 0:
                if is_remote(self.path) and not (self.path / META).is_file():
                    self._partial = self.path  # an object store would have to copy all of it
                self._lock = _start_partial(self.path, self._partial)
        self._partial = self.path.with_name(_broadcast(self._partial.name))
        with self._abandon_on_error():
            plan, planner, common = _plan_save(sharded_state(self._run))
            plans = _gather_on_rank_0(plan)
            if plans:
                # Not the planner's own, which refuses moments with gaps, left by frozen layers stacked with others.
                _, self._table = create_default_global_save_plan(plans)
            with _errors_on_all_ranks(self._refusal):
                self._partial.mkdir(parents=True, exist_ok=True)
                contents: dict[str, bytes | Shards] = {**_stage(plan, planner, buffer)}
                random_states = self._run.runtime.state_dict()
                contents[rng_file(dist.get_rank())] = torch_bytes(random_states)
                if dist.get_rank() == 0:
                    contents |= _unsharded_files(common)
            without_checksums = partial(torch.serialization.set_crc32_options, False)
            threads = ThreadPoolExecutor(_FILES_PER_RANK + 1, initializer=without_checksums)
            self._jobs = [
                threads.submit(self._write, name, content) for name, content in contents.items()
            ]
            threads.shutdown(wait=False)
        self._stall = time.monotonic() - self._begin

    def _write(self, name: str, content: bytes | Shards) -> _Written:
        results = []
        with synced_file(self._partial / name, _BUFFER) as stream:
            file = _ChecksummedFile(stream, self._is_abandoned)
            if isinstance(content, bytes):
                file.write(content)
            else:
                transforms = _StorageWriterTransforms()
                kind = SerializationFormat.TORCH_SAVE
                stream_for_torch: Any = file  # declared as IOBase; write and tell are called
                results = [
                    _write_item(transforms, stream_for_torch, data, item, name, kind)
                    for item, data in content
                ]
        return name, file.checksums, results

    def is_written(self) -> bool:
        """Whether this rank's files are on the disk, or have failed; costs nothing and does not communicate.

        Ranks differ: ``finish`` waits for all of them, so ask all ranks first if training should not wait.
        """
        return all(job.done() for job in self._jobs)

    def finish(self) -> None:
        """Wait for all ranks' files, complete the checkpoint and publish it under its name.

        Raises:
            CheckpointError: On all ranks, if any rank could not write; ``path`` is then unchanged, and no partial files
                are left.
        """
        with self._abandon_on_error():
            with _errors_on_all_ranks(self._refusal):
                own = [job.result() for job in self._wait()]
            written = _gather_on_rank_0(own)
            with _errors_on_all_ranks(self._refusal):
                if dist.get_rank() == 0:
                    self._complete(list(itertools.chain(*written)))
        self._release()

    @contextlib.contextmanager
    def _abandon_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Stop writing, wait for the threads, and delete the files; does not communicate."""
        self._is_abandoned.set()
        self._wait()
        # A store's client raises any type; what stays is no complete checkpoint.
        with contextlib.suppress(Exception):
            if dist.get_rank() == 0:
                self._delete_partial()
        self._release()

    def _delete_partial(self) -> None:
        if not is_remote(self._partial):
            shutil.rmtree(self._partial)
        elif not (self._partial / META).is_file():
            # Otherwise it is complete, and what it replaces may be gone.
            delete_from_store(self._partial)

    def report(self) -> str:
        """How long the save took, in a line."""
        seconds = time.monotonic() - self._begin
        return f"checkpoint {self.path} is complete after {seconds:.3g} s, of which training waited {self._stall:.3g} s"

    def _wait(self) -> list[Future[_Written]]:
        wait(self._jobs)
        # The option is per thread in torch 2.13, and per process in some earlier versions.
        torch.serialization.set_crc32_options(self._has_archive_checksums)
        return self._jobs

    def _complete(self, written: Sequence[_Written]) -> None:
        """Write the files of rank 0 alone, ``meta.pt`` last, which marks the checkpoint as complete."""
        partial = self._partial
        sizes = file_sizes(partial)
        for name, of_file, _ in written:
            if sizes.get(name) != of_file.size:
                raise CheckpointError(
                    f"rank 0 does not see {name}, as another rank has written it, in {partial}; keep checkpoints "
                    "(dirpath, default_root_dir) on a file system that all hosts share, and let nobody else change them"
                )
        _writer(partial).finish(self._table, [results for _, _, results in written])
        checksums = {name: checksums for name, checksums, _ in written}
        checksums[TABLE] = FileChecksums().update((partial / TABLE).read_bytes())
        checksums[META] = FileChecksums().update(self._meta)
        write_checksums(partial, checksums)
        with synced_file(partial / META) as stream:
            stream.write(self._meta)
        publish(partial, self.path)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()


def preallocate(run: RunState, buffer: HostBuffer) -> None:
    """Allocate and pin memory for saves of ``run`` in a thread, so that the first save does not wait for it.

    Every rank must call. It plans a save, which takes a small part of a save's time.
    """
    plan, planner, _ = _plan_save(sharded_state(run) | sharded_average(run))
    buffer.preallocate(_tensors(plan.items, planner))


_OWN_FILES = (META, COMMON, TABLE, BACKENDS, "*.distcp", "rng_*.pt")
"""Patterns of file names of which a checkpoint has some, also after a save to a store that was killed in its middle."""


def _start_partial(path: Path, in_store: Path | None = None) -> FolderLock | None:
    """Create an empty directory beside ``path`` to write into, and remove leftovers of killed programs.

    In an object store, which has neither directories nor locks, empty ``in_store`` or ``path`` instead.

    Raises:
        CheckpointError: If another program is writing the same checkpoint, or ``path`` is a directory of other files.
    """
    names: list[str] = []
    if path.is_dir() and not path.is_symlink():
        names = [each.name for each in path.iterdir()]
    is_own = any(fnmatch(name, pattern) for name in names for pattern in _OWN_FILES)
    if names and not is_own:
        raise CheckpointError(
            f"{path} is a directory of other files, which would be lost; give a new name"
        )
    if is_remote(path):
        delete_from_store(in_store or path)
        return None
    partial = path.with_name(path.name + PARTIAL)
    wait_for_deletions()
    lock = lock_partial(partial, CheckpointError)
    remove_leftovers(path.parent, "*.ckpt")
    return lock


def write_weights(chunks: list[Any], parent: Path) -> Path:
    """Write the weights of ``chunks`` into a new directory in ``parent``; every rank must call.

    Megatron's process groups are global: the weights of a module that another Trainer has built for another layout are
    written while its groups exist, and read (``load.read_weights``) once the new groups exist.

    Returns:
        The directory, the same on every rank.
    """
    names = [f"megatron_relayout_{uuid.uuid4().hex}"]
    dist.broadcast_object_list(names, 0)
    path = parent / names[0]
    refusal = f"weights are not written to {path}"
    with failures_as_errors(refusal):
        _, planner, common = _plan_save(sharded_weights(chunks))
        save_at_once(planner.state_dict, storage_writer=_writer(path), planner=planner)
    with _errors_on_all_ranks(refusal):
        if dist.get_rank() == 0:
            for name, data in _unsharded_files(common).items():
                (path / name).write_bytes(data)
    return path


# ---- meta.pt --------------------------------------------------------------------------------------------------------


def meta_bytes(run: RunState, lightning_state: Mapping[str, Any]) -> bytes:
    """Content of ``meta.pt``.

    Raises:
        CheckpointError: If Lightning's dict holds something that could not be loaded again as plain data.
    """
    config = run.hugging_face_config
    optimizer = run.optimizer
    description = {
        "format_version": FORMAT_VERSION,
        "layout": layout_of(run.topology),
        "has_optimizer": optimizer is not None,
        "optimizer_format": None if optimizer is None else optimizer.state_format,
        "model_description": dict(run.model_description),
        "time": time.time(),
        "position": run.position,
        "part": run.part,
        "num_averaged": run.num_averaged,
        "base": run.base,
        "hugging_face_config": None if config is None else dict(config),
    }
    try:
        content = torch_bytes({"lightning": plain_state(lightning_state), **description})
        torch.load(io.BytesIO(content), weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        reason = str(error)
        if isinstance(error, pickle.UnpicklingError):
            reason = pickle_refusal(error)
        raise CheckpointError(
            f"its state must be plain data (numbers, strings, containers, tensors), but {reason}; correct the "
            "hyper-parameters or the state_dict of the callback, module or datamodule in question"
        ) from None
    return content


# ---- shards ---------------------------------------------------------------------------------------------------------

_FILES_PER_RANK = 4
"""Files per rank, each with a thread; one H100 host wrote 1.5 GB/s to its disk with two and 1.8 with four, 3.5 and 4.7
to memory."""

Shards = Sequence[tuple[Any, io.BytesIO | torch.Tensor]]
"""Content of one file: data with their ``WriteItem``."""

_Written = tuple[str, FileChecksums, list[Any]]
"""Name and checksums of a file, and torch's ``WriteResult`` for each shard in it."""


def _writer(folder: Path) -> FileSystemWriter:
    """Torch's writer, of which only the table of contents is used where threads write the files."""
    kind = FsspecWriter if is_remote(folder) else FileSystemWriter
    return kind(str(folder), sync_files=not is_remote(folder))


def _plan_save(state: dict[str, Any]) -> tuple[Any, MCoreSavePlanner, dict[str, Any]]:
    """Plan what this rank writes of ``state``; returns plan, planner and what is not sharded; every rank must call."""
    sharded, common = save_preprocess({**state, "content_metadata": dict(SHARDING)})
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if replicas.size() > 1:
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
        FullyParallelSaveStrategyWrapper(strategy, replicas).apply_saving_parallelization(sharded)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    with AllPageable():
        tensors = mcore_to_pyt_state_dict(by_key, False)
        planner.set_up_planner(tensors, is_coordinator=dist.get_rank() == 0)
        plan = planner.create_local_plan()
    return plan, planner, common


def _stage(
    plan: Any,
    planner: Any,
    buffer: HostBuffer,
) -> dict[str, Shards]:
    """Copy this rank's shards to host memory, and return them by file name."""
    buckets = list(filter(None, _split_by_size_and_type(_FILES_PER_RANK, plan.items)))
    copies = iter(buffer.copy(_tensors(itertools.chain(*buckets), planner)))
    files: dict[str, Shards] = {}
    for index, bucket in enumerate(buckets):
        shards = []
        for item in bucket:
            is_tensor = item.type != WriteItemType.BYTE_IO
            data = next(copies) if is_tensor else planner.resolve_data(item)
            shards.append((item, data))
        files[f"__{dist.get_rank()}_{index}.distcp"] = shards
    return files


def _tensors(items: Iterable[Any], planner: Any) -> list[torch.Tensor]:
    return [planner.resolve_data(item) for item in items if item.type != WriteItemType.BYTE_IO]


def _unsharded_files(common: dict[str, Any]) -> dict[str, bytes]:
    """Files of a distributed checkpoint that rank 0 writes, besides the table of contents."""
    return {COMMON: torch_bytes(common), BACKENDS: json.dumps(KNOWN_BACKENDS).encode()}


def _broadcast(value: T) -> T:
    """The value of rank 0, on all ranks."""
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


def _gather_on_rank_0(value: T) -> list[T]:
    """Gather the values of all ranks on rank 0; an empty list elsewhere."""
    values: list[Any] = []
    if dist.get_rank() == 0:
        values = [None] * dist.get_world_size()
    dist.gather_object(value, values or None)
    return values


@contextlib.contextmanager
def _errors_on_all_ranks(refusal: str) -> Iterator[None]:
    """Raise on all ranks what the file system makes the block raise on any rank, as ``CheckpointError``."""
    with raise_on_all_ranks(), failures_as_errors(refusal):
        yield


_PIECE = 16 * 2**20
"""Bytes between two checks whether the save was abandoned."""

_BUFFER = 2**20


@dataclass
class _ChecksummedFile:
    """File that computes checksums of what is written to it, in order."""

    stream: BinaryIO
    is_abandoned: threading.Event
    checksums: FileChecksums = field(default_factory=FileChecksums)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            if self.is_abandoned.is_set():
                raise InterruptedError("the save was abandoned")
            piece = view[start : start + _PIECE]
            self.stream.write(piece)
            progress.tick()
            self.checksums.update(piece)
        return len(view)

    def tell(self) -> int:
        return self.checksums.size

    def flush(self) -> None:
        """Do nothing: torch calls this after each tensor."""
