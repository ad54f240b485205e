"""What is a source of samples? The contract between objectives (GPT, BERT, T5), blends of datasets, and loaders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from lightning_megatron.data.samples.split import SplitName

Rows: TypeAlias = dict[str, Tensor]
"""Tensors of a batch on the host, each with one row per sample: [rows, ...]."""


class Samples(Protocol):
    """The samples of one split in a fixed order; sample ``i`` is the same on every rank, in every worker and run."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal samples in equal order; a resumed run finds out by it whether it goes on in its own."""

    def __len__(self) -> int:
        """Samples."""

    def rows(self, indices: Sequence[int]) -> Rows:
        """The samples at ``indices``, at least one, stacked.

        Raises:
            DataError: If what the samples are made of is damaged.
        """


@dataclass(frozen=True, kw_only=True)
class Part:
    """The documents of one dataset that belong to one split, and how many samples of them are asked for."""

    prefix: str
    """Dataset, without suffix."""
    split: str
    """Weights of train, valid and test, e.g. ``949,50,1``."""
    name: SplitName
    """The split."""
    seed: int
    """Of the order, and of what is drawn for each sample."""
    num_samples: int | None
    """Samples that are needed, over as many passes as it takes; None for one pass."""


class Objective(ABC):
    """How samples are cut out of documents for one kind of model. Implementations are frozen dataclasses."""

    @property
    @abstractmethod
    def name(self) -> str:
        """``gpt``, ``bert`` or ``t5``."""

    @property
    @abstractmethod
    def index_key(self) -> str:
        """What of this objective the index (which documents, in which order) depends on, as text for a cache's name."""

    @property
    @abstractmethod
    def largest_token(self) -> int:
        """The largest id that samples contain besides those of the documents; -1 if there are none."""

    @abstractmethod
    def count(self, part: Part) -> int:
        """Samples in one pass over the documents of ``part``; reads ``.idx`` only, and ignores ``num_samples``.

        Raises:
            DataError: If there is not even one, with the rule and the fix: the engine would wait for ever.
        """

    @abstractmethod
    def open(self, part: Part, folder: str) -> Samples:
        """The samples of ``part``: at least ``num_samples`` of them.

        Args:
            part: Which.
            folder: Where the index is, or is to be written if this is empty; ``""`` keeps it in memory.
        """
