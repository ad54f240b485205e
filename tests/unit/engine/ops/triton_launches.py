"""Launches of Triton kernels: recorded by a pytest plugin in the interpreter, then compiled for a GPU.

The interpreter executes what no compiler would take. Triton and the assembler that it ships need no GPU to compile.
"""

import importlib
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, interpreter

RECORD = "KERNELS_LAUNCHES"
"""Environment variable: the file to which launches are written."""
SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a program can have on Hopper."""
_MULTIPLIES = "_add_grouped_gradient"
"""Kernel of bf16 matrices; the interpreter, which multiplies no bf16, gets fp32."""


class Argument(NamedTuple):
    """What a compiled kernel depends on of an argument."""

    dtype: str | None
    """Of a tensor, without ``torch.``; None for a number or constant."""
    value: Any
    """The number, or whether the tensor's address is a multiple of 16 bytes."""


class Launch(NamedTuple):
    """One launch of a kernel."""

    module: str
    kernel: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]


_launches: set[Launch] = set()


def _described(argument: Any) -> Argument:
    if isinstance(argument, torch.Tensor):
        return Argument(str(argument.dtype).removeprefix("torch."), argument.data_ptr() % 16 == 0)
    return Argument(None, argument)


def pytest_configure(config: Any) -> None:
    """Record the launches of this process."""
    execute = interpreter.GridExecutor.__call__

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = tuple((name, _described(each)) for name, each in kwargs.items())
        described = tuple(map(_described, args))
        module = self.fn.__globals__["__name__"]
        _launches.add(Launch(module, self.fn.__name__, described, options))
        return execute(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = record


def pytest_unconfigure(config: Any) -> None:
    """Write what was launched."""
    Path(os.environ[RECORD]).write_bytes(pickle.dumps(sorted(_launches, key=repr)))


# ---- the other process -----------------------------------------------------------------------------------------------


class _Hopper:
    """Driver of an H100 or H200, as far as the compiler asks."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def _argument(kernel: str, place: int, described: Argument) -> Any:
    if described.dtype is None:
        return described.value
    dtype = described.dtype
    if kernel == _MULTIPLIES and place < 2:
        dtype = "bfloat16"
    memory = torch.empty(64, dtype=getattr(torch, dtype))
    return memory if described.value else memory[1:]


def compile_all(launches: Sequence[Launch]) -> None:
    """Compile the kernel of each launch; print their names, and raise for the first that fails."""
    driver.set_active(_Hopper())
    for module, name, args, kwargs in launches:
        kernel = getattr(importlib.import_module(module), name)
        compiled = kernel.run(
            *(_argument(name, place, each) for place, each in enumerate(args)),
            grid=(1,),
            warmup=True,
            **{key: each.value for key, each in kwargs},
        )
        assert compiled.asm["cubin"], name
        shared = compiled.metadata.shared
        assert shared <= SHARED_MEMORY, f"{name}: {shared} bytes of shared memory"
        print(f"{module}.{name}")


if __name__ == "__main__":
    compile_all(pickle.loads(Path(sys.argv[1]).read_bytes()))
