"""How is a pickle read without running anything that it names? By carrying out its instructions ourselves.

Python's own unpickler can be told which globals to find, but not what an instruction may do with them: it would set
attributes of a class, or call what a dictionary holds. Here every instruction is one of ours, on our own objects:
names become values of ``pickled/allowed.py``, and only those are ever called.
"""

from __future__ import annotations

import argparse
import pickletools
from collections.abc import Callable, Hashable, Iterator, Sized
from dataclasses import dataclass
from types import SimpleNamespace
from typing import IO, Any

import torch

_LARGEST_ARGUMENT = 1 << 28
"""Bytes of one string; what is larger is not read at all, whatever length is declared."""
_MOST_COPIED = 1 << 28
"""Items and characters that calls may copy, all together: a few bytes of a pickle can ask for the same copy again."""


class Refused(Exception):
    """The pickle wants more than data; the text says what."""


class Damaged(Exception):
    """The pickle is no pickle, or ends too early; the text says how."""


@dataclass(frozen=True, kw_only=True)
class Global:
    """A class or function that a pickle names."""

    name: str
    """With its module: ``argparse.Namespace``."""
    make: Callable[..., Any]
    """What a call of it gives; ours, of positional arguments."""


@dataclass(kw_only=True, eq=False)
class Inert:
    """An object of a class that is not needed: it keeps what it was made from, and does nothing."""

    name: str
    """Of its class."""
    arguments: tuple[Any, ...]
    """Of the call."""
    state: Any = None
    """What would have been its attributes."""


class _Bounded:
    """A binary stream whose reads are of a reasonable size."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def read(self, size: int) -> bytes:
        if size > _LARGEST_ARGUMENT:
            raise Damaged(f"a string of {size:,} bytes")
        return self._stream.read(size)

    def readline(self) -> bytes:
        return self._stream.readline(_LARGEST_ARGUMENT)

    def tell(self) -> int:
        return self._stream.tell()


class _Mark:
    """Where on the stack a group of items begins."""


_MARK = _Mark()
_BY_VALUE = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
"""Instructions that put their argument on the stack."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "EMPTY_SET": set}
_GET = {"GET", "BINGET", "LONG_BINGET"}
_PUT = {"PUT", "BINPUT", "LONG_BINPUT"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_WITHOUT_EFFECT = {"PROTO", "FRAME"}


def read_pickle(
    stream: IO[bytes], find_global: Callable[[str], Any], persistent_load: Callable[[Any], Any] | None = None
) -> Any:
    """The object that a pickle describes; ``stream`` is left behind it.

    Args:
        stream: Binary, at the pickle's first byte.
        find_global: What ``module.name`` stands for: a ``Global``, or a plain value. Raises ``Refused``.
        persistent_load: What a persistent id stands for; None if there may be none.

    Raises:
        Refused: If it wants more than data.
        Damaged: If it is no pickle.
    """
    machine = _Machine(find_global, persistent_load)
    try:
        for opcode, argument, _ in pickletools.genops(_Bounded(stream)):  # type: ignore[arg-type]
            if opcode.name == "STOP":
                return machine.pop()
            machine.run(opcode.name, argument)
    except (Refused, Damaged):
        raise
    except Exception as error:  # whatever nonsense the bytes are
        raise Damaged(f"{type(error).__name__}: {str(error)[:100]}") from None
    raise Damaged("no end")


class _Machine:
    def __init__(self, find_global: Callable[[str], Any], persistent_load: Callable[[Any], Any] | None) -> None:
        self._find_global = find_global
        self._persistent_load = persistent_load
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._copied = 0

    def pop(self) -> Any:
        item = self._stack.pop()
        if item is _MARK:
            raise Damaged("a group that ends in an item")
        return item

    def run(self, name: str, argument: Any) -> None:
        """Carry out one instruction, by its name in ``pickletools``."""
        if name in _BY_VALUE:
            self._stack.append(argument)
        elif name in _PUT:
            self._memo[argument] = self._top()
        elif name in _GET:
            self._stack.append(self._memo[argument])
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self._stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            items = [self.pop() for _ in range(_TUPLES[name])]
            self._stack.append(tuple(items[::-1]))
        elif name not in _WITHOUT_EFFECT:
            instruction = _INSTRUCTIONS.get(name)
            if instruction is None:
                raise Refused(f"it has the instruction {name}, which no checkpoint needs")
            instruction(self, argument)

    def _top(self) -> Any:
        item = self._stack[-1]
        if item is _MARK:
            raise Damaged("a group where an item must be")
        return item

    def _push(self, item: Any) -> None:
        self._stack.append(item)

    def _group(self) -> list[Any]:
        """The items since the last mark, which go with it."""
        items: list[Any] = []
        while (item := self._stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _mark(self, _: Any) -> None:
        self._push(_MARK)

    def _drop(self, _: Any) -> None:
        self._stack.pop()

    def _drop_group(self, _: Any) -> None:
        self._group()

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._top()

    def _tuple(self, _: Any) -> None:
        self._push(tuple(self._group()))

    def _list(self, _: Any) -> None:
        self._push(self._group())

    def _dict(self, _: Any) -> None:
        items = self._group()
        self._push({})
        self._fill(items)

    def _set_item(self, _: Any) -> None:
        value, key = self.pop(), self.pop()
        self._fill([key, value])

    def _set_items(self, _: Any) -> None:
        self._fill(self._group())

    def _fill(self, items: list[Any]) -> None:
        target = _of_type(self._top(), dict)
        for key, value in _pairs(items):
            target[key] = value

    def _append(self, _: Any) -> None:
        item = self.pop()
        _of_type(self._top(), list).append(item)

    def _append_group(self, _: Any) -> None:
        items = self._group()
        _of_type(self._top(), list).extend(items)

    def _add_items(self, _: Any) -> None:
        items = self._group()
        _of_type(self._top(), set).update(as_key(item) for item in items)

    def _frozen_set(self, _: Any) -> None:
        self._push(frozenset(as_key(item) for item in self._group()))

    def _global(self, argument: str) -> None:
        self._push(self._find_global(argument.replace(" ", ".", 1)))

    def _stack_global(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        self._push(self._find_global(f"{_of_type(module, str)}.{_of_type(name, str)}"))

    def _call(self, _: Any) -> None:
        arguments, function = self.pop(), self.pop()
        self._make(function, arguments)

    def _call_with_names(self, _: Any) -> None:
        named, arguments, function = self.pop(), self.pop(), self.pop()
        if named:
            raise Refused(f"it makes a {_callable(function).name} from named arguments")
        self._make(function, arguments)

    def _make(self, function: Any, arguments: Any) -> None:
        self._copied += sum(len(each) for each in _of_type(arguments, tuple) if isinstance(each, Sized))
        if self._copied > _MOST_COPIED:
            raise Damaged(f"more than {_MOST_COPIED:,} items in calls")
        self._push(_callable(function).make(*arguments))

    def _build(self, _: Any) -> None:
        state = self.pop()
        target = self._top()
        if isinstance(target, Inert):
            target.state = state
        elif type(target) in (argparse.Namespace, SimpleNamespace):
            for name, value in _of_type(state, dict).items():
                vars(target)[_of_type(name, str)] = value
        elif isinstance(target, Global | type) or callable(target):
            raise Refused(f"it changes {getattr(target, 'name', target)}, which is no object of its own")
        # Else attributes of a dictionary (versions of modules) or a tensor (how it is split): not needed.

    def _persistent(self, _: Any) -> None:
        if self._persistent_load is None:
            raise Refused("it refers to an object outside of it")
        self._push(self._persistent_load(self.pop()))


_INSTRUCTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine._mark,
    "POP": _Machine._drop,
    "POP_MARK": _Machine._drop_group,
    "MEMOIZE": _Machine._memoize,
    "TUPLE": _Machine._tuple,
    "LIST": _Machine._list,
    "DICT": _Machine._dict,
    "SETITEM": _Machine._set_item,
    "SETITEMS": _Machine._set_items,
    "APPEND": _Machine._append,
    "APPENDS": _Machine._append_group,
    "ADDITEMS": _Machine._add_items,
    "FROZENSET": _Machine._frozen_set,
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._call,
    "NEWOBJ": _Machine._call,
    "NEWOBJ_EX": _Machine._call_with_names,
    "BUILD": _Machine._build,
    "BINPERSID": _Machine._persistent,
}


def as_key(item: Any) -> Hashable:
    """``item`` if it can be a key: a plain value or a tuple of such (the hash of nested tuples can take for ever).

    Raises:
        Damaged: If it is anything else.
    """
    plain = (str, bytes, int, float, bool, type(None), torch.dtype)
    if isinstance(item, plain) or (type(item) is tuple and all(isinstance(part, plain) for part in item)):
        return item
    raise Damaged(f"a {type(item).__name__} as a key")


def _pairs(items: list[Any]) -> Iterator[tuple[Hashable, Any]]:
    if len(items) % 2:
        raise Damaged("a key without a value")
    return ((as_key(key), value) for key, value in zip(items[::2], items[1::2], strict=True))


def _of_type(item: Any, kind: type) -> Any:
    if not isinstance(item, kind):
        raise Damaged(f"a {type(item).__name__} where a {kind.__name__} must be")
    return item


def _callable(item: Any) -> Global:
    if not isinstance(item, Global):
        raise Refused(f"it calls a {type(item).__name__}")
    return item
