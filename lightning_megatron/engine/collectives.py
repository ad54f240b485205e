"""Collectives for errors, averages, gathered rows and metrics.

``call_on_all_ranks`` raises one rank's error on every rank, so that none is left waiting. Averages and gathers over the
data-parallel group are for user code in ``validation_step`` and callbacks; losses and logged metrics need neither, they
are already the same on every rank.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.utils import _pytree as pytree
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_megatron.engine.gather import gather_objects
from lightning_megatron.engine.groups import Topology
from lightning_megatron.errors import ConfigError, type_of

T = TypeVar("T")


def call_on_all_ranks(function: Callable[[], T]) -> T:
    """Return ``function()``, with its errors raised as by ``raise_on_all_ranks``. Collective over the world."""
    with raise_on_all_ranks():
        return function()


@contextlib.contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise an error of any rank's block on every rank. Collective over the world.

    The block must not communicate, since another rank may already have raised.

    Raises:
        ConfigError: A rank's own error; on ranks without one, that of the first rank that has one, with its number.
    """
    error: ConfigError | None = None
    try:
        yield
    except ConfigError as caught:
        error = caught
    except OSError as caught:
        error = ConfigError(str(caught))
        error.__cause__ = caught
    if dist.is_initialized() and dist.get_world_size() > 1:
        own = None if error is None else (type(error), str(error))
        for rank, each in enumerate(gather_objects(own)):
            if error is None and each is not None:
                kind, text = each
                raise kind(f"{text} (on rank {rank})")
    if error is not None:
        raise error


_num_waits = itertools.count()


def wait_for_all_ranks(timeout: timedelta) -> bool:
    """Wait until every rank has called this; False if some have not after ``timeout``.

    It goes through the store: unlike a collective, it does not interfere with ranks that are in the middle of one.
    """
    store = dist.distributed_c10d._get_default_store()
    prefix = f"lightning_megatron/wait_for_all_ranks/{next(_num_waits)}"
    keys = [f"{prefix}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], "")
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:
        return False
    return True


def avg_losses_across_data_parallel_group(losses: Sequence[Tensor]) -> Tensor:
    """Mean of each loss over the data-parallel ranks; every rank of the group must call.

    A mean of means: exact only if all ranks have equal weight. ``TrainStep`` losses are weighted by their targets.

    Args:
        losses: Tensors of one element each.

    Returns:
        [len(losses)], detached.

    Raises:
        ConfigError: Before the process groups exist.
    """
    group = data_parallel_group()
    averaged = torch.cat([loss.detach().view(1) for loss in losses])
    dist.all_reduce(averaged, group=group)
    return averaged / dist.get_world_size(group)


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """All-gather rows over the data-parallel ranks, in rank order; every rank of the group must call.

    Samples are distributed over ranks in turn or by microbatches, so this is not the order of a dataset:
    ``gather_predictions`` returns the results of ``Trainer.predict`` in that order.

    Args:
        tensor: A tensor, or lists, tuples and dicts of tensors; None stays None. Ranks may have different numbers of
            rows, also none; a 0-D tensor counts as one row.

    Returns:
        The same structure on every rank, each tensor [rows of all ranks, ...], on its original device.

    Raises:
        ConfigError: Before the process groups exist; if a leaf is not a tensor; on all ranks, if their structures,
            dtypes or row shapes differ.
    """
    group = data_parallel_group()
    leaves, structure = pytree.tree_flatten(tensor)
    rows = [None if leaf is None else _as_rows(leaf) for leaf in leaves]
    kinds = [None if each is None else _kind(each) for each in rows]
    description = str(pytree.tree_unflatten(kinds, structure))
    counts = [0 if each is None else len(each) for each in rows]
    of_ranks = gather_objects((description, counts), group)
    first, _ = of_ranks[0]
    for rank, (other, _) in enumerate(of_ranks):
        if other != first:
            raise ConfigError(
                f"data-parallel rank {rank} gathers {other} and rank 0 gathers {first}; give all the same"
            )
    all_counts = zip(*(counts for _, counts in of_ranks), strict=True)
    gathered = [
        own if own is None else all_gather_rows(own, counts_of_ranks, group)
        for own, counts_of_ranks in zip(rows, all_counts, strict=True)
    ]
    return pytree.tree_unflatten(gathered, structure)


def _as_rows(leaf: Any) -> Tensor:
    if not isinstance(leaf, Tensor):
        raise ConfigError(
            f"{type_of(leaf)} cannot be gathered; give tensors, or lists and dicts of tensors"
        )
    rows: Tensor = torch.atleast_1d(leaf.detach())
    return rows


def _kind(rows: Tensor) -> str:
    shape = ["rows", *(str(size) for size in rows.shape[1:])]
    return f"{rows.dtype} of the shape [{', '.join(shape)}]"


def all_gather_rows(
    rows: Tensor,
    counts: Sequence[int],
    group: dist.ProcessGroup,
) -> Tensor:
    """All-gather ``rows`` in rank order; ``counts`` is the number of rows of each rank. Every rank must call."""
    if len(counts) == 1:
        return rows
    own_device = rows.device
    if own_device.type == "cpu" and dist.get_backend(group) == "nccl":
        # Predictions of Trainer.predict are on the CPU.
        rows = rows.cuda()
    # Collectives need equal shapes: ranks with fewer rows send padding, which is cut off again.
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded, group=group)
    parts = [part[:count] for part, count in zip(gathered, counts, strict=True)]
    return torch.cat(parts).to(own_device)


def compute_metrics(
    metrics: Mapping[str, Metric],
    topology: Topology,
    device: torch.device,
) -> dict[str, float]:
    """Values of metrics that the last stage has updated, on every rank; each rank must call with the same names.

    States are synchronized over the data-parallel ranks of the last stage only: other ranks of a replica have seen no
    rows, or the same ones. The last stage then broadcasts the values over the pp group.
    """
    values = torch.zeros(len(metrics), dtype=torch.float64, device=device)
    if topology.is_last_stage:
        for index, metric in enumerate(metrics.values()):
            metric.process_group = topology.dp_group
            values[index] = metric.compute()
    if topology.parallel.pp > 1:
        dist.broadcast(values, topology.last_stage, group=topology.pp_group)
    return dict(zip(metrics, values.tolist(), strict=True))


def gather_over_replicas(state: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """States of a metric of torchmetrics, one for each data-parallel replica, whose ranks have seen the same rows.

    Args:
        state: This rank's state.
        group: The metric's own group, if its user gave one.
    """
    states: list[Tensor] = gather_all_tensors(state, group or data_parallel_group())
    return states


def data_parallel_group() -> dist.ProcessGroup:
    """Process group of the ranks that hold the same part of the model as this one.

    Raises:
        ConfigError: Before the process groups exist.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            "there is no data-parallel group yet; call this within Trainer.fit, validate or test"
        )
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
    return group


class HostCopy:
    """Asynchronous copy of a scalar from device to host; only ``read`` waits for it."""

    def __init__(self, value: Tensor) -> None:
        """Queue the copy of ``value``, of one element, on the current stream; of a tensor on the host, copy it now."""
        self._copy = value.detach().to("cpu", non_blocking=True, copy=True)
        self._copied: torch.cuda.Event | None = None
        if value.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> float:
        """Wait for the copy and return the value."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._copy)
