"""How do values travel between the copies of the model? Averages and gathers over the data-parallel group.

For code of one's own in ``validation_step`` and callbacks: losses and logged metrics need neither, they agree already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    group = _data_parallel_group()
    averaged = torch.cat([loss.detach().clone().view(1) for loss in losses])
    dist.all_reduce(averaged, group=group)
    return averaged / dist.get_world_size(group)


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """The rows of all data-parallel ranks, in their order; every rank of the group must call.

    Args:
        tensor: A tensor, or lists, tuples and dicts of tensors. Ranks may have different numbers of rows; a tensor
            without axes counts as one row.

    Returns:
        The same structure on every rank, each tensor [rows of all ranks, ...].

    Raises:
        ConfigError: Before the process groups exist, or if something in it is no tensor.
    """
    if isinstance(tensor, Mapping):
        return type(tensor)({k: gather_across_data_parallel_groups(v) for k, v in tensor.items()})  # type: ignore[call-arg]
    if isinstance(tensor, tuple) and hasattr(tensor, "_fields"):
        return type(tensor)(*(gather_across_data_parallel_groups(v) for v in tensor))
    if isinstance(tensor, (list, tuple)):
        return type(tensor)(gather_across_data_parallel_groups(v) for v in tensor)
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"a {type(tensor).__name__} cannot be gathered; give tensors, or lists and dicts of tensors")
    return _gathered_rows(tensor.detach()[None] if tensor.dim() == 0 else tensor.detach())


def _gathered_rows(rows: torch.Tensor) -> torch.Tensor:
    group = _data_parallel_group()
    size = dist.get_world_size(group)
    count = torch.tensor([rows.shape[0]], device=rows.device)
    counts = [torch.empty_like(count) for _ in range(size)]
    dist.all_gather(counts, count, group=group)
    numbers = [int(c.item()) for c in counts]
    # Collectives want equal shapes: short ranks send rows that are cut off again.
    padded = rows.new_zeros(max(numbers), *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[:number] for part, number in zip(gathered, numbers, strict=True)])


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


def _data_parallel_group() -> dist.ProcessGroup:
    if not parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            "there is no data-parallel group yet; call this within Trainer.fit, validate or test under MegatronStrategy"
        )
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
    return group
