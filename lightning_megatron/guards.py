"""Lightning callbacks against numbers that go wrong though they are finite: loss spikes, and copies that drift apart.

``SpikeGuard`` does what PaLM's authors did by hand (https://arxiv.org/abs/2204.02311, section 5.1: restart from a
checkpoint before the spike and skip the batches around it, since a spike comes of a batch *and* the weights that meet
it). ``ReplicaCheck`` finds memory and arithmetic that silently fail on one device, as Llama 3's authors met six times
in 54 days (https://arxiv.org/abs/2407.21783, table 5).
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

from lightning_megatron.checkpoint.save import sharded_weights
from lightning_megatron.engine.collectives import HostCopy
from lightning_megatron.errors import ConfigError, NumericsError, require_number

__all__ = ["ReplicaCheck", "SpikeGuard"]

_DEVIATIONS_PER_MAD = 1.4826
"""A normal distribution's standard deviation is so many times its median absolute deviation."""
_SMALLEST_DEVIATION = 1e-3
"""Of the median: losses that hardly move would make a spike of anything."""


class SpikeGuard(Callback):
    """Goes back to the last checkpoint when the loss spikes, and leaves out the samples since then.

    A spike is a loss more than ``threshold`` deviations above the median of the last ``window`` losses; deviations are
    measured by the median of the distances from the median, which a few outliers do not move. Weights, optimizer,
    random states and learning rates are then again those of the newest checkpoint of this run from before the spike,
    and training goes on with the samples that come next: bit for bit as a run that never had the samples in between.
    Like steps that ``on_nan="skip"`` leaves out, these count among ``max_steps``, and not for learning rates. A step is
    judged when the next one is queued, so that no step waits for the device; nothing is judged before ``window``
    losses. The state is in checkpoints, so that a resumed run judges, and counts, as the uninterrupted one.

    Logged: ``spike_rollbacks``, from the first one on.
    """

    def __init__(self, window: int = 100, threshold: float = 10.0, max_rollbacks: int = 3) -> None:
        """Set what a spike is.

        Args:
            window: Losses that the next one is compared with.
            threshold: Deviations above their median from which on a loss is a spike.
            max_rollbacks: Of the whole run, resumed ones included; one spike more ends it with an error.

        Raises:
            ConfigError: If a number is out of range.
        """
        require_number("window", window, at_least=2)
        require_number("threshold", threshold, at_least=1)
        require_number("max_rollbacks", max_rollbacks)
        self.window, self.threshold, self.max_rollbacks = window, threshold, max_rollbacks
        self.rollbacks = 0
        """Rollbacks so far."""
        self._losses: deque[float] = deque(maxlen=window)
        self._last: tuple[int, HostCopy] | None = None
        """Step and loss of the last one, which is not judged yet."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a run that has nothing to go back to.

        Raises:
            ConfigError: If the strategy is not Megatron's, or no callback saves whole checkpoints.
        """
        if stage != "fit":
            return
        self._last = None
        if trainer.global_step == 0:
            self.rollbacks = 0
            self._losses.clear()
        if not hasattr(trainer.strategy, "checkpointing"):
            raise ConfigError("SpikeGuard goes back to checkpoints of MegatronStrategy; use it, or remove the callback")
        savers = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        if all(each.save_weights_only for each in savers):
            raise ConfigError(
                "SpikeGuard has no checkpoint to go back to; add ModelCheckpoint(every_n_train_steps=1000)"
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Judge the loss of the step before; the same on every rank.

        Raises:
            NumericsError: On all ranks, at a spike after the last rollback that is allowed.
        """
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        last, self._last = self._last, (trainer.global_step, HostCopy(loss))
        if last is not None and math.isfinite(value := last[1].read()):  # else the strategy's on_nan has decided
            is_known = len(self._losses) == self.window
            if not (is_known and value > self._limit() and self._goes_back(trainer, last[0], value)):
                self._losses.append(value)
        if self.rollbacks:
            pl_module.log("spike_rollbacks", torch.tensor(float(self.rollbacks)), batch_size=1)

    def _limit(self) -> float:
        median = statistics.median(self._losses)
        distance = statistics.median(abs(loss - median) for loss in self._losses)
        return median + self.threshold * max(_DEVIATIONS_PER_MAD * distance, _SMALLEST_DEVIATION * abs(median))

    def _goes_back(self, trainer: Trainer, step: int, loss: float) -> bool:
        """Load the newest checkpoint from before ``step``, if there is one; every rank must call."""
        told = f"SpikeGuard: the loss of step {step} is {loss:.4g}, expected at most {self._limit():.4g}"
        if self.rollbacks >= self.max_rollbacks:
            raise NumericsError(
                f"{told}, after max_rollbacks={self.max_rollbacks} rollbacks; look at samples and learning rate"
            )
        strategy: Any = trainer.strategy
        loaded = strategy.checkpointing.roll_back(before=step)
        if loaded is None:
            rank_zero_warn(f"{told}; this run has no checkpoint from before it, so training goes on as it is")
            return False
        # A checkpoint of a run without this callback knows no losses.
        state = {"losses": (), "last": None, **loaded["callbacks"].get(self.state_key, {})}
        self.load_state_dict({**state, "rollbacks": self.rollbacks + 1})
        first = loaded["global_step"] + 1
        rank_zero_warn(
            f"{told}: weights, optimizer and learning rates are again those of step {first - 1}, and the samples of "
            f"steps {first} to {trainer.global_step} are left out; rollback {self.rollbacks} of {self.max_rollbacks}"
        )
        return True

    @override
    def state_dict(self) -> dict[str, Any]:
        """The losses, that of the last step included."""
        last = self._last and [self._last[0], self._last[1].read()]
        return {"losses": list(self._losses), "last": last, "rollbacks": self.rollbacks}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue another run's."""
        self._losses = deque(state_dict["losses"], maxlen=self.window)
        self.rollbacks, last = state_dict["rollbacks"], state_dict["last"]
        self._last = last and (last[0], HostCopy(torch.tensor(last[1], dtype=torch.float64)))


class ReplicaCheck(Callback):
    """Compares all copies of every weight, bit by bit, once every ``every_n_steps``; all ranks end if two differ.

    Copies are what ranks hold of the same part of the same tensor: of data- and context-parallel ranks, of
    tensor-parallel ranks where a weight is not split (norms, some biases), of pipeline stages where it is tied. Each
    rank sums the bits of its tensors up on the device, which finds every single flipped bit, and the sums are gathered
    over the hosts. It reads all weights once (16 GB at 4 TB/s: 4 ms) and waits for the device.
    """

    def __init__(self, every_n_steps: int = 1000) -> None:
        """Set how often.

        Args:
            every_n_steps: Optimizer steps between two comparisons.

        Raises:
            ConfigError: If it is below 1.
        """
        require_number("every_n_steps", every_n_steps, at_least=1)
        self.every_n_steps = every_n_steps

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Compare, if it is time.

        Raises:
            NumericsError: On all ranks alike, with the ranks and the tensor.
        """
        if trainer.global_step % self.every_n_steps == 0:
            strategy: Any = trainer.strategy
            with strategy.engine():
                mine = _bit_sums(list(pl_module.model_chunks))  # type: ignore[arg-type]
            every: list[dict[str, int]] = [{}] * trainer.world_size
            dist.all_gather_object(every, mine, group=strategy._host_group)
            _check_copies(every, trainer.global_step)


@torch.no_grad()
def _bit_sums(chunks: list[Any]) -> dict[str, int]:
    """The sum of the bits of each of this rank's tensors, read as whole numbers; waits for the device."""
    state = sharded_weights(chunks)
    apply_factories(state)
    parts = [part for part in nested_values(state) if isinstance(part, ShardedTensor)]
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [p.data.contiguous().view(whole[p.data.element_size()]).sum(dtype=torch.int64) for p in parts]
    names = [f"{part.key} at {tuple(part.global_offset)}" for part in parts]
    return dict(zip(names, torch.stack(sums).tolist(), strict=True)) if sums else {}


def _check_copies(of_ranks: list[dict[str, int]], step: int) -> None:
    """Raise if ranks hold different copies of a tensor; those that fewer ranks hold are named first."""
    copies: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, sums in enumerate(of_ranks):
        for name, each in sums.items():
            copies[name][each].append(rank)
    wrong = {name: sorted(ranks.values(), key=len) for name, ranks in copies.items() if len(ranks) > 1}
    if wrong:
        name, holders = next(iter(wrong.items()))
        others = f", and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
        differing = " and another on ".join(f"ranks {', '.join(map(str, ranks))}" for ranks in holders)
        raise NumericsError(
            f"ReplicaCheck, step {step}: {name}{others}: expected equal bits in all copies, got one on {differing}; "
            "suspect memory or arithmetic of the device that is alone, and resume from a checkpoint before without it"
        )
