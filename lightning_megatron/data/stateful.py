"""Training loaders of other libraries whose dataset is a stream: their positions are saved where they keep one.

A loader with a ``state_dict`` of its own is asked for it after each batch. A ``DataLoader`` has none; here its workers
send the state of their copy of the dataset with each batch.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_megatron.data.resumable import RESTARTS
from lightning_megatron.data.stream_loader import Replicas, StreamLoader
from lightning_megatron.errors import ConfigError
from lightning_megatron.rank_zero import rank_zero_warn

_NUM_WORKERS = "stream_workers"
"""Key of the number of worker processes in the state of a ``DataLoader`` of ours."""


def is_stream(loader: object) -> bool:
    """Whether a training loader reads a stream, or keeps its own position."""
    if isinstance(loader, DataLoader):
        return isinstance(loader.dataset, IterableDataset)
    return has_state(loader)


def has_state(value: object) -> bool:
    """Whether an object keeps its position."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def why_not_exact(dataset: object) -> str | None:
    """Why a run on a streaming dataset cannot resume exactly, and what to do; None if it can."""
    if not has_state(dataset):
        return "it has no state_dict and load_state_dict; give a dataset that has them, or a map-style one"
    if _has_shuffle_buffer(getattr(dataset, "_ex_iterable", None)):
        return "its state_dict lacks the content of its shuffle buffer; leave out shuffle()"
    return None


def why_loader_is_not_exact(loader: Any) -> str | None:
    """As ``why_not_exact``, for a training loader; the reason begins with the name of the class."""
    source = loader
    if isinstance(loader, DataLoader) and (not has_state(loader) or has_state(loader.dataset)):
        source = loader.dataset
    reason = why_not_exact(source)
    if reason is None:
        return None
    return f"{type(source).__name__}: {reason}"


def reads_everything(loader: Any) -> bool:
    """Whether a loader reads a Hugging Face stream that is not split over replicas."""
    dataset = getattr(loader, "dataset", None)
    is_hugging_face = type(dataset).__module__.partition(".")[0] == "datasets"
    return is_hugging_face and getattr(dataset, "_distributed", None) is None


def divides_among_ranks(loader: Any) -> bool:
    """Whether a library divides the rows of a loader among all ranks itself, instead of among replicas."""
    source = getattr(loader, "dataset", None)
    # MosaicML's package is called streaming, a name that a user's own module may have too.
    return type(source).__module__.startswith(("litdata.", "streaming.base."))


def _has_shuffle_buffer(examples: Any) -> bool:
    """Whether a Hugging Face dataset shuffles in a buffer, here or in a dataset that it is made from."""
    if examples is None:
        return False
    if type(examples).__name__ == "BufferShuffledExamplesIterable":
        return True
    parts = [getattr(examples, "ex_iterable", None), *getattr(examples, "ex_iterables", [])]
    return any(_has_shuffle_buffer(part) for part in parts)


def restarts_workers(loader: Any) -> bool:
    """Whether worker processes that a user's ``DataLoader`` keeps for all epochs are started in each epoch here."""
    is_ours = isinstance(loader, DataLoader) and not has_state(loader) and has_state(loader.dataset)
    return is_ours and loader.persistent_workers


class StatefulLoader(StreamLoader):
    """A user's training loader of a stream; only the ranks that read data iterate it."""

    def __init__(self, loader: Any, replicas: Replicas, data_parallel_size: int) -> None:
        """Wrap ``loader``.

        Args:
            loader: For which ``is_stream`` is true.
            replicas: Agreement with the other replicas: an epoch ends where the first of them does.
            data_parallel_size: Number of replicas.
        """
        stream = None
        if replicas.is_data_source:
            stream = _LoaderStream(loader, replicas.rank)
        self.loader = loader
        self.dataset = getattr(loader, "dataset", None)
        self.batch_size = getattr(loader, "batch_size", None)
        self._dp = data_parallel_size
        super().__init__(
            stream,
            replicas,
            None,
            ends_with_first=True,
            num_rows=self.batch_size or 1,
            length=_length_of(loader),
        )

    def state_dict(self) -> dict[str, Any]:
        """Position of all replicas. Collective over the world."""
        return {"stream": self.position()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position with the next iterator.

        Raises:
            ConfigError: If it is that of other replicas.
        """
        if "stream" not in state_dict:
            rank_zero_warn(RESTARTS)
            return
        position = state_dict["stream"]
        states = position["replicas"]
        if states is not None:
            self._check(states)
        self.seek(position)

    def _check(self, states: list[Any]) -> None:
        name = type(self.loader if self.dataset is None else self.dataset).__name__
        new_run = "or begin a new run with its weights: MegatronStrategy(load_weights_only=True)"
        if len(states) != self._dp:
            raise ConfigError(
                f"dp={self._dp}: expected the {len(states)} data-parallel replicas of the run that wrote the "
                f"checkpoint, each of which has a position in its own {name}; resume with as many, {new_run}"
            )
        num_workers = getattr(self.loader, "num_workers", 0)
        saved = num_workers
        if isinstance(states[0], Mapping):
            saved = states[0].get(_NUM_WORKERS, num_workers)
        if saved != num_workers:
            raise ConfigError(
                f"num_workers={num_workers}: expected the {saved} of the run that wrote the checkpoint, each of which "
                f"has a position in its own {name}; resume with as many, {new_run}"
            )


def _length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


class _LoaderStream:
    """The loader of a replica, as ``StreamLoader`` takes it."""

    def __init__(self, loader: Any, rank: int) -> None:
        self._loader = loader
        self._rank = rank

    def open(self, epoch: int, states: list[Any] | None) -> _OpenLoader:
        """Begin an epoch, or go on from the position of this replica."""
        state = None
        if states is not None:
            state = states[self._rank]
        loader = self._loader
        if has_state(loader):
            if state is not None:
                loader.load_state_dict(copy.deepcopy(state))
            return _OpenLoader(iter(loader), loader)
        if isinstance(loader, DataLoader) and has_state(loader.dataset):
            return _OpenWorkers(loader, state)
        return _OpenLoader(iter(loader), None)


class _OpenLoader:
    """Batches of a loader, and the state that it keeps itself, if any."""

    def __init__(self, batches: Iterator[Any], stateful: Any) -> None:
        self._batches: Iterator[Any] | None = batches
        self._stateful = stateful

    def next(self) -> Any:
        """Next batch; None at the end."""
        assert self._batches is not None
        return next(self._batches, None)

    def padding(self) -> Any:
        """Refuse: nothing is known of the user's batches."""
        raise NotImplementedError

    def state(self) -> Any:
        """State of the loader after the last batch; None if it has none."""
        if self._stateful is None:
            return None
        return copy.deepcopy(self._stateful.state_dict())

    def close(self) -> None:
        """End worker processes."""
        self._batches = None


class _OpenWorkers(_OpenLoader):
    """Batches of a ``DataLoader`` whose dataset keeps its position in each worker."""

    def __init__(self, loader: DataLoader[Any], state: Mapping[str, Any] | None) -> None:
        self._states: dict[int, Any] = {}
        """State of the dataset by worker."""
        self._last_worker = -1
        """Worker of the last batch."""
        self._num_workers = loader.num_workers
        if state is not None:
            self._states = dict(state["workers"])
            self._last_worker = state["last_worker"]
        dataset = _BatchesWithState(loader, self._states, self._last_worker)
        options: dict[str, Any] = {}
        if loader.num_workers > 0:
            names = ("prefetch_factor", "multiprocessing_context")
            options = {name: getattr(loader, name) for name in names}
            options["worker_init_fn"] = partial(_begin_worker, loader.worker_init_fn)
        with_state: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=loader.num_workers,
            timeout=loader.timeout,
            pin_memory=loader.pin_memory,
            generator=loader.generator,
            **options,
        )
        super().__init__(iter(with_state), None)

    def next(self) -> Any:
        """Next batch; None at the end."""
        assert self._batches is not None
        for item in self._batches:
            self._last_worker = item["worker"]
            if item["batch"] is not None:
                self._states[item["worker"]] = item["state"]
                return item["batch"]
        return None

    def state(self) -> dict[str, Any]:
        """State of each worker's dataset, and whose turn it was."""
        return {
            "workers": dict(self._states),
            "last_worker": self._last_worker,
            _NUM_WORKERS: self._num_workers,
        }


class _BatchesWithState(IterableDataset[dict[str, Any]]):
    """Batches of a dataset, made in the worker, each with the state of the dataset after it.

    A DataLoader takes turns over its workers, from the first one on. After a resume, those that had their turn in the
    interrupted round begin with an item without a batch.
    """

    def __init__(
        self, loader: DataLoader[Any], workers: Mapping[int, Any], last_worker: int
    ) -> None:
        self._dataset: Any = loader.dataset
        if workers and loader.num_workers == 0:
            # A Hugging Face dataset would begin later epochs, too, at the state that it has loaded. One that cannot be
            # copied gets it itself.
            with contextlib.suppress(TypeError):
                self._dataset = copy.deepcopy(loader.dataset)
        self._batch_size = loader.batch_size
        self._drop_last = loader.drop_last
        self._collate = loader.collate_fn
        self._states = dict(workers)
        self._last_worker = last_worker

    @property
    def dataset(self) -> Any:
        """The user's dataset in this process."""
        return self._dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker = 0
        if info is not None:
            worker = info.id
            if worker <= self._last_worker:
                yield {"worker": worker, "batch": None, "state": None}
        if worker in self._states:
            self._dataset.load_state_dict(self._states[worker])
        for rows in self._rows():
            state = copy.deepcopy(self._dataset.state_dict())
            yield {"worker": worker, "batch": self._collate(rows), "state": state}

    def _rows(self) -> Iterator[Any]:
        """What the collate function takes."""
        if self._batch_size is None:
            yield from self._dataset
            return
        rows: list[Any] = []
        for row in self._dataset:
            rows.append(row)
            if len(rows) == self._batch_size:
                yield rows
                rows = []
        if rows and not self._drop_last:
            yield rows


def _begin_worker(user_function: Callable[[int], None] | None, worker: int) -> None:
    """Call the user's ``worker_init_fn``: what it finds in ``get_worker_info().dataset``, and may change, is theirs."""
    info: Any = get_worker_info()
    # It refuses to be changed (torch 2.13, utils/data/_utils/worker.py:WorkerInfo).
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if user_function is not None:
        user_function(worker)


def _unchanged(item: Any) -> Any:
    return item
