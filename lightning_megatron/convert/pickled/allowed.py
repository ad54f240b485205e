"""Which classes and functions may the pickle of a checkpoint name, and what do they become here?

Nothing of theirs is called or even imported: a name becomes a plain value, or an object that only holds what it was
made from. What is not listed is refused.
"""

from __future__ import annotations

import argparse
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lightning_megatron.convert.pickled.pickle_machine import Damaged, Global, Inert, Refused, as_key
from lightning_megatron.convert.pickled.tensor_handle import Storage, TensorHandle

_INERT = re.compile(
    r"(megatron|apex|transformer_engine|fp16)(\.\w+)+"  # enums, tokenizers, loss scalers, RNG trackers, options
    r"|datetime\.(datetime|date|time|timedelta|timezone)|signal\.Signals|_io\.BytesIO|torch\.device"
    r"|numpy\.(ndarray|_?core\.(multiarray\._reconstruct|numeric\._frombuffer)|dtypes\.\w+|dtype)"
    r"|numpy\.random\.(_pickle\.\w+|\w+\.\w+)"
)
"""Names whose objects nobody needs: they are kept as they are."""

_BUILTINS = re.compile(r"(?:__builtin__|builtins)\.(dict|list|tuple|int|float|bool|str|bytes|bytearray|set|frozenset)")
_SCALAR = re.compile(r"[fiubcSU]\d+|\?")
"""NumPy's names of the types that its scalars have."""
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
    "_UntypedStorage": torch.uint8,
}
_STORAGE = re.compile(r"torch\.(?:cuda\.|storage\.)?(\w*Storage)")


def find_global(name: str) -> Any:
    """What ``module.name`` stands for: a ``Global``, or a dtype itself.

    Raises:
        Refused: If it is not among the names that checkpoints need.
    """
    if name in _FUNCTIONS:
        return Global(name=name, make=_FUNCTIONS[name])
    module, _, last = name.rpartition(".")
    if module == "torch" and isinstance(dtype := vars(torch).get(last), torch.dtype):
        return dtype
    if (storage := _STORAGE.fullmatch(name)) and storage[1] in _STORAGES:
        return _STORAGES[storage[1]]
    if (builtin := _BUILTINS.fullmatch(name)) is not None:
        return Global(name=name, make=_BUILTIN_TYPES.get(builtin[1], _refusing(name)))
    if _INERT.fullmatch(name):
        return Global(name=name, make=lambda *arguments: Inert(name=name, arguments=arguments))
    raise Refused(f"it would run {name} when loaded")


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise Refused(f"it would run {name} when loaded")

    return refuse


def _dict(items: Any = ()) -> dict[Any, Any]:
    """An ordered dictionary; that of Python 2 comes with a list of its items."""
    pairs = items.items() if isinstance(items, dict) else items
    return OrderedDict((as_key(key), value) for key, value in pairs)


def _namespace(*arguments: Any) -> argparse.Namespace:
    if arguments:
        raise Damaged("a Namespace with arguments")
    return argparse.Namespace()


def _simple_namespace(*arguments: Any) -> SimpleNamespace:
    if arguments:
        raise Damaged("a SimpleNamespace with arguments")
    return SimpleNamespace()


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    if encoding.replace("-", "") not in ("latin1", "utf8"):
        raise Refused(f"it would run the codec {encoding} when loaded")
    return text.encode(encoding)


def _attribute(owner: Any, name: str) -> Inert:
    """How Python 3.11.0 wrote a member of an enumeration."""
    if not (isinstance(owner, Global) and _INERT.fullmatch(owner.name)):
        raise Refused("it would run builtins.getattr when loaded")
    return Inert(name=owner.name, arguments=(name,))


def _reconstructor(cls: Any, base: Any, _: Any = None) -> Any:
    """How protocols 0 and 1 make an object."""
    if not isinstance(cls, Global) or not isinstance(base, Global) or not base.name.endswith(".object"):
        raise Refused("it would run copyreg._reconstructor when loaded")
    return cls.make()


def _scalar(dtype: Any, data: bytes) -> Any:
    """A NumPy scalar, as Python's number or string."""
    if not isinstance(dtype, Inert) or dtype.name != "numpy.dtype" or not isinstance(dtype.arguments[0], str):
        raise Damaged("a scalar of no dtype")
    name, order = dtype.arguments[0], dtype.state[1] if dtype.state else "="
    if not _SCALAR.fullmatch(name) or order not in ("<", ">", "=", "|"):
        raise Damaged(f"a scalar of the dtype {name[:20]}")
    kind = np.dtype(f"{order}{name}" if name != "?" else "?")
    if len(data) != kind.itemsize:
        raise Damaged(f"a scalar of {len(data)} bytes")
    return np.frombuffer(data, kind)[0].item()


def _tensor(storage: Any, first: int, shape: Iterable[int], stride: Iterable[int], *_: Any) -> TensorHandle:
    """Versions 1 and 2 of tensors; what follows is about gradients."""
    kept, dtype = storage
    return _handle(kept, dtype, first, shape, stride)


def _untyped_tensor(storage: Any, first: int, shape: Iterable[int], stride: Iterable[int], *rest: Any) -> TensorHandle:
    """Version 3: the dtype comes after gradient flag and hooks."""
    return _handle(storage[0], rest[2], first, shape, stride)


def _handle(storage: Any, dtype: Any, first: int, shape: Iterable[int], stride: Iterable[int]) -> TensorHandle:
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise Damaged("a tensor without a storage")
    return TensorHandle(storage=storage, dtype=dtype, shape=tuple(shape), stride=tuple(stride), first=first)


def _parameter(data: Any, *_: Any) -> TensorHandle:
    if not isinstance(data, TensorHandle):
        raise Damaged("a parameter without a tensor")
    return data


def _with_attributes(function: Any, _type: Any, arguments: tuple[Any, ...], *_: Any) -> TensorHandle:
    """A tensor with attributes of its own, as Megatron gives them to main parameters."""
    if not isinstance(function, Global) or function.name not in _TENSOR_FUNCTIONS:
        raise Refused(f"it would run {getattr(function, 'name', function)} when loaded")
    tensor = function.make(*arguments)
    assert isinstance(tensor, TensorHandle)
    return tensor


_BUILTIN_TYPES: dict[str, Callable[..., Any]] = {
    "bytes": lambda data=b"": data if isinstance(data, bytes) else _refusing("bytes")(),
    "bytearray": lambda data=b"": data if isinstance(data, bytes) else _refusing("bytearray")(),
    "set": lambda items=(): {as_key(item) for item in items},
    "frozenset": lambda items=(): frozenset(as_key(item) for item in items),
}
"""Of the others only the name is needed, as the default of a ``defaultdict``."""
_TENSOR_FUNCTIONS: dict[str, Callable[..., TensorHandle]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _untyped_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **_TENSOR_FUNCTIONS,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    "torch.Tensor": _refusing("torch.Tensor"),
    "torch.nn.parameter.Parameter": _refusing("torch.nn.parameter.Parameter"),
    "torch.Size": lambda sizes=(): tuple(sizes),
    "torch.serialization._get_layout": lambda name: name,
    "collections.OrderedDict": _dict,
    "collections.defaultdict": lambda _=None, items=(): _dict(items),
    "argparse.Namespace": _namespace,
    "types.SimpleNamespace": _simple_namespace,
    "_codecs.encode": _encode,
    "builtins.getattr": _attribute,
    "__builtin__.getattr": _attribute,
    "builtins.object": _refusing("builtins.object"),
    "__builtin__.object": _refusing("__builtin__.object"),
    "copyreg._reconstructor": _reconstructor,
    "copy_reg._reconstructor": _reconstructor,
    "builtins.complex": complex,
    "__builtin__.complex": complex,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "pathlib.PosixPath": PurePosixPath,
    "pathlib.PurePosixPath": PurePosixPath,
    "pathlib.WindowsPath": PureWindowsPath,
    "pathlib._local.PosixPath": PurePosixPath,
}
"""Names and what a call of them gives here; a class that is only handed on refuses to be called."""
