"""Data loaders that resume at the exact sample, at any layout, and the broadcast of batches to model-parallel ranks.

``TrainLoader`` and ``PassLoader`` serve the samples of this package's data modules. A position counts samples over all
data-parallel ranks, so it means the same at any tp, pp, dp or batch size. The two are not subclasses of
``torch.utils.data.DataLoader``, so Lightning does not replace their sampling.

``ResumableLoader`` and ``EvaluationLoader`` wrap an ordinary DataLoader. Lightning gives each data-parallel rank every
dp-th sample (``DistributedSampler``): between two optimizer steps the ranks together have consumed a prefix of the
epoch's order, whatever dp is, and its length is the state.

``broadcast_batch`` sends the batch that one rank has read to the other ranks of its replica, once per step: a short
header (names, shapes, dtypes) over gloo, which never waits for a GPU, and then one flat buffer over the device's
backend. Batches of the other ranks' loaders are ignored, so a random or placeholder batch there cannot make the ranks
of a replica diverge.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, Self, TypeAlias, TypeGuard, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_megatron.data.samples import Rows, Samples
from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.progress import progress
from lightning_megatron.errors import ConfigError, DataError

PADDING_ROW = -1
"""Index of a row without a sample, in the last batch of an evaluation."""

_Key = TypeVar("_Key")
_Item = TypeVar("_Item")

Shuffling: TypeAlias = Literal["later passes", "every pass", "never"]
"""Which passes are shuffled: the samples' own order may be shuffled already, or be the one that the user wants."""


# ---- global batch and data-parallel ranks ---------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchRampup:
    """Ramp-up of the global batch from ``start`` in equal increments over the first ``samples`` samples.

    Megatron's ``--rampup-batch-size START INCREMENT SAMPLES``.
    """

    start: int
    """Global batch of the first step."""
    increment: int
    """Rows added at each increase."""
    samples: int
    """Samples after which the global batch has its full size."""


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Global batch of an optimizer step, and this data-parallel rank's share of it."""

    micro_batch_size: int
    """Rows of one microbatch of one data-parallel rank."""
    num_microbatches: int
    """Microbatches per step; with a ramp-up, of a full-size step."""
    data_parallel_size: int
    """Number of data-parallel ranks."""
    data_parallel_rank: int
    """This data-parallel rank."""
    rampup: BatchRampup | None = None
    """Ramp-up of training steps to this size."""

    @property
    def global_batch_size(self) -> int:
        """Rows of one step over all data-parallel ranks."""
        return self.micro_batch_size * self.num_microbatches * self.data_parallel_size

    @cached_property
    def stages(self) -> list[int]:
        """Microbatches of one data-parallel rank at each stage of the ramp-up, ascending.

        Raises:
            ConfigError: If the batch of a stage cannot be split into equal microbatches on all ranks.
        """
        if self.rampup is None:
            return [self.num_microbatches]
        ramp, full, unit = (
            self.rampup,
            self.global_batch_size,
            self.micro_batch_size * self.data_parallel_size,
        )
        grows = ramp.start >= 1 and ramp.increment >= 1 and ramp.samples >= 1 and ramp.start < full
        if (
            not grows
            or (full - ramp.start) % ramp.increment
            or ramp.start % unit
            or ramp.increment % unit
        ):
            raise ConfigError(
                f"rampup_batch_size=[{ramp.start}, {ramp.increment}, {ramp.samples}]: expected a first global batch and"
                f" an increment, multiples of micro_batch_size={self.micro_batch_size} x dp={self.data_parallel_size},"
                f" which reach the global batch of {full} in whole increments, and a positive number of samples"
            )
        return [rows // unit for rows in range(ramp.start, full + 1, ramp.increment)]

    def at(self, consumed_samples: int) -> Self:
        """Shape of the training step that begins at this position, by the rule of Megatron's ramp-up."""
        ramp, stages = self.rampup, self.stages
        if ramp is None:
            return self
        is_full = consumed_samples > ramp.samples
        stage = -1 if is_full else int(consumed_samples / (ramp.samples / (len(stages) - 1)))
        return replace(self, num_microbatches=stages[stage], rampup=None)

    def positions(self, first: int) -> list[int]:
        """This rank's positions in the step that begins at position ``first``, in row order.

        Megatron's order: each microbatch over all ranks is consecutive, and each rank has a consecutive part of it
        (Megatron-LM core_r0.16, legacy/data/data_samplers.py:MegatronPretrainingSampler).
        """
        rows, first = self.micro_batch_size, first + self.micro_batch_size * self.data_parallel_rank
        microbatches = range(first, first + self.global_batch_size, rows * self.data_parallel_size)
        return [begin + row for begin in microbatches for row in range(rows)]

    def steps_in(self, first: int, end: int) -> int:
        """Complete training steps between the positions ``first`` and ``end``."""
        steps = 0
        while self.rampup is not None and first <= self.rampup.samples:
            first += self.at(first).global_batch_size
            if first > end:
                return steps
            steps += 1
        return steps + max(0, end - first) // self.global_batch_size

    def position_after(self, first: int, steps: int) -> int:
        """Position after ``steps`` training steps from ``first``."""
        while self.rampup is not None and steps > 0 and first <= self.rampup.samples:
            first, steps = first + self.at(first).global_batch_size, steps - 1
        return first + max(0, steps) * self.global_batch_size


# ---- loaders of data modules ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PassOrder:
    """Order of the samples in each pass over them; the same on every rank and in every run."""

    num_samples: int
    seed: int
    shuffling: Shuffling
    fingerprint: str = ""
    """Fingerprint of the samples."""
    requested: int | None = None
    """Samples requested for the whole run, where these are indexed at once; None for one pass."""

    def sample_at(self, pass_index: int, position: int) -> int:
        """Index of the sample at ``position`` of pass ``pass_index``, both from 0."""
        if self.shuffling == "never" or (self.shuffling == "later passes" and pass_index == 0):
            return position
        return int(_permutation(self.num_samples, self.seed, pass_index)[position])


@lru_cache(maxsize=2)  # a batch may span two passes
def _permutation(num_samples: int, seed: int, pass_index: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, pass_index)).permutation(num_samples)


@dataclass
class Position:
    """Progress of a run in its training samples: integers that are the same on every rank and at any layout."""

    epoch: int = 0
    """Current epoch; stays 0 with ``max_steps``."""
    consumed_samples: int = 0
    """Samples yielded since the epoch began, over all data-parallel ranks."""
    steps: int = 0
    """Steps yielded since the epoch began, including those before a resume."""
    earlier_samples: int = 0
    """Samples yielded in earlier epochs; a ramp-up counts those of the whole run."""


class TrainLoader:
    """Resumable loader of training batches; its position counts batches yielded, not those prefetched by workers.

    Two modes, by ``max_steps``:

    * a number: the run is one long epoch of that many steps. Where the samples end, the next pass over them begins
      within the same batch. Lightning epochs do not matter;
    * None: each Lightning epoch is one pass; an incomplete global batch at its end is dropped.
    """

    def __init__(
        self,
        samples: Samples | None,
        order: PassOrder,
        shape: BatchShape,
        max_steps: int | None,
        num_workers: int,
    ) -> None:
        """Start at the first sample.

        Args:
            samples: Open samples; None on a rank that receives its batches from another one.
            order: Order of the samples.
            shape: Global batch of a step, and this rank's share.
            max_steps: Steps of the run, or None for epochs of one pass each.
            num_workers: Worker processes that prefetch.

        Raises:
            DataError: If ``max_steps`` is None and one pass has too few samples for a step.
        """
        self.samples, self.order = samples, order
        """May be replaced before the first batch, by those of a resumed run."""
        self.sampler = self
        """Lightning calls ``sampler.set_epoch`` on every loader."""
        self.before_batch: Callable[[], object] = lambda: None
        """Called when a batch is requested: those yielded before have been trained on."""
        self.position = Position()
        self.state_dict: Callable[[], dict[str, Any]] = dict
        """``state_dict`` of the data module, which Lightning saves for the loader too."""
        self._shape, self._max_steps, self._num_workers = shape, max_steps, num_workers
        step = shape.at(0)
        if max_steps is None and order.num_samples < step.global_batch_size:
            raise DataError(
                f"one epoch of the training split has {order.num_samples} samples, one step takes micro_batch_size="
                f"{step.micro_batch_size} x num_microbatches={step.num_microbatches} x dp={step.data_parallel_size};"
                " lower one of them, add documents, or set trainer.max_steps without max_epochs to repeat the corpus"
            )

    def __len__(self) -> int:
        """Steps of the whole epoch, including those already taken: Lightning counts these as done when it resumes."""
        return self.position.steps + self._remaining_steps()

    def __iter__(self) -> Iterator[Rows]:
        """Yield batches from the position at the first ``next``: Lightning may restore it after making the iterator."""
        # Random numbers that samples draw differ between epochs and replicas, and after a resume.
        position = self.position
        seed = (
            self.order.seed,
            position.epoch,
            position.consumed_samples,
            self._shape.data_parallel_rank,
        )
        self.before_batch()
        for batch in _load_batches(self.samples, self.batches(), self._num_workers, seed):
            # Counted before it is yielded, so that a checkpoint written during the step includes it.
            self.advance()
            yield batch
            self.before_batch()

    def batches(self) -> Iterator[list[int]]:
        """Sample indices of this rank for each step from the position on, which does not advance."""
        position, first = self.position, self.position.consumed_samples
        epoch, earlier = position.epoch, position.earlier_samples
        for _ in range(self._remaining_steps()):
            shape = self._shape.at(earlier + first)
            offsets = (divmod(index, self.order.num_samples) for index in shape.positions(first))
            yield [self.order.sample_at(epoch + passes, offset) for passes, offset in offsets]
            first += shape.global_batch_size

    def advance(self) -> None:
        """Count one step as yielded."""
        position = self.position
        shape = self._shape.at(position.earlier_samples + position.consumed_samples)
        position.steps += 1
        position.consumed_samples += shape.global_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``, unless it is the current one; Lightning calls this before each epoch."""
        position = self.position
        if self._max_steps is None and epoch != position.epoch:
            self.position = Position(
                epoch=epoch, earlier_samples=position.earlier_samples + position.consumed_samples
            )

    def next_epoch_has_same_length(self) -> bool:
        """Whether the next epoch has as many steps: not after a resume with another batch size, or in a ramp-up."""
        if self._max_steps is not None:
            return True
        begin = self.position.earlier_samples + self.position.consumed_samples
        begin = self._shape.position_after(begin, self._remaining_steps())
        return self._shape.steps_in(begin, begin + self.order.num_samples) == len(self)

    def seek(self, position: Mapping[str, int]) -> None:
        """Continue from the ``Position`` of a run at any layout, as a dict; older ones lack ``earlier_samples``."""
        old = Position(**position)
        if self._max_steps is not None and old.epoch > 0:
            # That run counted epochs of one pass each: continue within its last one.
            old = Position(
                consumed_samples=old.consumed_samples + old.epoch * self.order.num_samples,
                steps=old.steps,
            )
        self.position = old

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: Lightning has restored the data module before, and restores the loader only in some cases.

        (lightning 2.6.6, loops/fit_loop.py:setup_data, which asks whether the run is in mid-epoch.)
        """

    def _remaining_steps(self) -> int:
        if self._max_steps is not None:
            return max(0, self._max_steps - self.position.steps)
        position, earlier = self.position, self.position.earlier_samples
        return self._shape.steps_in(
            earlier + position.consumed_samples, earlier + self.order.num_samples
        )


class PassLoader:
    """Loader of one pass over a split, for validation, test and prediction.

    Every rank yields the same number of batches of the same shape, whatever the remainder. They have a ``sample_mask``
    [rows] float32 too: 0 for the rows that pad the last batch.
    """

    def __init__(
        self, samples: Samples | None, num_samples: int, shape: BatchShape, num_workers: int
    ) -> None:
        """Keep the arguments.

        Args:
            samples: Open samples; None on a rank that receives its batches from another one.
            num_samples: Number of samples of the split, also on ranks without ``samples``.
            shape: Global batch of a step, and this rank's share.
            num_workers: Worker processes that prefetch.
        """
        self._samples, self._num_samples, self._shape, self._num_workers = (
            samples,
            num_samples,
            shape,
            num_workers,
        )

    def __len__(self) -> int:
        return -(-self._num_samples // self._shape.global_batch_size)

    def batch_indices(self) -> Iterator[list[int]]:
        """Sample indices of each batch of this replica; the last one is padded with ``PADDING_ROW``."""
        for first in range(0, self._num_samples, self._shape.global_batch_size):
            yield [
                i if i < self._num_samples else PADDING_ROW for i in self._shape.positions(first)
            ]

    def __iter__(self) -> Iterator[Rows]:
        seed = (self._shape.data_parallel_rank,)
        # Padding rows repeat the first sample, with weight 0.
        padded = ([max(0, index) for index in batch] for batch in self.batch_indices())
        batches = _load_batches(self._samples, padded, self._num_workers, seed)
        for indices, rows in zip(self.batch_indices(), batches, strict=True):
            mask = torch.tensor([float(index != PADDING_ROW) for index in indices])
            yield {**rows, "sample_mask": rows.get("sample_mask", 1) * mask}


class _FunctionDataset(Dataset[Any]):
    """Dataset of ``function(key)``.

    A ``ConfigError`` is returned as an item: a DataLoader would bury its message in a worker's traceback.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._function(key)
        except ConfigError as error:
            return error


_PARENT_POLL_SECONDS = 2.0


class EndsWithRank:
    """``worker_init_fn`` of a DataLoader whose workers end with their rank, also while they hang in a dataset.

    Torch's workers look for their parent only between two samples.
    """

    def __init__(self, init: Callable[[int], object] | None) -> None:
        """Wrap the user's function."""
        self._init = init

    def __call__(self, worker_id: int) -> None:
        """Watch the rank from a thread of the worker, and call the user's function."""
        threading.Thread(target=self._watch, args=(os.getppid(),), daemon=True).start()
        if self._init is not None:
            self._init(worker_id)

    @staticmethod
    def _watch(rank: int) -> None:
        while os.getppid() == rank:
            time.sleep(_PARENT_POLL_SECONDS)
        os._exit(1)


def let_workers_end(loader: object) -> None:
    """Let the workers of a DataLoader end with their rank."""
    if isinstance(loader, DataLoader) and not isinstance(loader.worker_init_fn, EndsWithRank):
        loader.worker_init_fn = EndsWithRank(loader.worker_init_fn)


def parallel_map(
    function: Callable[[_Key], _Item], keys: Iterator[_Key], options: dict[str, Any]
) -> Iterator[_Item]:
    """Yield ``function(key)`` for each key in order, computed here or by worker processes that end with the iterator.

    Args:
        function: Picklable if ``options`` ask for processes that are not forked.
        keys: Iterated in this process.
        options: Of a ``DataLoader``, which keeps the order, bounds the items in flight, and notices killed workers.

    Raises:
        ConfigError: Raised by ``function``.
        RuntimeError: If a worker fails or is killed.
    """
    items: Any = DataLoader(_FunctionDataset(function), batch_size=None, sampler=keys, **options)
    let_workers_end(items)
    for item in items:
        if isinstance(item, ConfigError):
            raise item
        yield item


def _load_batches(
    samples: Samples | None, batches: Iterator[list[int]], num_workers: int, seed: tuple[int, ...]
) -> Iterator[Rows]:
    if samples is None:
        # A placeholder for the source rank's batch; its rows tell Lightning the batch size.
        yield from (
            {"rows": torch.empty((len(indices), 0), dtype=torch.int64)} for indices in batches
        )
        return
    # A private generator: the DataLoader draws a seed for its workers, which must not advance the random state that
    # dropout uses: on this rank alone, and at another step after a resume.
    private = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    options = {"num_workers": num_workers, "generator": private}
    yield from parallel_map(samples.rows, batches, options)


# ---- wrappers of ordinary DataLoaders -------------------------------------------------------------------------------


def _skip(sampler: Any, num_skipped: int, after_skipping: Callable[[], None]) -> Iterator[Any]:
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
    if requested == num_microbatches or isinstance(
        loader, TrainLoader
    ):  # TrainLoader sizes batches itself
        return loader
    rows = getattr(loader, "batch_size", None)
    if (
        not is_map_style(loader)
        or type(loader.batch_sampler) is not BatchSampler
        or not rows
        or rows % requested
    ):
        raise ConfigError(
            f"fewer nodes than num_nodes take num_microbatches={num_microbatches} instead of {requested}, and larger "
            f"batches: expected a DataLoader of a map-style dataset with a batch_size that {requested} divides, got "
            f"{type(loader).__name__} with batch_size={rows}; give it one, or start all nodes"
        )
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
        self._generator = loader.generator or getattr(_sampler_of(loader), "generator", None)
        self._random_state: torch.Tensor | None = None
        self._generator_state: torch.Tensor | None = None
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
            self._epoch, self._num_yielded = self._epoch + 1, 0
        self._is_resuming = False
        if isinstance(sampler := _sampler_of(self.loader), DistributedSampler):
            sampler.set_epoch(self._epoch)
        self.before_batch()
        for batch in self._remaining() if self._num_yielded else self._full_epoch():
            self._num_yielded += 1
            yield batch
            self.before_batch()

    def _full_epoch(self) -> DataLoader[Any]:
        self._random_state, self._generator_state = (
            torch.get_rng_state(),
            _state_of(self._generator),
        )
        return self.loader

    def _remaining(self) -> DataLoader[Any]:
        """Batches after those already yielded, without advancing the global random state again."""
        current_state = torch.get_rng_state()
        if self._random_state is not None:
            torch.set_rng_state(self._random_state)
        _set_state(self._generator, self._generator_state)
        batches = self.loader.batch_sampler
        order = self.loader.sampler if batches is None else batches
        # Skipped samples are not read from the dataset.
        rest = _skip(order, self._num_yielded, lambda: torch.set_rng_state(current_state))
        return _rebuild(
            self.loader,
            **(
                {"sampler": rest, "batch_size": None}
                if batches is None
                else {"batch_sampler": rest}
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """Epoch, samples of it consumed by all ranks together, and the random states that determine its order."""
        return {
            "epoch": self._epoch,
            "consumed_samples": self._num_yielded * self._global_batch,
            "random_state": self._random_state,
            "generator_state": self._generator_state,
            "generator_state_now": _state_of(self._generator),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration after the consumed samples.

        If the global batch size does not divide them, start at the last complete batch, so that no sample is skipped.
        """
        self._epoch = state["epoch"]
        self._num_yielded = state["consumed_samples"] // self._global_batch
        self._random_state, self._generator_state = state["random_state"], state["generator_state"]
        _set_state(self._generator, state["generator_state_now"])
        self._is_resuming = True


class OneShotIterator:
    """An iterator as training data; raises on a second pass, where Lightning would wait for a next step forever."""

    def __init__(self, batches: Iterator[Any]) -> None:
        """Wrap ``batches``."""
        self._batches, self._at_start = batches, False

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
                f"got a {type(self._batches).__name__}; give a DataLoader, or set max_epochs=1"
            )
        raise StopIteration


def _state_of(generator: torch.Generator | None) -> torch.Tensor | None:
    return None if generator is None else generator.get_state()


def _set_state(generator: torch.Generator | None, state: torch.Tensor | None) -> None:
    if generator is not None and state is not None:
        generator.set_state(state)


class EvaluationLoader:
    """A validation or test DataLoader in which every sample counts once.

    ``DistributedSampler`` repeats samples so that all ranks have the same number; repeated rows get loss weight 0.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Wrap ``loader``, whose sampler may be a ``DistributedSampler``."""
        self.loader = loader
        # Read by Lightning and callbacks.
        self.dataset, self.batch_size = loader.dataset, loader.batch_size
        self.sampler, self.batch_sampler = loader.sampler, loader.batch_sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        num_seen = 0
        # A resumed run may skip a validation that was due (Lightning does), and must keep the same random state.
        with torch.random.fork_rng(devices=[]):
            batches = iter(self.loader)
        for batch in batches:
            rows = _num_rows(batch)
            # An item of a dataset of batches is one sample with several rows.
            samples = 1 if self.loader.batch_sampler is None else rows
            mask = self._first_visits(num_seen, samples)
            num_seen += samples
            if not bool(mask.all()):
                batch = {**batch, "sample_mask": batch.get("sample_mask", torch.ones(rows)) * mask}
            yield batch

    def _first_visits(self, num_seen: int, samples: int) -> torch.Tensor:
        """1 for each sample at its first visit in the epoch's order, 0 for repetitions: [samples], fp32."""
        sampler = self.loader.sampler
        if not isinstance(sampler, DistributedSampler):
            return torch.ones(samples)
        positions = (num_seen + torch.arange(samples)) * sampler.num_replicas + sampler.rank
        num_samples: int = len(sampler.dataset)  # type: ignore[arg-type]
        return (positions < num_samples).float()

    def batch_indices(self) -> Iterator[list[int]]:
        """Sample indices of each batch of the last pass, ``PADDING_ROW`` for repetitions.

        For a dataset of batches, their indices. In prediction, Lightning's batch sampler records them.
        """
        batch_sampler, num_seen = self.loader.batch_sampler, 0
        seen = getattr(batch_sampler, "seen_batch_indices", None)
        if seen is None:
            seen = (
                ([index] for index in self.loader.sampler)
                if batch_sampler is None
                else batch_sampler
            )
        for samples in seen:
            mask = self._first_visits(num_seen, len(samples))
            num_seen += len(samples)
            yield [
                sample if first else PADDING_ROW
                for sample, first in zip(samples, mask.tolist(), strict=True)
            ]


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """Sampler that shards samples over ranks: a user's batch sampler has it, while the loader's own is a default."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _num_rows(batch: Any) -> int:
    tensors = (
        [v for v in batch.values() if isinstance(v, torch.Tensor)]
        if isinstance(batch, dict)
        else []
    )
    return tensors[0].shape[0] if tensors else 0


def is_map_style(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Whether ``loader`` is a DataLoader whose samples or batches have an order, so they can be counted and skipped."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    # In prediction Lightning wraps it in one that records its indices (overrides/distributed.py).
    batch_sampler = getattr(loader.batch_sampler, "_batch_sampler", loader.batch_sampler)
    return batch_sampler is None or isinstance(batch_sampler, BatchSampler)


# ---- broadcast to the ranks of a replica ----------------------------------------------------------------------------

_ALIGNMENT = 16
"""Alignment in bytes of each tensor in the buffer, enough for every dtype."""

Check: TypeAlias = Callable[[dict[str, torch.Tensor]], None]
"""Raises if values of a batch are invalid."""

Header: TypeAlias = list[tuple[str, torch.dtype, torch.Size]]
"""Name, dtype and shape of each tensor, in the order of the buffer."""


def check_batch(batch: Any) -> dict[str, torch.Tensor]:
    """The batch as a dict of tensors with the same number of rows, at least one.

    Raises:
        DataError: If it is anything else.
    """
    if not isinstance(batch, Mapping) or not batch:
        raise DataError(
            f"a batch is a {type(batch).__name__}; the DataLoader must yield dicts of tensors"
        )
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            raise DataError(
                f"batch[{name!r}]: expected a tensor with a row per sample, got a {type(value).__name__}"
            )
    rows = {name: value.shape[0] for name, value in batch.items()}
    if len(set(rows.values())) > 1:
        raise DataError(
            f"the tensors of a batch have different numbers of rows, {rows}; give all the same"
        )
    if 0 in rows.values():
        raise DataError(
            "a batch has no rows, and each must have at least one; correct the dataset or sampler"
        )
    return dict(batch)


def broadcast_batch(
    batch: Any, topology: Topology, device: torch.device, check: Check | None = None
) -> dict[str, torch.Tensor]:
    """Broadcast the source rank's batch to ``device`` on every rank of its replica. Collective over ``mp_group``.

    Args:
        batch: This rank's batch; only the source's is read.
        topology: Source rank and process groups.
        device: Device of the result.
        check: Called with the source's batch if it is still on the host, where reading values costs nothing; None for
            prompts, which are not training batches (a T5's have no labels).

    Raises:
        DataError: On all ranks of the group, if the source's batch is not a dict of tensors or ``check`` raises.
    """
    progress.steps += 1
    is_alone = dist.get_world_size(topology.mp_group) == 1
    if dist.get_rank() == topology.mp_source:
        try:
            tensors = check_batch(batch)
            if check is not None and all(
                tensor.device.type == "cpu" for tensor in tensors.values()
            ):
                check(tensors)
        except Exception as error:
            if not is_alone:  # the other ranks wait for a header: send the error instead
                _broadcast_header(
                    str(error) if isinstance(error, DataError) else repr(error), topology
                )
            raise
        header = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        buffer = pack(tensors, header).to(device, non_blocking=True)
        if is_alone:
            return unpack(buffer, header)
        _broadcast_header(header, topology)
    else:
        header = _broadcast_header(None, topology)
        if isinstance(header, str):
            raise DataError(header)
        buffer = _empty_buffer(header, device)
    dist.broadcast(buffer, topology.mp_source, group=topology.mp_group)
    return unpack(buffer, header)


def _broadcast_header(header: Any, topology: Topology) -> Any:
    """Header of the source rank, on every rank of the group."""
    box = [header]
    dist.broadcast_object_list(box, topology.mp_source, group=topology.mp_header_group)
    return box[0]


def _empty_buffer(header: Header, device: torch.device) -> torch.Tensor:
    """Uninitialized buffer for all tensors: [bytes], uint8, pinned if on the CPU of a machine with a GPU."""
    num_bytes = sum(_size_bytes(dtype, shape) for _, dtype, shape in header)
    pinned = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)


def pack(tensors: Mapping[str, torch.Tensor], header: Header) -> torch.Tensor:
    """Copy all tensors into one buffer: [bytes], uint8."""
    buffer = _empty_buffer(header, next(iter(tensors.values())).device)
    # Copied by element: a single element of a column has another stride than 1, and cannot be viewed as bytes.
    for name, view in unpack(buffer, header).items():
        view.copy_(tensors[name])
    return buffer


def unpack(buffer: torch.Tensor, header: Header) -> dict[str, torch.Tensor]:
    """Tensors of ``header`` as views of the buffer."""
    tensors, start = {}, 0
    for name, dtype, shape in header:
        size = _size_bytes(dtype, shape)
        tensors[name] = buffer[start : start + size].view(dtype)[: shape.numel()].view(shape)
        start += size
    return tensors


def _size_bytes(dtype: torch.dtype, shape: torch.Size) -> int:
    return -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
