"""Ways to spoil a checkpoint: missing, cut, foreign and malicious files."""

from __future__ import annotations

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


def malicious_torch_file(name: str) -> Damage:
    return lambda path: torch.save({"optimizer": Evil(marker_of(path))}, path / name)


def malicious_pickle(name: str) -> Damage:
    return lambda path: (path / name).write_bytes(pickle.dumps(Evil(marker_of(path)))) and None


def malicious_table_of_contents(path: Path) -> None:
    """A real table with an object in it that loads last."""
    table = _table(path)
    table.mcore_data = {"decoder": Evil(marker_of(path))}
    _write_table(path, table)


def table_that_changes_classes(path: Path) -> None:
    """A real table, and instructions that name nothing unknown: they set attributes of classes of torch and Python.

    Whoever then opens a file by ``PosixPath.open("rb")``, as torch does, reads another pickle.
    """
    dcp = "torch.distributed.checkpoint.metadata"
    plain = {file: _call("pathlib", "PosixPath", str(file)) for file in [*path.glob("rng_*"), path / "meta.pt"]}
    stream = _call(dcp, "StorageMeta") + _dict({_opcodes("read"): _LAYOUT, _opcodes("readline"): _LAYOUT}) + b"b"
    cache = {
        _opcodes(1): _opcodes(pickle.dumps(Evil(marker_of(path)))),
        _call(dcp, "MetadataIndex", "rb"): stream,
        **{key: _opcodes(file.read_bytes()) for file, key in plain.items()},
    }
    index = _global(dcp, "MetadataIndex")
    changes = {
        _LAYOUT: {"cache": _dict(cache)},
        index: {"__enter__": _LAYOUT, "__exit__": _global("torch.distributed.checkpoint.planner", "SavePlan")},
        _global("pathlib", "PosixPath"): {"open": index, "read_bytes": _LAYOUT},
    }
    data = b"\x80\x03" + _opcodes(_table(path))
    for target, attributes in changes.items():
        state = _dict({_opcodes(name): value for name, value in attributes.items()})
        data += target + b"N" + state + b"\x86b0"  # BUILD with (None, attributes of anything), POP
    (path / ".metadata").write_bytes(data + b".")


def _opcodes(value: Any) -> bytes:
    return pickle.dumps(value, 3)[2:-1]


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _call(module: str, name: str, *arguments: Any) -> bytes:
    return _global(module, name) + _opcodes(arguments) + b"R"


def _dict(items: dict[bytes, bytes]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in items.items()) + b"u"


_LAYOUT = _global("torch.serialization", "_get_layout")


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


def sum_up(path: Path) -> None:
    """Write ``checksums.json`` anew, for the files as they are."""
    from lightning_megatron.checkpoint.files import CHECKSUMS, checksums_of, write_checksums

    found = {each.name: each for each in path.iterdir() if each.is_file()}
    write_checksums(path, {name: checksums_of(file.read_bytes()) for name, file in found.items() if name != CHECKSUMS})


def _table(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())


def _write_table(path: Path, table: Any) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(table))
