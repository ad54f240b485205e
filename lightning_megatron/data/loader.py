"""Loaders that hold their place in the samples, so that a run resumes at the exact sample, at any layout.

``TrainLoader`` and ``PassLoader`` serve the samples of our data modules. A position is a count of samples over all
ranks, so it means the same at any tp, pp, dp or batch size. They are no ``torch.utils.data.DataLoader``, so Lightning
leaves their sampling alone.

``ResumableLoader`` and ``EvaluationLoader`` wrap an ordinary DataLoader. Lightning gives each data-parallel rank every
dp-th sample (``DistributedSampler``): between two optimizer steps the ranks together have consumed a prefix of the
epoch's order, whatever dp is, and its length is the state.

``broadcast_batch`` sends the batch that one rank has read to the ranks that share its copy of the model, once a step: a
short header (names, shapes, dtypes) over gloo, which never waits for a GPU, and then one flat buffer over the device's
backend. What other ranks' loaders yielded is ignored, so a random or placeholder batch there cannot make the ranks of
one model drift apart.
"""

from __future__ import annotations

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
from lightning_megatron.engine.heartbeat import progress
from lightning_megatron.errors import ConfigError, DataError

PADDING_ROW = -1
"""Stands for a row without a sample in the last batch of an evaluation."""

_Key = TypeVar("_Key")
_Item = TypeVar("_Item")

Shuffling: TypeAlias = Literal["later passes", "every pass", "never"]
"""When samples are put in another order: their own may be shuffled already, or be the one that the user wants."""


# ---- how a step is dealt to ranks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchRampup:
    """A global batch that grows from ``start`` in equal steps while the first ``samples`` samples are consumed.

    Megatron's ``--rampup-batch-size START INCREMENT SAMPLES``.
    """

    start: int
    """Rows of all ranks in the first step."""
    increment: int
    """Rows by which it grows each time."""
    samples: int
    """Samples after which it has its full size."""


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How one optimizer step's samples are dealt to ranks."""

    micro_batch_size: int
    """Rows of one microbatch of one data-parallel rank."""
    num_microbatches: int
    """Microbatches of one step; with a ramp-up, of a step of full size."""
    data_parallel_size: int
    """Data-parallel ranks."""
    data_parallel_rank: int
    """This one."""
    rampup: BatchRampup | None = None
    """How training steps grow to this size."""

    @property
    def global_batch_size(self) -> int:
        """Rows of all ranks in one step."""
        return self.micro_batch_size * self.num_microbatches * self.data_parallel_size

    @cached_property
    def stages(self) -> list[int]:
        """Microbatches of one data-parallel rank at each stage of the ramp-up, ascending.

        Raises:
            ConfigError: If a stage cannot be dealt to the ranks in equal microbatches.
        """
        if self.rampup is None:
            return [self.num_microbatches]
        ramp, full, unit = self.rampup, self.global_batch_size, self.micro_batch_size * self.data_parallel_size
        grows = ramp.start >= 1 and ramp.increment >= 1 and ramp.samples >= 1 and ramp.start < full
        if not grows or (full - ramp.start) % ramp.increment or ramp.start % unit or ramp.increment % unit:
            raise ConfigError(
                f"rampup_batch_size=[{ramp.start}, {ramp.increment}, {ramp.samples}]: expected a first global batch and"
                f" an increment, multiples of micro_batch_size={self.micro_batch_size} x dp={self.data_parallel_size},"
                f" which reach the global batch of {full} in whole increments, and a positive number of samples"
            )
        return [rows // unit for rows in range(ramp.start, full + 1, ramp.increment)]

    def at(self, consumed_samples: int) -> Self:
        """The shape of the training step that begins at this position, as by Megatron's ramp-up calculator."""
        ramp, stages = self.rampup, self.stages
        if ramp is None:
            return self
        is_full = consumed_samples > ramp.samples
        stage = -1 if is_full else int(consumed_samples / (ramp.samples / (len(stages) - 1)))
        return replace(self, num_microbatches=stages[stage], rampup=None)

    def positions(self, first: int) -> list[int]:
        """This rank's positions in the step that begins at position ``first``, in row order.

        Megatron's order: a microbatch of all ranks is consecutive, and each rank has a consecutive part of it
        (Megatron-LM core_r0.16, legacy/data/data_samplers.py:MegatronPretrainingSampler).
        """
        rows, first = self.micro_batch_size, first + self.micro_batch_size * self.data_parallel_rank
        microbatches = range(first, first + self.global_batch_size, rows * self.data_parallel_size)
        return [begin + row for begin in microbatches for row in range(rows)]

    def steps_in(self, first: int, end: int) -> int:
        """Whole training steps between the positions ``first`` and ``end``."""
        steps = 0
        while self.rampup is not None and first <= self.rampup.samples:
            first += self.at(first).global_batch_size
            if first > end:
                return steps
            steps += 1
        return steps + max(0, end - first) // self.global_batch_size

    def position_after(self, first: int, steps: int) -> int:
        """The position that ``steps`` training steps reach from ``first``."""
        while self.rampup is not None and steps > 0 and first <= self.rampup.samples:
            first, steps = first + self.at(first).global_batch_size, steps - 1
        return first + max(0, steps) * self.global_batch_size


# ---- samples of our data modules ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PassOrder:
    """The order in which each pass over ``num_samples`` samples takes them; the same on every rank and in every run."""

    num_samples: int
    seed: int
    shuffling: Shuffling
    fingerprint: str = ""
    """That of the samples."""
    requested: int | None = None
    """Samples that were asked for, where those of the whole run are laid out at once."""

    def sample_at(self, pass_index: int, position: int) -> int:
        """Index of the sample at ``position`` of pass ``pass_index``, both from 0."""
        if self.shuffling == "never" or (self.shuffling == "later passes" and pass_index == 0):
            return position
        return int(_permutation(self.num_samples, self.seed, pass_index)[position])


@lru_cache(maxsize=2)  # a batch may lie across two passes
def _permutation(num_samples: int, seed: int, number: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, number)).permutation(num_samples)


@dataclass
class Position:
    """How far a run has come in its training samples: plain numbers, the same on every rank, at any layout."""

    epoch: int = 0
    """Current epoch; stays 0 with ``max_steps``."""
    consumed_samples: int = 0
    """Samples handed out since the epoch began, over all data-parallel ranks."""
    steps: int = 0
    """Steps handed out since the epoch began, over all runs that led here."""
    earlier_samples: int = 0
    """Samples handed out in the epochs before; a ramp-up counts those of the whole run."""


class TrainLoader:
    """Batches of training samples from a position on, which counts what was handed out, not what workers read ahead.

    Two ways, by ``max_steps``:

    * a number: the run is one long epoch of that many steps. Where the samples end, the next pass over them begins
      within the same batch. Lightning epochs do not matter;
    * None: each Lightning epoch is one pass; an incomplete global batch at its end is dropped.
    """

    def __init__(
        self, samples: Samples | None, order: PassOrder, shape: BatchShape, max_steps: int | None, num_workers: int
    ) -> None:
        """Begin at the first sample.

        Args:
            samples: Open samples; None on a rank that gets its batches from another one.
            order: Of the samples.
            shape: How a step is dealt.
            max_steps: Steps of the run, or None for whole epochs.
            num_workers: Processes that read ahead.

        Raises:
            DataError: If whole epochs are asked for and one has not enough samples for a step.
        """
        self.samples, self.order = samples, order
        """May be replaced before the first batch, by others in which the position means the same samples."""
        self.sampler = self
        """Lightning calls ``sampler.set_epoch`` of every loader."""
        self.before_batch: Callable[[], object] = lambda: None
        """Called when a batch is asked for: what was handed out before has been trained on."""
        self.position = Position()
        self.state_dict: Callable[[], dict[str, Any]] = dict
        """The data module's, which Lightning saves here once more."""
        self._shape, self._max_steps, self._num_workers = shape, max_steps, num_workers
        step = shape.at(0)
        if max_steps is None and order.num_samples < step.global_batch_size:
            raise DataError(
                f"one epoch of the training split has {order.num_samples} samples, one step takes micro_batch_size="
                f"{step.micro_batch_size} x num_microbatches={step.num_microbatches} x dp={step.data_parallel_size};"
                " lower one of them, add documents, or set trainer.max_steps without max_epochs to repeat the corpus"
            )

    def __len__(self) -> int:
        """Steps of the whole epoch, those already taken included: Lightning counts them as done when it resumes."""
        return self.position.steps + self._remaining_steps()

    def __iter__(self) -> Iterator[Rows]:
        """Go on from the position at the first batch: Lightning may make the iterator before it restores it."""
        # Samples that are drawn at random differ from epoch to epoch, copy to copy, and behind a resume.
        at = self.position
        seed = (self.order.seed, at.epoch, at.consumed_samples, self._shape.data_parallel_rank)
        self.before_batch()
        for batch in _load(self.samples, self.batches(), self._num_workers, seed):
            # Counted before it is handed out, so that a checkpoint written during the step has it.
            self.advance()
            yield batch
            self.before_batch()

    def batches(self) -> Iterator[list[int]]:
        """Samples of this rank for each step from the position on; does not move it."""
        at, first = self.position, self.position.consumed_samples
        epoch, earlier = at.epoch, at.earlier_samples
        for _ in range(self._remaining_steps()):
            shape = self._shape.at(earlier + first)
            places = (divmod(position, self.order.num_samples) for position in shape.positions(first))
            yield [self.order.sample_at(epoch + passes, place) for passes, place in places]
            first += shape.global_batch_size

    def advance(self) -> None:
        """Count one step as handed out."""
        at = self.position
        at.steps += 1
        at.consumed_samples += self._shape.at(at.earlier_samples + at.consumed_samples).global_batch_size

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``, unless it is the current one; Lightning calls this before each epoch."""
        at = self.position
        if self._max_steps is None and epoch != at.epoch:
            self.position = Position(epoch=epoch, earlier_samples=at.earlier_samples + at.consumed_samples)

    def next_epoch_has_same_length(self) -> bool:
        """Whether it has as many steps; not behind a resume with another batch size, nor while the batch grows."""
        if self._max_steps is not None:
            return True
        at = self.position.earlier_samples + self.position.consumed_samples
        begin = self._shape.position_after(at, self._remaining_steps())
        return self._shape.steps_in(begin, begin + self.order.num_samples) == len(self)

    def seek(self, position: Mapping[str, int]) -> None:
        """Go on from the position of a run with any layout, field by field; older ones have no ``earlier_samples``."""
        at = Position(**position)
        if self._max_steps is not None and at.epoch > 0:
            # The run counted epochs: each was a pass, of which this one goes on.
            at = Position(consumed_samples=at.consumed_samples + at.epoch * self.order.num_samples, steps=at.steps)
        self.position = at

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: Lightning gives the data module its state before, and the loader not in every case.

        (lightning 2.6.6, loops/fit_loop.py:setup_data, which asks whether the run is in mid-epoch.)
        """

    def _remaining_steps(self) -> int:
        if self._max_steps is not None:
            return max(0, self._max_steps - self.position.steps)
        at, earlier = self.position, self.position.earlier_samples
        return self._shape.steps_in(earlier + at.consumed_samples, earlier + self.order.num_samples)


class PassLoader:
    """One pass over a split, each time, for validation, test and prediction.

    Every rank gets as many batches of the same shape, whatever the remainder. They have a ``sample_mask`` [rows]
    float32 too: 0 for the rows that fill the last one up.
    """

    def __init__(self, samples: Samples | None, num_samples: int, shape: BatchShape, num_workers: int) -> None:
        """Bind the parts.

        Args:
            samples: Open samples; None on a rank that gets its batches from another one.
            num_samples: Samples of the split, known on every rank.
            shape: How a step is dealt.
            num_workers: Processes that read ahead.
        """
        self._samples, self._num_samples, self._shape, self._num_workers = samples, num_samples, shape, num_workers

    def __len__(self) -> int:
        return -(-self._num_samples // self._shape.global_batch_size)

    def batch_indices(self) -> Iterator[list[int]]:
        """Which samples each batch of this rank's copy of the model is of; ``PADDING_ROW`` fills the last one up."""
        for first in range(0, self._num_samples, self._shape.global_batch_size):
            yield [p if p < self._num_samples else PADDING_ROW for p in self._shape.positions(first)]

    def __iter__(self) -> Iterator[Rows]:
        seed = (self._shape.data_parallel_rank,)
        # Where there is no sample stands the first one, with the weight 0.
        there = ([max(0, index) for index in batch] for batch in self.batch_indices())
        batches = _load(self._samples, there, self._num_workers, seed)
        for indices, rows in zip(self.batch_indices(), batches, strict=True):
            given = torch.tensor([float(index != PADDING_ROW) for index in indices])
            yield {**rows, "sample_mask": rows.get("sample_mask", 1) * given}


class _Calls(Dataset[Any]):
    """Items that a function makes of keys.

    A mistake of the user's is an item, too: a DataLoader would hide its message behind a worker's traceback.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._function(key)
        except ConfigError as error:
            return error


def parallel_map(function: Callable[[_Key], _Item], keys: Iterator[_Key], options: dict[str, Any]) -> Iterator[_Item]:
    """What ``function`` makes of each key, in order, here or in processes that end with the iterator.

    Args:
        function: Picklable where ``options`` ask for processes that are not forked.
        keys: Are asked for here.
        options: Of a ``DataLoader``: its workers keep the order, bound what waits, and are missed when they are killed.

    Raises:
        ConfigError: That of ``function``.
        RuntimeError: If a process fails or is killed.
    """
    items: Any = DataLoader(_Calls(function), batch_size=None, sampler=keys, **options)
    for item in items:
        if isinstance(item, ConfigError):
            raise item
        yield item


def _load(
    samples: Samples | None, batches: Iterator[list[int]], num_workers: int, seed: tuple[int, ...]
) -> Iterator[Rows]:
    if samples is None:
        # Its content is replaced by the source rank's batch; the rows tell Lightning the batch size.
        yield from ({"rows": torch.empty((len(indices), 0), dtype=torch.int64)} for indices in batches)
        return
    # A generator of its own: the loader draws a seed for its workers, which must not advance the state that dropout
    # uses, on this rank alone and at another step after a resume.
    private = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    options = {"num_workers": num_workers, "generator": private}
    yield from parallel_map(samples.rows, batches, options)


# ---- ordinary DataLoaders -------------------------------------------------------------------------------------------


def _skipping(sampler: Any, skipped: int, after_skipping: Callable[[], None]) -> Iterator[Any]:
    batches = iter(sampler)
    for _ in range(skipped):
        next(batches, None)
    after_skipping()
    yield from batches


def _like(loader: DataLoader[Any], **order: Any) -> DataLoader[Any]:
    """The samples of ``loader`` in another order or other batches."""
    of_workers = ("num_workers", "prefetch_factor", "timeout", "multiprocessing_context", "worker_init_fn")
    kept = {name: getattr(loader, name) for name in (*of_workers, "pin_memory", "collate_fn", "generator")}
    return DataLoader(loader.dataset, **order, **kept)


def resize_batches(loader: object, asked: int, num_microbatches: int) -> object:
    """A training loader whose batches have rows for ``num_microbatches``, where the user's have them for ``asked``.

    Raises:
        ConfigError: If its batches are not made by ``batch_size``.
    """
    if asked == num_microbatches or isinstance(loader, TrainLoader):  # which counts by itself
        return loader
    rows = getattr(loader, "batch_size", None)
    if not is_map_style(loader) or type(loader.batch_sampler) is not BatchSampler or not rows or rows % asked:
        raise ConfigError(
            f"fewer nodes than num_nodes take num_microbatches={num_microbatches} instead of {asked}, and larger "
            f"batches: expected a DataLoader of a map-style dataset with a batch_size that {asked} divides, got "
            f"{type(loader).__name__} with batch_size={rows}; give it one, or start all nodes"
        )
    rows = rows // asked * num_microbatches
    return _like(loader, batch_size=rows, sampler=loader.sampler, drop_last=loader.drop_last)


class ResumableLoader:
    """A training DataLoader that continues where a checkpoint was taken, at any dp, in mid-epoch too.

    It counts its own epochs, because Lightning counts an epoch as finished when ``max_steps`` ends it, although samples
    of it are left. Its length is that of the whole epoch, as Lightning expects, also after a resume. Samplers that draw
    their order from random numbers draw it again from the state that those had when the epoch began.
    """

    def __init__(
        self, loader: DataLoader[Any], data_parallel_size: int, limit: Callable[[], float], first_epoch: int = 0
    ) -> None:
        """Wrap ``loader``, whose sampler already gives this rank its share.

        Args:
            loader: The user's loader.
            data_parallel_size: Ranks that share the samples of an epoch.
            limit: Tells after how many batches the Trainer ends an epoch; asked when one begins.
            first_epoch: The epoch to begin with, on which the order of samples depends.
        """
        self.loader = loader
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self._dp = data_parallel_size
        self._limit = limit
        self._epoch = first_epoch
        self._handed_out = 0
        self.before_batch: Callable[[], object] = lambda: None
        """Called when a batch is asked for: what was handed out before has been trained on."""
        self._is_resuming = False
        self._generator = loader.generator or getattr(_sampler_of(loader), "generator", None)
        self._random_state: torch.Tensor | None = None
        self._generator_state: torch.Tensor | None = None
        """Both as they were when the epoch began."""

    @property
    def _global_batch(self) -> int:
        return (self.batch_size or 1) * self._dp

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        is_resuming_in_mid_epoch = self._is_resuming and self._handed_out < min(len(self), self._limit())
        if self._handed_out > 0 and not is_resuming_in_mid_epoch:
            self._epoch, self._handed_out = self._epoch + 1, 0
        self._is_resuming = False
        if isinstance(sampler := _sampler_of(self.loader), DistributedSampler):
            sampler.set_epoch(self._epoch)
        self.before_batch()
        for batch in self._rest() if self._handed_out else self._whole():
            self._handed_out += 1
            yield batch
            self.before_batch()

    def _whole(self) -> DataLoader[Any]:
        self._random_state, self._generator_state = torch.get_rng_state(), _state_of(self._generator)
        return self.loader

    def _rest(self) -> DataLoader[Any]:
        """What follows the batches that were handed out, without moving the user's random numbers once more."""
        outside = torch.get_rng_state()
        if self._random_state is not None:
            torch.set_rng_state(self._random_state)
        _set_state(self._generator, self._generator_state)
        batches = self.loader.batch_sampler
        order = self.loader.sampler if batches is None else batches
        # The first ones are never read from the dataset.
        rest = _skipping(order, self._handed_out, lambda: torch.set_rng_state(outside))
        return _like(
            self.loader, **({"sampler": rest, "batch_size": None} if batches is None else {"batch_sampler": rest})
        )

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the samples of it that all ranks together have consumed, and where its order comes from."""
        return {
            "epoch": self._epoch,
            "consumed_samples": self._handed_out * self._global_batch,
            "random_state": self._random_state,
            "generator_state": self._generator_state,
            "generator_state_now": _state_of(self._generator),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration behind the consumed samples.

        A global batch size that does not divide them starts at the last whole batch before, so that nothing is skipped.
        """
        self._epoch = state["epoch"]
        self._handed_out = state["consumed_samples"] // self._global_batch
        self._random_state, self._generator_state = state["random_state"], state["generator_state"]
        _set_state(self._generator, state["generator_state_now"])
        self._is_resuming = True


class OneShotIterator:
    """An iterator as training data, which cannot begin anew: Lightning would wait for a next step for ever."""

    def __init__(self, batches: Iterator[Any]) -> None:
        """Wrap ``batches``."""
        self._batches, self._begins = batches, False

    def __iter__(self) -> Iterator[Any]:
        self._begins = True
        return self

    def __next__(self) -> Any:
        for batch in self._batches:
            self._begins = False
            return batch
        if self._begins:
            raise DataError(
                "train_dataloaders: expected what can begin anew, since training goes on behind its last batch, got a "
                f"{type(self._batches).__name__}; give a DataLoader, or set max_epochs=1"
            )
        raise StopIteration


def _state_of(generator: torch.Generator | None) -> torch.Tensor | None:
    return None if generator is None else generator.get_state()


def _set_state(generator: torch.Generator | None, state: torch.Tensor | None) -> None:
    if generator is not None and state is not None:
        generator.set_state(state)


class EvaluationLoader:
    """A validation or test DataLoader in which every sample counts once.

    ``DistributedSampler`` repeats samples so that all ranks have as many; the repeated rows get the loss weight 0.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Wrap ``loader``, whose sampler may be a ``DistributedSampler``."""
        self.loader = loader
        # Where Lightning and callbacks look for them.
        self.dataset, self.batch_size = loader.dataset, loader.batch_size
        self.sampler, self.batch_sampler = loader.sampler, loader.batch_sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        taken = 0
        # A resumed run may skip a validation that was due (Lightning does), and must still draw the same numbers.
        with torch.random.fork_rng(devices=[]):
            batches = iter(self.loader)
        for batch in batches:
            rows = _num_rows(batch)
            # A dataset of whole batches has one sample for all of their rows.
            samples = 1 if self.loader.batch_sampler is None else rows
            mask = self._counts(taken, samples)
            taken += samples
            if not bool(mask.all()):
                batch = {**batch, "sample_mask": batch.get("sample_mask", torch.ones(rows)) * mask}
            yield batch

    def _counts(self, taken: int, samples: int) -> torch.Tensor:
        """1 for each sample whose place in the epoch's order is a first visit, else 0: [samples], fp32."""
        sampler = self.loader.sampler
        if not isinstance(sampler, DistributedSampler):
            return torch.ones(samples)
        places = (taken + torch.arange(samples)) * sampler.num_replicas + sampler.rank
        num_samples: int = len(sampler.dataset)  # type: ignore[arg-type]
        return (places < num_samples).float()

    def batch_indices(self) -> Iterator[list[int]]:
        """Which samples each batch of the last pass was of, ``PADDING_ROW`` for repeated ones.

        Of a dataset of whole batches, which of these. In prediction Lightning has the batch sampler remember them.
        """
        batch_sampler, taken = self.loader.batch_sampler, 0
        seen = getattr(batch_sampler, "seen_batch_indices", None)
        if seen is None:
            seen = ([index] for index in self.loader.sampler) if batch_sampler is None else batch_sampler
        for samples in seen:
            mask = self._counts(taken, len(samples))
            taken += len(samples)
            yield [sample if first else PADDING_ROW for sample, first in zip(samples, mask.tolist(), strict=True)]


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """What deals samples to the ranks; a batch sampler of the user's has it, and then the loader has another one."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _num_rows(batch: Any) -> int:
    tensors = [v for v in batch.values() if isinstance(v, torch.Tensor)] if isinstance(batch, dict) else []
    return tensors[0].shape[0] if tensors else 0


def is_map_style(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Whether ``loader`` is a DataLoader with an order of samples or of whole batches, to be skipped and counted."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    # In prediction Lightning wraps it into one that remembers what it gave (overrides/distributed.py).
    batch_sampler = getattr(loader.batch_sampler, "_batch_sampler", loader.batch_sampler)
    return batch_sampler is None or isinstance(batch_sampler, BatchSampler)


# ---- to all ranks of a copy -----------------------------------------------------------------------------------------

_ALIGNMENT = 16
"""Bytes: every tensor starts where any dtype may start."""

Check: TypeAlias = Callable[[dict[str, torch.Tensor]], None]
"""Raises if the numbers of a batch are wrong."""

Header: TypeAlias = list[tuple[str, torch.dtype, torch.Size]]
"""Name, dtype and shape of each tensor, in the order of the buffer."""


def check_batch(batch: Any) -> dict[str, torch.Tensor]:
    """The batch as a dict of tensors with equal numbers of rows, at least one.

    Raises:
        DataError: If it is anything else.
    """
    if not isinstance(batch, Mapping) or not batch:
        raise DataError(f"a batch is a {type(batch).__name__}; the DataLoader must yield dicts of tensors")
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            raise DataError(f"batch[{name!r}]: expected a tensor with a row per sample, got a {type(value).__name__}")
    rows = {name: value.shape[0] for name, value in batch.items()}
    if len(set(rows.values())) > 1:
        raise DataError(f"the tensors of a batch have different numbers of rows, {rows}; give all the same")
    if 0 in rows.values():
        raise DataError("a batch has no rows, and each must have at least one; correct the dataset or sampler")
    return dict(batch)


def broadcast_batch(
    batch: Any, topology: Topology, device: torch.device, check: Check | None = None
) -> dict[str, torch.Tensor]:
    """The source rank's batch, on ``device``, on every rank of its model-parallel group; each of them must call.

    Args:
        batch: This rank's batch; only the source's is read.
        topology: Tells the source and the groups.
        device: Where the batch shall be.
        check: Called with the source's batch if it is still on the host, where looking at numbers costs nothing; None
            for prompts, which are no batches to learn from (a T5's have no labels).

    Raises:
        DataError: On all of these ranks, if the source's batch is not a dict of tensors or ``check`` refuses it.
    """
    progress.steps += 1
    is_alone = dist.get_world_size(topology.mp_group) == 1
    if dist.get_rank() == topology.mp_source:
        try:
            tensors = check_batch(batch)
            if check is not None and all(tensor.device.type == "cpu" for tensor in tensors.values()):
                check(tensors)
        except Exception as error:
            if not is_alone:  # the others wait for a header; they get the reason why there is none
                _sent(str(error) if isinstance(error, DataError) else repr(error), topology)
            raise
        header = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        buffer = pack(tensors, header).to(device, non_blocking=True)
        if is_alone:
            return unpack(buffer, header)
        _sent(header, topology)
    else:
        header = _sent(None, topology)
        if isinstance(header, str):
            raise DataError(header)
        buffer = _empty(header, device)
    dist.broadcast(buffer, topology.mp_source, group=topology.mp_group)
    return unpack(buffer, header)


def _sent(header: Any, topology: Topology) -> Any:
    """The source's header, on all ranks."""
    box = [header]
    dist.broadcast_object_list(box, topology.mp_source, group=topology.mp_header_group)
    return box[0]


def _empty(header: Header, device: torch.device) -> torch.Tensor:
    """For all tensors one after the other: [bytes], uint8, pinned on the CPU of a machine with a GPU."""
    num_bytes = sum(_size_bytes(dtype, shape) for _, dtype, shape in header)
    pinned = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)


def pack(tensors: Mapping[str, torch.Tensor], header: Header) -> torch.Tensor:
    """All tensors one after the other: [bytes], uint8."""
    buffer = _empty(header, next(iter(tensors.values())).device)
    # Written as numbers, not as bytes: a single element of a column cannot be viewed as those.
    for name, view in unpack(buffer, header).items():
        view.copy_(tensors[name])
    return buffer


def unpack(buffer: torch.Tensor, header: Header) -> dict[str, torch.Tensor]:
    """The tensors again, as views of the buffer."""
    tensors, start = {}, 0
    for name, dtype, shape in header:
        size = _size_bytes(dtype, shape)
        tensors[name] = buffer[start : start + size].view(dtype)[: shape.numel()].view(shape)
        start += size
    return tensors


def _size_bytes(dtype: torch.dtype, shape: torch.Size) -> int:
    return -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
