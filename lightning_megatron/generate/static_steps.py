"""Static caches: passes of one token per row at the same shapes and addresses.

The first pass runs eagerly, which compiles what has to be compiled; before the second one, each chunk's work on each
group of rows is captured as a CUDA graph. Communication between stages and the choice of tokens are not part of the
graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_megatron.errors import ConfigError
from lightning_megatron.generate import cuda_graphs
from lightning_megatron.generate.chunk import CachedChunk, Task, pass_tasks
from lightning_megatron.generate.cuda_graphs import Work
from lightning_megatron.generate.layout import ModelInputs
from lightning_megatron.models.config import ModelConfig

MIN_WINDOW = 1024
"""Minimum number of slots of static caches that queries attend to, or all slots if there are fewer. It doubles when
sequences outgrow it, and the steps are captured again."""

MIN_NEW_TOKENS = 8
"""Fewest new tokens for which static caches are the default: capture takes as long as one or two eager steps, and a
replayed step a fifth of one."""


def uses_static_cache(
    requested: bool | None, new_tokens: int, model: ModelConfig, device: torch.device
) -> bool:
    """Whether a call uses static caches: as ``static_cache`` says, by default where a GPU gains by it.

    Args:
        requested: The option ``static_cache``.
        new_tokens: Maximum number of new tokens per row.
        model: Config of the model.
        device: Device of the model.

    Raises:
        ConfigError: If static caches are requested and the model does not support them.
    """
    reason = None
    if model.architecture == "t5":
        reason = "its decoder has cross-attention, and position biases that the host computes from the length"
    elif model.experts is not None:
        reason = "the host must know how many tokens go to each expert"
    elif (scaling := model.rope_scaling) is not None and scaling.depends_on_length:
        reason = f"the host computes its rotary frequencies ({scaling.rope_type}) from the length at every token"
    if requested is None:
        return device.type == "cuda" and reason is None and new_tokens >= MIN_NEW_TOKENS
    if requested and reason is not None:
        raise ConfigError(
            f"static_cache=True: {model.family} does not support it, as {reason}; leave it out"
        )
    return requested


class StaticSteps:
    """Passes of one token per row at fixed shapes and addresses, captured as graphs where the device supports it."""

    def __init__(
        self,
        chunks: Sequence[CachedChunk],
        groups: Sequence[slice],
        batch: ModelInputs,
        slot: int,
        slots: int,
    ) -> None:
        """Allocate the inputs of the steps besides caches and weights.

        Args:
            chunks: This rank's chunks, with caches that hold the prompts.
            groups: Rows of each group.
            batch: The first tokens after the prompts.
            slot: Their cache slot.
            slots: Number of cache slots.
        """
        self._chunks = chunks
        self._groups = groups
        self._batch = replace(batch, mask=None).map(Tensor.clone)
        tokens = batch.tokens
        self._recorder = cuda_graphs.graph_recorder(tokens.device)
        self._slot = tokens.new_full((1,), slot)
        self._is_token = tokens.new_ones((len(tokens), slots), dtype=torch.bool)
        if batch.mask is not None:
            self._is_token[:, : slot + 1] = batch.mask != 0
        self._tasks: list[Task] = []
        self._is_captured = False
        self._num_keys = 0

    def tasks(self, batch: ModelInputs, slot: int) -> list[Task]:
        """Tasks for the next tokens; the next call overwrites their outputs. Every rank of a replica must call.

        Args:
            batch: The tokens.
            slot: Their cache slot.

        Raises:
            ConfigError: If a step cannot be captured.
        """
        assert self._batch.positions is not None
        assert batch.positions is not None
        self._batch.tokens.copy_(batch.tokens)
        self._batch.positions.copy_(batch.positions)
        self._slot.fill_(slot)
        if slot >= self._num_keys:
            # Queries attend to more slots from now on; the graphs for fewer slots are freed.
            self._is_captured = False
            window = max(MIN_WINDOW, 1 << slot.bit_length())
            self._num_keys = min(window, self._is_token.shape[1])
            batch = replace(self._batch, mask=self._is_token[:, : self._num_keys])
            tasks = pass_tasks(self._chunks, self._groups, batch, slot=self._slot)
            self._tasks = list(tasks)
            if self._recorder is not None:
                warm_up = self._recorder.warm_up
                return self._with_works(
                    [functools.partial(warm_up, task.work) for task in self._tasks]
                )
        elif self._recorder is not None and not self._is_captured:
            works = [task.work for task in self._tasks]
            self._tasks = self._with_works(self._recorder.capture(works))
            self._is_captured = True
        return self._tasks

    def _with_works(self, works: Sequence[Work]) -> list[Task]:
        """The tasks with other work."""
        pairs = zip(self._tasks, works, strict=True)
        return [replace(task, work=work) for task, work in pairs]
