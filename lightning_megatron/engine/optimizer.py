"""Megatron's optimizer as a torch optimizer: options, parameter groups, the wrapper for Lightning, and its state.

Lightning and torch's learning-rate schedulers want a ``torch.optim.Optimizer``; Megatron's is not one. The wrapper here
shows Megatron's parameter groups and leaves gradients, loss scaling and state to Megatron.

On a GPU the host does not wait for the gradient norm: clipping, and whether there is an update at all, are decided on
the device (``grad_scale`` and ``found_inf`` of the fused optimizers, torch's names), and the norm is copied beside it.
Where steps may be skipped the host reads it behind the update it has queued, because learning rates depend on it;
otherwise when the next step's gradients are queued, so that Python and data are prepared while the GPU works. A step
that is not finite never reaches the weights either way.

In checkpoints there are, for each parameter, the entries ``optimizer.state.{param,exp_avg,exp_avg_sq}.NAME`` in the
shape of the weight: its fp32 master and its moments, as megatron-core's ``fully_reshardable`` format has them. So a run
goes on with or without distributed optimizer, at any number of data-parallel ranks and in another precision.
megatron-core 0.16.1 (optimizer/distrib_optimizer.py) writes that format by gathering everything on every rank, and its
optimizers without sharding write other names. Here each rank writes and reads exactly what it holds: its part of a
parameter is a range of consecutive numbers, which is cut into boxes (rest of a row, whole rows, start of a row).
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
from lightning_megatron.engine.fillers.adam import MasterOptimizer
from lightning_megatron.engine.overrides import MIN_LOSS_SCALE, build_config
from lightning_megatron.errors import ConfigError, as_options, require_choice, require_number
from lightning_megatron.foreign_names import explains_options

if TYPE_CHECKING:
    from lightning_megatron.models.transformer_config import EngineSettings


@dataclass(frozen=True, kw_only=True)
class GroupMultipliers:
    """Factors for one group of parameters.

    Args:
        lr_mult: Times the learning rate.
        wd_mult: Times the weight decay.
    """

    lr_mult: float = 1.0
    wd_mult: float = 1.0


@explains_options
@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Megatron's optimizer without its learning rate, which the module owns.

    Args:
        name: ``adamw`` decouples weight decay from the gradient, ``adam`` adds it to the gradient, ``sgd`` has
            momentum.
        weight_decay: Per step, times the learning rate; never on biases and other 1-D weights unless ``multipliers``
            say so.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        momentum: Of ``sgd``.
        multipliers: Glob over Megatron's parameter names, e.g. ``*word_embeddings*``, to factors; the first match wins.
        initial_loss_scale: Of ``16-mixed``: halved after each overflow that outlasts ``loss_scale_hysteresis``.
        min_loss_scale: Of ``16-mixed``: never below.
        loss_scale_window: Of ``16-mixed``: steps without overflow after which the scale doubles.
        loss_scale_hysteresis: Of ``16-mixed``: overflows that are tolerated before the scale is halved.
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
        """Refuse unknown optimizers and impossible numbers.

        Raises:
            ConfigError: If the name is unknown, or a number is out of range.
        """
        factors = {glob: as_options(GroupMultipliers, each, "multipliers") for glob, each in self.multipliers.items()}
        object.__setattr__(self, "multipliers", factors)
        require_choice("optimizer name", self.name, ("adamw", "adam", "sgd"))
        for name in ("weight_decay", "eps", "momentum", "beta1", "beta2"):
            require_number(name, getattr(self, name))
        for name in ("beta1", "beta2"):
            if not getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be in [0, 1); correct the optimizer options")
        for name in ("loss_scale_window", "loss_scale_hysteresis"):
            require_number(name, getattr(self, name), at_least=1)
        require_number("min_loss_scale", self.min_loss_scale, MIN_LOSS_SCALE)
        require_number("initial_loss_scale", self.initial_loss_scale, self.min_loss_scale)


@dataclass(frozen=True, kw_only=True)
class OptimizerReport:
    """What the last optimizer step did; the same on every rank."""

    grad_norm: float
    """Global 2-norm of the gradients before clipping; NaN where the step was skipped."""
    skipped: bool
    """Whether the weights were left alone: an overflow was found, or a loss or gradient that is not finite."""
    skipped_steps: int
    """How often a step was left out for a loss or gradient that was not finite, those before a resume included."""
    loss_scale: torch.Tensor
    """[1], fp32: the scale that the next step uses; 1 unless ``16-mixed``. On the device: reading it waits."""


def multipliers_of(name: str, parameter: torch.Tensor, options: OptimizerOptions) -> GroupMultipliers:
    """The factors of one parameter.

    Args:
        name: Megatron's name of it, wrappers included.
        parameter: The parameter.
        options: Where the user's globs are.
    """
    plain_name = name.replace("module.", "")
    if plain_name == "output_layer.weight" and getattr(parameter, "shared_embedding", False):
        # The last stage's copy of a tied embedding, which must move as the embedding does.
        plain_name = "embedding.word_embeddings.weight"
    for pattern, multipliers in options.multipliers.items():
        if fnmatch(plain_name, pattern):
            return multipliers
    is_one_dimensional = parameter.dim() == 1 or plain_name.endswith(".bias")
    return GroupMultipliers(wd_mult=0.0 if is_one_dimensional else 1.0)


def _overrides(chunks: Iterable[torch.nn.Module], options: OptimizerOptions) -> dict[ParamKey, dict[str, float]]:
    """Megatron's parameter groups: one row for every distinct pair of factors."""
    default = GroupMultipliers()
    distinct = {multipliers_of(n, p, options) for chunk in chunks for n, p in chunk.named_parameters()}
    distinct |= {GroupMultipliers(wd_mult=0.0), *options.multipliers.values()}

    def belongs(wanted: GroupMultipliers) -> Callable[[torch.nn.Parameter, str], bool]:
        return lambda parameter, name: multipliers_of(name, parameter, options) == wanted

    return {
        ParamKey(with_name_predicate=ParamWithNamePredicate(name=str(group), fn=belongs(group))): {
            "lr_mult": group.lr_mult,
            "wd_mult": group.wd_mult,
        }
        for group in sorted(distinct - {default}, key=lambda g: (g.lr_mult, g.wd_mult))
    }


def _group_name(lr_mult: float, wd_mult: float) -> str:
    """How Lightning's LearningRateMonitor names a group, e.g. ``lr/weight_decay``."""
    decay = {0.0: "no_weight_decay", 1.0: "weight_decay"}.get(wd_mult, f"weight_decay_x{wd_mult:g}")
    return decay if lr_mult == 1.0 else f"{decay}_lr_x{lr_mult:g}"


@dataclass(frozen=True, kw_only=True)
class OptimizerContext:
    """What the run, not the user's options, decides about the optimizer."""

    settings: EngineSettings
    engine: Callable[[], AbstractContextManager[None]]
    """Opens the surroundings in which Megatron may be called."""
    may_skip: bool
    """Whether training goes on behind a step that was left out, so that its outcome must be known before the next."""


class MegatronOptimizer(torch.optim.Optimizer):
    """Megatron's optimizer as Lightning and torch's schedulers see it.

    ``zero_grad`` does nothing, because the schedule that ran just before has filled the gradients; ``state`` is empty,
    because moments are sharded and saved by the strategy.
    """

    def __init__(
        self, chunks: list[torch.nn.Module], options: OptimizerOptions, lr: float, context: OptimizerContext
    ) -> None:
        """Make Megatron's optimizer over DDP-wrapped chunks. Every rank must call, inside ``context.engine()``.

        ``super().__init__`` is not called: it would build groups of its own.

        Raises:
            ConfigError: If the learning rate is negative.
        """
        require_number("lr", lr)
        settings = context.settings
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
        config = build_config(OptimizerConfig, chosen, settings.overrides.optimizer)
        self.inner: Any = get_megatron_optimizer(config, chunks, config_overrides=_overrides(chunks, options))
        for group in self.inner.param_groups:
            # Torch's schedulers know nothing of multipliers, so they are part of each group's base values.
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = options.weight_decay * group["wd_mult"]
            group["name"] = _group_name(group["lr_mult"], group["wd_mult"])
        self._context = context
        self.clip_grad = 0.0
        """Largest global gradient norm of the next step; 0 for no clipping (the norm is computed all the same)."""
        # OneCycleLR and CyclicLR look here whether the optimizer has a momentum that they can move in the groups.
        self.defaults: dict[str, Any] = dict(self.parts[0].optimizer.defaults)
        self.loss = torch.zeros(())
        """[], fp32, on the device: what the gradients are of, the same on every rank."""
        self.check_finite: Callable[[float], None] = lambda grad_norm: None
        """Called on all ranks with the step's gradient norm; NaN or infinite if the loss is. Raises to end the run."""
        self.grad_norm: torch.Tensor | None = None
        """[], fp32: the last step's gradient norm, maybe still on the device; None before the first."""
        self._report: OptimizerReport | None = None
        self._outcome: tuple[HostCopy, Callable[[float], None]] | None = None
        """Of a step that the host does not know yet: the squared norm, and ``check_finite`` of then."""
        self.skipped_steps = 0
        for masters in self._masters:
            masters.materialize_state()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Megatron's own groups: setting ``lr`` or ``weight_decay`` in them takes effect."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """Empty: nothing to move or to save the ordinary way."""
        return {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: see the class."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run ``closure`` (forward and backward), then clip, update and gather. Every rank must call."""
        loss = None
        if closure is not None:
            self.clip_grad = 0.0  # until the closure's hooks say otherwise
            with torch.enable_grad():
                loss = closure()
        with self._context.engine():
            self.settle()  # the step before; this one's gradients are queued by now
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
        """What the last step did, None before the first. Waits for the device, and never communicates."""
        if self._outcome is None:
            return self._report
        return self._reported(self._outcome[0].read() ** 0.5)

    @property
    def has_skipped(self) -> bool:
        """Whether the last step was left out, and training goes on. Does not wait for the device."""
        return self._outcome is None and self._report is not None and self._report.skipped

    def settle(self) -> None:
        """Learn what became of the last step. Every rank must call at the same place; does nothing the second time.

        Raises:
            NonFiniteError: If it was not finite, and ``check_finite`` says so.
        """
        if self._outcome is None:
            return
        (squared, judge), self._outcome = self._outcome, None
        norm = squared.read() ** 0.5
        if not math.isfinite(norm):
            for optimizer in self._masters:
                optimizer.uncount_step()
        self._finish(norm, judge)

    def _masked_update(self) -> None:
        """Queue the update, which the device leaves out if the gradient norm is not finite."""
        squared = self._squared_norm()
        self.grad_norm = squared.sqrt().squeeze()
        found_inf, clip = (~squared.isfinite()).float(), self.clip_grad
        for optimizer in self._masters:
            optimizer.found_inf = found_inf
            optimizer.grad_scale = ((self.grad_norm + 1e-6) / clip).clamp(min=1.0) if clip else None
        # Copied before the update, behind which the host then need not wait.
        self._outcome = HostCopy(squared), self.check_finite
        self.inner.step_with_ready_grads()

    def _squared_norm(self) -> torch.Tensor:
        """[1], fp32, over all ranks; NaN or infinite also if the loss is, which so travels with what is read anyway.

        megatron-core 0.16.1, optimizer/clip_grads.py:get_grad_norm_fp32, without its wait for the device.
        """
        of_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
        for part in self.parts:  # experts have an optimizer of their own, and without sharding other ranks hold them
            has_new_name = hasattr(part, "get_grads_for_grad_norm")  # from megatron-core 0.19 on
            gradients = (part.get_grads_for_grad_norm if has_new_name else part.get_main_grads_for_grad_norm)()
            of_group.setdefault(part.get_grad_stats_parallel_group(), []).extend(gradients)
        total = torch.zeros(1, dtype=torch.float32, device=self.loss.device)
        for group, gradients in of_group.items():
            norms = torch._foreach_norm([*gradients, 0.0 * self.loss], 2, dtype=torch.float32)
            squared = torch.linalg.vector_norm(torch.stack(norms)).reshape(1) ** 2.0
            dist.all_reduce(squared, group=group)
            total += squared
        return total

    @property
    def _settles_late(self) -> bool:
        """Whether the host would have to wait for the outcome of a step, and need not."""
        return self.loss.is_cuda and not self._context.may_skip

    @property
    def _masters(self) -> list[MasterOptimizer]:
        """The optimizers inside; a part without weights on this rank has none."""
        return [part.optimizer for part in self.parts if part.optimizer is not None]

    def _finish(self, norm: float, judge: Callable[[float], None], *, overflow: bool = False) -> None:
        # Gradients that are too large only with the loss scale are 16-mixed's everyday business.
        is_wrong = not math.isfinite(self.loss if overflow else norm)
        if is_wrong or not overflow:
            judge(norm)
        self.skipped_steps += is_wrong
        self._report = self._reported(norm)

    def _reported(self, norm: float) -> OptimizerReport:
        return OptimizerReport(
            grad_norm=norm if math.isfinite(norm) else math.nan,
            skipped=not math.isfinite(norm),
            skipped_steps=self.skipped_steps,
            loss_scale=self.inner.get_loss_scale().detach().clone(),
        )

    @property
    def parts(self) -> list[Any]:
        """The optimizers that Megatron chained."""
        return list(getattr(self.inner, "chained_optimizers", [self.inner]))

    # ---- the state in a checkpoint --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """For Lightning's dict; ``sharded_state_dict`` has the rest."""
        return {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` has said."""
        self.skipped_steps = state_dict.get("skipped_steps", 0)

    @property
    def state_format(self) -> dict[str, Any]:
        """What must be the same for one optimizer to read another one's state."""
        config = self.parts[0].config
        has_momentum = config.optimizer != "sgd" or config.sgd_momentum > 0
        groups = {(float(group["lr_mult"]), float(group["wd_mult"])) for group in self.param_groups}
        return {
            "implementation": "DistributedOptimizer",  # the only one that could read the format once
            "algorithm": config.optimizer + ("" if has_momentum else " without momentum"),
            "multipliers of lr and weight decay": [list(group) for group in sorted(groups)],
        }

    def sharded_state_dict(self, models: Mapping[str, Any], *, is_loading: bool = False) -> dict[str, Any]:
        """The state as sharded tensors over the live ones, and plain data; every rank must call.

        Args:
            models: Sharded state of all chunks, with the parameters themselves as data.
            is_loading: Whether a checkpoint is about to be read: fp32 masters, which are weights, then get memory of
                their own, because the weights are read too, perhaps with fewer digits.
        """
        placements = _placements(models)
        entries: dict[str, ShardedTensor] = {}
        for number, held in enumerate(self._held()):
            for name, tensor in held.tensors.items():
                flat = torch.empty_like(tensor) if is_loading and name == "param" and held.is_own_master else tensor
                pieces = _pieces(placements[id(held.parameter)], held, flat, f"optimizer.state.{name}")
                entries |= {f"{number}.{name}.{index}": piece for index, piece in enumerate(pieces)}
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]
        scaler = getattr(self.parts[0], "grad_scaler", None)
        return {
            "param_state": entries,
            "param_state_sharding_type": "fully_reshardable",
            "optimizer": {"param_groups": groups},
            **({} if scaler is None else {"grad_scaler": scaler.state_dict()}),
        }

    @torch.no_grad()
    def load_sharded_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """Take over what was loaded after the weights are back; every rank must call.

        The settings of the optimizer stay those that it was made with, so they may change on the way.

        Args:
            loaded: What became of ``sharded_state_dict``; masters and moments are in place already, except fp32
                masters.
        """
        entries = loaded["param_state"]
        for number, held in enumerate(self._held()):
            prefix = f"{number}.param."
            # In the order in which they were asked for.
            pieces = sorted((int(key.removeprefix(prefix)), key) for key in entries if key.startswith(prefix))
            if held.is_own_master and pieces:
                held.tensors["param"].copy_(torch.cat([entries[key].flatten() for _, key in pieces]))
        saved = {_identity(group): group for group in loaded.get("optimizer", loaded)["param_groups"]}
        for group in self.param_groups:
            kept = {"params", *(name for name in _GROUP_SETTINGS if name in group)}
            group.update({name: value for name, value in saved[_identity(group)].items() if name not in kept})
        for part in self.parts:
            scaler = getattr(part, "grad_scaler", None)
            if scaler is not None and "grad_scaler" in loaded:
                scaler.load_state_dict(loaded["grad_scaler"])
            if isinstance(part, DistributedOptimizer) and part.config.params_dtype is torch.float32:
                # Weights are masters, of which each data-parallel rank has just set its own part: gather the others.
                for chunk in part.model_chunks:
                    chunk.start_param_sync(force_sync=True)

    def _held(self) -> Iterator[_Held]:
        """What this rank holds, in an order that does not change."""
        for part in self.parts:
            for parameter, master, start in _mastered(part):
                moments = {name: part.optimizer.state[master][name].view(-1) for name in part.optimizer.state_names}
                tensors = {"param": master.detach().view(-1), **moments}
                yield _Held(parameter, start, isinstance(part, DistributedOptimizer), tensors)


# ---- which part of which parameter a rank holds -------------------------------------------------------------------

_GROUP_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""What tells parameter groups apart; each rank has all of them, in any order."""

_GROUP_SETTINGS = ("max_lr", "min_lr", "start_wd", "end_wd", "weight_decay", "betas", "eps", "momentum")
"""What a run sets for its parameter groups; the rest of them, as ``lr`` and ``step``, is where a run stands."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First index along each axis, and size along each axis."""


class _Held(NamedTuple):
    """What this rank's optimizer holds of one parameter."""

    parameter: Tensor
    start: int
    """The first of the parameter's numbers that it holds, counted row by row."""
    is_sharded: bool
    """Whether other data-parallel ranks hold other numbers, instead of the same ones."""
    tensors: Mapping[str, Tensor]
    """``param``, which is the master, and the moments by name; each [numbers held]."""

    @property
    def stop(self) -> int:
        """The first number behind those that it holds."""
        return self.start + self.tensors["param"].numel()

    @property
    def is_own_master(self) -> bool:
        """Whether the master is the weight itself, as in fp32."""
        master = self.tensors["param"].untyped_storage().data_ptr()
        return bool(self.parameter.untyped_storage().data_ptr() == master)


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group[name] for name in _GROUP_IDENTITY)


def _mastered(part: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Each parameter, its master or this rank's part of it, and which number of the parameter comes first in it."""
    if isinstance(part, DistributedOptimizer):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            first: int = part._get_model_param_range_map(parameter)["param"].start
            yield parameter, part.optimizer.param_groups[group]["params"][order], first
        return
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for parameters, masters in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from ((parameter, master, 0) for parameter, master in zip(parameters, masters, strict=True))
        yield from ((parameter, parameter, 0) for group in part.fp32_from_fp32_groups for parameter in group)
        return
    yield from ((parameter, parameter, 0) for parameter in part.get_parameters())


def _placements(models: Mapping[str, Any]) -> dict[int, list[ShardedTensor]]:
    """By parameter (``id``): where it lies in the whole model, in one place or in several."""
    sharded, _ = extract_sharded_tensors_and_factories(dict(models))
    placements = {}
    for placement in nested_values(sharded):
        is_factory = isinstance(placement, ShardedTensorFactory)
        placements[id(placement.data)] = list(nested_values(placement.build())) if is_factory else [placement]
    return placements


def _pieces(placements: Sequence[ShardedTensor], held: _Held, flat: Tensor, prefix: str) -> Iterator[ShardedTensor]:
    """What ``flat``, the held numbers of one kind, is in the whole model, in its order."""
    for placement in placements:
        data = placement.data
        assert data is not None
        assert data.is_contiguous(), "parts of a parameter are whole rows of it"
        begin = data.storage_offset() - held.parameter.storage_offset()
        start, stop = max(held.start, begin), min(held.stop, begin + data.numel())
        # The last component counts data-parallel ranks: of those that hold the same, the first one writes.
        replica = (*placement.replica_id[:2], 0) if held.is_sharded else placement.replica_id
        prepended = placement.prepend_axis_num
        for offset, size in boxes(tuple(data.shape), start - begin, stop - begin):
            shape, inside = (1,) * prepended + size, (0,) * prepended + offset
            count = math.prod(size)
            yield ShardedTensor(
                key=f"{prefix}.{placement.key}",
                data=flat[start - held.start :][:count].view(shape),
                dtype=flat.dtype,
                local_shape=shape,
                global_shape=placement.global_shape,
                global_offset=tuple(a + b for a, b in zip(placement.global_offset, inside, strict=True)),
                axis_fragmentations=None,
                replica_id=replica,
                allow_shape_mismatch=placement.allow_shape_mismatch,
            )
            start += count


def boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The numbers ``start`` to ``stop`` of a tensor, counted row by row, as few boxes in the same order."""
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row

    def within(index: int, begin: int, end: int) -> list[Box]:
        return [((index, *offset), (1, *size)) for offset, size in boxes(shape[1:], begin, end)]

    if first > last:
        return within(last, start - last * row, stop - last * row)
    whole = [((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))] if first < last else []
    return [*within(first - 1, start - (first - 1) * row, row), *whole, *within(last, 0, stop - last * row)]
