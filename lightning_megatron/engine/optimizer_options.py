"""Options of Megatron's optimizer, and the parameter groups that they describe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

from lightning_megatron.engine.gather import gather_objects
from lightning_megatron.engine.ops.muon import AdjustLR
from lightning_megatron.engine.overrides import MIN_LOSS_SCALE, build_config
from lightning_megatron.engine.settings import EngineSettings
from lightning_megatron.engine.weight_names import global_name
from lightning_megatron.errors import ConfigError, as_options, require_choice, require_number
from lightning_megatron.foreign_names import checks_options


@checks_options
@dataclass(frozen=True, kw_only=True)
class GroupMultipliers:
    """Factors for one group of parameters.

    Args:
        lr_mult: Factor of the learning rate.
        wd_mult: Factor of the weight decay. None: 1, and 0 for biases and other 1-D weights.
    """

    lr_mult: float = 1.0
    wd_mult: float | None = None

    def __post_init__(self) -> None:
        """Check the factors.

        Raises:
            ConfigError: If one is negative.
        """
        require_number("lr_mult", self.lr_mult)
        if self.wd_mult is not None:
            require_number("wd_mult", self.wd_mult)


class _Factors(NamedTuple):
    """Factors of the learning rate and the weight decay of a group of parameters."""

    lr_mult: float
    wd_mult: float


OptimizerName = Literal["adamw", "adam", "sgd", "muon"]

_USED_BY: dict[str, tuple[OptimizerName, ...]] = {
    "beta1": ("adamw", "adam", "muon"),
    "beta2": ("adamw", "adam", "muon"),
    "eps": ("adamw", "adam", "muon"),
    "momentum": ("sgd", "muon"),
    "nesterov": ("muon",),
    "ns_steps": ("muon",),
    "adjust_lr": ("muon",),
}
"""Optimizers that read an option which others do not have."""
_MOMENTUM_OF_SGD = 0.9
_MOST_ITERATIONS = 99
"""Of the orthogonalization, as in ``torch.optim.Muon``."""
_OF_DYNAMIC_SCALE = (
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale_window",
    "loss_scale_hysteresis",
)
"""Options of a loss scale that follows overflows."""


@checks_options
@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Options of Megatron's optimizer, without the learning rate, which is an option of the module.

    Args:
        name: ``adamw`` decouples weight decay from the gradient, ``adam`` adds it to the gradient, ``sgd`` has
            momentum. ``muon`` orthogonalizes the momentum of the layers' matrices, and is ``adamw`` for all else.
        weight_decay: Per step, times the learning rate; never on biases and other 1-D weights unless ``multipliers``
            say so. None: 0.1 with ``muon``, 0.01 with the others.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        momentum: Momentum of ``sgd``, and of the matrices of ``muon``. None: 0.95 with ``muon``, 0.9 with ``sgd``.
        nesterov: Of ``muon``: add the gradient to the momentum once more.
        ns_steps: Of ``muon``: iterations of the orthogonalization.
        adjust_lr: Of ``muon``: ``original`` multiplies a matrix's learning rate by the root of rows / columns if
            that is above 1; ``match_rms_adamw`` by 0.2 times the root of the larger of both, which suits learning
            rate and weight decay of AdamW.
        multipliers: Maps globs of Megatron's parameter names (``*word_embeddings*``, ``decoder.layers.0.*``; layers
            have their numbers in the whole model) to factors; the first match wins.
        initial_loss_scale: Initial loss scale of ``16-mixed``.
        min_loss_scale: Lower bound of the loss scale of ``16-mixed``.
        loss_scale_window: Of ``16-mixed``: steps without overflow after which the loss scale doubles.
        loss_scale_hysteresis: Of ``16-mixed``: the loss scale is halved at this overflow and each later one, counted
            since it last doubled.
    """

    name: OptimizerName = "adamw"
    weight_decay: float | None = None
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    momentum: float | None = None
    multipliers: Mapping[str, GroupMultipliers] = field(default_factory=dict)
    initial_loss_scale: float = 2.0**32
    min_loss_scale: float = 1.0
    loss_scale_window: int = 1000
    loss_scale_hysteresis: int = 2
    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr: AdjustLR = "original"

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ConfigError: If the name is unknown, a value is out of range, or an option is of another optimizer.
        """
        factors: dict[str, GroupMultipliers] = {}
        for glob, given in dict(self.multipliers).items():
            factors[glob] = as_options(GroupMultipliers, given, "multipliers")
        object.__setattr__(self, "multipliers", factors)
        require_choice("optimizer name", self.name, get_args(OptimizerName))
        for name in ("eps", "beta1", "beta2"):
            require_number(name, getattr(self, name))
        require_number("weight_decay", self.used_weight_decay)
        require_number("momentum", self.used_momentum)
        self._check_muon()
        self._check_used()
        for name in ("beta1", "beta2"):
            if not getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} must be in [0, 1); correct the optimizer options"
                )
        for name in ("loss_scale_window", "loss_scale_hysteresis"):
            require_number(name, getattr(self, name), at_least=1)
        require_number("min_loss_scale", self.min_loss_scale, MIN_LOSS_SCALE, math.inf)
        require_number("initial_loss_scale", self.initial_loss_scale, self.min_loss_scale, math.inf)

    def _check_muon(self) -> None:
        require_number("ns_steps", self.ns_steps, at_least=1, at_most=_MOST_ITERATIONS)
        require_choice("adjust_lr", self.adjust_lr, get_args(AdjustLR))
        if self.name == "muon" and self.used_momentum >= 1:
            raise ConfigError(
                f"momentum={self.momentum} must be in [0, 1) with muon; correct the optimizer options"
            )

    def _check_used(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            users = _USED_BY.get(each.name, (self.name,))
            if self.name in users or value == each.default:
                continue
            if each.name == "momentum" and value == _MOMENTUM_OF_SGD:
                continue  # the former default, which checkpoints hold with any optimizer
            raise ConfigError(
                f"{each.name}={value!r} is an option of {_listed(users)}, but the optimizer is {self.name}; leave it "
                f"out, or set name={users[0]!r}"
            )

    @property
    def used_weight_decay(self) -> float:
        """``weight_decay``, or the optimizer's own default."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.1 if self.name == "muon" else 0.01

    @property
    def used_momentum(self) -> float:
        """``momentum``, or the optimizer's own default."""
        if self.momentum is not None:
            return self.momentum
        return 0.95 if self.name == "muon" else _MOMENTUM_OF_SGD


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def plain_names(
    chunks: Iterable[torch.nn.Module],
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the trained weights of chunks by their names in the whole model, without the prefixes of wrappers."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if not parameter.requires_grad:
                continue
            plain_name = global_name(name, chunk).replace("module.", "")
            if plain_name == "output_layer.weight" and getattr(
                parameter, "shared_embedding", False
            ):
                # The last stage's copy of a tied embedding, which must be updated like the embedding.
                plain_name = "embedding.word_embeddings.weight"
            yield plain_name, parameter


def check_multipliers(chunks: Iterable[torch.nn.Module], options: OptimizerOptions) -> None:
    """Refuse globs that no weight follows. Collective over the world.

    Raises:
        ConfigError: On all ranks, if one is the first to match no trained weight on any.
    """
    if not options.multipliers:
        return
    names = [name for name, _ in plain_names(chunks)]
    found = {_first_match(name, options) for name in names}
    of_ranks = gather_objects((found, names[:1]))
    used = set().union(*(globs for globs, _ in of_ranks))
    examples = [name for _, first in of_ranks for name in first]
    for pattern in options.multipliers:
        if pattern not in used:
            raise ConfigError(
                f"multipliers: expected trained weights that {pattern!r} is the first to match, got none; correct it, "
                f"or leave it out (the first weight is {''.join(examples[:1])})"
            )


def _first_match(name: str, options: OptimizerOptions) -> str | None:
    """First of the user's globs that matches the name of a weight; None if none does."""
    for pattern in options.multipliers:
        if fnmatch(name, pattern):
            return pattern
    return None


def _factors_of(name: str, parameter: torch.Tensor, options: OptimizerOptions) -> _Factors:
    """Factors of one parameter: by default no weight decay on biases and other 1-D weights."""
    has_decay = parameter.dim() > 1 and not name.endswith(".bias")
    factors = _Factors(1.0, float(has_decay))
    pattern = _first_match(name, options)
    if pattern is None:
        return factors
    given = options.multipliers[pattern]
    if given.wd_mult is None:
        return _Factors(given.lr_mult, factors.wd_mult)
    return _Factors(given.lr_mult, given.wd_mult)


def group_overrides(
    chunks: Iterable[torch.nn.Module],
    options: OptimizerOptions,
) -> dict[ParamKey, dict[str, float]]:
    """Overrides of Megatron's parameter groups: one entry for every distinct pair of factors on this rank."""
    factors_of: dict[torch.Tensor, _Factors] = {}
    for name, parameter in plain_names(chunks):
        factors_of[parameter] = _factors_of(name, parameter, options)

    def is_in(
        group: _Factors,
        parameter: torch.nn.Parameter,
        name: str,
    ) -> bool:
        return factors_of[parameter] == group

    overrides = {}
    for group in sorted(set(factors_of.values())):
        if group != _Factors(1.0, 1.0):
            predicate = ParamWithNamePredicate(name=str(group), fn=partial(is_in, group))
            overrides[ParamKey(with_name_predicate=predicate)] = {
                "lr_mult": group.lr_mult,
                "wd_mult": group.wd_mult,
            }
    return overrides


def check_loss_scaling(options: OptimizerOptions, settings: EngineSettings) -> None:
    """Check that a run has the dynamic loss scale of which options are set.

    Raises:
        ConfigError: If one is set, and the run has a constant loss scale, or none.
    """
    constant = settings.overrides.optimizer.get("loss_scale")
    dtype = str(settings.params_dtype).removeprefix("torch.")
    found = None
    if settings.params_dtype is not torch.float16:
        found = f"weights in {dtype}, whose losses are not scaled"
    elif constant is not None:
        found = f"the constant loss_scale={constant} of optimizer_config_overrides"
    if found is None:
        return
    for each in fields(options):
        value = getattr(options, each.name)
        if each.name in _OF_DYNAMIC_SCALE and value != each.default:
            raise ConfigError(
                f"{each.name}={value!r}: expected the dynamic loss scale of precision='16-mixed', got {found}; leave "
                "it out"
            )


def group_name(lr_mult: float, wd_mult: float) -> str:
    """Name of a parameter group, which Lightning's LearningRateMonitor logs as e.g. ``lr/weight_decay``."""
    if wd_mult == 0.0:
        name = "no_weight_decay"
    elif wd_mult == 1.0:
        name = "weight_decay"
    else:
        name = f"weight_decay_x{wd_mult:g}"
    if lr_mult != 1.0:
        name += f"_lr_x{lr_mult:g}"
    return name


def engine_config(
    options: OptimizerOptions,
    lr: float,
    settings: EngineSettings,
) -> Any:
    """Megatron's config of the optimizer.

    Raises:
        ConfigError: If options are of another precision than the run's, or Megatron refuses an override.
    """
    check_loss_scaling(options, settings)
    chosen = {
        "optimizer": "sgd" if options.name == "sgd" else "adam",
        "decoupled_weight_decay": options.name in ("adamw", "muon"),
        "lr": lr,
        "weight_decay": options.used_weight_decay,
        "adam_beta1": options.beta1,
        "adam_beta2": options.beta2,
        "adam_eps": options.eps,
        "sgd_momentum": options.used_momentum,
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
