"""Ways to spoil a checkpoint: missing, cut, foreign and malicious files."""

from __future__ import annotations

import io
import json
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


def empty(name: str) -> Damage:
    return lambda path: (path / name).write_bytes(b"")


def malicious_torch_file(name: str) -> Damage:
    return lambda path: torch.save({"optimizer": Evil(marker_of(path))}, path / name)


def malicious_pickle(name: str) -> Damage:
    return lambda path: (path / name).write_bytes(pickle.dumps(Evil(marker_of(path)))) and None


def malicious_table_of_contents(path: Path) -> None:
    """A real table with an object in it that loads last."""
    table = _table(path)
    table.mcore_data = {"decoder": Evil(marker_of(path))}
    _write_table(path, table)


def malicious_entry(path: Path) -> None:
    """One of the entries that are not tensors leads to another pickle, behind the end of a data file."""
    table = _table(path)
    index = next(each for each in table.storage_data if "_extra_state" in each.fqn)
    payload = io.BytesIO()
    torch.save(Evil(marker_of(path)), payload)
    place = table.storage_data[index]
    file = path / place.relative_path
    place.offset, place.length = file.stat().st_size, len(payload.getvalue())
    with file.open("ab") as stream:
        stream.write(payload.getvalue())
    _write_table(path, table)


def malicious_tensor(path: Path) -> None:
    """The same for an entry that should be a tensor."""
    table = _table(path)
    index = next(each for each in table.storage_data if each.fqn == "decoder.final_layernorm.weight")
    payload = io.BytesIO()
    torch.save(Evil(marker_of(path)), payload)
    place = table.storage_data[index]
    file = path / place.relative_path
    place.offset, place.length = file.stat().st_size, len(payload.getvalue())
    with file.open("ab") as stream:
        stream.write(payload.getvalue())
    _write_table(path, table)


def pointing_outside(path: Path) -> None:
    table = _table(path)
    next(iter(table.storage_data.values())).relative_path = "../other.ckpt/__0_0.distcp"
    _write_table(path, table)


def without_tensor(path: Path) -> None:
    """As of a model that has no such parameter."""
    table = _table(path)
    del table.state_dict_metadata["decoder.final_layernorm.weight"]
    _write_table(path, table)


def other_backend(path: Path) -> None:
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "common_backend": "torch"}))


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


def _table(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())


def _write_table(path: Path, table: Any) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(table))
