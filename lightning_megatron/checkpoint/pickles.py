"""Safe reader for files of ``torch.save``: nothing that a file names is imported or executed.

It reads the files of a run (``meta.pt``, ``common.pt``) and those of other programs (Megatron-LM, Hugging Face
``.bin``). ``torch.load(weights_only=True)`` alone is not enough for either: it refuses the enumerations, loss scalers
and random states that Megatron-LM stores with the weights, and a file of a few bytes can make it build huge objects.
So the globals that a file names are listed first, without executing an instruction (``scan_pickle``); those of
Megatron-LM, Apex, NumPy and the like become stand-ins that keep their arguments, all others are refused by name, and
the size of the result is checked. Stand-ins replace the real classes, because importing a global may run code
(``numpy.testing``).

Tensors of zip archives (torch 1.6 and newer) are memory-mapped: a row takes memory when it is used.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import torch

from lightning_megatron.errors import CheckpointError
from lightning_megatron.storage.failures import pickle_refusal

_FOREIGN_GLOBALS = re.compile(
    r"(megatron|apex|transformer_engine|fp16)(\.\w+)+"  # enums, tokenizers, loss scalers, options
    r"|datetime\.\w+|signal\.Signals|_io\.BytesIO|pathlib\.(_local\.)?\w+Path|builtins\.(dict|list|int|float)"
    r"|builtins\.getattr"  # members of enumerations, as Python 3.11.0 to 3.11.3 pickle them
    r"|numpy\.(ndarray|dtype|dtypes\.\w+|_?core\.multiarray\._reconstruct)"
)
"""Globals of other programs whose objects are not needed: they become stand-ins."""
_SCALAR = re.compile(r"[fiubcSU]\d+|\?")
"""NumPy's names of scalar types."""
_ZIP = b"PK\x03\x04"
_LEGACY_PICKLES = 5
"""Pickles in a file of torch before 1.6: magic number, version, machine, object, storage names; then raw storages."""
_MAX_PICKLE_BYTES = 1 << 27
"""Maximum size of the part of a file that is not tensors."""
_MAX_DEPTH = 100
"""Maximum nesting of containers."""
_MAX_ITEMS = 1_000_000
_MAX_ITEMS_PER_BYTE = 10
"""Maximum number of items in containers; an item in several containers counts several times: each takes a byte."""

_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_FILLS = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
"""Instructions that add to the object below their operands."""
_TUPLES = {"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_CALLS = {"REDUCE", "NEWOBJ"}
_RESERVING = re.compile(
    r"builtins\.bytearray|torch\.(cuda\.)?(sparse\.)?\w+Tensor"
    r"|torch\._utils\._rebuild_(device_tensor\w+|qtensor|sparse_tensor|nested_tensor|wrapper_subclass)"
)
"""Globals that torch allows in any file and that reserve as much memory as their arguments say; ``torch.save`` names
none of them for a dense tensor in host memory."""
_RESERVING_CALLS = {"torch.Tensor", "torch.storage.UntypedStorage", "torch.storage.TypedStorage"}
"""Globals that are the type of a tensor or storage, and reserve memory if they are called."""


class StandIn:
    """Replaces a class or function that a pickle names: keeps the arguments of the call, and does nothing.

    No instruction of a pickle can change the class: unpicklers set attributes through ``__setstate__``, which they also
    look up on classes (there it is called without ``self``).
    """

    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> StandIn:
        """Keep the arguments of the call."""
        instance = super().__new__(cls)
        instance.arguments = arguments
        return instance

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, *state: Any) -> None:
        if not state:
            raise CheckpointError("it would change a class when loaded")
        (self.state,) = state

    def __repr__(self) -> str:
        """The call; arguments that may hold others are left out, as their text may double with each level."""
        plain = tuple(
            each if isinstance(each, (str, int, float)) else ... for each in self.arguments
        )
        return f"{type(self).__name__}{plain}"


def stand_in(name: str) -> type[StandIn]:
    """Create a stand-in class for the class or function ``name``, which includes its module."""
    module, _, last = name.rpartition(".")
    return type(last, (StandIn,), {"__module__": module})


def read_pickle(
    file: Path | io.BytesIO,
    *,
    foreign: bool = True,
    name: str = "",
) -> Any:
    """Read the object in a file of ``torch.save`` (pickle protocol 2, its default), with tensors on the CPU.

    Args:
        file: A path, or the content of a file.
        foreign: Whether another program may have written it: objects of Megatron-LM and the like become ``StandIn``,
            NumPy's scalars become Python's, and the tensors of a zip archive are memory-mapped. Otherwise only globals
            that torch allows, and those of ``torch.serialization.add_safe_globals``, are accepted.
        name: Name of the file in errors; "" for its path.

    Raises:
        CheckpointError: If the file holds more than data, is damaged or truncated, or claims to be larger than it is.
    """
    name = name or str(file)
    try:
        stream = file.open("rb") if isinstance(file, Path) else io.BytesIO(file.getvalue())
        with stream as opened:
            is_zip = opened.read(len(_ZIP)) == _ZIP
            size = opened.seek(0, io.SEEK_END)
            opened.seek(0)
            pickled: BinaryIO = opened
            num_pickles = _LEGACY_PICKLES
            if is_zip:
                pickled = _archive_pickle(opened, size)
                num_pickles = 1
            known = _resolve_globals(pickled, num_pickles, foreign)
            num_bytes = pickled.tell()
            opened.seek(0)
            with _safe_globals(known) if foreign else nullcontext():
                is_mapped = foreign and is_zip and isinstance(file, Path)
                source = file if is_mapped else opened
                value = torch.load(source, map_location="cpu", weights_only=True, mmap=is_mapped)
        max_items = _MAX_ITEMS + _MAX_ITEMS_PER_BYTE * num_bytes
        # Strides of a file of another program may repeat what it holds.
        _check_containers(value, max_items, size if foreign else math.inf)
        return value
    except CheckpointError as error:
        raise CheckpointError(f"{name} is not loaded: {error}; do not trust its source") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{name} is not loaded: {pickle_refusal(error)}") from None
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be read ({error.strerror or error}); check the path"
        ) from None
    except Exception as error:  # arbitrary bytes raise anything
        reason = " ".join(str(error).split())[:100]
        raise CheckpointError(
            f"{name} is damaged, or no file of torch.save ({type(error).__name__}: {reason}); use another copy"
        ) from None


class _Part(io.RawIOBase):
    """A range of bytes of an open file, as a file."""

    def __init__(self, stream: BinaryIO, offset: int, length: int) -> None:
        super().__init__()
        self._stream = stream
        self._offset = offset
        self._length = length
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_CUR:
            offset += self._position
        elif whence == io.SEEK_END:
            offset += self._length
        self._position = max(0, offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        left = max(0, self._length - self._position)
        size = min(len(buffer), left)
        self._stream.seek(self._offset + self._position)
        data = self._stream.read(size)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def check_archive(
    stream: BinaryIO,
    offset: int,
    length: int,
    name: str,
) -> None:
    """Check a tensor of ``torch.save`` within a file, which another program is going to load.

    Args:
        stream: The open file.
        offset: Where it begins.
        length: Its size in bytes.
        name: Its name in errors.

    Raises:
        CheckpointError: If loading it would take more memory than it has bytes, or it is damaged.
    """
    try:
        part: Any = _Part(stream, offset, length)
        _resolve_globals(_archive_pickle(part, length), 1, foreign=False)
    except CheckpointError as error:
        raise CheckpointError(f"{name} is not loaded: {error}; do not trust its source") from None
    except Exception as error:  # arbitrary bytes raise anything
        raise CheckpointError(
            f"{name} is damaged ({type(error).__name__}: {error}); use another copy"
        ) from None


def _archive_pickle(opened: BinaryIO, size: int) -> io.BytesIO:
    """The pickle in a zip archive, after checking that its members take no more memory than the file has bytes."""
    with zipfile.ZipFile(opened) as archive:
        members = archive.infolist()
    total = sum(member.file_size for member in members)
    is_compressed = any(each.compress_type != zipfile.ZIP_STORED for each in members)
    pickles = [each.file_size for each in members if each.filename.endswith("/data.pkl")]
    if is_compressed or total > size or max(pickles, default=0) > _MAX_PICKLE_BYTES:
        raise CheckpointError(f"its {size:,} bytes would become {total:,} in memory")
    opened.seek(0)
    reader = torch._C.PyTorchFileReader(opened)
    return io.BytesIO(reader.get_record("data.pkl"))  # found as torch.load will find it


def _resolve_globals(
    pickled: BinaryIO,
    num_pickles: int,
    foreign: bool,
) -> list[tuple[Any, str]]:
    """Map globals of pickles to their replacements, without executing an instruction, as pairs (object, name).

    Raises:
        CheckpointError: If a pickle would become far larger than it is.
    """
    resolved: dict[str, Any] = {}
    for _ in range(num_pickles):
        for name in scan_pickle(pickled, max_protocol=2):
            if foreign and (name in _KNOWN_GLOBALS or _FOREIGN_GLOBALS.fullmatch(name)):
                resolved.setdefault(name, _KNOWN_GLOBALS.get(name) or stand_in(name))
            elif _RESERVING.fullmatch(name):
                what = name.removeprefix("builtins.")
                raise CheckpointError(
                    f"it would reserve memory for a {what}, of whatever length it says"
                )
    return [(replacement, name) for name, replacement in resolved.items()]


@dataclass(slots=True)
class _Operand:
    """What is known about an object on the stack of an unpickler before anything is executed."""

    size: int
    """Number of objects in it; those in several containers count several times."""
    text: str = ""
    """Content of a string, or name of a global."""
    items: tuple[_Operand, ...] | None = None
    """Items of a tuple; None for other objects."""


def scan_pickle(
    pickled: BinaryIO,
    *,
    max_protocol: int = pickle.HIGHEST_PROTOCOL,
) -> list[str]:
    """Follow the instructions of a pickle without executing them; leaves ``pickled`` behind its end.

    Python's unpickler allocates a memo as large as the largest index in it, computes the hash of a tuple anew for each
    tuple that holds it, and torch's calls some functions with whatever arguments.

    Returns:
        Names of all globals.

    Raises:
        CheckpointError: If unpickling it would take far more memory or time than it has bytes.
        ValueError: If it is damaged, or of a newer protocol.
    """
    names: dict[str, None] = {}
    stack: list[_Operand | None] = []  # None is a mark
    memo: dict[int, _Operand | None] = {}
    for opcode, argument, position in pickletools.genops(pickled):
        if opcode.proto > max_protocol:
            raise ValueError(
                f"pickle protocol {opcode.proto}, where torch.save writes {max_protocol}"
            )
        if opcode.name in _PUTS or opcode.name == "MEMOIZE":
            index = len(memo)
            if argument is not None:
                index = int(argument)
            if index > (position or 0):
                raise CheckpointError(
                    f"it would reserve memory for {index:,} objects in {position} bytes"
                )
            memo[index] = stack[-1]
            continue
        if opcode.name in _GETS:
            stack.append(memo[int(argument or 0)])
            continue
        if opcode.name == "MARK":
            stack.append(None)
            continue
        operands = _pop_operands(opcode, stack)
        if opcode.stack_after:
            result = _apply(opcode.name, argument, operands)
            stack += [result] * len(opcode.stack_after)
            if opcode.name in ("GLOBAL", "STACK_GLOBAL"):
                names.setdefault(result.text)
            if result.size > _MAX_ITEMS + _MAX_ITEMS_PER_BYTE * (position or 0):
                raise CheckpointError("its containers hold each other without end")
    return list(names)


def _pop_operands(opcode: pickletools.OpcodeInfo, stack: list[_Operand | None]) -> list[_Operand]:
    """Operands of an instruction, which are removed from the stack with their mark."""
    before = opcode.stack_before
    count = len(before)
    operands: list[_Operand | None] = []
    if pickletools.markobject in before:
        count = before.index(pickletools.markobject)
        while (operand := stack.pop()) is not None:
            operands.append(operand)
    operands += [stack.pop() for _ in range(count)]
    return [operand for operand in reversed(operands) if operand is not None]


def _apply(
    name: str,
    argument: Any,
    operands: list[_Operand],
) -> _Operand:
    """Result of an instruction.

    Raises:
        CheckpointError: If it calls a function that multiplies its arguments.
    """
    size = sum(operand.size for operand in operands)
    if name in _FILLS:
        operands[0].size = size
        return operands[0]
    if name in _TUPLES:
        return _Operand(1 + size, items=tuple(operands))
    if name == "GLOBAL":
        dotted = str(argument).replace(" ", ".", 1)
        return _Operand(1, dotted.replace("__builtin__.", "builtins."))
    if name == "STACK_GLOBAL":
        return _Operand(1, ".".join(operand.text for operand in operands))
    if name in _CALLS:
        _check_call(operands[0].text, operands[1].items)
    text = argument if isinstance(argument, str) else ""
    return _Operand(1 + size, text)


def _check_call(function: str, arguments: tuple[_Operand, ...] | None) -> None:
    """Raise if a call reserves memory: of ``torch.Tensor``, also through another function, or of a codec.

    Raises:
        CheckpointError: If it does.
        ValueError: If its arguments are not a tuple.
    """
    if arguments is None:
        raise ValueError(f"a call of {function or 'data'} without a tuple of arguments")
    texts = [each.text for each in arguments]
    called = {function, *texts[:1]}
    if reserving := _RESERVING_CALLS & called:
        raise CheckpointError(
            f"it would reserve memory for a {min(reserving)}, of whatever length it says"
        )
    if "_codecs.encode" in called and texts[1:] != ["latin1"]:
        raise CheckpointError("it would encode text over and over")


@contextmanager
def _safe_globals(known: list[Any]) -> Iterator[None]:
    """Let torch load these globals and its own, but none that other libraries of the process have registered."""
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(known):
            yield
    finally:
        torch.serialization.add_safe_globals(registered)


def _check_containers(value: Any, max_items: int, max_bytes: float) -> None:
    """Raise if containers are nested without end, or hold too many items, too large a tensor, or one without values.

    Args:
        value: The loaded object.
        max_items: Maximum number of items in all containers.
        max_bytes: Maximum size of a tensor: strides can repeat an element a billion times.
    """
    stack: list[tuple[Any, int]] = [([value], 0)]
    count = 0
    while stack:
        items, depth = stack.pop()
        if isinstance(items, dict):
            items = items.values()
        count += len(items)
        if depth > _MAX_DEPTH or count > max_items:
            raise CheckpointError("its containers hold each other without end")
        for item in items:
            if isinstance(item, (dict, list, tuple, set)):
                stack.append((item, depth + 1))
            elif isinstance(item, (Namespace, SimpleNamespace)):
                stack.append((vars(item), depth + 1))
            elif isinstance(item, torch.Tensor) and item.is_meta:
                raise CheckpointError(
                    f"it has a tensor of shape {list(item.shape)[:8]} without values, of torch's device meta"
                )
            elif isinstance(item, torch.Tensor) and item.nbytes > max_bytes:
                raise CheckpointError(
                    f"it has a tensor of shape {list(item.shape)[:8]} in {max_bytes:,} bytes"
                )


def _scalar(dtype: Any, data: bytes) -> Any:
    """A NumPy scalar as a Python number or string; replaces NumPy's function of this name."""
    name = dtype.arguments[0]
    order = dtype.state[1] if dtype.state else "="
    if not _SCALAR.fullmatch(name) or order not in ("<", ">", "=", "|"):
        raise ValueError(f"a scalar of the dtype {name!r}")
    if name != "?":
        name = order + name
    return np.frombuffer(data, name, 1)[0].item()


_KNOWN_GLOBALS: dict[str, Any] = {
    "argparse.Namespace": Namespace,
    "types.SimpleNamespace": SimpleNamespace,
    "collections.defaultdict": lambda *_: OrderedDict(),
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}
"""Globals of other programs whose objects are needed: Megatron-LM's arguments."""
