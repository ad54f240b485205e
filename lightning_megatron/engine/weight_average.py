"""Exponential moving average of the fp32 master weights, sharded as they are, and its swap with the weights.

Source: Polyak and Juditsky 1992; the update is that of torch's ``AveragedModel`` with ``get_ema_multi_avg_fn``. Each
rank averages the elements whose master weights it holds. The average takes the place of the weights for an evaluation:
each rank writes its elements, and data-parallel ranks gather the others. A copy of the weights is kept meanwhile, so
that they come back bit for bit and without communication, also on a rank that fails alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from lightning_megatron.engine import optimizer_state
from lightning_megatron.engine.wrap import finish_parameter_gathers


class WeightAverage:
    """The average of the weights that an optimizer trains; frozen weights and buffers have none."""

    def __init__(
        self,
        chunks: Sequence[Any],
        parts: Iterable[Any],
        device: torch.device | None,
    ) -> None:
        """Allocate the average, 4 bytes for each element that this rank updates. Does not communicate.

        Args:
            chunks: The model chunks, wrapped in DDP.
            parts: Megatron's optimizers.
            device: Where the average is kept; None: where the weights are.
        """
        self._chunks = list(chunks)
        self._parts = list(parts)
        self._held = list(optimizer_state.param_states(self._parts))
        self._average = [
            torch.empty_like(held.tensors["param"], device=device or held.parameter.device)
            for held in self._held
        ]
        self._device = device
        self._weights = [
            weight for chunk in chunks for weight in chunk.parameters() if weight.requires_grad
        ]
        self._trained: list[Tensor] | None = None
        """Copies of the weights while the average is in their place."""
        self._depth = 0
        """How many callers have swapped the average in, and not yet out."""
        self.num_updates = 0
        """Updates so far; with 0 there is no average yet."""

    def is_of(self, chunks: Sequence[Any]) -> bool:
        """Whether this is the average of these model chunks."""
        return len(chunks) == len(self._chunks) and all(map(_is, chunks, self._chunks))

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Move the average towards the master weights by ``1 - decay``; the first update copies them."""
        masters = [held.tensors["param"] for held in self._held]
        is_beside = all(
            average.device == master.device
            for average, master in zip(self._average, masters, strict=True)
        )
        self._wait_for_masters()
        if self.num_updates == 0:
            for average, master in zip(self._average, masters, strict=True):
                average.copy_(master)
        elif not is_beside:
            # One at a time: all copies together would take as much memory as the average.
            for average, master in zip(self._average, masters, strict=True):
                average.lerp_(master.to(average.device, non_blocking=average.is_cuda), 1 - decay)
        elif masters:
            torch._foreach_lerp_(self._average, masters, 1 - decay)
        self.num_updates += 1

    def _wait_for_masters(self) -> None:
        """Let who reads them, the host or the device, wait for master weights on their way back to host memory."""
        for part in self._parts:
            host = None if part.optimizer is None else part.optimizer.host
            if host is None:
                continue
            if self._device is None:
                host.let_stream_wait()
            else:
                host.wait()

    # ---- in place of the weights ------------------------------------------------------------------------------------

    @property
    def is_swapped_in(self) -> bool:
        """Whether the model computes with the average."""
        return self._trained is not None

    def swap_in(self) -> None:
        """Put the average in place of the weights, if there is one; every rank must call, inside the engine.

        Calls nest: ``swap_out`` as often restores the weights.
        """
        if self.num_updates == 0:
            return
        self._depth += 1
        if self._depth == 1:
            self.write_average()

    def swap_out(self) -> None:
        """Undo a ``swap_in``; nothing if there was none. Does not communicate."""
        if self._depth > 0:
            self._depth -= 1
        if self._depth == 0:
            self.write_trained()

    def restore(self) -> None:
        """Undo every ``swap_in``. Does not communicate."""
        self._depth = 0
        self.write_trained()

    @torch.inference_mode(False)
    @torch.no_grad()
    def write_average(self) -> None:
        """Write the average over the weights, after a copy of them; every rank must call, inside the engine."""
        finish_parameter_gathers(self._chunks)
        self._trained = [
            weight.to(self._device or weight.device, copy=True) for weight in self._weights
        ]
        for held, average in zip(self._held, self._average, strict=True):
            weight = held.parameter.detach().view(-1)
            weight[held.start : held.stop].copy_(average)
        sharding: dict[int, Any] = {}
        for part in self._parts:
            if isinstance(part, DistributedOptimizer):
                sharding |= {id(chunk): chunk for chunk in part.model_chunks}
        for chunk in sharding.values():
            chunk.start_param_sync(force_sync=True)

    @torch.inference_mode(False)
    @torch.no_grad()
    def write_trained(self) -> None:
        """Write the copy back, if there is one. Does not communicate."""
        if self._trained is None:
            return
        for weight, trained in zip(self._weights, self._trained, strict=True):
            weight.copy_(trained)
        self._trained = None

    # ---- in a checkpoint --------------------------------------------------------------------------------------------

    def sharded_state_dict(self, models: Mapping[str, Any]) -> dict[str, ShardedTensor]:
        """Sharded tensors that view the average, in the shapes of the weights.

        Args:
            models: Sharded state dict of all chunks, with the parameters themselves as data.
        """
        return optimizer_state.sharded_average(self._held, self._average, models)


def _is(one: object, other: object) -> bool:
    return one is other
