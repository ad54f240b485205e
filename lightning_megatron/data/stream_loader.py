"""Loader of a stream's training batches: replicas end an epoch together, and a state has all their positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_megatron.data.samples import Rows


class OpenStream(Protocol):
    """Batches of one replica from a position on, of which each is read once."""

    def next(self) -> Any:
        """Next batch; None at the end of the epoch."""

    def padding(self) -> Any:
        """Batch without targets, of a replica that has ended."""

    def state(self) -> Any:
        """Position after the last batch, as plain data."""

    def close(self) -> None:
        """End worker processes."""


class BatchStream(Protocol):
    """Batches of one replica."""

    def open(self, epoch: int, states: list[Any] | None) -> OpenStream:
        """Begin an epoch, or go on from the positions of all replicas."""


@dataclass(frozen=True)
class Replicas:
    """Agreement of the replicas of a run. Its methods are collective over the world."""

    group: dist.ProcessGroup
    """All ranks, over gloo."""
    is_data_source: bool
    """Whether this rank reads for its replica."""
    rank: int
    """Data-parallel rank."""

    def any(self, flag: bool) -> bool:
        """Whether it is true for a replica; only its source counts."""
        value = torch.tensor(int(flag and self.is_data_source))
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return bool(value)

    def all(self, flag: bool) -> bool:
        """Whether it is true for all replicas."""
        return not self.any(not flag)

    def gather(self, value: Any) -> list[Any]:
        """Values of the sources, by data-parallel rank."""
        own = (self.rank, value) if self.is_data_source else None
        boxes: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(boxes, own, group=self.group)
        found = [box for box in boxes if box is not None]
        found.sort(key=lambda box: box[0])
        return [value for _, value in found]


class StreamLoader:
    """Resumable loader of a stream's training batches; a position is that of all replicas.

    Two modes, by ``max_steps``: a number makes one long epoch of as many steps from a stream without end; None makes
    an epoch of each pass, whose length nobody knows, so Lightning asks for one batch more than it has trained on.
    """

    def __init__(
        self,
        stream: BatchStream | None,
        replicas: Replicas,
        max_steps: int | None,
        *,
        ends_with_first: bool,
        num_rows: int = 1,
        length: int | None = None,
    ) -> None:
        """Start at the first batch.

        Args:
            stream: Batches of this replica; None on a rank that receives them from another one.
            replicas: Agreement with the other replicas.
            max_steps: Steps of the run, if the stream has no end; None for an epoch of each pass.
            ends_with_first: Whether an epoch ends where the first replica's does; else replicas that have ended repeat
                ``padding`` until all have.
            num_rows: Rows of a batch, on ranks without a stream.
            length: Batches of an epoch, if it is known.
        """
        self.sampler = self
        """Lightning calls ``sampler.set_epoch`` on every loader."""
        self.before_batch: Callable[[], object] = lambda: None
        """Called when a batch is requested."""
        self.epoch = 0
        self.steps = 0
        """Steps trained on since the epoch began, or that are about to be."""
        self._stream = stream
        self._replicas = replicas
        self._max_steps = max_steps
        self._length = length if max_steps is None else max_steps
        self._placeholder: Rows = {"rows": torch.empty((num_rows, 0), dtype=torch.int64)}
        self._ends_with_first = ends_with_first
        self._state: Any = None
        """Of this replica, after the batches trained on; None at the beginning of an epoch."""
        self._restored: list[Any] | None = None
        """Of all replicas, to go on from."""

    def __len__(self) -> int:
        """Steps of the whole epoch, including those already taken.

        Raises:
            TypeError: If nobody knows, as ``len`` does for objects that have none.
        """
        if self._length is None:
            raise TypeError(f"a {type(self).__name__} of a stream without a length has no len()")
        return max(self.steps, self._length)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches from the position at the first ``next``: Lightning may restore it after making the iterator.

        Collective over the world.
        """
        # Lightning may end its epoch before ours (limit_train_batches): the next one goes on.
        states = self.position()["replicas"]
        stream = None
        if self._stream is not None:
            stream = self._stream.open(self.epoch, states)
        try:
            yield from self._batches(stream)
        finally:
            if stream is not None:
                stream.close()

    def _batches(self, stream: OpenStream | None) -> Iterator[Any]:
        # Counted here too: where Lightning fetches a batch ahead, ``steps`` follows one batch later.
        yielded = self.steps
        self.before_batch()
        while self._max_steps is None or yielded < self._max_steps:
            batch: Any = self._placeholder
            state = None
            if stream is not None:
                batch = stream.next()
            if self._max_steps is None and not self._goes_on(batch is not None):
                return
            if stream is not None:
                state = stream.state()
                if batch is None:
                    batch = stream.padding()
            yielded += 1
            if self._length is None:
                # Lightning has asked for the next batch when it trains on this one.
                yield batch
                self.before_batch()
                self._move(yielded, state)
            else:
                self._move(yielded, state)
                yield batch
                self.before_batch()

    def _goes_on(self, has_batch: bool) -> bool:
        if self._ends_with_first:
            return self._replicas.all(has_batch)
        return self._replicas.any(has_batch)

    def _move(self, steps: int, state: Any) -> None:
        self.steps = steps
        self._state = state
        self._restored = None

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``, unless it is the current one; Lightning calls this before each epoch."""
        if self._max_steps is None and epoch != self.epoch:
            self.epoch = epoch
            self.steps = 0
            self._state = None
            self._restored = None

    def position(self) -> dict[str, Any]:
        """Position of all replicas, as plain data. Collective over the world."""
        replicas = self._restored
        if replicas is None:
            replicas = self._replicas.gather(self._state)
        if None in replicas:
            # At the beginning of an epoch.
            replicas = None
        return {"epoch": self.epoch, "steps": self.steps, "replicas": replicas}

    def seek(self, position: dict[str, Any]) -> None:
        """Go on from a position, with the next iterator."""
        self.epoch = position["epoch"]
        self.steps = position["steps"]
        self._state = None
        self._restored = position["replicas"]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the data module has the state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the data module restores the position."""
