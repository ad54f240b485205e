"""Samples of one split in a fixed order: what an objective and its index are."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, Self, TypeAlias

import numpy as np
import torch

from lightning_megatron.data.contents import hash_of_indexed, with_contents
from lightning_megatron.data.indexed import IndexedDataset, open_dataset
from lightning_megatron.data.splits import SplitName
from lightning_megatron.errors import DataError

Rows: TypeAlias = dict[str, torch.Tensor]
"""Tensors of a batch on the host, with one row per sample: [rows, ...]."""


class Samples(Protocol):
    """The samples of one split in a fixed order; sample ``i`` is the same on every rank, in every worker and run."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal samples in equal order; tells a resumed run whether its order is unchanged."""

    def __len__(self) -> int:
        """Number of samples."""

    def rows(self, indices: Sequence[int]) -> Rows:
        """Samples at ``indices``, at least one, stacked.

        Raises:
            DataError: If their source is damaged.
        """


@dataclass(frozen=True, kw_only=True)
class Part:
    """The documents of one dataset that belong to one split, and the number of samples requested of them."""

    prefix: str
    """Path of the dataset without suffix."""
    weight: float | None = None
    """Weight of the dataset in a blend, not normalized; None to blend in proportion to sizes."""
    split: str
    """Weights of train, valid and test, e.g. ``949,50,1``."""
    name: SplitName
    """Name of the split."""
    seed: int
    """Seed of the order, and of the random numbers of each sample."""
    num_samples: int | None
    """Samples needed, of a blend over all its parts, in as many passes as it takes; None for one pass."""


class Objective(ABC):
    """How documents become samples for one kind of model. Implementations are frozen dataclasses."""

    name: ClassVar[str]
    """``gpt``, ``bert`` or ``t5``."""
    index_type: ClassVar[type[SavedArrays]]
    """Class of the index, which says which documents make up each sample, and the order of samples."""

    @property
    @abstractmethod
    def index_key(self) -> str:
        """Settings of this objective on which the index depends, as text for the name of its directory."""

    @abstractmethod
    def count(self, part: Part) -> int:
        """Number of samples in one pass over the documents of ``part``; reads only ``.idx``, ignores ``num_samples``.

        Raises:
            DataError: If there is none, with the rule and the fix; the engine would loop forever.
        """

    @abstractmethod
    def build_index(self, part: Part) -> SavedArrays:
        """Build the index of ``part``, of at least ``num_samples`` samples."""

    def open(self, part: Part, folder: str) -> IndexedSamples:
        """Samples of ``part`` by the index saved in ``folder``."""
        return IndexedSamples(
            self,
            part,
            open_dataset(part.prefix),
            self.index_type.load(folder),
        )

    @abstractmethod
    def order_key(self, part: Part) -> str:
        """What determines the samples besides their index, for the fingerprint of an order."""

    @abstractmethod
    def read(
        self,
        dataset: IndexedDataset,
        index: Any,
        indices: Sequence[int],
        seed: int,
    ) -> Rows:
        """Samples at ``indices`` of ``index``, which has the type ``index_type``."""


class SavedArrays:
    """Arrays saved as one ``FIELD.npy`` each, and memory-mapped when loaded; subclasses are dataclasses."""

    folder = ""
    """Directory that the arrays were loaded from."""

    def save(self, folder: str) -> None:
        """Write the arrays to ``folder``."""
        for field in fields(self):  # type: ignore[arg-type]
            np.save(os.path.join(folder, f"{field.name}.npy"), getattr(self, field.name))

    @classmethod
    def load(cls, folder: str) -> Self:
        """Memory-map the arrays in ``folder``.

        Raises:
            DataError: If a file is damaged or gone: a run opens its index again for each validation.
        """
        arrays = {}
        for field in fields(cls):  # type: ignore[arg-type]
            path = os.path.join(folder, f"{field.name}.npy")
            try:
                array = np.load(path, mmap_mode="r", allow_pickle=False)
                # As a plain ndarray: slicing a numpy.memmap costs more than copying the slices.
                arrays[field.name] = array.view(np.ndarray)
            # Of any type: NumPy reads the header as Python's source text.
            except Exception as error:
                raise DataError(
                    f"{path} cannot be read ({error}): removed or damaged; start the run again, which rebuilds it"
                ) from error
        loaded = cls(**arrays)
        loaded.__dict__["folder"] = folder
        return loaded

    def __getstate__(self) -> str | dict[str, Any]:
        """Pickle the directory: other processes load the arrays again, as memory maps cannot be pickled."""
        return self.folder or self.__dict__

    def __setstate__(self, state: str | dict[str, Any]) -> None:
        if isinstance(state, str):
            state = vars(self.load(state))
        self.__dict__.update(state)

    def fingerprint(self, key: str) -> str:
        """Hash of ``key`` and the beginning of each array, which suffices as any change reshuffles the whole order."""
        digest = hashlib.sha256(key.encode())
        for field in fields(self):  # type: ignore[arg-type]
            beginning = getattr(self, field.name)[:4096]
            digest.update(np.ascontiguousarray(beginning).tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class IndexedSamples:
    """Samples of one split of one dataset; every process maps the files itself, and shares their pages."""

    objective: Objective
    """How documents become samples."""
    part: Part
    """Documents of the samples."""
    dataset: IndexedDataset
    """Dataset that holds the documents."""
    index: Any
    """Documents of each sample, and order of samples; of the objective's ``index_type``."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the order, and of what the documents hold."""
        return with_contents(self.order_fingerprint, hash_of_indexed([self.dataset]))

    @property
    def order_fingerprint(self) -> str:
        """Fingerprint of the order, which lengths of documents decide."""
        return self.index.fingerprint(f"({len(self)}, {self.objective.order_key(self.part)})")  # type: ignore[no-any-return]

    def rows(self, indices: Sequence[int]) -> Rows:
        """Samples at ``indices``, at least one, stacked.

        Raises:
            DataError: If a file of the dataset changed since it was opened, or holds invalid tokens.
        """
        self._check_unchanged()
        try:
            return self.objective.read(
                self.dataset,
                self.index,
                indices,
                self.part.seed,
            )
        except DataError:
            raise
        except (IndexError, ValueError) as error:
            raise DataError(
                f"{self.part.prefix}: its cached index names samples that it does not have ({error}): it was changed"
                " with its checksums; delete the directory of the index"
            ) from error
        finally:
            self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Raise unless both files have the sizes with which they were opened; takes 1 us on a local disk.

        Beyond the end of a truncated file, its memory map reads zeros up to the end of the page, and after that the
        kernel kills the process (SIGBUS). The check before a read prevents the latter; the check after it keeps zeros
        from being taken for tokens. A file that was deleted or replaced as a whole can still be read.
        """
        for suffix, file in self.dataset.files.items():
            now = file.size()
            if now != len(file):
                raise DataError(
                    f"{self.dataset.prefix}{suffix}: expected {len(file)} bytes, got {now}: it was cut or overwritten "
                    "while it was in use; copy it again and resume from the last checkpoint, and give new data a new "
                    "name"
                )
