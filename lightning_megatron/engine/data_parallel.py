"""How do values travel between the copies of the model? Averages and gathers over the data-parallel group.

For code of one's own in ``validation_step`` and callbacks: losses and logged metrics need neither, they agree already.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torchmetrics import Metric

from lightning_megatron.engine.groups import Topology
from lightning_megatron.errors import ConfigError


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
    tensors: list[torch.Tensor] = []
    structure = _described(tensor, tensors)
    answers: list[tuple[Any, list[int]]] = [(None, [])] * dist.get_world_size(group)
    dist.all_gather_object(answers, (structure, [len(rows) for rows in tensors]), group=group)
    for rank, (other, _) in enumerate(answers):
        if other != answers[0][0]:
            raise ConfigError(
                f"data-parallel rank {rank} gathers {other} and rank 0 gathers {answers[0][0]}; give all the same, "
                "each tensor with any number of rows (pad rows to one length, or join a list of batches first)"
            )
    counts = zip(*(counts for _, counts in answers), strict=True)
    gathered = [_gathered_rows(rows, of_ranks, group) for rows, of_ranks in zip(tensors, counts, strict=True)]
    return _filled(tensor, iter(gathered))


def _described(value: Any, tensors: list[torch.Tensor]) -> Any:
    """What all ranks must have alike, as plain data; appends the tensors that are met."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: _described(part, tensors) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(part, tensors) for part in value]
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"a {type(value).__name__} cannot be gathered; give tensors, or lists and dicts of tensors")
    rows = value.detach()[None] if value.dim() == 0 else value.detach()
    tensors.append(rows)
    return f"{value.dtype} of the shape [rows{''.join(f', {length}' for length in rows.shape[1:])}]"


def _filled(value: Any, gathered: Iterator[torch.Tensor]) -> Any:
    """``value`` with other tensors, in the order in which ``_described`` meets its own."""
    if isinstance(value, torch.Tensor):
        return next(gathered)
    if isinstance(value, Mapping):
        return type(value)({key: _filled(part, gathered) for key, part in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_filled(part, gathered) for part in value))
    return None if value is None else type(value)(_filled(part, gathered) for part in value)


def _gathered_rows(rows: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
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


def computed_metrics(metrics: Mapping[str, Metric], topology: Topology, device: torch.device) -> dict[str, float]:
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
        raise ConfigError(
            "there is no data-parallel group yet; call this within Trainer.fit, validate or test under MegatronStrategy"
        )
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
    return group
