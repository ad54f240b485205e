"""CPU stand-ins for CUDA's devices, streams and random states.

Megatron-Core calls ``torch.cuda`` for them, and passes ``device="cuda"``. ``runtime.emulated_cuda`` patches these calls
while a strategy runs on a CPU (``patches.CPU`` is the table) and restores the real functions afterwards. The same
schedules, layers and optimizers then run in gloo processes on a laptop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cpu")


_CONVERSIONS = frozenset({Tensor.cuda, Tensor.to, Tensor.type})
"""Methods to which a device is no keyword."""


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class CudaMeansCpu(TorchFunctionMode):
    """Redirects every ``device="cuda"``, ``.cuda()`` and ``.to("cuda")`` to the CPU.

    Code that is known to name no such device can do without, in ``without_redirection``.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Every operation and attribute of a tensor passes here, most of them without keywords: 1.5 us, not 3.5.
        if not kwargs:
            if func not in _CONVERSIONS:
                return func(*args)
            kwargs = {}
        elif _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": DEVICE}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], DEVICE, *args[2:])
        if func is Tensor.type and len(args) == 1 and not kwargs:
            # optimizer/optimizer.py accepts only parameters of type "torch.cuda.FloatTensor" and the like.
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def without_redirection(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """On a CPU, a block in which a device "cuda" is an error again, and a small operation takes 2 us less.

    Decoding a token of a small model is a thousand operations: 5 % of the time of ``generate``.
    """
    if device.type == "cpu":
        return torch._C.DisableTorchFunction()
    return contextlib.nullcontext()
