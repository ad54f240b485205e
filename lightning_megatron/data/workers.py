"""Worker processes that load samples: ordered results, and no worker that outlives its rank."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset

from lightning_megatron.errors import ConfigError

_Key = TypeVar("_Key")


_Item = TypeVar("_Item")


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
        threading.Thread(
            target=self._watch,
            args=(os.getppid(),),
            daemon=True,
        ).start()
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
    function: Callable[[_Key], _Item],
    keys: Iterator[_Key],
    options: dict[str, Any],
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
    items: Any = DataLoader(
        _FunctionDataset(function),
        batch_size=None,
        sampler=keys,
        **options,
    )
    let_workers_end(items)
    for item in items:
        if isinstance(item, ConfigError):
            raise item
        yield item
