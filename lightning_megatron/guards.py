"""Callbacks against loss spikes (``SpikeGuard``) and replicas of weights that diverge (``ReplicaCheck``).

``SpikeGuard`` does what PaLM's authors did by hand (https://arxiv.org/abs/2204.02311, section 5.1: restart from a
checkpoint before the spike and skip the batches around it, since a spike is caused by a batch *and* the current
weights). ``ReplicaCheck`` detects silent data corruption on one device, which Llama 3's authors had six times in
54 days (https://arxiv.org/abs/2407.21783, table 5).
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from typing_extensions import override

from lightning_megatron.checkpoint.save import ungathered_weights
from lightning_megatron.engine.collectives import HostCopy
from lightning_megatron.engine.wrap import finish_parameter_gathers
from lightning_megatron.errors import ConfigError, NumericsError, require_number
from lightning_megatron.foreign_names import explains_options

__all__ = ["ReplicaCheck", "SpikeGuard"]

_DEVIATIONS_PER_MAD = 1.4826
"""Ratio of standard deviation to median absolute deviation (MAD) of a normal distribution."""
_SMALLEST_DEVIATION = 1e-3
"""Lower bound of a deviation relative to the median, for losses that are almost constant."""


@explains_options
class SpikeGuard(Callback):
    """Rolls back to the newest checkpoint from before a loss spike, and skips the samples since then.

    A spike is a loss more than ``threshold`` deviations above the median of the last ``window`` losses; a deviation is
    estimated from the median absolute deviation, which is robust to outliers. Weights, optimizer, random states and
    learning rates are restored from the newest checkpoint of this run from before the spike, and training continues
    with the next samples: bit for bit as a run that never had the skipped ones. Like steps skipped by
    ``on_nan="skip"``, the steps in between count towards ``max_steps``, but not for learning rates. A loss is checked
    after the next step has been queued, so that no step waits for the device; there is no check before ``window``
    losses. The state is saved in checkpoints, so that a resumed run behaves as an uninterrupted one.

    Logged: ``spike_rollbacks``, from the first rollback on.
    """

    def __init__(self, window: int = 100, threshold: float = 10.0, max_rollbacks: int = 3) -> None:
        """Set the spike detection.

        Args:
            window: Number of previous losses to compare a loss with.
            threshold: Deviations above their median beyond which a loss is a spike.
            max_rollbacks: Limit for the whole run, resumed parts included; the next spike raises an error.

        Raises:
            ConfigError: If a value is out of range.
        """
        require_number("window", window, at_least=2)
        require_number("threshold", threshold, at_least=1)
        require_number("max_rollbacks", max_rollbacks)
        self.window, self.threshold, self.max_rollbacks = window, threshold, max_rollbacks
        self.rollbacks = 0
        """Rollbacks so far."""
        self._losses: deque[float] = deque(maxlen=window)
        self._last: tuple[int, HostCopy] | None = None
        """Step and loss of the last step, which has not been checked yet."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a run without checkpoints to roll back to.

        Raises:
            ConfigError: If the strategy is not Megatron's, or all ``ModelCheckpoint`` callbacks save weights only.
        """
        if stage != "fit":
            return
        self._last = None
        if trainer.global_step == 0:
            self.rollbacks = 0
            self._losses.clear()
        if not hasattr(trainer.strategy, "checkpointing"):
            raise ConfigError(
                "SpikeGuard needs checkpoints of MegatronStrategy; use it, or remove the callback"
            )
        savers = [
            callback
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint)
        ]
        if all(saver.save_weights_only for saver in savers):
            raise ConfigError(
                "SpikeGuard has no checkpoint to roll back to; add ModelCheckpoint(every_n_train_steps=1000)"
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check the loss of the previous step; losses are equal on all ranks.

        Raises:
            NumericsError: On all ranks, for a spike after ``max_rollbacks`` rollbacks.
        """
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        last, self._last = self._last, (trainer.global_step, HostCopy(loss))
        if last is not None and math.isfinite(
            value := last[1].read()
        ):  # others are handled by the strategy's on_nan
            is_full = len(self._losses) == self.window
            if not (is_full and value > self._limit() and self._roll_back(trainer, last[0], value)):
                self._losses.append(value)
        if self.rollbacks:
            pl_module.log("spike_rollbacks", torch.tensor(float(self.rollbacks)), batch_size=1)

    def _limit(self) -> float:
        median = statistics.median(self._losses)
        distance = statistics.median(abs(loss - median) for loss in self._losses)
        return median + self.threshold * max(
            _DEVIATIONS_PER_MAD * distance, _SMALLEST_DEVIATION * abs(median)
        )

    def _roll_back(self, trainer: Trainer, step: int, loss: float) -> bool:
        """Load the newest checkpoint from before ``step``; False if there is none. Collective over the world."""
        spike = f"SpikeGuard: the loss of step {step} is {loss:.4g}, expected at most {self._limit():.4g}"
        if self.rollbacks >= self.max_rollbacks:
            raise NumericsError(
                f"{spike}, after max_rollbacks={self.max_rollbacks} rollbacks; look at samples and learning rate"
            )
        strategy: Any = trainer.strategy
        loaded = strategy.checkpointing.roll_back(before=step)
        if loaded is None:
            rank_zero_warn(
                f"{spike}; this run has no earlier checkpoint, so training continues without a rollback"
            )
            return False
        # A checkpoint saved without this callback has no losses.
        state = {"losses": (), "last": None, **loaded["callbacks"].get(self.state_key, {})}
        self.load_state_dict({**state, "rollbacks": self.rollbacks + 1})
        first = loaded["global_step"] + 1
        rank_zero_warn(
            f"{spike}: weights, optimizer and learning rates are restored from step {first - 1}, and the samples of "
            f"steps {first} to {trainer.global_step} are skipped; rollback {self.rollbacks} of {self.max_rollbacks}"
        )
        return True

    @override
    def state_dict(self) -> dict[str, Any]:
        """Recent losses, that of the last step included, and the number of rollbacks."""
        last = self._last and [self._last[0], self._last[1].read()]
        return {"losses": list(self._losses), "last": last, "rollbacks": self.rollbacks}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of ``state_dict``."""
        self._losses = deque(state_dict["losses"], maxlen=self.window)
        self.rollbacks, last = state_dict["rollbacks"], state_dict["last"]
        self._last = last and (last[0], HostCopy(torch.tensor(last[1], dtype=torch.float64)))


@explains_options
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
    (16 GB at 4 TB/s: 4 ms), and synchronizes; parameters are gathered before the step with a check, not during it.
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
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Begin a check every ``every_n_steps`` steps, before the forward pass."""
        self._state_before = None
        if trainer.global_step == 0 or trainer.global_step % self.every_n_steps:
            return
        strategy: Any = trainer.strategy
        with strategy.engine():
            # Within the step copies are then compared as they are: a gather would overwrite them.
            finish_parameter_gathers(strategy._chunks)
            self._state_before = _checksums(strategy, is_unchanging=True)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any
    ) -> None:
        """Compare the copies after the backward pass of a step with a check.

        Raises:
            NumericsError: On all ranks, if copies differ or state has changed; names the tensor and the ranks.
        """
        before, self._state_before = self._state_before, None
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
            finish_parameter_gathers(strategy._chunks)
        self._check(trainer, before={})

    def _check(self, trainer: Trainer, before: _Checksums) -> None:
        strategy: Any = trainer.strategy
        with strategy.engine():
            own = _checksums(strategy)
        changed = [
            name for (name, shape), checksum in before.items() if own[name, shape] != checksum
        ]
        gathered: list[tuple[_Checksums, list[str]]] = [({}, [])] * trainer.world_size
        dist.all_gather_object(gathered, (own, changed), group=strategy._host_group)
        _check_copies([checksums for checksums, _ in gathered], trainer.global_step)
        _check_unchanged([names for _, names in gathered], trainer.global_step)


_Checksums = dict[tuple[str, tuple[int, ...]], int]
"""By name and shape of the tensors of a rank: ranks may cut the same tensor differently."""


@torch.no_grad()
def _checksums(strategy: Any, *, is_unchanging: bool = False) -> _Checksums:
    """Sum of the bits of each of this rank's tensors, viewed as integers; synchronizes with the device.

    Args:
        strategy: With the model's chunks, and the optimizer if there is one.
        is_unchanging: Whether to leave out the weights, also as their own main weights: hooks may change them.
    """
    weights = ungathered_weights(strategy._chunks)
    optimizer = strategy.megatron_optimizer
    state = {} if optimizer is None else optimizer.sharded_state_dict(weights)["param_state"]
    apply_factories(weights)
    parts = _sharded_tensors(state)
    if is_unchanging:
        storages = {part.data.untyped_storage().data_ptr() for part in _sharded_tensors(weights)}
        parts = [part for part in parts if part.data.untyped_storage().data_ptr() not in storages]
    else:
        parts += _sharded_tensors(weights)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        p.data.contiguous().view(integers[p.data.element_size()]).sum(dtype=torch.int64)
        for p in parts
    ]
    names = [
        (f"{part.key} at {tuple(part.global_offset)}", tuple(part.data.shape)) for part in parts
    ]
    return dict(zip(names, torch.stack(sums).tolist(), strict=True)) if sums else {}


def _sharded_tensors(state: dict[str, Any]) -> list[Any]:
    return [part for part in nested_values(state) if isinstance(part, ShardedTensor)]


def _check_copies(checksums: list[_Checksums], step: int) -> None:
    """Raise if ranks hold different copies of a tensor; the rarest copy is named first."""
    copies: dict[tuple[str, tuple[int, ...]], dict[int, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for rank, sums in enumerate(checksums):
        for tensor, checksum in sums.items():
            copies[tensor][checksum].append(rank)
    wrong = {
        name: sorted(ranks.values(), key=len)
        for (name, _), ranks in copies.items()
        if len(ranks) > 1
    }
    if wrong:
        name, holders = next(iter(wrong.items()))
        others = f", and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
        differing = " and another on ".join(
            f"ranks {', '.join(map(str, ranks))}" for ranks in holders
        )
        raise NumericsError(
            f"ReplicaCheck, step {step}: {name}{others}: expected equal bits in all copies, got one on {differing}; "
            "suspect memory or arithmetic of the device with the odd copy, and resume without it from before"
        )


def _check_unchanged(changed: list[list[str]], step: int) -> None:
    """Raise if optimizer state of a rank has changed between two updates."""
    for rank, names in enumerate(changed):
        if names:
            others = f", and {len(names) - 1} more tensors" if len(names) > 1 else ""
            raise NumericsError(
                f"ReplicaCheck, step {step}: {names[0]}{others}: expected equal bits before and after the backward "
                f"pass, got others on rank {rank}; suspect the memory of its device, and resume without it from before"
            )
