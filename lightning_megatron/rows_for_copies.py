"""Has each copy of the model a row to predict? Lightning's sampler wants one, and says so without words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler

from lightning_megatron.errors import ConfigError


def check_rows_for_copies(loader: object) -> None:
    """Refuse a loader of ``Trainer.predict`` on the ranks that have a row of it, when others have none.

    Raises:
        ConfigError: If the copies of the model are more than its rows (or batches, where a row is a whole one).
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader if batches is None else batches, "sampler", None)
    if isinstance(sampler, UnrepeatedDistributedSampler) and 0 < sampler.total_size < sampler.num_replicas:
        raise _too_few(sampler)


@contextmanager
def rows_for_copies() -> Iterator[None]:
    """Refuse it in the same words on the ranks that have none: there the sampler fails while it is made.

    lightning 2.6.6, overrides/distributed.py:UnrepeatedDistributedSampler asserts it, before a hook sees the loader.

    Raises:
        ConfigError: In place of that AssertionError.
    """
    try:
        yield
    except AssertionError as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        failed = None if trace is None else trace.tb_frame.f_locals.get("self")
        if not isinstance(failed, UnrepeatedDistributedSampler) or failed.num_samples > 0:
            raise
        raise _too_few(failed) from error


def _too_few(sampler: UnrepeatedDistributedSampler) -> ConfigError:
    return ConfigError(
        f"predict has {sampler.total_size} samples for dp={sampler.num_replicas} copies of the model, and each needs "
        "at least one; use fewer devices or a larger tp or pp, or serve the samples with DatasetDataModule(test=...), "
        "which takes any number"
    )
