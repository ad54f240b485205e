"""Broadcast of a batch from the rank that has read it to the other ranks of its replica, once per step.

A short header (names, shapes, dtypes) goes over gloo, which never waits for a GPU, and then one flat buffer over the
device's backend. Batches of the other ranks' loaders are ignored, so a random or placeholder batch there cannot make
the ranks of a replica diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.engine.groups import Topology
from lightning_megatron.engine.progress import progress
from lightning_megatron.errors import DataError, type_of

_ALIGNMENT = 16
"""Alignment in bytes of each tensor in the buffer, enough for every dtype."""
Check: TypeAlias = Callable[[dict[str, Tensor]], None]
"""Raises if values of a batch are invalid."""
Header: TypeAlias = list[tuple[str, torch.dtype, torch.Size]]
"""Name, dtype and shape of each tensor, in the order of the buffer."""


def check_batch(batch: Any) -> dict[str, Tensor]:
    """The batch as a dict of tensors with the same number of rows, at least one.

    Raises:
        DataError: If it is anything else.
    """
    if not isinstance(batch, Mapping) or not batch:
        raise DataError(f"a batch is {type_of(batch)}; the DataLoader must yield dicts of tensors")
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise DataError(
                f"batch[{name!r}]: expected a tensor with a row per sample, got {type_of(value)}"
            )
    rows = {name: value.shape[0] for name, value in batch.items()}
    if len(set(rows.values())) > 1:
        raise DataError(
            f"the tensors of a batch have different numbers of rows, {rows}; give all the same"
        )
    if 0 in rows.values():
        raise DataError(
            "a batch has no rows, and each must have at least one; correct the dataset or sampler"
        )
    return dict(batch)


def broadcast_batch(
    batch: Any,
    topology: Topology,
    device: torch.device,
    check: Check | None = None,
) -> dict[str, Tensor]:
    """Broadcast the source rank's batch to ``device`` on every rank of its replica. Collective over ``mp_group``.

    Args:
        batch: This rank's batch; only the source's is read.
        topology: Source rank and process groups.
        device: Device of the result.
        check: Called with the source's batch if it is still on the host, where reading values costs nothing; None for
            prompts, which are not training batches (a T5's have no labels).

    Raises:
        DataError: On all ranks of the group, if the source's batch is not a dict of tensors or ``check`` raises.
    """
    progress.step()
    is_alone = dist.get_world_size(topology.mp_group) == 1
    if dist.get_rank() == topology.mp_source:
        try:
            tensors = check_batch(batch)
            if check is not None and all(
                tensor.device.type == "cpu" for tensor in tensors.values()
            ):
                check(tensors)
        except Exception as error:
            if not is_alone:  # the other ranks wait for a header: send the error instead
                _broadcast_header(
                    str(error) if isinstance(error, DataError) else repr(error), topology
                )
            raise
        header = [
            (
                name,
                tensor.dtype,
                tensor.shape,
            )
            for name, tensor in tensors.items()
        ]
        buffer = pack(tensors, header).to(device, non_blocking=True)
        if is_alone:
            return unpack(buffer, header)
        _broadcast_header(header, topology)
    else:
        header = _broadcast_header(None, topology)
        if isinstance(header, str):
            raise DataError(header)
        buffer = _empty_buffer(header, device)
    dist.broadcast(buffer, topology.mp_source, group=topology.mp_group)
    return unpack(buffer, header)


def _broadcast_header(header: Any, topology: Topology) -> Any:
    """Header of the source rank, on every rank of the group."""
    box = [header]
    dist.broadcast_object_list(box, topology.mp_source, group=topology.mp_header_group)
    return box[0]


def _empty_buffer(header: Header, device: torch.device) -> Tensor:
    """Uninitialized buffer for all tensors: [bytes], uint8, pinned if on the CPU of a machine with a GPU."""
    num_bytes = sum(_size_bytes(dtype, shape) for _, dtype, shape in header)
    pinned = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(
        num_bytes,
        dtype=torch.uint8,
        device=device,
        pin_memory=pinned,
    )


def pack(tensors: Mapping[str, Tensor], header: Header) -> Tensor:
    """Copy all tensors into one buffer: [bytes], uint8."""
    buffer = _empty_buffer(header, next(iter(tensors.values())).device)
    # Copied by element: a single element of a column has another stride than 1, and cannot be viewed as bytes.
    for name, view in unpack(buffer, header).items():
        view.copy_(tensors[name])
    return buffer


def unpack(buffer: Tensor, header: Header) -> dict[str, Tensor]:
    """Tensors of ``header`` as views of the buffer."""
    tensors = {}
    start = 0
    for name, dtype, shape in header:
        size = _size_bytes(dtype, shape)
        tensors[name] = buffer[start : start + size].view(dtype)[: shape.numel()].view(shape)
        start += size
    return tensors


def _size_bytes(dtype: torch.dtype, shape: torch.Size) -> int:
    return -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
