"""How does an engine that hard-codes CUDA run on a CPU? A table of its CUDA calls and what they mean with gloo.

Megatron-Core asks ``torch.cuda`` for devices, streams, events and random states, and writes ``device="cuda"``.
``emulated_cuda`` answers those calls with the CPU while a strategy runs there, and puts the real functions back after.
The same schedules, layers and optimizers then run in gloo processes on a laptop.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_megatron.engine.patching import Patch, active

_CPU = torch.device("cpu")
_ENGINE = "megatron-core 0.16.1"


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _CudaMeansCpu(TorchFunctionMode):
    """Sends every ``device="cuda"``, ``.cuda()`` and ``.to("cuda")`` to the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # optimizer/optimizer.py accepts parameters of type "torch.cuda.FloatTensor" and the like, nothing else.
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class _Stream:
    """A CUDA stream on a device that runs one operation after the other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None:
        """Nothing can be behind."""

    def wait_event(self, event: Any) -> None:
        """Nothing can be behind."""

    def synchronize(self) -> None:
        """Nothing can be behind."""

    def record_event(self, event: Any = None) -> _Event:
        return event if event is not None else _Event()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


class _Event:
    """A CUDA event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        """Already happened."""

    def wait(self, stream: Any = None) -> None:
        """Already happened."""

    def synchronize(self) -> None:
        """Already happened."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 0.0


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _returning(value: Callable[[], Any]) -> Callable[[Any], Any]:
    """A replacement that ignores its arguments and returns ``value()``."""

    def replacement(original: Any) -> Any:
        @functools.wraps(original if callable(original) else value)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return value()

        return stand_in

    return replacement


def _being(stand_in: Any) -> Callable[[Any], Any]:
    """A replacement that is ``stand_in`` itself."""
    return lambda original: stand_in


def _row(attribute: str, replacement: Callable[[Any], Any], reason: str, module: str = "torch.cuda") -> Patch:
    return Patch(module=module, attribute=attribute, replacement=replacement, engine=_ENGINE, reason=reason)


_RANDOM = "megatron.core.tensor_parallel.random"

CPU_PATCHES: tuple[Patch, ...] = (
    _row("current_device", _returning(lambda: _CPU), "every buffer is created on torch.cuda.current_device()"),
    _row("current_stream", _returning(_Stream), "distributed/param_and_grad_buffer.py orders its communication"),
    _row("default_stream", _returning(_Stream), "pipeline_parallel/schedules.py returns to the default stream"),
    _row("stream", _returning(contextlib.nullcontext), "overlapped communication runs on a side stream"),
    _row("set_stream", _returning(lambda: None), "nothing to switch"),
    _row("Stream", _being(_Stream), "side streams are created in constructors"),
    _row("Event", _being(_Event), "timers and p2p communication record events"),
    _row("synchronize", _returning(lambda: None), "a CPU operation is finished when it returns"),
    _row("set_device", _returning(lambda: None), "there is one CPU"),
    _row("empty_cache", _returning(lambda: None), "dist_checkpointing frees the GPU cache around saves"),
    _row("memory_allocated", _returning(lambda: 0), "memory is logged in checkpointing"),
    _row("max_memory_allocated", _returning(lambda: 0), "memory is logged in checkpointing"),
    _row("manual_seed", _being(torch.manual_seed), "tensor_parallel/random.py seeds the device generator"),
    _row("get_rng_state", _being(_get_rng_state), "tensor_parallel/random.py reads the device generator"),
    _row("set_rng_state", _being(_set_rng_state), "tensor_parallel/random.py sets the device generator"),
    _row("FloatTensor", _being(torch.FloatTensor), "optimizer/optimizer.py builds loss scales with it"),
    _row("_get_cuda_rng_state", _being(_get_rng_state), "reads torch.cuda.random directly", module=_RANDOM),
    _row("_set_cuda_rng_state", _being(_set_rng_state), "sets torch.cuda.default_generators", module=_RANDOM),
)
"""Every CUDA call on the trained path of the engine, and what stands in for it."""


@contextlib.contextmanager
def emulated_cuda() -> Iterator[None]:
    """While active, the engine's CUDA calls mean the CPU; afterwards torch is as it was."""
    log = logging.getLogger(_RANDOM)
    log.addFilter(_is_not_about_one_generator)
    try:
        with active(CPU_PATCHES), _CudaMeansCpu():
            yield
    finally:
        log.removeFilter(_is_not_about_one_generator)


def _is_not_about_one_generator(record: logging.LogRecord) -> bool:
    """Drop ``CudaRNGStatesTracker.fork``'s warning that GPU code drew from the CPU: here both are one generator."""
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()
