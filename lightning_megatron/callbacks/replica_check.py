"""``ReplicaCheck``: compares the copies of weights and optimizer state on several ranks.

It detects silent data corruption on one device, which Llama 3's authors had six times in 54 days
(https://arxiv.org/abs/2407.21783, table 5).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from torch import Tensor
from typing_extensions import override

from lightning_megatron.checkpoint.state import ungathered_weights
from lightning_megatron.engine.gather import gather_objects
from lightning_megatron.engine.wrap import finish_parameter_gathers
from lightning_megatron.errors import NumericsError, require_number
from lightning_megatron.foreign_names import checks_options


@checks_options
class ReplicaCheck(Callback):
    """Compares all copies of weights and optimizer state bit by bit; all ranks raise if two differ.

    Every ``every_n_steps`` steps, between the backward pass and the update, and at the end of training. Copies are
    equal shards of a tensor on several ranks: on data- and context-parallel ranks, on tensor-parallel ranks for
    replicated weights (norms, some biases), and on pipeline stages for tied weights. What is found:

    - A changed bit of a weight of which there are copies. Without the distributed optimizer ranks that differ stay so:
      any such bit that has flipped since the start. With it, each update overwrites the copies with the shard of their
      owner: a bit that has flipped since the last update, in any copy, the owner's included.
    - A changed bit of an fp32 main weight or a moment of which there are copies, whenever it has flipped: without the
      distributed optimizer on all data- and context-parallel ranks, and with either those of weights that
      tensor-parallel ranks or stages share.
    - A changed bit of a main weight or a moment that no other rank has, as with the distributed optimizer, if it has
      flipped in the forward or backward pass of the step with the check. One that flipped in an earlier step is not
      found, as nothing tells it from an update: ``every_n_steps=1`` looks at every step. With ``32-true`` the weights
      are the main weights, which hooks may change in the middle of a step: they are only compared with copies.

    Not found are bits of gradients and activations, and, where nothing has a copy (one rank), of weights. Each rank
    computes checksums of its tensors on the device (the sum of their bits as integers, which detects any single flipped
    bit), and the checksums are all-gathered on the CPU. A check reads the weights once and the optimizer's state twice
    (16 GB at 4 TB/s: 4 ms; state that ``offload_optimizer`` keeps in host memory at the speed of the processor), and
    synchronizes; parameters are gathered before the step with a check, not during it.
    """

    def __init__(self, every_n_steps: int = 1000) -> None:
        """Set the interval.

        Args:
            every_n_steps: Optimizer steps between two checks.

        Raises:
            ConfigError: If it is below 1.
        """
        require_number("every_n_steps", every_n_steps, at_least=1)
        self.every_n_steps = every_n_steps
        self._state_before: _Checksums | None = None
        """Of the optimizer state at the beginning of a step with a check; None in other steps."""

    @override
    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *_: Any,
    ) -> None:
        """Begin a check every ``every_n_steps`` steps, before the forward pass."""
        self._state_before = None
        if trainer.global_step == 0 or trainer.global_step % self.every_n_steps:
            return
        strategy: Any = trainer.strategy
        with strategy.engine():
            # Within the step copies are then compared as they are: a gather would overwrite them.
            finish_parameter_gathers(strategy.chunks)
            self._state_before = _checksums(strategy, is_unchanging=True)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any
    ) -> None:
        """Compare the copies after the backward pass of a step with a check.

        Raises:
            NumericsError: On all ranks, if copies differ or state has changed; names the tensor and the ranks.
        """
        before = self._state_before
        self._state_before = None
        if before is not None:
            self._check(trainer, before)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the copies of the final weights.

        Raises:
            NumericsError: On all ranks, if copies differ; names the tensor and the ranks.
        """
        strategy: Any = trainer.strategy
        with strategy.engine():
            finish_parameter_gathers(strategy.chunks)
        self._check(trainer, before={})

    def _check(self, trainer: Trainer, before: _Checksums) -> None:
        strategy: Any = trainer.strategy
        with strategy.engine():
            own = _checksums(strategy)
        changed = [tensor[0] for tensor, checksum in before.items() if own[tensor] != checksum]
        of_ranks = gather_objects((own, changed), strategy.host_group)
        _check_copies([checksums for checksums, _ in of_ranks], trainer.global_step)
        _check_unchanged([names for _, names in of_ranks], trainer.global_step)


_Checksums = dict[tuple[str, tuple[int, ...]], int]
"""By name and shape of the tensors of a rank: ranks may cut the same tensor differently."""


@torch.no_grad()
def _checksums(strategy: Any, *, is_unchanging: bool = False) -> _Checksums:
    """Sum of the bits of each of this rank's tensors, viewed as integers; synchronizes with the device.

    Args:
        strategy: With the model's chunks, and the optimizer if there is one.
        is_unchanging: Whether to leave out the weights, also as their own main weights: hooks may change them.
    """
    state = ungathered_weights(strategy.chunks)
    parts = []
    if strategy.megatron_optimizer is not None:
        optimizer_state = strategy.megatron_optimizer.sharded_state_dict(state)
        parts = _sharded_tensors(optimizer_state["param_state"])
    apply_factories(state)
    weights = _sharded_tensors(state)
    if is_unchanging:
        storages = {_storage(weight) for weight in weights}
        parts = [part for part in parts if _storage(part) not in storages]
    else:
        parts += weights
    if not parts:
        return {}
    # One transfer for all sums.
    device = strategy.root_device
    sums = torch.stack([_sum_of_bits(part.data).to(device) for part in parts])
    checksums = {}
    for part, checksum in zip(parts, sums.tolist(), strict=True):
        name = f"{part.key} at {tuple(part.global_offset)}"
        checksums[name, tuple(part.data.shape)] = checksum
    return checksums


def _storage(part: Any) -> int:
    return int(part.data.untyped_storage().data_ptr())


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Sum of a tensor's elements as integers of the same width, int64."""
    integers = {
        1: torch.int8,
        2: torch.int16,
        4: torch.int32,
        8: torch.int64,
    }
    bits = tensor.contiguous().view(integers[tensor.element_size()])
    return bits.sum(dtype=torch.int64)


def _sharded_tensors(state: dict[str, Any]) -> list[Any]:
    return [part for part in nested_values(state) if isinstance(part, ShardedTensor)]


def _check_copies(checksums: list[_Checksums], step: int) -> None:
    """Raise if ranks hold different copies of a tensor; the rarest copy is named first."""
    copies: defaultdict[Any, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, sums in enumerate(checksums):
        for tensor, checksum in sums.items():
            copies[tensor][checksum].append(rank)
    wrong = {}
    for (name, _), ranks_by_checksum in copies.items():
        if len(ranks_by_checksum) > 1:
            wrong[name] = sorted(ranks_by_checksum.values(), key=len)
    if not wrong:
        return
    name, holders = next(iter(wrong.items()))
    ranks = [f"ranks {', '.join(map(str, holder))}" for holder in holders]
    raise NumericsError(
        f"ReplicaCheck, step {step}: {name}{_and_more(wrong)}: expected equal bits in all copies, got one on "
        f"{' and another on '.join(ranks)}; suspect memory or arithmetic of the device with the odd copy, and resume "
        "without it from before"
    )


def _and_more(tensors: Collection[str]) -> str:
    """How many tensors there are besides the first."""
    if len(tensors) == 1:
        return ""
    return f", and {len(tensors) - 1} more tensors"


def _check_unchanged(changed: list[list[str]], step: int) -> None:
    """Raise if optimizer state of a rank has changed between two updates."""
    for rank, names in enumerate(changed):
        if names:
            raise NumericsError(
                f"ReplicaCheck, step {step}: {names[0]}{_and_more(names)}: expected equal bits before and after the "
                f"backward pass, got others on rank {rank}; suspect the memory of its device, and resume without it "
                "from before"
            )
