"""Read files of ``torch.save`` as data: nothing that a file names is imported or run.

One reader for the files of a run (``meta.pt``, ``common.pt``) and for those of other programs (Megatron-LM, Hugging
Face ``.bin``). ``torch.load(weights_only=True)`` alone is not enough for either: it refuses the enumerations, loss
scalers and random states that Megatron-LM stores beside the weights, and a file of a few bytes can make it build huge
objects. So the names in a file are listed first, without carrying out an instruction; those of Megatron-LM, Apex, NumPy
and the like become stand-ins that keep their arguments, every other one is refused by name, and what comes out is
measured. Stand-ins replace the real classes, since importing a name of a file may run code (``numpy.testing``).

Tensors of zip archives (torch 1.6 and newer) are mapped, not read: a row costs memory when it is used.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import torch

from lightning_megatron.errors import CheckpointError
from lightning_megatron.files import pickle_refusal

_FOREIGN = re.compile(
    r"(megatron|apex|transformer_engine|fp16)(\.\w+)+"  # enums, tokenizers, loss scalers, options
    r"|datetime\.\w+|signal\.Signals|_io\.BytesIO|pathlib\.(_local\.)?\w+Path|builtins\.(dict|list|int|float)"
    r"|numpy\.(ndarray|dtype|dtypes\.\w+|_?core\.multiarray\._reconstruct)"
)
"""Names of other programs whose objects nobody needs."""
_SCALAR = re.compile(r"[fiubcSU]\d+|\?")
"""NumPy's names of the types that its scalars have."""
_ZIP = b"PK\x03\x04"
_PICKLES_BEFORE_ZIP = 5
"""Of a file of torch before 1.6: magic number, version, machine, object, names of storages; then the numbers."""
_LARGEST_PICKLE = 1 << 27
"""Bytes of the part of a file that is not tensors."""
_DEEPEST = 100
"""Containers in each other."""
_MOST_ITEMS = 1_000_000
_MOST_ITEMS_OF_A_BYTE = 10
"""What a pickle may hold in its containers, items that stand in several of them counted as often: each takes a byte."""


class StandIn:
    """Takes the place of a class or function that a pickle names: it keeps what it is called with, and does nothing.

    No instruction of a pickle can change it: unpicklers leave attributes to ``__setstate__``, which they look up on
    classes (here without ``self``) as on objects.
    """

    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> StandIn:
        """Keep the arguments of the call."""
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, *state: Any) -> None:
        if not state:
            raise CheckpointError("it would change a class when loaded")
        (self.state,) = state

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self.arguments}"


def stand_in(name: str) -> type[StandIn]:
    """A stand-in for the class or function ``name``, with its module."""
    module, _, last = name.rpartition(".")
    return type(last, (StandIn,), {"__module__": module})


def read_pickle(file: Path | io.BytesIO, *, foreign: bool = True, name: str = "") -> Any:
    """The object in a file of ``torch.save`` (pickle protocol 2, its default), tensors on the CPU.

    Args:
        file: A path, or the content of a file.
        foreign: Whether another program may have written it: objects of Megatron-LM and the like come as ``StandIn``,
            NumPy's scalars as Python's, and the tensors of a zip archive are mapped from the file. Else only what
            torch and ``torch.serialization.add_safe_globals`` take for data is accepted.
        name: What errors call it; "" for its path.

    Raises:
        CheckpointError: If it holds more than data, is damaged or truncated, or says that it is larger than it is.
    """
    name = name or str(file)
    try:
        with file.open("rb") if isinstance(file, Path) else io.BytesIO(file.getvalue()) as opened:
            is_zip, size = opened.read(len(_ZIP)) == _ZIP, opened.seek(0, io.SEEK_END)
            opened.seek(0)
            pickled = _pickle_of_archive(opened, size) if is_zip else opened
            known = _meanings_of_names(pickled, 1 if is_zip else _PICKLES_BEFORE_ZIP, foreign)
            num_bytes = pickled.tell()
            opened.seek(0)
            with _only_safe(known) if foreign else nullcontext():
                is_mapped = foreign and is_zip and isinstance(file, Path)
                source = file if is_mapped else opened
                value = torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)
        _check_containers(value, _MOST_ITEMS + _MOST_ITEMS_OF_A_BYTE * num_bytes, size if foreign else None)
        return value
    except CheckpointError as error:
        raise CheckpointError(f"{name} is not loaded: {error}; do not trust its source") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{name} is not loaded: {pickle_refusal(error)}") from None
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read ({error.strerror or error}); check the path") from None
    except Exception as error:  # whatever nonsense the bytes are
        reason = " ".join(str(error).split())[:100]
        raise CheckpointError(
            f"{name} is damaged, or no file of torch.save ({type(error).__name__}: {reason}); use another copy"
        ) from None


def _pickle_of_archive(opened: BinaryIO, size: int) -> io.BytesIO:
    """The pickle in a zip archive, whose members must take no more memory than the file has bytes."""
    with zipfile.ZipFile(opened) as archive:
        members = archive.infolist()
    total = sum(member.file_size for member in members)
    largest = max((each.file_size for each in members if each.filename.endswith("/data.pkl")), default=0)
    if total > size or largest > _LARGEST_PICKLE or any(each.compress_type != zipfile.ZIP_STORED for each in members):
        raise CheckpointError(f"its {size:,} bytes would become {total:,} in memory")
    opened.seek(0)
    return io.BytesIO(torch._C.PyTorchFileReader(opened).get_record("data.pkl"))  # as torch.load will find it


def _meanings_of_names(pickled: BinaryIO, num_pickles: int, foreign: bool) -> list[tuple[Any, str]]:
    """What the names in pickles stand for, found without carrying out an instruction.

    Raises:
        CheckpointError: If a name is none that data needs.
    """
    meanings: dict[str, Any] = {}
    for _ in range(num_pickles):
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.proto > 2:
                raise ValueError(f"pickle protocol {opcode.proto}, where torch.save writes 2")
            if opcode.name != "GLOBAL":
                continue
            name = str(argument).replace(" ", ".", 1).replace("__builtin__.", "builtins.")
            if foreign and (name in _MEANINGS or _FOREIGN.fullmatch(name)):
                meanings.setdefault(name, _MEANINGS.get(name) or stand_in(name))
            elif name == "builtins.bytearray":
                raise CheckpointError("it would reserve memory for a bytearray, of whatever length it says")
    return [(meaning, name) for name, meaning in meanings.items()]


@contextmanager
def _only_safe(known: list[Any]) -> Iterator[None]:
    """Let torch load these names and its own, not those that other libraries of the process have registered."""
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(known):
            yield
    finally:
        torch.serialization.add_safe_globals(registered)


def _check_containers(value: Any, most_items: int, num_bytes: int | None) -> None:
    """Raise if containers hold each other, so that a walk through them would not end.

    Args:
        value: What was loaded.
        most_items: In all containers.
        num_bytes: Of the file, if no tensor may be larger: strides can repeat a number a billion times.
    """
    left: list[tuple[Any, int]] = [([value], 0)]
    count = 0
    while left:
        container, depth = left.pop()
        items: Collection[Any] = container.values() if isinstance(container, dict) else container
        count += len(items)
        if depth > _DEEPEST or count > most_items:
            raise CheckpointError("its containers hold each other without end")
        for item in items:
            if isinstance(item, (dict, list, tuple, set)):
                left.append((item, depth + 1))
            elif isinstance(item, (Namespace, SimpleNamespace)):
                left.append((vars(item), depth + 1))
            elif isinstance(item, torch.Tensor) and num_bytes is not None and item.nbytes > num_bytes:
                raise CheckpointError(f"it has a tensor of shape {list(item.shape)[:8]} in {num_bytes:,} bytes")


def _scalar(dtype: Any, data: bytes) -> Any:
    """A NumPy scalar, as Python's number or string."""
    name, order = dtype.arguments[0], dtype.state[1] if dtype.state else "="
    if not _SCALAR.fullmatch(name) or order not in ("<", ">", "=", "|"):
        raise ValueError(f"a scalar of the dtype {name!r}")
    return np.frombuffer(data, "?" if name == "?" else f"{order}{name}", 1)[0].item()


_MEANINGS: dict[str, Any] = {
    "argparse.Namespace": Namespace,
    "types.SimpleNamespace": SimpleNamespace,
    "collections.defaultdict": lambda *_: OrderedDict(),
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}
"""Names of other programs that are needed: Megatron-LM's arguments."""
