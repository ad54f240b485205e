"""How does an ordinary DataLoader resume exactly and validate exactly? Two thin faces around it.

Lightning gives each data-parallel rank every dp-th sample (``DistributedSampler``). Between two optimizer steps the
ranks together have consumed a prefix of the epoch's order, whatever dp is: that number of samples is the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_megatron.data.serving.sampler import PADDING_ROW


class _SkipFirst:
    """A batch sampler (or a sampler of whole batches) without its first ones, never read from the dataset."""

    def __init__(self, sampler: Any, skipped: int, after_skipping: Callable[[], None]) -> None:
        self._sampler = sampler
        self._skipped = skipped
        self._after_skipping = after_skipping

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._sampler)
        for _ in range(self._skipped):
            next(batches, None)
        self._after_skipping()
        yield from batches

    def __len__(self) -> int:
        return len(self._sampler) - self._skipped


def _without_first(loader: DataLoader[Any], skipped: int, after_skipping: Callable[[], None]) -> DataLoader[Any]:
    rest = _SkipFirst(loader.batch_sampler or loader.sampler, skipped, after_skipping)
    order: dict[str, Any] = {"batch_sampler": rest}
    if loader.batch_sampler is None:
        order = {"batch_size": None, "sampler": rest}
    return DataLoader(
        loader.dataset,
        **order,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )


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
        self.before_batch: Callable[[], None] = lambda: None
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
        return _without_first(self.loader, self._handed_out, lambda: torch.set_rng_state(outside))

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
            if mask is not None and not bool(mask.all()):
                batch = {**batch, "sample_mask": batch.get("sample_mask", torch.ones(rows)) * mask}
            yield batch

    def _counts(self, taken: int, samples: int) -> torch.Tensor | None:
        """1 for each sample whose place in the epoch's order is a first visit, else 0: [samples], fp32."""
        sampler = self.loader.sampler
        if not isinstance(sampler, DistributedSampler) or samples == 0:
            return None
        places = (taken + torch.arange(samples)) * sampler.num_replicas + sampler.rank
        num_samples: int = len(sampler.dataset)  # type: ignore[arg-type]
        return (places < num_samples).float()

    def samples_of_batches(self) -> Iterator[list[int]]:
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
            is_first = [True] * len(samples) if mask is None else mask.bool().tolist()
            yield [sample if first else PADDING_ROW for sample, first in zip(samples, is_first, strict=True)]

    @property
    def dataset(self) -> Any:
        """The dataset, where Lightning and callbacks look for it."""
        return self.loader.dataset

    @property
    def sampler(self) -> Any:
        """The sampler, where Lightning sets the epoch."""
        return self.loader.sampler

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler, where Lightning looks for inner samplers."""
        return self.loader.batch_sampler

    @property
    def batch_size(self) -> int | None:
        """Rows per batch of one data-parallel rank."""
        return self.loader.batch_size


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
