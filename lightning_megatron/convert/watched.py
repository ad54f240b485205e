"""How far is a conversion? A source that shows a progress bar of what has been read of it."""

from __future__ import annotations

from types import TracebackType
from typing import Any, cast

import torch
from tqdm import tqdm

from lightning_megatron.convert.options import ConvertOptions
from lightning_megatron.convert.stored.base import Key, StoredModel


class Watched:
    """A ``StoredModel`` like the one that it is made of; a context, in which the bar is shown."""

    def __init__(self, source: StoredModel, options: ConvertOptions) -> None:
        self._source = source
        # disable=None: shown only if standard error is a terminal.
        self._bar = tqdm(
            desc=f"converting to {options.to}",
            total=sum(spec.num_bytes for spec in source.tensors.values()),
            unit="B",
            unit_scale=True,
            disable=None,
        )

    def __enter__(self) -> StoredModel:
        return cast(StoredModel, self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def __getattr__(self, name: str) -> Any:
        """The source's."""
        return getattr(self._source, name)

    def read(self, key: Key, start: int, stop: int) -> torch.Tensor:
        """The source's rows."""
        rows = self._source.read(key, start, stop)
        # What is read twice does not count twice.
        self._bar.update(min(rows.nbytes, (self._bar.total or 0) - self._bar.n))
        return rows
