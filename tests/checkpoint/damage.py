"""Ways to damage a checkpoint: missing, truncated, foreign and malicious files."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Damage = Callable[[Path], None]
"""Damages the checkpoint at a path."""


class Evil:
    """Object that creates a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def marker_path(path: Path) -> Path:
    """Directory that exists once code in the checkpoint has run."""
    return path.with_name(path.name + ".code_has_run")


def missing(name: str) -> Damage:
    return lambda path: (path / name).unlink()


def truncated(name: str) -> Damage:
    def damage(path: Path) -> None:
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[: len(data) // 2])

    return damage


def flipped_bit(name: str) -> Damage:
    def damage(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 16
        (path / name).write_bytes(data)

    return damage


def malicious_torch_file(name: str) -> Damage:
    return lambda path: torch.save({"optimizer": Evil(marker_path(path))}, path / name)


def malicious_pickle(name: str) -> Damage:
    def damage(path: Path) -> None:
        (path / name).write_bytes(pickle.dumps(Evil(marker_path(path))))

    return damage


def malicious_data(name: str) -> Damage:
    """Point the entry ``name`` (a tensor or an object) to a malicious pickle appended to its file."""

    def damage(path: Path) -> None:
        table = _table(path)
        payload = io.BytesIO()
        torch.save(Evil(marker_path(path)), payload)
        index = min(
            (index for index in table.storage_data if name in index.fqn),
            key=lambda index: len(index.fqn),
        )
        entry = table.storage_data[index]
        file = path / entry.relative_path
        entry.offset = file.stat().st_size
        entry.length = len(payload.getvalue())
        with file.open("ab") as stream:
            stream.write(payload.getvalue())
        _write_table(path, table)

    return damage


def pointing_outside(path: Path) -> None:
    table = _table(path)
    next(iter(table.storage_data.values())).relative_path = "../other.ckpt/__0_0.distcp"
    _write_table(path, table)


def without_tensor(path: Path) -> None:
    """Remove a parameter from the table, as if the saved model had none."""
    table = _table(path)
    del table.state_dict_metadata["decoder.final_layernorm.weight"]
    _write_table(path, table)


def other_version(path: Path) -> None:
    meta = torch.load(path / "meta.pt", weights_only=True)
    torch.save({**meta, "format_version": 99}, path / "meta.pt")


def fsdp_meta(path: Path) -> None:
    """Write ``meta.pt`` as Lightning's FSDP strategy does: same name, other content."""
    torch.save({"epoch": 1, "global_step": 5}, path / "meta.pt")


def fsdp_checkpoint(path: Path) -> None:
    """Leave only the files that Lightning's FSDP strategy writes."""
    fsdp_meta(path)
    (path / "metadata.json").unlink()
    (path / "common.pt").unlink()


def update_checksums(path: Path) -> None:
    """Rewrite ``checksums.json`` to match the current files."""
    from lightning_megatron.storage.checksums import CHECKSUMS, FileChecksums, write_checksums

    files = [file for file in path.iterdir() if file.is_file() and file.name != CHECKSUMS]
    write_checksums(
        path,
        {file.name: FileChecksums().update(file.read_bytes()) for file in files},
    )


def _table(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())


def _write_table(path: Path, table: Any) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(table))
