"""Wrappers of ordinary DataLoaders for training: they resume, and take other batch sizes.

Lightning gives each data-parallel rank every dp-th sample (``DistributedSampler``): between two optimizer steps the
ranks together have consumed a prefix of the epoch's order, whatever dp is, and its length is the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_megatron.data.contents import hash_of_rows
from lightning_megatron.data.loader import TrainLoader
from lightning_megatron.data.stream_loader import StreamLoader
from lightning_megatron.errors import ConfigError, DataError, type_of
from lightning_megatron.rank_zero import rank_zero_warn

ENDED_EARLY = "ended_early"
"""Key of a loader's state in a checkpoint: whether the rest of the epoch was skipped."""
RESTARTS = (
    "The checkpoint has a position in a map-style dataset or in a stream, and train_dataloaders is now the other: the"
    " training data restarts"
)
"""Warning of a position that a loader cannot use."""


def _skip(
    sampler: Any,
    num_skipped: int,
    after_skipping: Callable[[], None],
) -> Iterator[Any]:
    batches = iter(sampler)
    for _ in range(num_skipped):
        next(batches, None)
    after_skipping()
    yield from batches


def _rebuild(loader: DataLoader[Any], **order: Any) -> DataLoader[Any]:
    """A DataLoader like ``loader``, with another order or other batches."""
    worker_options = (
        "num_workers",
        "prefetch_factor",
        "timeout",
        "multiprocessing_context",
        "worker_init_fn",
    )
    kept = {
        name: getattr(loader, name)
        for name in (*worker_options, "pin_memory", "collate_fn", "generator")
    }
    return DataLoader(loader.dataset, **order, **kept)


def resize_batches(loader: object, requested: int, num_microbatches: int) -> object:
    """Training loader whose batches have the rows of ``num_microbatches`` instead of ``requested`` microbatches.

    Raises:
        ConfigError: If its batches are not made by a ``batch_size`` that ``requested`` divides.
    """
    # These size batches themselves.
    sizes_itself = isinstance(loader, (StreamLoader, TrainLoader))
    if requested == num_microbatches or sizes_itself:
        return loader
    rows = getattr(loader, "batch_size", None)
    has_plain_batches = is_map_style(loader) and type(loader.batch_sampler) is BatchSampler
    if not has_plain_batches or not rows or rows % requested:
        raise ConfigError(
            f"fewer nodes than num_nodes take num_microbatches={num_microbatches} instead of {requested}, and larger "
            f"batches: expected a DataLoader of a map-style dataset with a batch_size that {requested} divides, got "
            f"{type(loader).__name__} with batch_size={rows}; give it one, or start all nodes"
        )
    assert isinstance(loader, DataLoader)
    rows = rows // requested * num_microbatches
    return _rebuild(loader, batch_size=rows, sampler=loader.sampler, drop_last=loader.drop_last)


class ResumableLoader:
    """A training DataLoader that resumes where a checkpoint was taken, at any dp, in mid-epoch too.

    It counts epochs itself, because Lightning counts an epoch as finished when ``max_steps`` ends it, although samples
    of it are left. Its length is that of the whole epoch, as Lightning expects, also after a resume, where random
    samplers draw their order again from the random state at the beginning of the epoch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        data_parallel_size: int,
        limit: Callable[[], float],
        first_epoch: int = 0,
    ) -> None:
        """Wrap ``loader``, whose sampler already shards the samples over data-parallel ranks.

        Args:
            loader: The user's loader.
            data_parallel_size: Ranks over which the samples are sharded.
            limit: Returns the number of batches after which the Trainer ends an epoch; called when one begins.
            first_epoch: Epoch to begin with, which determines the order of samples.
        """
        self.loader = loader
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self._dp = data_parallel_size
        self._limit = limit
        self._epoch = first_epoch
        self._num_yielded = 0
        self.before_batch: Callable[[], object] = lambda: None
        """Called when a batch is requested: those yielded before have been trained on."""
        self._is_resuming = False
        self._generator = loader.generator or getattr(sampler_of(loader), "generator", None)
        self._random_state: Tensor | None = None
        self._generator_state: Tensor | None = None
        """Both at the beginning of the epoch."""

    @property
    def _global_batch(self) -> int:
        return (self.batch_size or 1) * self._dp

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        is_resuming_in_mid_epoch = self._is_resuming and self._num_yielded < min(
            len(self), self._limit()
        )
        if self._num_yielded > 0 and not is_resuming_in_mid_epoch:
            self._epoch = self._epoch + 1
            self._num_yielded = 0
        self._is_resuming = False
        self._set_epoch()
        self.before_batch()
        for batch in self._remaining() if self._num_yielded else self._full_epoch():
            self._num_yielded += 1
            yield batch
            self.before_batch()

    def _set_epoch(self) -> None:
        """As Lightning, which sees no sampler of this loader: any sampler may have a ``set_epoch``."""
        samplers = [self.loader.sampler, sampler_of(self.loader)]
        for sampler in {id(each): each for each in samplers}.values():
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epoch)

    def _full_epoch(self) -> DataLoader[Any]:
        self._random_state = torch.get_rng_state()
        self._generator_state = _state_of(self._generator)
        return self.loader

    def _remaining(self) -> DataLoader[Any]:
        """Batches after those already yielded, without advancing the global random state again."""
        current_state = torch.get_rng_state()
        if self._random_state is not None:
            torch.set_rng_state(self._random_state)
        _set_state(self._generator, self._generator_state)

        def restore() -> None:
            torch.set_rng_state(current_state)

        # Skipped samples are not read from the dataset.
        batches = self.loader.batch_sampler
        if batches is None:
            samples = _skip(self.loader.sampler, self._num_yielded, restore)
            return _rebuild(self.loader, sampler=samples, batch_size=None)
        return _rebuild(self.loader, batch_sampler=_skip(batches, self._num_yielded, restore))

    @property
    def _order(self) -> dict[str, Any]:
        """What determines the order of the samples, besides epoch and random states, and a hash of a few of them."""
        sampler = sampler_of(self.loader)
        return {
            "length": len(self.dataset) if hasattr(self.dataset, "__len__") else None,
            "seed": getattr(sampler, "seed", None),
            "shuffle": getattr(sampler, "shuffle", None),
            "contents": hash_of_rows(self.dataset),
        }

    def state_dict(self) -> dict[str, Any]:
        """Epoch, samples of it consumed by all ranks together, and what determines its order."""
        return {
            "epoch": self._epoch,
            "consumed_samples": self._num_yielded * self._global_batch,
            "order": self._order,
            "random_state": self._random_state,
            "generator_state": self._generator_state,
            "generator_state_now": _state_of(self._generator),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration after the consumed samples.

        If the global batch size does not divide them, start at the last complete batch, so that no sample is skipped.
        """
        if "random_state" not in state:
            rank_zero_warn(RESTARTS)
            return
        self._epoch = state["epoch"]
        consumed = state["consumed_samples"]
        self._num_yielded = consumed // self._global_batch
        has_ended_early = state.get(ENDED_EARLY, False)
        if not has_ended_early:
            self._warn_of_repeats(consumed, state.get("order", self._order))
        self._random_state = state["random_state"]
        self._generator_state = state["generator_state"]
        _set_state(self._generator, state["generator_state_now"])
        self._is_resuming = not has_ended_early

    def _warn_of_repeats(self, consumed: int, order: dict[str, Any]) -> None:
        """Warn of samples that come twice in the epoch.

        Args:
            consumed: Samples of the epoch before the checkpoint.
            order: What determined theirs; as ``_order``.
        """
        if not 0 < self._num_yielded < len(self):
            return  # an epoch begins
        # An older checkpoint does not tell all of it.
        own = {name: fact for name, fact in self._order.items() if name in order}
        if order != own:
            rank_zero_warn(
                f"The run goes on at sample {consumed} of another order than the checkpoint's: expected {order}, got "
                f"{own}, and samples may repeat"
            )
        elif rest := consumed % self._global_batch:
            rank_zero_warn(
                f"The last {rest} of the {consumed} samples before the checkpoint are repeated: expected a batch of "
                f"all replicas that divides them, got {self._global_batch}"
            )


class OneShotIterator:
    """An iterator as training data; raises on a second pass, where Lightning would wait for a next step forever."""

    def __init__(self, batches: Iterator[Any]) -> None:
        """Wrap ``batches``."""
        self._batches = batches
        self._at_start = False

    def __iter__(self) -> Iterator[Any]:
        self._at_start = True
        return self

    def __next__(self) -> Any:
        for batch in self._batches:
            self._at_start = False
            return batch
        if self._at_start:
            raise DataError(
                "train_dataloaders: expected a loader for several passes, as training continues after the last batch, "
                f"got {type_of(self._batches)}; give a DataLoader, or set max_epochs=1"
            )
        raise StopIteration


def _state_of(generator: torch.Generator | None) -> Tensor | None:
    return None if generator is None else generator.get_state()


def _set_state(generator: torch.Generator | None, state: Tensor | None) -> None:
    if generator is not None and state is not None:
        generator.set_state(state)


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Sampler that shards samples over ranks: a user's batch sampler has it, while the loader's own is a default."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def is_map_style(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Whether ``loader`` is a DataLoader whose samples or batches have an order, so they can be counted and skipped."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    # In prediction Lightning wraps it in one that records its indices (overrides/distributed.py).
    batch_sampler = getattr(loader.batch_sampler, "_batch_sampler", loader.batch_sampler)
    return batch_sampler is None or isinstance(batch_sampler, BatchSampler)
