"""A teacher's top-k logits in files, for distillation without the teacher.

A folder has a part for each data-parallel replica that wrote, and ``top_logits.json``, written last. A part has flat
arrays of the k most likely tokens and their logits at each position, and for each row its length and a hash of what the
model read. Rows are found by this hash, so their order, their number and the layout may be others than when they were
written, and logits of another row are never taken.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_megatron.errors import DataError
from lightning_megatron.foreign_names import checks_options
from lightning_megatron.storage.checksums import FileChecksums, verify_checksums, write_checksums

MANIFEST = "top_logits.json"
_FORMAT_VERSION = 1
_KEY_BYTES = 16
_FILES = ("keys.bin", "lengths.bin", "ids.bin", "logits.bin")


def row_key(row: Mapping[str, Any]) -> bytes:
    """Hash of what a GPT reads of a row: tokens, positions, and a mask that hides something.

    Args:
        row: ``input_ids`` [s], and optionally ``attention_mask`` and ``position_ids``.
    """
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    for name in ("input_ids", "attention_mask", "position_ids"):
        if name not in row:
            continue
        values = torch.as_tensor(row[name]).long()
        if name == "attention_mask" and bool((values == 1).all()):
            continue
        digest.update(name.encode())
        digest.update(values.cpu().numpy().tobytes())
    return digest.digest()


class TopLogitsPart:
    """Files of one part, written row by row."""

    def __init__(self, folder: Path) -> None:
        """Create the files.

        Raises:
            OSError: If they cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._checksums: dict[str, FileChecksums] = {}
        for name in _FILES:
            self._files[name] = (folder / name).open("wb")
            self._checksums[name] = FileChecksums()

    def append(
        self,
        row: Mapping[str, Any],
        ids: Tensor,
        logits: Tensor,
    ) -> None:
        """Append a row.

        Args:
            row: What the model read, as for ``row_key``.
            ids: Tokens, [s, k], on the host.
            logits: Their logits, [s, k], on the host.
        """
        tokens = ids.int().numpy()
        values = logits.float().numpy()
        content = {
            "keys.bin": row_key(row),
            "lengths.bin": np.int32(len(tokens)).tobytes(),
            "ids.bin": tokens.tobytes(),
            "logits.bin": values.tobytes(),
        }
        for name, data in content.items():
            self._files[name].write(data)
            self._checksums[name].update(data)

    def close(self) -> None:
        """Close the files, and write their checksums."""
        for file in self._files.values():
            file.close()
        write_checksums(self._folder, self._checksums)


def write_manifest(
    folder: Path,
    parts: list[str],
    k: int,
    facts: Mapping[str, Any],
) -> int:
    """Write the manifest, whose presence marks the folder as complete; returns the number of rows.

    Args:
        folder: With all parts.
        parts: Names of their folders.
        k: Tokens per position.
        facts: What else it says, as plain data: of which model the logits are.
    """
    num_bytes = 0
    for part in parts:
        num_bytes += (folder / part / "keys.bin").stat().st_size
    num_rows = num_bytes // _KEY_BYTES
    manifest = {
        "format_version": _FORMAT_VERSION,
        "k": k,
        "parts": parts,
        "num_rows": num_rows,
        **facts,
    }
    text = json.dumps(manifest, indent=1)
    (folder / MANIFEST).write_text(f"{text}\n", encoding="utf-8")
    return num_rows


class _OpenPart:
    """Memory-mapped arrays of a part."""

    def __init__(self, folder: Path, k: int) -> None:
        self.lengths = np.fromfile(folder / "lengths.bin", dtype=np.int32)
        ends_of_rows = np.cumsum(self.lengths, dtype=np.int64)
        self.starts = np.concatenate([[0], ends_of_rows])
        shape = (int(self.starts[-1]), k)
        self.ids = _mapped(folder / "ids.bin", np.dtype(np.int32), shape)
        self.logits = _mapped(folder / "logits.bin", np.dtype(np.float32), shape)
        content = (folder / "keys.bin").read_bytes()
        ends = range(_KEY_BYTES, len(content) + 1, _KEY_BYTES)
        self.keys = [content[end - _KEY_BYTES : end] for end in ends]
        if len(self.keys) != len(self.lengths):
            raise ValueError(f"{len(self.keys)} keys of {len(self.lengths)} rows")


def _mapped(
    file: Path,
    dtype: np.dtype[Any],
    shape: tuple[int, int],
) -> NDArray[Any]:
    if shape[0] == 0:
        return np.zeros(shape, dtype)
    return np.memmap(file, dtype=dtype, mode="r", shape=shape)


@checks_options
class TopLogitsDataset:
    """A map-style dataset whose rows have a teacher's top-k logits, which ``TopLogitsWriter`` has written.

    Each row of ``dataset``, with ``input_ids`` and whatever else ``GPTTrainStep`` takes, gets ``teacher_ids`` and
    ``teacher_logits``, [s, k] each, for ``DistillationTrainStep(teacher=None)``. Serve it with ``DatasetDataModule`` or
    a DataLoader. Rows are found by their tokens, mask and positions, in any order.

    Args:
        dataset: Items are dicts with ``input_ids`` [s]: ``datasets.Dataset``, ``torch.utils.data.Dataset``, a list.
        folder: What ``TopLogitsWriter`` has written; its checksums are verified once.

    Raises:
        DataError: If the folder is missing, not complete or damaged, or lacks the first or the last row.
    """

    def __init__(self, dataset: Any, folder: str | Path) -> None:
        self._dataset = dataset
        self.folder = Path(folder)
        self._open(is_new=True)
        if len(dataset):
            for index in (0, len(dataset) - 1):
                self._find(index, dataset[index])

    def _open(self, *, is_new: bool) -> None:
        path = self.folder / MANIFEST
        if not path.is_file():
            raise DataError(
                f"{self.folder}: expected a folder of TopLogitsWriter with {MANIFEST}, which it writes last, got none; "
                "write it, to its end"
            )
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
            if manifest["format_version"] != _FORMAT_VERSION:
                raise ValueError(f"format version {manifest['format_version']}")
            k = int(manifest["k"])
            # Names alone: a manifest may not lead out of its folder.
            folders = [self.folder / Path(part).name for part in manifest["parts"]]
            if is_new:
                for folder in folders:
                    verify_checksums(folder)
            self._parts = [_OpenPart(folder, k) for folder in folders]
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise DataError(f"{self.folder} is damaged ({error}); write it again") from None
        self._places: dict[bytes, tuple[int, int]] = {}
        for number, part in enumerate(self._parts):
            for row, key in enumerate(part.keys):
                self._places[key] = (number, row)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the folder: other processes map the files again."""
        return {"dataset": self._dataset, "folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._dataset = state["dataset"]
        self.folder = state["folder"]
        self._open(is_new=False)

    @property
    def _fingerprint(self) -> str | None:
        """Fingerprint of the dataset, if it has one."""
        return getattr(self._dataset, "_fingerprint", None)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A row with the teacher's top-k logits.

        Raises:
            DataError: If there are none of this row.
        """
        row = self._dataset[index]
        number, place = self._find(index, row)
        part = self._parts[number]
        positions = slice(part.starts[place], part.starts[place + 1])
        ids = part.ids[positions].astype(np.int64)
        logits = np.array(part.logits[positions])  # a copy, which may be written to
        return {
            **row,
            "teacher_ids": torch.from_numpy(ids),
            "teacher_logits": torch.from_numpy(logits),
        }

    def _find(self, index: int, row: Mapping[str, Any]) -> tuple[int, int]:
        """Part and place of a row."""
        place = self._places.get(row_key(row))
        if place is None:
            raise DataError(
                f"row {index}: expected logits of the teacher for its tokens, mask and positions in {self.folder}, got "
                "none; write them for this dataset"
            )
        return place
