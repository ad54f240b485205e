"""What a checkpoint holds of a run, and how that is saved: training waits while shards are copied into host memory.

The sharded part is described to Megatron's ``dist_checkpointing``. The rest is plain data in ``meta.pt``: Lightning's
own dict, and for which models, optimizers and layouts the sharded part is good.

Megatron and torch plan which rank writes which part of which tensor; copying, writing and naming are ours. Megatron's
own writer forks the trainer, starts a manager process that runs the user's script again, and writes tensors on a CPU
from where training changes them. Here threads of this process write the copies and sum up what they write. Everything
that ranks do together happens in ``Save.start`` and ``Save.finish``, called where every rank has come to the same
step: no collective runs in a thread. Nothing has the final name before every rank's files, their checksums and
``meta.pt`` are on the disk.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import mmap
import pickle
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.filesystem_async import _split_by_size_and_type
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
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

from lightning_megatron import files
from lightning_megatron.checkpoint.files import BACKENDS, COMMON, FORMAT_VERSION, KNOWN_BACKENDS, META, TABLE
from lightning_megatron.engine.adapter_names import is_adapter
from lightning_megatron.engine.collectives import raise_on_all_ranks
from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.heartbeat import progress
from lightning_megatron.engine.optimizer import MegatronOptimizer
from lightning_megatron.engine.runtime import Runtime
from lightning_megatron.engine.wrap import finish_parameter_gathers, unwrap
from lightning_megatron.errors import CheckpointError
from lightning_megatron.files import FileChecksums, pickle_refusal

T = TypeVar("T")

EXPERT_BIAS = "transformer_config_overrides.moe_router_enable_expert_bias"
"""In the description of a model whose router has biases and sigmoids, which no config of Hugging Face tells."""

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}
"""megatron-core 0.16.1, optimizer/distrib_optimizer.py: the default type raises on every save."""


Part = Literal["all", "base", "adapters"]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The live objects of a run that a checkpoint is taken of, or loaded into."""

    chunks: list[Any]
    optimizer: MegatronOptimizer | None
    """None when only weights count."""
    runtime: Runtime
    topology: Topology
    model_description: Mapping[str, Any]
    """Plain data that identifies the model; loading into another model is refused."""
    hugging_face_config: Mapping[str, Any] | None = None
    """What Hugging Face's ``config.json`` of the model would hold, so that a checkpoint can be converted by itself."""
    base: str | None = None
    """Of a model with adapters: where its frozen weights are, if weights alone shall be saved without them."""
    part: Part = "all"
    """Which weights are exchanged with a checkpoint."""

    def settle(self) -> None:
        """Learn what became of the last step, behind which nothing is saved before; every rank must call.

        Raises:
            NonFiniteError: If it was not finite, and the run ends with it.
        """
        if self.optimizer is not None:
            self.optimizer.settle()

    def weights_only(self) -> RunState:
        """What a checkpoint of weights alone takes: it leaves out those that others have."""
        return replace(self, optimizer=None, part="all" if self.base is None else "adapters")


def layout_of(topology: Topology) -> dict[str, Any]:
    """The sizes on which it depends which rank draws which random numbers."""
    sizes = asdict(topology.parallel)
    return {name: sizes[name] for name in ("tp", "pp", "vpp", "cp")} | {"dp": topology.dp}


def rng_file(rank: int) -> str:
    """Name of the file with the random states of a rank."""
    return f"rng_{rank:05d}.pt"


def sharded_weights(chunks: list[Any], part: Part = "all") -> dict[str, Any]:
    """The weights as Megatron's sharded tensors over the live ones, which are whole then; every rank must call."""
    finish_parameter_gathers(chunks)
    whole = {f"model{i}": unwrap(chunk).sharded_state_dict(metadata=dict(SHARDING)) for i, chunk in enumerate(chunks)}
    if part == "all":
        return whole
    wanted = part == "adapters"
    return {i: {name: each for name, each in of.items() if is_adapter(name) == wanted} for i, of in whole.items()}


def sharded_state(run: RunState, *, is_loading: bool = False) -> dict[str, Any]:
    """Weights and optimizer state as Megatron's sharded tensors; every rank must call."""
    state = sharded_weights(run.chunks, run.part)
    if run.optimizer is not None:
        state["optimizer"] = run.optimizer.sharded_state_dict(state, is_loading=is_loading)
    return state


# ---- one save -------------------------------------------------------------------------------------------------------


class Save:
    """One checkpoint on its way to its name. Every rank makes the same calls, except where they say otherwise.

    Training may go on behind ``start``: threads write a copy of the run. A fork would double the memory of a trainer
    with its GPU context, and a spawned process would run the user's script again. Threads leave the interpreter to the
    trainer, because nearly all of their time passes in system calls and in zlib, on large pieces; torch's own checksum
    of an archive's entries, which holds the interpreter, is off meanwhile.
    """

    def __init__(self, run: RunState, lightning_state: Mapping[str, Any], path: str | Path) -> None:
        """Describe what is saved, before anything is written.

        Args:
            run: The whole of it.
            lightning_state: Lightning's dict; without ``optimizer_states`` the checkpoint holds only weights.
            path: The final name, the same on all ranks.

        Raises:
            CheckpointError: On all ranks alike, if Lightning's dict holds more than plain data.
            NonFiniteError: If the last step ends the run.
        """
        run.settle()
        self._run = run if "optimizer_states" in lightning_state else run.weights_only()
        self.path = files.as_path(path)
        self._refusal = f"checkpoint {self.path} is not written"
        with _alike(self._refusal):
            self._meta = meta_of(self._run, lightning_state) if dist.get_rank() == 0 else b""
        self._partial = self.path.with_name(self.path.name + files.PARTIAL)
        if files.is_remote(self.path) and not (self.path / META).is_file():
            self._partial = self.path  # a store would have to copy all of it
        self._lock: files.FolderLock | None = None
        self._jobs: list[Future[_Written]] = []
        self._is_abandoned = threading.Event()
        self._has_archive_checksums = torch.serialization.get_crc32_options()

    def start(self, memory: HostMemory) -> None:
        """Copy the run and begin to write.

        Args:
            memory: For the copy; used until ``finish`` or ``abandon``.

        Raises:
            CheckpointError: On all ranks alike if the files cannot be written; ``path`` is then as it was.
        """
        self._begin = time.monotonic()
        with _alike(self._refusal):
            self._lock = _start_partial(self.path, self._partial) if dist.get_rank() == 0 else None
        with self._whole_or_abandoned():
            plan, planner, common = _planned(sharded_state(self._run))
            plans = _gathered(plan)
            # Not the planner's own, which refuses moments with gaps, where layers stacked with others are frozen.
            self._table = create_default_global_save_plan(plans)[1] if plans else None
            with _alike(self._refusal):
                self._partial.mkdir(parents=True, exist_ok=True)
                contents: dict[str, bytes | Shards] = {**_staged(plan, planner, memory)}
                contents[rng_file(dist.get_rank())] = torch_bytes(self._run.runtime.state_dict())
                if dist.get_rank() == 0:
                    contents |= {COMMON: torch_bytes(common), BACKENDS: json.dumps(KNOWN_BACKENDS).encode()}
            without_checksums = partial(torch.serialization.set_crc32_options, False)
            threads = ThreadPoolExecutor(_FILES_PER_RANK + 1, initializer=without_checksums)
            self._jobs = [threads.submit(self._write, name, content) for name, content in contents.items()]
            threads.shutdown(wait=False)
        self._stall = time.monotonic() - self._begin

    def _write(self, name: str, content: bytes | Shards) -> _Written:
        results = []
        with files.synced_file(self._partial / name, _BUFFER) as stream:
            file = _ChecksummedFile(stream, self._is_abandoned)
            if isinstance(content, bytes):
                file.write(content)
            else:
                as_it_is, how = _StorageWriterTransforms(), SerializationFormat.TORCH_SAVE
                results = [_write_item(as_it_is, file, data, item, name, how) for item, data in content]  # type: ignore[arg-type]
        return name, file.checksums, results

    def is_written(self) -> bool:
        """Whether this rank's files are on the disk, or have failed; costs nothing and does not communicate.

        Ranks differ: ``finish`` waits for all of them, so ask all ranks first if training should not wait.
        """
        return all(job.done() for job in self._jobs)

    def finish(self) -> None:
        """Wait for all ranks' files, complete the checkpoint and give it its name.

        Raises:
            CheckpointError: On all ranks alike if any rank could not write; ``path`` is then as it was, and nothing
                half-written is left.
        """
        with self._whole_or_abandoned():
            with _alike(self._refusal):
                own = [job.result() for job in self._wait()]
            written = _gathered(own)
            with _alike(self._refusal):
                if dist.get_rank() == 0:
                    self._complete(list(itertools.chain(*written)))
        self._release()

    @contextlib.contextmanager
    def _whole_or_abandoned(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Stop writing, wait for it, and delete what is there; does not communicate."""
        self._is_abandoned.set()
        self._wait()
        with contextlib.suppress(OSError):
            if dist.get_rank() == 0 and not files.is_remote(self._partial):
                shutil.rmtree(self._partial)
            elif dist.get_rank() == 0 and not (self._partial / META).is_file():
                files.delete_from_store(self._partial)  # else it is whole, and what it was to replace may be gone
        self._release()

    def report(self) -> str:
        """What it took, in a line."""
        seconds = time.monotonic() - self._begin
        return f"checkpoint {self.path} is complete after {seconds:.3g} s, of which training waited {self._stall:.3g} s"

    def _wait(self) -> list[Future[_Written]]:
        wait(self._jobs)
        # The option belongs to a thread in torch 2.13, and to the program in some earlier versions.
        torch.serialization.set_crc32_options(self._has_archive_checksums)
        return self._jobs

    def _complete(self, written: Sequence[_Written]) -> None:
        """Write what only rank 0 writes, ``meta.pt`` last, which says that all the rest is there."""
        partial, sizes = self._partial, files.file_sizes(self._partial)
        for name, each, _ in written:
            if sizes.get(name) != each.size:
                raise CheckpointError(
                    f"rank 0 does not see {name}, as another rank has written it, in {partial}; keep checkpoints "
                    "(dirpath, default_root_dir) on a file system that all hosts share, and let nobody else change them"
                )
        assert self._table is not None
        _writer(partial).finish(self._table, [results for *_, results in written])
        of_table, of_meta = (FileChecksums().update(data) for data in ((partial / TABLE).read_bytes(), self._meta))
        files.write_checksums(partial, {**{name: each for name, each, _ in written}, TABLE: of_table, META: of_meta})
        with files.synced_file(partial / META) as stream:
            stream.write(self._meta)
        files.publish(partial, self.path)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()


def preallocate(run: RunState, memory: HostMemory) -> None:
    """Have a thread get and pin the memory that saves of ``run`` will need, so that the first one does not wait for it.

    Every rank must call. It plans a save, which takes a small part of a save's time.
    """
    plan, planner, _ = _planned(sharded_state(run))
    memory.preallocate([planner.resolve_data(item) for item in plan.items if item.type != WriteItemType.BYTE_IO])


def _start_partial(path: Path, in_store: Path | None = None) -> files.FolderLock | None:
    """Make an empty folder beside ``path`` to write into, after what killed programs left beside it is gone.

    In a store, which has neither folders nor locks, it is ``in_store``.

    Raises:
        CheckpointError: If another program is writing the same checkpoint, or ``path`` is a folder of other files.
    """
    is_folder = path.is_dir() and not path.is_symlink() and any(path.iterdir())
    names = (META, COMMON, TABLE, BACKENDS)
    if is_folder and not any((path / name).exists() for name in names) and not any(path.glob("*.distcp")):
        raise CheckpointError(f"{path} is a folder of other files, which would be lost; give the checkpoint a new name")
    if files.is_remote(path):
        files.delete_from_store(in_store or path)
        return None
    partial = path.with_name(path.name + files.PARTIAL)
    files.wait_for_deletions()
    lock = files.lock_partial(partial, CheckpointError)
    files.remove_leftovers(path.parent, "*.ckpt")
    return lock


def write_weights(chunks: list[Any], parent: Path) -> Path:
    """Write the weights of ``chunks`` into a new folder below ``parent``; every rank must call.

    Megatron's groups are global: the weights of a module that another Trainer has built for another layout are written
    while its groups exist, and read (``load.read_weights``) after the new ones do.

    Returns:
        The folder, the same on every rank.
    """
    names = [f"megatron_relayout_{uuid.uuid4().hex}"]
    dist.broadcast_object_list(names, 0)
    path = parent / names[0]
    refusal = f"weights are not written to {path}"
    with files.failures_as_errors(refusal):
        _, planner, common = _planned(sharded_weights(chunks))
        save_at_once(planner.state_dict, storage_writer=_writer(path), planner=planner)
    rest = {COMMON: torch_bytes(common), BACKENDS: json.dumps(KNOWN_BACKENDS).encode()}
    with _alike(refusal):
        for name, data in rest.items() if dist.get_rank() == 0 else ():
            (path / name).write_bytes(data)
    return path


# ---- meta.pt --------------------------------------------------------------------------------------------------------


def meta_of(run: RunState, lightning_state: Mapping[str, Any]) -> bytes:
    """The content of ``meta.pt``.

    Raises:
        CheckpointError: If Lightning's dict holds what could not be loaded again as plain data.
    """
    own = {
        "format_version": FORMAT_VERSION,
        "layout": layout_of(run.topology),
        "has_optimizer": run.optimizer is not None,
        "optimizer_format": None if run.optimizer is None else run.optimizer.state_format,
        "model_description": dict(run.model_description),
        "time": time.time(),
        "part": run.part,
        "base": run.base,
        "hugging_face_config": None if run.hugging_face_config is None else dict(run.hugging_face_config),
    }
    try:
        written = torch_bytes({"lightning": plain_state(lightning_state), **own})
        torch.load(io.BytesIO(written), weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        reason = pickle_refusal(error) if isinstance(error, pickle.UnpicklingError) else str(error)
        raise CheckpointError(
            f"its state must be plain data (numbers, strings, containers, tensors), but {reason}; correct the "
            "hyper-parameters or the state_dict of the callback, module or datamodule in question"
        ) from None
    return written


def plain_state(lightning_state: Mapping[str, Any]) -> dict[str, Any]:
    """Lightning's dict in types that can be read back without running code, as far as they have such a form.

    Hyper-parameters are for people to read, so an object among them is kept as its text.
    """
    plain: dict[str, Any] = {name: as_plain_data(value) for name, value in lightning_state.items()}
    for values in (plain[name] for name in ("hyper_parameters", "datamodule_hyper_parameters") if name in plain):
        values.update({name: as_plain_data(value, f"hyper-parameter {name!r}") for name, value in values.items()})
    return plain


_PLAIN_FORMS: dict[type, Callable[[Any], Any]] = {
    np.generic: lambda each: each.item(),
    np.ndarray: torch.from_numpy,
    Path: str,
    bytearray: bytes,
}


def as_plain_data(value: Any, readable: str = "") -> Any:
    """The same value in the types that can be read back without running code: containers, numbers, strings, tensors.

    Args:
        value: What has no such form stays as it is; writing the checkpoint then fails with its name.
        readable: What the value is, if it shall become text instead, with a warning.
    """
    if isinstance(value, Mapping):
        return {as_plain_data(k): as_plain_data(v, readable) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [as_plain_data(v, readable) for v in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Enum):  # also those that are numbers or strings, of which files would name the class
        return as_plain_data(value.value, readable)
    value = next((plain(value) for kind, plain in _PLAIN_FORMS.items() if isinstance(value, kind)), value)
    if readable and not (value is None or isinstance(value, (bool, int, float, str, torch.Tensor))):
        rank_zero_warn(f"{readable} is a {type(value).__name__}; the checkpoint keeps its text only")
        return repr(value)
    return value


# ---- shards ---------------------------------------------------------------------------------------------------------

_FILES_PER_RANK = 4
"""Each has a thread; one H100 host wrote 1.5 GB/s to its disk with two and 1.8 with four, 3.5 and 4.7 to memory."""

Shards = Sequence[tuple[Any, io.BytesIO | torch.Tensor]]
"""What one file holds, each with its ``WriteItem``."""

_Written = tuple[str, FileChecksums, list[Any]]
"""A file's name and checksums, and torch's ``WriteResult`` of each shard in it."""


def _writer(folder: Path) -> FileSystemWriter:
    """Torch's, of which only the table of contents is used where threads write the files."""
    kind = FsspecWriter if files.is_remote(folder) else FileSystemWriter
    return kind(str(folder), sync_files=not files.is_remote(folder))


def _planned(state: dict[str, Any]) -> tuple[Any, MCoreSavePlanner, dict[str, Any]]:
    """What this rank writes of ``state``, what resolves it to tensors, and what is not sharded; all ranks must call."""
    sharded, common = save_preprocess({**state, "content_metadata": dict(SHARDING)})
    if (copies := parallel_state.get_data_parallel_group(with_context_parallel=True)).size() > 1:
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
        FullyParallelSaveStrategyWrapper(strategy, copies).apply_saving_parallelization(sharded)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    tensors = mcore_to_pyt_state_dict(_replace_state_dict_keys_with_sharded_keys(sharded, True)[0], False)
    planner.set_up_planner(tensors, is_coordinator=dist.get_rank() == 0)
    return planner.create_local_plan(), planner, common


def _staged(plan: Any, planner: Any, memory: HostMemory) -> dict[str, Shards]:
    """What this rank writes, by file name, in host memory."""
    buckets = [bucket for bucket in _split_by_size_and_type(_FILES_PER_RANK, plan.items) if bucket]
    items = [item for bucket in buckets for item in bucket if item.type != WriteItemType.BYTE_IO]
    copies = iter(memory.copy([planner.resolve_data(item) for item in items]))
    return {
        f"__{dist.get_rank()}_{number}.distcp": [
            (item, planner.resolve_data(item) if item.type == WriteItemType.BYTE_IO else next(copies))
            for item in bucket
        ]
        for number, bucket in enumerate(buckets)
    }


def _gathered(mine: T) -> list[T]:
    """What all ranks have, on rank 0; empty elsewhere."""
    every: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(mine, every or None)
    return every


@contextlib.contextmanager
def _alike(refusal: str) -> Iterator[None]:
    """What files or the disk make the block raise on one rank is raised on all ranks."""
    with raise_on_all_ranks(), files.failures_as_errors(refusal):
        yield


_PIECE = 16 * 2**20
"""Bytes between two looks at whether the save was abandoned."""

_BUFFER = 2**20


class _ChecksummedFile:
    """Sums up what is written to a stream, in the order of its bytes."""

    def __init__(self, stream: BinaryIO, is_abandoned: threading.Event) -> None:
        self._stream = stream
        self._is_abandoned = is_abandoned
        self.checksums = FileChecksums()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            if self._is_abandoned.is_set():
                raise InterruptedError("nobody wants this file any more")
            self._stream.write(view[start : start + _PIECE])
            progress.ticks += 1
            self.checksums.update(view[start : start + _PIECE])
        return len(view)

    def tell(self) -> int:
        return self.checksums.size

    def flush(self) -> None:
        """Nothing: torch calls it after each tensor."""


def torch_bytes(value: Any) -> bytes:
    """What ``torch.save`` would write to a file."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


# ---- host memory ----------------------------------------------------------------------------------------------------

_ALIGNMENT = 64
"""Bytes; any dtype may begin there."""
_TOUCH = 64 * 2**20
_TOUCHING_THREADS = 8
_PINNED_AT_ONCE = 2**30
"""Bytes; the driver holds locks meanwhile that the kernels of training need, too."""


class HostMemory:
    """A block of host memory that grows to what is asked for and is then reused.

    It is kept from one save to the next, because on a GPU it is pinned (copies run at the speed of the bus) and pinning
    takes longer than copying: of 112 GB on two H200s 12 of the first save's 13.7 s, which ``preallocate`` saves it.
    It is as large as the largest save so far: one copy of this rank's shards.
    """

    def __init__(self, *, in_place: bool = False) -> None:
        """Nothing is allocated yet.

        Args:
            in_place: Whether what is on a CPU does not change while the copies are used, and may be its own copy.
        """
        self._in_place = in_place
        self._block: mmap.mmap | None = None
        self._pinned: list[torch.Tensor] = []
        """Pieces of the block."""
        self._preparing: threading.Thread | None = None

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of ``tensors`` in host memory, complete when this returns and valid until the next call.

        Every copy has a storage of its own size, so that ``torch.save`` writes no neighbours.
        """
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if self._in_place and not on_gpu:
            own = [tensor.detach() for tensor in tensors]
            return [each if each.untyped_storage().nbytes() == each.nbytes else each.clone() for each in own]
        self._wait()
        self._reserve(tensors)
        copies = [self._copied(tensor, offset) for tensor, offset in zip(tensors, _offsets(tensors), strict=False)]
        if on_gpu:
            torch.cuda.synchronize()
        return copies

    def _copied(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """``tensor`` at ``offset``; CUDA refuses a copy that reaches from one pinned piece into another."""
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if len(data) == 0 or self._block is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        target = torch.frombuffer(self._block, dtype=torch.uint8, count=len(data), offset=offset)
        cuts = [*range(-offset % _PINNED_AT_ONCE, len(data), _PINNED_AT_ONCE)]
        for part, source in zip(target.tensor_split(cuts), data.tensor_split(cuts), strict=True):
            part.copy_(source, non_blocking=True)
        return target.view(tensor.dtype).view(tensor.shape)

    def preallocate(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to get memory for ``copy`` of as much, in a thread."""
        self._wait()
        self._preparing = threading.Thread(target=self._reserve, args=(tensors,), daemon=True)
        self._preparing.start()

    def _wait(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def release(self) -> None:
        """Give the memory back; copies must not be used any more."""
        self._wait()
        self._unpin()

    def _unpin(self) -> None:
        for piece in self._pinned:
            _call_cuda("cudaHostUnregister", piece.data_ptr())
        self._block, self._pinned = None, []

    def _reserve(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the kernel give memory for ``tensors`` now, many pages at a time, and pin it if they are on a GPU."""
        size, gpu = _offsets(tensors)[-1], next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if size <= len(self._block or b""):
            return
        self._unpin()
        self._block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._block.madvise(mmap.MADV_HUGEPAGE)
        if gpu is not None:
            torch.cuda.set_device(gpu)  # a new thread would make a context on the first one
        with ThreadPoolExecutor(_TOUCHING_THREADS) as pool:
            for piece in torch.frombuffer(self._block, dtype=torch.uint8).split(_PINNED_AT_ONCE):
                list(pool.map(torch.Tensor.zero_, piece.split(_TOUCH)))  # what has been touched is pinned faster
                if gpu is not None and _call_cuda("cudaHostRegister", piece.data_ptr(), piece.numel(), 0):
                    self._pinned.append(piece)


def _offsets(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where in a block each tensor begins, and last its size."""
    sizes = (-(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
    return [0, *itertools.accumulate(sizes)]


def _call_cuda(function: str, *args: Any) -> bool:
    """Whether a function of the CUDA runtime succeeded; without pinning, copies are only slower."""
    succeeded = int(getattr(torch.cuda.cudart(), function)(*args)) == 0
    if not succeeded:
        with contextlib.suppress(RuntimeError):  # the runtime remembers the error until the next kernel is launched
            torch.zeros(1, device="cuda").add_(1)
    return succeeded
