"""Ways to spoil a checkpoint: missing, cut, foreign and malicious files."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Damage = Callable[[Path], None]
"""Spoils the checkpoint at a path."""


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def marker_of(path: Path) -> Path:
    """Exists after code in the checkpoint has run."""
    return path.with_name(path.name + ".code_has_run")


def missing(name: str) -> Damage:
    return lambda path: (path / name).unlink()


def cut_in_half(name: str) -> Damage:
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
    return lambda path: torch.save({"optimizer": Evil(marker_of(path))}, path / name)


def malicious_pickle(name: str) -> Damage:
    return lambda path: (path / name).write_bytes(pickle.dumps(Evil(marker_of(path)))) and None


def malicious_table_of_contents(path: Path) -> None:
    """A real table with an object in it that loads last."""
    table = _table(path)
    table.mcore_data = {"decoder": Evil(marker_of(path))}
    _write_table(path, table)


def malicious_data(name: str) -> Damage:
    """What should be a tensor, or another object, of that name leads to another pickle, behind the end of a file."""

    def damage(path: Path) -> None:
        table, payload = _table(path), io.BytesIO()
        torch.save(Evil(marker_of(path)), payload)
        index = min((each for each in table.storage_data if name in each.fqn), key=lambda each: len(each.fqn))
        place = table.storage_data[index]
        file = path / place.relative_path
        place.offset, place.length = file.stat().st_size, len(payload.getvalue())
        with file.open("ab") as stream:
            stream.write(payload.getvalue())
        _write_table(path, table)

    return damage


def pointing_outside(path: Path) -> None:
    table = _table(path)
    next(iter(table.storage_data.values())).relative_path = "../other.ckpt/__0_0.distcp"
    _write_table(path, table)


def without_tensor(path: Path) -> None:
    """As of a model that has no such parameter."""
    table = _table(path)
    del table.state_dict_metadata["decoder.final_layernorm.weight"]
    _write_table(path, table)


def other_version(path: Path) -> None:
    meta = torch.load(path / "meta.pt", weights_only=True)
    torch.save({**meta, "format_version": 99}, path / "meta.pt")


def another_strategys_meta(path: Path) -> None:
    """As Lightning's FSDP strategy writes it: a file of the same name with other content."""
    torch.save({"epoch": 1, "global_step": 5}, path / "meta.pt")


def fsdp_checkpoint(path: Path) -> None:
    """A folder as Lightning's FSDP strategy leaves it."""
    another_strategys_meta(path)
    (path / "metadata.json").unlink()
    (path / "common.pt").unlink()


def update_checksums(path: Path) -> None:
    """Write ``checksums.json`` anew, for the files as they are."""
    from lightning_megatron.files import CHECKSUMS, FileChecksums, write_checksums

    files = [each for each in path.iterdir() if each.is_file() and each.name != CHECKSUMS]
    write_checksums(path, {file.name: FileChecksums().update(file.read_bytes()) for file in files})


def _table(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())


def _write_table(path: Path, table: Any) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(table))
