"""Megatron's optimizer as a torch optimizer, for Lightning.

Lightning and torch's learning-rate schedulers require a ``torch.optim.Optimizer``; Megatron's is not one. The wrapper
exposes Megatron's parameter groups and leaves gradients, loss scaling and state to Megatron.

On a GPU the host does not wait for the gradient norm: clipping, and whether there is an update at all, are decided on
the device (``grad_scale`` and ``found_inf`` of the fused optimizers, torch's names), and the norm is copied to the host
asynchronously. A gradient that is not finite anywhere, also in a copy that the norm leaves out, makes the norm NaN on
all ranks. Where steps may be skipped, the host reads it after queueing the update, because learning rates depend
on it; otherwise after queueing the next step's gradients, so that Python and data preparation overlap with the GPU. A
step that is not finite never reaches the weights either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from lightning_megatron.engine import optimizer_state
from lightning_megatron.engine.bucket_plan import share_of
from lightning_megatron.engine.collectives import HostCopy
from lightning_megatron.engine.grad_norm import GradientNorm
from lightning_megatron.engine.host_state import (
    HostState,
    MasterPlaceholders,
    OffloadedMaster,
    Staging,
)
from lightning_megatron.engine.ops.adam import MasterOptimizer
from lightning_megatron.engine.ops.matrix_shards import Matrices, MatrixGroup, MatrixShard
from lightning_megatron.engine.ops.muon import MatrixUpdates
from lightning_megatron.engine.optimizer_options import (
    OptimizerOptions,
    check_multipliers,
    engine_config,
    group_name,
    group_overrides,
)
from lightning_megatron.engine.settings import EngineSettings
from lightning_megatron.engine.weight_changes import WeightChanges
from lightning_megatron.errors import ConfigError, NonFiniteError, require_number


@dataclass(frozen=True, kw_only=True)
class OptimizerReport:
    """Outcome of the last optimizer step; the same on every rank."""

    grad_norm: float
    """Global 2-norm of the gradients before clipping; NaN if the step was skipped."""
    skipped: bool
    """Whether the weights were left unchanged, because of an overflow or a non-finite loss or gradient."""
    skipped_steps: int
    """Number of steps skipped for a non-finite loss or gradient, including those before a resume."""
    loss_scale: Tensor
    """[1], fp32, on the device (reading it waits): the loss scale of the next step; 1 unless ``16-mixed``."""


@dataclass(frozen=True, kw_only=True)
class OptimizerContext:
    """Settings of the optimizer that come from the run, not from the user's options."""

    settings: EngineSettings
    engine: Callable[[], AbstractContextManager[None]]
    """Context manager within which Megatron may be called."""
    may_skip: bool
    """Whether training continues after a skipped step: each step's outcome must then be known before the next step."""
    max_skips_in_a_row: int
    """How many overflows in a row may be skipped with a loss scale that cannot be lowered."""
    matrices: Mapping[torch.nn.Parameter, Matrices]
    """How the parameters that Muon updates make up matrices; AdamW updates the others."""


class Gradients(NamedTuple):
    """What an update must know of the gradients in the buffers."""

    loss: Tensor
    """[], fp32, on the device: the loss that they belong to, the same on every rank."""
    check_finite: Callable[[float], None]
    """Called on all ranks with their norm (NaN or infinite if the loss is); raises to end the run."""


class MegatronOptimizer(torch.optim.Optimizer):
    """Megatron's optimizer as Lightning and torch's schedulers see it.

    ``zero_grad`` does nothing, because the schedule has just computed the gradients; ``state`` is empty, because
    moments are sharded and saved by the strategy.
    """

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        options: OptimizerOptions,
        lr: float,
        context: OptimizerContext,
    ) -> None:
        """Build Megatron's optimizer for DDP-wrapped chunks. Every rank must call, inside ``context.engine()``.

        ``super().__init__`` is not called: it would build groups of its own.

        Raises:
            ConfigError: If the learning rate is negative, or a glob of ``multipliers`` matches nothing.
        """
        require_number("lr", lr)
        check_multipliers(chunks, options)
        share = context.settings.offload_optimizer
        with MasterPlaceholders() if share else nullcontext():
            engine_optimizer = get_megatron_optimizer(
                engine_config(options, lr, context.settings),
                chunks,
                config_overrides=group_overrides(chunks, options),
            )
        self.inner: Any = _without_empty_parts(engine_optimizer)
        for group in self.inner.param_groups:
            # Torch's schedulers ignore multipliers, so each group's base values include them.
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = options.used_weight_decay * group["wd_mult"]
            group["name"] = group_name(group["lr_mult"], group["wd_mult"])
        self._context = context
        self.clip_grad = 0.0
        """Maximum global gradient norm of the next step; 0 for no clipping (the norm is computed anyway)."""
        # OneCycleLR and CyclicLR check here whether the groups have a momentum that they can schedule.
        self.defaults: dict[str, Any] = {**self.parts[0].optimizer.defaults}
        self._algorithm: str = self.parts[0].config.optimizer
        if options.name == "muon":
            self._algorithm = "muon"
            self._use_muon(chunks, options)
        self._settings_as_built = optimizer_state.settings_of(self.param_groups)
        """Before schedulers and callbacks change them."""
        self._gradients: Gradients | None = None
        """Those of the next step; None before they are computed."""
        self.grad_norm: Tensor | None = None
        """[], fp32: the last step's gradient norm, perhaps on the device; None before the first step."""
        self._report: OptimizerReport | None = None
        self._outcome: tuple[HostCopy, Callable[[float], None]] | None = None
        """Of a step whose outcome the host has not read yet: the squared norm, and its ``check_finite``."""
        self.skipped_steps = 0
        """Steps skipped for a non-finite loss or gradient, including those before a resume."""
        self.skips_in_a_row = 0
        """How many of them came last, without an update since."""
        self.has_updated = False
        """Whether a step of this run has changed the weights."""
        self._norm = GradientNorm(self.parts)
        for part in self.parts:
            if getattr(part, "grad_scaler", None) is not None:
                # Otherwise a replica alone could overflow, and skip the step alone.
                part.grad_stats_parallel_group = dist.group.WORLD
        if share:
            self._offload(share)
        for masters in self._masters:
            masters.materialize_state()
        self.weight_changes = WeightChanges(self.parts, self._wait_for_hosts)
        """What user code has changed in 16-bit weights since the last update."""

    def _wait_for_hosts(self) -> None:
        for host in self._hosts:
            host.wait()

    def _offload(self, share: float) -> None:
        """Keep a share of master weights and moments in host memory, and give memory to the other master weights."""
        device = self._context.settings.device
        for part in self.parts:
            if part.optimizer is not None:
                part.optimizer.keep_on_host(_host_state(part, share, device))
        hosts = self._hosts
        staging = Staging(max((host.slot_size for host in hosts), default=0), device)
        for host in hosts:
            host.use(staging)

    def _use_muon(self, chunks: list[torch.nn.Module], options: OptimizerOptions) -> None:
        """Let Muon update the matrices; their momentum is what schedules of a momentum change."""
        del self.defaults["betas"]
        self.defaults["momentum"] = options.used_momentum
        for group in self.param_groups:
            group["momentum"] = options.used_momentum
        for part in self.parts:
            if part.optimizer is not None:
                part.optimizer.matrices = MatrixUpdates(
                    _matrix_shards(part, chunks, self._context.matrices),
                    _matrix_group(part),
                    self._context.settings.device,
                    nesterov=options.nesterov,
                    iterations=options.ns_steps,
                    adjust_lr=options.adjust_lr,
                )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Megatron's own parameter groups: setting ``lr`` or ``weight_decay`` in them takes effect."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """Empty: ``sharded_state_dict`` has the state."""
        return {}

    @property
    def parts(self) -> list[Any]:
        """The optimizers that Megatron has chained."""
        return list(getattr(self.inner, "chained_optimizers", [self.inner]))

    # ---- a step ---------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: see the class."""

    def accept(self, gradients: Gradients) -> None:
        """Take the gradients that are in the buffers now for the next step."""
        self._gradients = gradients

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run ``closure`` (forward and backward), then clip, update and gather. Every rank must call."""
        result = None
        if closure is not None:
            self.clip_grad = 0.0  # until the closure's hooks set it
            with torch.enable_grad():
                result = closure()
        gradients = self._gradients
        if gradients is None:
            raise ConfigError(
                "optimizer.step: expected gradients of a new batch, got none since the last update; pass the closure "
                "that optimizer_step gets, or call it before"
            )
        self._gradients = None
        with self._context.engine():
            self.settle()  # of the previous step; this one's gradients are queued
            self.weight_changes.take_over()
            self._update(gradients)
            self.weight_changes.have_updated()
        return result

    def _update(self, gradients: Gradients) -> None:
        overflows = self.inner.prepare_grads()  # of 16-mixed
        if overflows:
            self.grad_norm = torch.tensor(math.nan)
            # Gradients that overflow only because of the loss scale are normal in 16-mixed.
            if math.isfinite(gradients.loss):
                self._count_overflow()
                self._report = self._make_report(math.nan)
            else:
                self._finish(math.nan, gradients.check_finite)
            return
        self._masked_update(gradients)
        if not self._settles_late:
            self.settle()

    def _masked_update(self, gradients: Gradients) -> None:
        """Queue the update, which the device skips if the gradient norm is not finite."""
        squared = self._norm.squared(gradients.loss)
        self.grad_norm = squared.sqrt().squeeze()
        found_inf = (~squared.isfinite()).float()
        for optimizer in self._masters:
            optimizer.found_inf = found_inf
            optimizer.grad_scale = None
            if self.clip_grad:
                excess = (self.grad_norm + 1e-6) / self.clip_grad
                optimizer.grad_scale = excess.clamp(min=1.0)
        # Copied before the update, so that the host need not wait for the update.
        self._outcome = (HostCopy(squared), gradients.check_finite)
        self.inner.step_with_ready_grads()

    @property
    def _masters(self) -> list[MasterOptimizer]:
        """Optimizers of the parts; a part without weights on this rank has none."""
        return [part.optimizer for part in self.parts if part.optimizer is not None]

    @property
    def _hosts(self) -> list[HostState]:
        return [masters.host for masters in self._masters if masters.host is not None]

    @property
    def host_bytes(self) -> int:
        """Host memory that holds state on this rank."""
        return sum(host.num_bytes for host in self._hosts)

    def release_host_memory(self) -> None:
        """Free the state in host memory: the optimizer is not used any more."""
        for masters in self._masters:
            if masters.host is not None:
                masters.state.clear()
                masters.host.release()

    # ---- its outcome ----------------------------------------------------------------------------------------------

    @property
    def report(self) -> OptimizerReport | None:
        """Outcome of the last step, None before the first. Waits for the device; never communicates."""
        if self._outcome is None:
            return self._report
        squared, _ = self._outcome
        return self._make_report(squared.read() ** 0.5)

    @property
    def has_skipped(self) -> bool:
        """Whether the last step was skipped, and training goes on. Does not wait for the device."""
        return self._outcome is None and self._report is not None and self._report.skipped

    @property
    def _settles_late(self) -> bool:
        """Whether ``settle`` is deferred to the next step: on a GPU it would wait, and no skipped step needs it."""
        return self._context.settings.device.type == "cuda" and not self._context.may_skip

    def settle(self) -> None:
        """Read the outcome of the last step, if not yet read. Every rank must call at the same point.

        Raises:
            NonFiniteError: If the step was not finite, and its ``check_finite`` raises.
        """
        if self._outcome is None:
            return
        squared, check_finite = self._outcome
        self._outcome = None
        norm = squared.read() ** 0.5
        if not math.isfinite(norm):
            for optimizer in self._masters:
                optimizer.uncount_step()
        self._finish(norm, check_finite)

    def _finish(
        self,
        norm: float,
        check_finite: Callable[[float], None],
    ) -> None:
        check_finite(norm)
        if math.isfinite(norm):
            self.skips_in_a_row = 0
            self.has_updated = True
        else:
            self.skipped_steps += 1
            self.skips_in_a_row += 1
        self._report = self._make_report(norm)

    @property
    def _has_smallest_scale(self) -> bool:
        """Whether no overflow lowers the loss scale of ``16-mixed`` any more: it is constant, or at its minimum."""
        scaler = self.parts[0].grad_scaler
        smallest = getattr(scaler, "min_scale", None)
        return smallest is None or bool(scaler.scale <= smallest)

    def _count_overflow(self) -> None:
        """Count an overflow with the smallest loss scale as a skipped step.

        Raises:
            NonFiniteError: On all ranks, whose overflows and scales are the same, after too many in a row.
        """
        if not self._has_smallest_scale:
            return
        self.skips_in_a_row += 1
        limit = self._context.max_skips_in_a_row
        if self.skips_in_a_row <= limit:
            return
        raise NonFiniteError(
            f"gradients of {self.skips_in_a_row} steps in a row are NaN or infinite (their losses are not) with the "
            f"smallest loss scale, {self.inner.get_loss_scale().item():g}; expected at most "
            f"max_skips_in_a_row={limit}. The weights are as before these steps: look at their batches and the "
            'learning rate, or train with precision="bf16-mixed"'
        )

    def _make_report(self, norm: float) -> OptimizerReport:
        skipped = not math.isfinite(norm)
        return OptimizerReport(
            grad_norm=math.nan if skipped else norm,
            skipped=skipped,
            skipped_steps=self.skipped_steps,
            loss_scale=self.inner.get_loss_scale().detach().clone(),
        )

    # ---- the state in a checkpoint --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The numbers of skipped steps and changed settings, for Lightning; ``sharded_state_dict`` has the rest."""
        settings = optimizer_state.settings_of(self.param_groups)
        return {
            "skipped_steps": self.skipped_steps,
            "skips_in_a_row": self.skips_in_a_row,
            "settings": [
                {"group": list(group), "as_built": as_built, "now": settings[group]}
                for group, as_built in self._settings_as_built.items()
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self.skipped_steps = state_dict.get("skipped_steps", 0)
        self.skips_in_a_row = state_dict.get("skips_in_a_row", 0)
        self.restore_settings(state_dict)

    def restore_settings(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the settings of a ``state_dict`` alone; each only if both runs have begun with the same value."""
        saved = {tuple(each["group"]): each for each in state_dict.get("settings", ())}
        for group in self.param_groups:
            key = optimizer_state.group_key(group)
            if key not in saved:
                continue
            for name, value in saved[key]["as_built"].items():
                if self._settings_as_built[key].get(name) == value:
                    group[name] = saved[key]["now"][name]

    @property
    def state_format(self) -> dict[str, Any]:
        """Properties that must match for one optimizer to load another one's state."""
        config = self.parts[0].config
        algorithm = self._algorithm
        if algorithm == "sgd" and config.sgd_momentum <= 0:
            algorithm += " without momentum"
        multipliers: list[list[float]] = []
        for group in self.param_groups:
            pair = [float(group["lr_mult"]), float(group["wd_mult"])]
            if pair not in multipliers:
                multipliers.append(pair)
        return {
            "implementation": "DistributedOptimizer",  # formerly the only one that could read the format
            "algorithm": algorithm,
            "multipliers of lr and weight decay": sorted(multipliers),
        }

    def sharded_state_dict(
        self,
        models: Mapping[str, Any],
        *,
        is_loading: bool = False,
    ) -> dict[str, Any]:
        """Build the state dict: sharded tensors that view the live state, and plain data; every rank must call.

        Args:
            models: Sharded state dict of all chunks, with the parameters themselves as data.
            is_loading: Whether a checkpoint is about to be loaded: fp32 masters, which are the weights, then get their
                own memory, because the weights are loaded too, perhaps in lower precision.
        """
        if not is_loading:
            self.weight_changes.take_over()
        self._wait_for_hosts()
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.param_groups
        ]
        state = {
            "param_state": optimizer_state.sharded(self.parts, models, is_loading=is_loading),
            "param_state_sharding_type": "fully_reshardable",
            "optimizer": {"param_groups": groups},
        }
        scaler = getattr(self.parts[0], "grad_scaler", None)
        if scaler is not None:
            state["grad_scaler"] = scaler.state_dict()
        return state

    @torch.no_grad()
    def reload_masters(self) -> None:
        """Copy the weights, which have been loaded, into the master weights."""
        self._wait_for_hosts()
        for part in self.parts:
            if part.optimizer is None:
                continue
            for parameter, master, start in optimizer_state.master_weights(part):
                target = part.optimizer.master_of(master).detach().view(-1)
                weights = parameter.detach().view(-1)[start : start + target.numel()]
                if weights.data_ptr() != target.data_ptr():
                    target.copy_(weights)

    @torch.no_grad()
    def load_sharded_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """Restore a loaded state after the weights have been restored; every rank must call.

        The optimizer keeps the settings that it was built with, so they may change on resume.

        Args:
            loaded: ``sharded_state_dict`` after loading; masters and moments are already in place, except fp32 masters.
        """
        optimizer_state.copy_masters(self.parts, loaded["param_state"])
        optimizer_state.restore_groups(
            self.param_groups, loaded.get("optimizer", loaded)["param_groups"]
        )
        for part in self.parts:
            scaler = getattr(part, "grad_scaler", None)
            if scaler is not None and "grad_scaler" in loaded:
                scaler.load_state_dict(loaded["grad_scaler"])
        optimizer_state.gather_weights(self.parts)
        self.weight_changes.have_loaded()


def _host_state(part: Any, share: float, device: torch.device) -> HostState:
    """State of one of Megatron's optimizers in host memory, and memory for master weights that stay on the device."""
    optimizer: MasterOptimizer = part.optimizer
    rounds: list[list[Tensor]] = []
    if optimizer.matrices is not None:
        rounds = optimizer.matrices.rounds
    in_rounds = {master for masters in rounds for master in masters}
    held: dict[Tensor, OffloadedMaster] = {}
    for parameter, master, start in optimizer_state.master_weights(part):
        low = None
        if master.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            low = parameter.detach().view(-1)[start : start + master.numel()]
        moments = optimizer.state_names_of(master)
        held[master] = OffloadedMaster(master, low, moments)
    elementwise = [
        master
        for group in optimizer.param_groups
        for master in group["params"]
        if master not in in_rounds
    ]
    # Megatron's copies leave out placeholders, which a tensor of one element cannot be told from.
    movable = [
        master
        for master in (*elementwise, *(master for masters in rounds for master in masters))
        if held[master].names and master.numel() > 1
    ]
    count = share_of([master.numel() for master in movable], share)
    offloaded = set(movable[:count])
    for master, (_, low, _) in held.items():
        if master not in offloaded and low is not None:
            master.data = low.float().view(master.shape)
    return HostState(
        [held[master] for master in elementwise if master in offloaded],
        [[held[master] for master in masters if master in offloaded] for masters in rounds],
        device,
    )


def _without_empty_parts(optimizer: Any) -> Any:
    """Megatron's optimizer without the one of weights outside of experts, if they are frozen on all ranks.

    megatron-core 0.16.1, optimizer/__init__.py:get_megatron_optimizer, makes one all the same, without a torch
    optimizer. Ranks agree: each has the parameter groups of all.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    trained = [part for part in parts if part.optimizer is not None]
    if not trained or len(trained) == len(parts):
        return optimizer
    return ChainedOptimizer(trained)


def _matrix_shards(
    part: Any,
    chunks: list[torch.nn.Module],
    matrices: Mapping[torch.nn.Parameter, Matrices],
) -> list[MatrixShard]:
    """What this rank holds of each matrix of one of Megatron's optimizers, in the order of the model's parameters."""
    held: dict[Tensor, tuple[Tensor, int]] = {}
    for parameter, master, start in optimizer_state.master_weights(part):
        held[parameter] = (master, start)
    shards = []
    for chunk in chunks:
        for parameter in chunk.parameters():
            if parameter not in matrices or not parameter.requires_grad:
                continue
            if _is_expert(parameter) == _has_experts(part):
                shards.append(MatrixShard(matrices[parameter], *held.get(parameter, (None, 0))))
    return shards


def _matrix_group(part: Any) -> MatrixGroup:
    """Ranks that hold parts of the same matrices as this rank."""
    is_sharded = isinstance(part, DistributedOptimizer)
    if _has_experts(part):
        # Experts are not split over tp: its ranks have different ones, or are data-parallel for them.
        return MatrixGroup(part.data_parallel_group if is_sharded else None, 0)
    group = parallel_state.get_tensor_model_parallel_group()
    if is_sharded:
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return MatrixGroup(group, parallel_state.get_tensor_model_parallel_rank())


def _has_experts(part: Any) -> bool:
    return bool(part.optimizer.param_groups[0]["is_expert_parallel"])


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)
