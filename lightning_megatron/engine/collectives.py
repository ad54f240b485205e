"""Collectives on values of user code and of checks: failures, averages, gathered rows and metrics.

``call_on_all_ranks`` raises on every rank what one rank's check has found, so that none is left waiting. Averages and
gathers over the data-parallel group are for code of one's own in ``validation_step`` and callbacks: losses and logged
metrics need neither, they agree already.
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
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from lightning_megatron.engine.groups import Topology
from lightning_megatron.errors import ConfigError

T = TypeVar("T")


def call_on_all_ranks(check: Callable[[], T]) -> T:
    """What ``check`` returns, and what it raises as ``raise_on_all_ranks`` does; every rank of the world must call."""
    with raise_on_all_ranks():
        return check()


@contextlib.contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise the first rank's error of the block on all ranks, each of which must come to it.

    The block must not communicate, since another rank may already have raised.

    Raises:
        ConfigError: What any rank raised: as it was on the rank itself, and with that rank's number on the others.
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
        found: list[tuple[type[ConfigError], str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, None if error is None else (type(error), str(error)))
        first = next(((rank, *each) for rank, each in enumerate(found) if each is not None), None)
        if error is None and first is not None:
            rank, kind, text = first
            raise kind(f"{text} (on rank {rank})")
    if error is not None:
        raise error


_meetings = itertools.count()


def wait_for_all_ranks(patience: timedelta) -> bool:
    """Whether every rank calls this within ``patience`` of the others; False if some are elsewhere.

    Unlike a collective, it leaves ranks that are in the middle of one alone.
    """
    store = dist.distributed_c10d._get_default_store()
    place = f"lightning_megatron/wait_for_all_ranks/{next(_meetings)}"
    names = [f"{place}/{rank}" for rank in range(dist.get_world_size())]
    store.set(names[dist.get_rank()], "")
    try:
        store.wait(names, patience)
    except dist.DistStoreError:
        return False
    return True


def avg_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean of each loss over the data-parallel ranks; every rank of the group must call.

    A mean of means: exact only where all ranks count equally. ``TrainStep`` losses are weighed by their targets.

    Args:
        losses: Tensors of one element each.

    Returns:
        [len(losses)], without a graph.

    Raises:
        ConfigError: Before the process groups exist.
    """
    group = data_parallel_group()
    averaged = torch.cat([loss.detach().clone().view(1) for loss in losses])
    dist.all_reduce(averaged, group=group)
    return averaged / dist.get_world_size(group)


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """The rows of all data-parallel ranks, those of rank 0 first; every rank of the group must call.

    Samples are dealt to the ranks in turn or by microbatches, so this is no dataset's order: ``gather_predictions``
    puts what ``Trainer.predict`` returned into that.

    Args:
        tensor: A tensor, or lists, tuples and dicts of tensors; None stays None. Ranks may have different numbers of
            rows, also none; a tensor without axes counts as one row.

    Returns:
        The same structure on every rank, each tensor [rows of all ranks, ...], on the device where it was.

    Raises:
        ConfigError: Before the process groups exist; if something in it is no tensor; on all ranks, if they have
            different structures, dtypes or lengths of rows.
    """
    group = data_parallel_group()
    leaves, structure = pytree.tree_flatten(tensor)
    rows = [None if leaf is None else _as_rows(leaf) for leaf in leaves]
    kinds = [None if each is None else _kind(each) for each in rows]
    described = str(pytree.tree_unflatten(kinds, structure))
    counts = [0 if each is None else len(each) for each in rows]
    answers: list[tuple[str, list[int]]] = [("", [])] * dist.get_world_size(group)
    dist.all_gather_object(answers, (described, counts), group=group)
    for rank, (other, _) in enumerate(answers):
        if other != answers[0][0]:
            raise ConfigError(
                f"data-parallel rank {rank} gathers {other} and rank 0 gathers {answers[0][0]}; give all the same"
            )
    of_ranks = zip(*(counts for _, counts in answers), strict=True)
    gathered = [r if r is None else all_gather_rows(r, n, group) for r, n in zip(rows, of_ranks, strict=True)]
    return pytree.tree_unflatten(gathered, structure)


def _as_rows(leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        raise ConfigError(f"a {type(leaf).__name__} cannot be gathered; give tensors, or lists and dicts of tensors")
    return leaf.detach()[None] if leaf.dim() == 0 else leaf.detach()


def _kind(rows: torch.Tensor) -> str:
    return f"{rows.dtype} of the shape [{', '.join(['rows', *map(str, rows.shape[1:])])}]"


def all_gather_rows(rows: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The rows of all ranks of the group, of which each has ``counts``, in order; every rank must call."""
    if len(counts) == 1:
        return rows
    own_device = rows.device
    if own_device.type == "cpu" and dist.get_backend(group) == "nccl":  # Trainer.predict leaves predictions there
        rows = rows.cuda()
    # Collectives want equal shapes: short ranks send rows that are cut off again.
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[:count].to(own_device) for part, count in zip(gathered, counts, strict=True)])


def compute_metrics(metrics: Mapping[str, Metric], topology: Topology, device: torch.device) -> dict[str, float]:
    """What metrics that were updated on the last stage say, on every rank; each rank must call with the same names.

    The states are synchronized over the data-parallel ranks of the last stage only: other ranks of a copy have seen
    nothing, or the same rows again. Then the last stage tells the others.
    """
    values = torch.zeros(len(metrics), dtype=torch.float64, device=device)
    if topology.is_last_stage:
        for index, metric in enumerate(metrics.values()):
            metric.process_group = topology.dp_group
            values[index] = metric.compute()
    if topology.parallel.pp > 1:
        dist.broadcast(values, topology.last_stage, group=topology.pp_group)
    return dict(zip(metrics, values.tolist(), strict=True))


def data_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold the same part of the model as this one.

    Raises:
        ConfigError: Before the process groups exist.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise ConfigError("there is no data-parallel group yet; call this within Trainer.fit, validate or test")
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
    return group


class HostCopy:
    """A number on its way from the device to the host, which does not wait before it reads it."""

    def __init__(self, number: torch.Tensor) -> None:
        """Queue the copy of ``number``, of one element, behind what the device does now."""
        self._copy = number.detach().to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if number.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> float:
        """Waits for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._copy)
