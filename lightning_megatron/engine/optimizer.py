"""Megatron's optimizer as a torch optimizer: options, parameter groups, a wrapper for Lightning, and its sharded state.

Lightning and torch's learning-rate schedulers require a ``torch.optim.Optimizer``; Megatron's is not one. The wrapper
exposes Megatron's parameter groups and leaves gradients, loss scaling and state to Megatron.

On a GPU the host does not wait for the gradient norm: clipping, and whether there is an update at all, are decided on
the device (``grad_scale`` and ``found_inf`` of the fused optimizers, torch's names), and the norm is copied to the host
asynchronously. A gradient that is not finite anywhere, also in a copy that the norm leaves out, makes the norm NaN on
all ranks. Where steps may be skipped, the host reads it after queueing the update, because learning rates depend
on it; otherwise after queueing the next step's gradients, so that Python and data preparation overlap with the GPU. A
step that is not finite never reaches the weights either way.

Checkpoints hold, for each parameter, the entries ``optimizer.state.{param,exp_avg,exp_avg_sq}.NAME`` in the shape of
the weight: its fp32 master weight and its moments, as in megatron-core's ``fully_reshardable`` format. So a run can be
resumed with or without distributed optimizer, at any data-parallel size and in another precision. megatron-core 0.16.1
(optimizer/distrib_optimizer.py) writes that format by gathering everything on every rank, and its optimizers without
sharding write other names. Here each rank writes and reads exactly what it holds: its shard of a parameter is a range
of consecutive elements, which is cut into boxes (rest of a row, complete rows, start of a row).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from torch import Tensor

from lightning_megatron.engine.collectives import HostCopy
from lightning_megatron.engine.ops.adam import MasterOptimizer
from lightning_megatron.engine.overrides import MIN_LOSS_SCALE, build_config
from lightning_megatron.errors import ConfigError, as_options, require_choice, require_number
from lightning_megatron.foreign_names import explains_options

if TYPE_CHECKING:
    from lightning_megatron.engine.settings import EngineSettings


@explains_options
@dataclass(frozen=True, kw_only=True)
class GroupMultipliers:
    """Factors for one group of parameters.

    Args:
        lr_mult: Factor of the learning rate.
        wd_mult: Factor of the weight decay.
    """

    lr_mult: float = 1.0
    wd_mult: float = 1.0


@explains_options
@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Options of Megatron's optimizer, without the learning rate, which is an option of the module.

    Args:
        name: ``adamw`` decouples weight decay from the gradient, ``adam`` adds it to the gradient, ``sgd`` has
            momentum.
        weight_decay: Per step, times the learning rate; never on biases and other 1-D weights unless ``multipliers``
            say so.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        momentum: Momentum of ``sgd``.
        multipliers: Maps globs of Megatron's parameter names (``*word_embeddings*``) to factors; the first match wins.
        initial_loss_scale: Initial loss scale of ``16-mixed``.
        min_loss_scale: Lower bound of the loss scale of ``16-mixed``.
        loss_scale_window: Of ``16-mixed``: steps without overflow after which the loss scale doubles.
        loss_scale_hysteresis: Of ``16-mixed``: the loss scale is halved at this overflow and each later one, counted
            since it last doubled.
    """

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.9
    multipliers: Mapping[str, GroupMultipliers] = field(default_factory=dict)
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000
    loss_scale_hysteresis: int = 2

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ConfigError: If the name is unknown, or a value is out of range.
        """
        factors = {
            glob: as_options(GroupMultipliers, each, "multipliers")
            for glob, each in dict(self.multipliers).items()
        }
        object.__setattr__(self, "multipliers", factors)
        require_choice("optimizer name", self.name, ("adamw", "adam", "sgd"))
        for name in ("weight_decay", "eps", "momentum", "beta1", "beta2"):
            require_number(name, getattr(self, name))
        for name in ("beta1", "beta2"):
            if not getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} must be in [0, 1); correct the optimizer options"
                )
        for name in ("loss_scale_window", "loss_scale_hysteresis"):
            require_number(name, getattr(self, name), at_least=1)
        require_number("min_loss_scale", self.min_loss_scale, MIN_LOSS_SCALE, math.inf)
        require_number("initial_loss_scale", self.initial_loss_scale, self.min_loss_scale, math.inf)


@dataclass(frozen=True, kw_only=True)
class OptimizerReport:
    """Outcome of the last optimizer step; the same on every rank."""

    grad_norm: float
    """Global 2-norm of the gradients before clipping; NaN if the step was skipped."""
    skipped: bool
    """Whether the weights were left unchanged, because of an overflow or a non-finite loss or gradient."""
    skipped_steps: int
    """Number of steps skipped for a non-finite loss or gradient, including those before a resume."""
    loss_scale: torch.Tensor
    """[1], fp32, on the device (reading it waits): the loss scale of the next step; 1 unless ``16-mixed``."""


def multipliers_of(
    name: str, parameter: torch.Tensor, options: OptimizerOptions
) -> GroupMultipliers:
    """Return the factors of one parameter: by default no weight decay on biases and other 1-D weights.

    Args:
        name: Megatron's parameter name, with the prefixes of wrappers.
        parameter: The parameter.
        options: The options with the user's globs.
    """
    plain_name = name.replace("module.", "")
    if plain_name == "output_layer.weight" and getattr(parameter, "shared_embedding", False):
        # The last stage's copy of a tied embedding, which must be updated like the embedding.
        plain_name = "embedding.word_embeddings.weight"
    for pattern, multipliers in options.multipliers.items():
        if fnmatch(plain_name, pattern):
            return multipliers
    is_one_dimensional = parameter.dim() == 1 or plain_name.endswith(".bias")
    return GroupMultipliers(wd_mult=0.0 if is_one_dimensional else 1.0)


def _group_overrides(
    chunks: Iterable[torch.nn.Module], options: OptimizerOptions
) -> dict[ParamKey, dict[str, float]]:
    """Overrides of Megatron's parameter groups: one entry for every distinct pair of factors."""
    default = GroupMultipliers()
    distinct = {
        multipliers_of(n, p, options) for chunk in chunks for n, p in chunk.named_parameters()
    }
    distinct |= {GroupMultipliers(wd_mult=0.0), *options.multipliers.values()}

    def has(multipliers: GroupMultipliers) -> Callable[[torch.nn.Parameter, str], bool]:
        return lambda parameter, name: multipliers_of(name, parameter, options) == multipliers

    return {
        ParamKey(
            with_name_predicate=ParamWithNamePredicate(
                name=str(group),
                fn=has(group),
            )
        ): {
            "lr_mult": group.lr_mult,
            "wd_mult": group.wd_mult,
        }
        for group in sorted(distinct - {default}, key=lambda g: (g.lr_mult, g.wd_mult))
    }


def _group_name(lr_mult: float, wd_mult: float) -> str:
    """Name of a parameter group, which Lightning's LearningRateMonitor logs as e.g. ``lr/weight_decay``."""
    decay = {0.0: "no_weight_decay", 1.0: "weight_decay"}.get(wd_mult, f"weight_decay_x{wd_mult:g}")
    return decay if lr_mult == 1.0 else f"{decay}_lr_x{lr_mult:g}"


@dataclass(frozen=True, kw_only=True)
class OptimizerContext:
    """Settings of the optimizer that come from the run, not from the user's options."""

    settings: EngineSettings
    engine: Callable[[], AbstractContextManager[None]]
    """Context manager within which Megatron may be called."""
    may_skip: bool
    """Whether training continues after a skipped step: each step's outcome must then be known before the next step."""


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
            ConfigError: If the learning rate is negative.
        """
        require_number("lr", lr)
        config = _engine_config(options, lr, context.settings)
        self.inner: Any = get_megatron_optimizer(
            config, chunks, config_overrides=_group_overrides(chunks, options)
        )
        for group in self.inner.param_groups:
            # Torch's schedulers ignore multipliers, so each group's base values include them.
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = options.weight_decay * group["wd_mult"]
            group["name"] = _group_name(group["lr_mult"], group["wd_mult"])
        self._context = context
        self.clip_grad = 0.0
        """Maximum global gradient norm of the next step; 0 for no clipping (the norm is computed anyway)."""
        # OneCycleLR and CyclicLR check here whether the groups have a momentum that they can schedule.
        self.defaults: dict[str, Any] = dict(self.parts[0].optimizer.defaults)
        self.loss = torch.zeros(())
        """[], fp32, on the device: the loss that the gradients belong to, the same on every rank."""
        self._updated_loss = self.loss
        """The loss of the last update."""
        self.check_finite: Callable[[float], None] = lambda grad_norm: None
        """Called on all ranks with the step's gradient norm (NaN or infinite if the loss is); raises to end the run."""
        self.grad_norm: torch.Tensor | None = None
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
        self._norm_groups = [part.get_grad_stats_parallel_group() for part in self.parts]
        """Of each part: the ranks whose gradients add up to the norm of one model copy."""
        for part in self.parts:
            if getattr(part, "grad_scaler", None) is not None:
                # Otherwise a replica alone could overflow, and skip the step alone.
                part.grad_stats_parallel_group = dist.group.WORLD
        for masters in self._masters:
            masters.materialize_state()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Megatron's own parameter groups: setting ``lr`` or ``weight_decay`` in them takes effect."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """Empty: ``sharded_state_dict`` has the state."""
        return {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: see the class."""

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Run ``closure`` (forward and backward), then clip, update and gather. Every rank must call."""
        loss = None
        if closure is not None:
            self.clip_grad = 0.0  # until the closure's hooks set it
            with torch.enable_grad():
                loss = closure()
        if self.loss is self._updated_loss:
            raise ConfigError(
                "optimizer.step: expected gradients of a new batch, got none since the last update; pass the closure "
                "that optimizer_step gets, or call it before"
            )
        self._updated_loss = self.loss
        with self._context.engine():
            self.settle()  # of the previous step; this one's gradients are queued
            if self.inner.prepare_grads():  # an overflow of 16-mixed
                self.grad_norm = torch.tensor(math.nan)
                self._finish(math.nan, self.check_finite, overflow=True)
            else:
                self._masked_update()
                if not self._settles_late:
                    self.settle()
        return loss

    @property
    def report(self) -> OptimizerReport | None:
        """Outcome of the last step, None before the first. Waits for the device; never communicates."""
        if self._outcome is None:
            return self._report
        return self._make_report(self._outcome[0].read() ** 0.5)

    @property
    def has_skipped(self) -> bool:
        """Whether the last step was skipped, and training goes on. Does not wait for the device."""
        return self._outcome is None and self._report is not None and self._report.skipped

    def settle(self) -> None:
        """Read the outcome of the last step, if not yet read. Every rank must call at the same point.

        Raises:
            NonFiniteError: If the step was not finite, and its ``check_finite`` raises.
        """
        if self._outcome is None:
            return
        (squared, check_finite), self._outcome = self._outcome, None
        norm = squared.read() ** 0.5
        if not math.isfinite(norm):
            for optimizer in self._masters:
                optimizer.uncount_step()
        self._finish(norm, check_finite)

    def _masked_update(self) -> None:
        """Queue the update, which the device skips if the gradient norm is not finite."""
        squared = self._squared_norm()
        self.grad_norm = squared.sqrt().squeeze()
        found_inf, clip = (~squared.isfinite()).float(), self.clip_grad
        for optimizer in self._masters:
            optimizer.found_inf = found_inf
            optimizer.grad_scale = ((self.grad_norm + 1e-6) / clip).clamp(min=1.0) if clip else None
        # Copied before the update, so that the host need not wait for the update.
        self._outcome = HostCopy(squared), self.check_finite
        self.inner.step_with_ready_grads()

    def _squared_norm(self) -> torch.Tensor:
        """Squared global gradient norm: [1], fp32. NaN or infinite also if the loss is: the host reads only this value.

        megatron-core 0.16.1, optimizer/clip_grads.py:get_grad_norm_fp32, without waiting for the device.
        """
        counted_by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
        copies_by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
        # Experts have their own optimizer and, without sharding, their own group of ranks.
        for part, group in zip(self.parts, self._norm_groups, strict=True):
            counted, copies = _counted_gradients(part)
            counted_by_group.setdefault(group, []).extend(counted)
            copies_by_group.setdefault(group, []).extend(copies)
        total = torch.zeros(
            1,
            dtype=torch.float32,
            device=self.loss.device,
        )
        for group, counted in counted_by_group.items():
            copies = copies_by_group[group]
            gradients = [*counted, 0.0 * self.loss, *copies]
            norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
            num_counted = len(counted) + 1
            squared = torch.linalg.vector_norm(torch.stack(norms[:num_counted])).reshape(1) ** 2.0
            if copies:
                squared += _zero_or_nan(torch.stack(norms[num_counted:]).sum())
            dist.all_reduce(squared, group=group)
            total += squared
        if not self._norms_span_world:
            # Replicas have equal gradients, unless a device computes wrongly: then all skip the step, or none.
            problems = _zero_or_nan(total)
            dist.all_reduce(problems)
            total += problems
        return total

    @property
    def _norms_span_world(self) -> bool:
        """Whether each rank's gradients reach all ranks with the norm, as with the distributed optimizer."""
        world_size = dist.get_world_size()
        return all(dist.get_world_size(group) == world_size for group in self._norm_groups)

    @property
    def _settles_late(self) -> bool:
        """Whether ``settle`` is deferred to the next step: on a GPU it would wait, and no skipped step needs it."""
        return self.loss.is_cuda and not self._context.may_skip

    @property
    def _masters(self) -> list[MasterOptimizer]:
        """Optimizers of the parts; a part without weights on this rank has none."""
        return [part.optimizer for part in self.parts if part.optimizer is not None]

    def _finish(
        self,
        norm: float,
        check_finite: Callable[[float], None],
        *,
        overflow: bool = False,
    ) -> None:
        # Gradients that overflow only because of the loss scale are normal in 16-mixed.
        is_nonfinite = not math.isfinite(self.loss if overflow else norm)
        if is_nonfinite or not overflow:
            check_finite(norm)
        if is_nonfinite:
            self.skipped_steps += 1
            self.skips_in_a_row += 1
        elif not overflow:
            self.skips_in_a_row = 0
            self.has_updated = True
        self._report = self._make_report(norm)

    def _make_report(self, norm: float) -> OptimizerReport:
        return OptimizerReport(
            grad_norm=norm if math.isfinite(norm) else math.nan,
            skipped=not math.isfinite(norm),
            skipped_steps=self.skipped_steps,
            loss_scale=self.inner.get_loss_scale().detach().clone(),
        )

    @property
    def parts(self) -> list[Any]:
        """The optimizers that Megatron has chained."""
        return list(getattr(self.inner, "chained_optimizers", [self.inner]))

    # ---- the state in a checkpoint --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The numbers of skipped steps, for Lightning; ``sharded_state_dict`` has the rest."""
        return {"skipped_steps": self.skipped_steps, "skips_in_a_row": self.skips_in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self.skipped_steps = state_dict.get("skipped_steps", 0)
        self.skips_in_a_row = state_dict.get("skips_in_a_row", 0)

    @property
    def state_format(self) -> dict[str, Any]:
        """Properties that must match for one optimizer to load another one's state."""
        config = self.parts[0].config
        has_momentum = config.optimizer != "sgd" or config.sgd_momentum > 0
        groups = {(float(group["lr_mult"]), float(group["wd_mult"])) for group in self.param_groups}
        return {
            "implementation": "DistributedOptimizer",  # formerly the only one that could read the format
            "algorithm": config.optimizer + ("" if has_momentum else " without momentum"),
            "multipliers of lr and weight decay": [list(group) for group in sorted(groups)],
        }

    def sharded_state_dict(
        self, models: Mapping[str, Any], *, is_loading: bool = False
    ) -> dict[str, Any]:
        """Build the state dict: sharded tensors that view the live state, and plain data; every rank must call.

        Args:
            models: Sharded state dict of all chunks, with the parameters themselves as data.
            is_loading: Whether a checkpoint is about to be loaded: fp32 masters, which are the weights, then get their
                own memory, because the weights are loaded too, perhaps in lower precision.
        """
        placements = _placements(models)
        entries: dict[str, ShardedTensor] = {}
        for number, held in enumerate(self._param_states()):
            for name, tensor in held.tensors.items():
                flat = (
                    torch.empty_like(tensor)
                    if is_loading and name == "param" and held.is_own_master
                    else tensor
                )
                shards = _shards(
                    placements[id(held.parameter)], held, flat, f"optimizer.state.{name}"
                )
                entries |= {f"{number}.{name}.{index}": shard for index, shard in enumerate(shards)}
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.param_groups
        ]
        scaler = getattr(self.parts[0], "grad_scaler", None)
        return {
            "param_state": entries,
            "param_state_sharding_type": "fully_reshardable",
            "optimizer": {"param_groups": groups},
            **({} if scaler is None else {"grad_scaler": scaler.state_dict()}),
        }

    @torch.no_grad()
    def load_sharded_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """Restore a loaded state after the weights have been restored; every rank must call.

        The optimizer keeps the settings that it was built with, so they may change on resume.

        Args:
            loaded: ``sharded_state_dict`` after loading; masters and moments are already in place, except fp32 masters.
        """
        entries = loaded["param_state"]
        for number, held in enumerate(self._param_states()):
            prefix = f"{number}.param."
            # In the order of sharded_state_dict.
            keys = sorted(
                (int(key.removeprefix(prefix)), key) for key in entries if key.startswith(prefix)
            )
            if held.is_own_master and keys:
                held.tensors["param"].copy_(torch.cat([entries[key].flatten() for _, key in keys]))
        saved = {
            _group_key(group): group for group in loaded.get("optimizer", loaded)["param_groups"]
        }
        for group in self.param_groups:
            kept = {"params", *(name for name in _GROUP_SETTINGS if name in group)}
            group.update(
                {
                    name: value
                    for name, value in saved[_group_key(group)].items()
                    if name not in kept
                }
            )
        for part in self.parts:
            scaler = getattr(part, "grad_scaler", None)
            if scaler is not None and "grad_scaler" in loaded:
                scaler.load_state_dict(loaded["grad_scaler"])
            if isinstance(part, DistributedOptimizer) and part.config.params_dtype is torch.float32:
                # The weights are the masters, of which each data-parallel rank has restored its shard: all-gather them.
                for chunk in part.model_chunks:
                    chunk.start_param_sync(force_sync=True)

    def _param_states(self) -> Iterator[_ParamState]:
        """This rank's state of each parameter, in a fixed order."""
        for part in self.parts:
            for parameter, master, start in _master_weights(part):
                moments = {
                    name: part.optimizer.state[master][name].view(-1)
                    for name in part.optimizer.state_names
                }
                tensors = {"param": master.detach().view(-1), **moments}
                yield _ParamState(parameter, start, isinstance(part, DistributedOptimizer), tensors)


def _engine_config(options: OptimizerOptions, lr: float, settings: EngineSettings) -> Any:
    """Megatron's config of the optimizer."""
    chosen = {
        "optimizer": "sgd" if options.name == "sgd" else "adam",
        "decoupled_weight_decay": options.name == "adamw",
        "lr": lr,
        "weight_decay": options.weight_decay,
        "adam_beta1": options.beta1,
        "adam_beta2": options.beta2,
        "adam_eps": options.eps,
        "sgd_momentum": options.momentum,
        "params_dtype": settings.params_dtype,
        "bf16": settings.params_dtype is torch.bfloat16,
        "fp16": settings.params_dtype is torch.float16,
        "initial_loss_scale": options.initial_loss_scale,
        "min_loss_scale": options.min_loss_scale,
        "loss_scale_window": options.loss_scale_window,
        "hysteresis": options.loss_scale_hysteresis,
        "use_distributed_optimizer": settings.distributed_optimizer,
        "overlap_param_gather": settings.overlaps_gathers,
    }
    return build_config(OptimizerConfig, chosen, settings.overrides.optimizer)


def _counted_gradients(part: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of one of Megatron's optimizers that the norm counts, and copies of some that other ranks count.

    The copies are those of weights that every tp rank has, and of weights shared by several pipeline stages.
    """
    has_new_name = hasattr(part, "get_grads_for_grad_norm")  # from megatron-core 0.19 on
    counted: list[Tensor] = (
        part.get_grads_for_grad_norm if has_new_name else part.get_main_grads_for_grad_norm
    )()
    counted_ids = {id(gradient) for gradient in counted}
    gradients = (parameter.grad for parameter in part.get_parameters())
    copies = [
        gradient
        for gradient in gradients
        if gradient is not None and id(gradient) not in counted_ids
    ]
    return counted, copies


def _zero_or_nan(value: Tensor) -> Tensor:
    """0 if ``value`` is finite, NaN if it is not; does not wait for the device."""
    return 0.0 * value


# ---- shards of the optimizer state --------------------------------------------------------------------------------

_GROUP_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""Keys that identify a parameter group; each rank has all groups, in any order."""

_GROUP_SETTINGS = (
    "max_lr",
    "min_lr",
    "start_wd",
    "end_wd",
    "weight_decay",
    "betas",
    "eps",
    "momentum",
)
"""Keys of parameter groups that each run sets; the others, such as ``lr`` and ``step``, are restored on resume."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size along each axis."""


class _ParamState(NamedTuple):
    """State that this rank's optimizer holds of one parameter."""

    parameter: Tensor
    start: int
    """Index of the first element held, in row-major order."""
    is_sharded: bool
    """Whether other data-parallel ranks hold other elements, instead of the same ones."""
    tensors: Mapping[str, Tensor]
    """``param``, the master weight, and the moments by name; each [elements held]."""

    @property
    def stop(self) -> int:
        """Index after the last element held."""
        return self.start + self.tensors["param"].numel()

    @property
    def is_own_master(self) -> bool:
        """Whether the master weight is the weight itself, as in fp32."""
        master = self.tensors["param"].untyped_storage().data_ptr()
        return bool(self.parameter.untyped_storage().data_ptr() == master)


def _group_key(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group[name] for name in _GROUP_IDENTITY)


def _master_weights(part: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield each parameter, its master weight or this rank's shard of it, and the index of its first element."""
    if isinstance(part, DistributedOptimizer):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            first: int = part._get_model_param_range_map(parameter)["param"].start
            yield parameter, part.optimizer.param_groups[group]["params"][order], first
        return
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for parameters, masters in zip(
            part.float16_groups, part.fp32_from_float16_groups, strict=True
        ):
            yield from (
                (parameter, master, 0)
                for parameter, master in zip(parameters, masters, strict=True)
            )
        yield from (
            (parameter, parameter, 0) for group in part.fp32_from_fp32_groups for parameter in group
        )
        return
    yield from ((parameter, parameter, 0) for parameter in part.get_parameters())


def _placements(models: Mapping[str, Any]) -> dict[int, list[ShardedTensor]]:
    """Map each parameter's ``id`` to its position in the full model: one sharded tensor, or several."""
    sharded, _ = extract_sharded_tensors_and_factories(dict(models))
    placements = {}
    for placement in nested_values(sharded):
        is_factory = isinstance(placement, ShardedTensorFactory)
        placements[id(placement.data)] = (
            list(nested_values(placement.build())) if is_factory else [placement]
        )
    return placements


def _shards(
    placements: Sequence[ShardedTensor], held: _ParamState, flat: Tensor, name: str
) -> Iterator[ShardedTensor]:
    """Sharded tensors of the full model that make up ``flat``, the held elements of a state tensor, in its order."""
    for placement in placements:
        data = placement.data
        assert data is not None
        assert data.is_contiguous(), "shards of a parameter are contiguous"
        begin = data.storage_offset() - held.parameter.storage_offset()
        start, stop = max(held.start, begin), min(held.stop, begin + data.numel())
        # The last component is the data-parallel rank: of ranks that hold the same elements, the first one writes.
        replica = (*placement.replica_id[:2], 0) if held.is_sharded else placement.replica_id
        prepended = placement.prepend_axis_num
        for offset, size in boxes(
            tuple(data.shape),
            start - begin,
            stop - begin,
        ):
            shape, inside = (1,) * prepended + size, (0,) * prepended + offset
            count = math.prod(size)
            yield ShardedTensor(
                key=f"{name}.{placement.key}",
                data=flat[start - held.start :][:count].view(shape),
                dtype=flat.dtype,
                local_shape=shape,
                global_shape=placement.global_shape,
                global_offset=tuple(
                    a + b for a, b in zip(placement.global_offset, inside, strict=True)
                ),
                axis_fragmentations=None,
                replica_id=replica,
                allow_shape_mismatch=placement.allow_shape_mismatch,
            )
            start += count


def boxes(
    shape: tuple[int, ...],
    start: int,
    stop: int,
) -> list[Box]:
    """Split elements ``start`` to ``stop`` of a tensor, in row-major order, into few boxes in the same order."""
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row

    def within(
        index: int,
        begin: int,
        end: int,
    ) -> list[Box]:
        return [((index, *offset), (1, *size)) for offset, size in boxes(shape[1:], begin, end)]

    if first > last:
        return within(last, start - last * row, stop - last * row)
    complete = (
        [((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))] if first < last else []
    )
    return [
        *within(first - 1, start - (first - 1) * row, row),
        *complete,
        *within(last, 0, stop - last * row),
    ]
