"""Broadcast the batch that one rank has read to the ranks that share its copy of the model, once a step.

The source sends a short header (names, shapes, dtypes) over gloo, which never waits for a GPU, and then one flat buffer
over the device's backend. What other ranks' loaders yielded is ignored, so a random or placeholder batch there cannot
make the ranks of one model drift apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.heartbeat import progress
from lightning_megatron.errors import DataError

_ALIGNMENT = 16
"""Bytes: every tensor starts where any dtype may start."""

Check: TypeAlias = Callable[[dict[str, torch.Tensor]], None]
"""Raises if the numbers of a batch are wrong."""

Header: TypeAlias = list[tuple[str, torch.dtype, torch.Size]]
"""Name, dtype and shape of each tensor, in the order of the buffer."""


def check_batch(batch: Any) -> dict[str, torch.Tensor]:
    """The batch as a dict of tensors with equal numbers of rows.

    Raises:
        DataError: If it is anything else.
    """
    if not isinstance(batch, Mapping) or not batch:
        raise DataError(f"a batch is a {type(batch).__name__}; the DataLoader must yield dicts of tensors")
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            raise DataError(f"batch[{name!r}]: expected a tensor with a row per sample, got a {type(value).__name__}")
    rows = {name: value.shape[0] for name, value in batch.items()}
    if len(set(rows.values())) > 1:
        raise DataError(f"the tensors of a batch have different numbers of rows, {rows}; give all the same")
    return dict(batch)


def broadcast_batch(
    batch: Any, topology: Topology, device: torch.device, check: Check | None = None
) -> dict[str, torch.Tensor]:
    """The source rank's batch, on ``device``, on every rank of its model-parallel group; each of them must call.

    Args:
        batch: This rank's batch; only the source's is read.
        topology: Tells the source and the groups.
        device: Where the batch shall be.
        check: Called with the source's batch if it is still on the host, where looking at numbers costs nothing.

    Raises:
        DataError: On all of these ranks, if the source's batch is not a dict of tensors or ``check`` refuses it.
    """
    progress.steps += 1
    is_alone = dist.get_world_size(topology.mp_group) == 1
    if topology.is_data_source:
        try:
            tensors = _checked(batch, check)
        except Exception as error:
            if not is_alone:  # the others wait for a header; they get the reason why there is none
                _sent(str(error) if isinstance(error, DataError) else repr(error), topology)
            raise
        header = _header_of(tensors)
        buffer = pack(tensors).to(device, non_blocking=True)
        if is_alone:
            return unpack(buffer, header)
        _sent(header, topology)
    else:
        header = _sent(None, topology)
        if isinstance(header, str):
            raise DataError(header)
        buffer = _empty(header, device)
    dist.broadcast(buffer, topology.mp_source, group=topology.mp_group)
    return unpack(buffer, header)


def _sent(header: Any, topology: Topology) -> Any:
    """The source's header, on all ranks."""
    box = [header]
    dist.broadcast_object_list(box, topology.mp_source, group=topology.mp_header_group)
    return box[0]


def _checked(batch: Any, check: Check | None) -> dict[str, torch.Tensor]:
    tensors = check_batch(batch)
    if check is not None and all(tensor.device.type == "cpu" for tensor in tensors.values()):
        check(tensors)
    return tensors


def _header_of(tensors: Mapping[str, torch.Tensor]) -> Header:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def _empty(header: Header, device: torch.device) -> torch.Tensor:
    """For all tensors one after the other: [bytes], uint8, pinned on the CPU of a machine with a GPU."""
    num_bytes = sum(_size_bytes(dtype, shape) for _, dtype, shape in header)
    pinned = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)


def pack(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All tensors one after the other: [bytes], uint8."""
    header = _header_of(tensors)
    buffer = _empty(header, next(iter(tensors.values())).device)
    # Written as numbers, not as bytes: a single element of a column cannot be viewed as those.
    for name, view in unpack(buffer, header).items():
        view.copy_(tensors[name])
    return buffer


def unpack(buffer: torch.Tensor, header: Header) -> dict[str, torch.Tensor]:
    """The tensors again, as views of the buffer."""
    tensors, start = {}, 0
    for name, dtype, shape in header:
        size = _size_bytes(dtype, shape)
        tensors[name] = buffer[start : start + size].view(dtype)[: shape.numel()].view(shape)
        start += size
    return tensors


def _size_bytes(dtype: torch.dtype, shape: torch.Size) -> int:
    return -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
