"""Stand-in for CUDA graphs on a CPU: records kernels and replays them on the same memory.

As with a graph, only values of tensors with fixed addresses can change between replays: decisions of the host are
frozen at recording. A step that synchronizes with the device fails here as it would there. What recording writes is
undone: a graph's kernels do not run while they are captured.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_megatron.generate.cuda_graphs import Work

_SYNCHRONIZES = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::is_nonzero",
    "aten::unique",
)

_ALLOCATES = ("aten::empty", "aten::new_empty")
"""Not recorded: the results have no values yet, and the engine replaces the memory of some (viewless tensors)."""


class Tape(TorchDispatchMode):
    """Records every kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[tuple[Any, Any, Any, Any]] = []
        self._overwritten: list[tuple[Tensor, Tensor]] = []
        """Tensors that kernels wrote to, and what was in them."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if func._schema.name.startswith(_SYNCHRONIZES):
            raise RuntimeError(f"{func} makes the host wait")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, Tensor):
                self._overwritten.append((value, value.clone()))
        result = func(*args, **(kwargs or {}))
        if not func._schema.name.startswith(_ALLOCATES):
            self.kernels.append((func, args, kwargs or {}, result))
        return result

    def undo(self) -> None:
        """Write back what was in the tensors before."""
        for tensor, before in reversed(self._overwritten):
            tensor.copy_(before)
        self._overwritten.clear()

    def replay(self) -> None:
        """Run the kernels again; each writes to the memory of its recorded result."""
        for func, args, kwargs, result in self.kernels:
            for old, new in zip(
                tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True
            ):
                if not isinstance(old, Tensor):
                    _wait(new)
                elif old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeRecorder:
    """Graph recorder that uses tapes and counts its calls."""

    def __init__(self) -> None:
        self.counts = (0, 0, 0)
        """Number of warm-ups, recordings and replays."""

    def warm_up(self, work: Work) -> Tensor:
        self._count(1, 0, 0)
        return work()

    def capture(self, works: Sequence[Work]) -> list[Work]:
        return [self._capture(work) for work in works]

    def _capture(self, work: Work) -> Work:
        self._count(0, 1, 0)
        with Tape() as tape:
            output = work()
        tape.undo()
        return functools.partial(self._replay, tape, output)

    def _replay(self, tape: Tape, output: Tensor) -> Tensor:
        self._count(0, 0, 1)
        tape.replay()
        return output

    def _count(self, *more: int) -> None:
        self.counts = tuple(map(sum, zip(self.counts, more, strict=True)))  # type: ignore[assignment]


def _wait(result: Any) -> None:
    """Wait for a collective, which returns a work handle."""
    if isinstance(result, torch.ScriptObject):
        torch._C._distributed_c10d.Work.unbox(result).wait()
