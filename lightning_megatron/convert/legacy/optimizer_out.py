"""How does Megatron-LM keep an optimizer's state in a legacy checkpoint? By the numbers of its parameters.

A model in float32 has the state of torch's Adam; one in 16 bits the same below ``optimizer``, and beside it float32
copies of the parameters. Parameters are numbered in the order in which the model's modules are built, first those that
weights decay, then biases and norms (Megatron-LM, ``get_param_groups``: whatever is a bias or has one axis).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_megatron.convert.stored.base import State, Training
from lightning_megatron.errors import ConfigError

NO_STATE: Mapping[str, Any] = {
    "step": 0,
    "param_groups": [
        {"lr": 0.0, "beta1": 0.0, "beta2": 0.0, "eps": 0.0, "weight_decay": 0.0, "correct_bias": False, "params": []}
    ],
}
"""Of a checkpoint without moments; readers of old wanted an optimizer, and this is what transformers' script wrote."""

_IDENTITY: Mapping[str, Any] = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
"""By which Megatron-Core tells groups from each other (optimizer/optimizer.py)."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a rank, as its optimizer sees it."""

    name: str
    """Flat legacy name."""
    weight: torch.Tensor
    """Its shard, in the dtype of the model."""
    state: Callable[[State], torch.Tensor]
    """Reads the same shard of ``param``, ``exp_avg`` or ``exp_avg_sq``: float32."""

    @property
    def decays(self) -> bool:
        """Whether weight decay is for it."""
        return self.weight.dim() > 1 and not self.name.endswith(".bias")


def check_optimizer(training: Training | None, *, is_distributed: bool) -> None:
    """Raise if the moments cannot be written.

    Raises:
        ConfigError: If each copy of the model is to have its part of them.
    """
    if is_distributed and training is not None and training.has_optimizer:
        raise ConfigError(
            "use_distributed_optimizer=True is not possible for a checkpoint with moments: each copy of the model then "
            "has a range of Megatron-LM's gradient buffer, whose order no file tells; leave the option out, and the "
            "moments are in model_optim_rng.pt"
        )


def optimizer_state(training: Training | None, parameters: Sequence[Parameter]) -> Mapping[str, Any]:
    """What stands under ``optimizer`` in the file of one rank.

    Args:
        training: Of the source.
        parameters: Of the rank, in the order of its modules, those of all its chunks one after the other.
    """
    if training is None or not training.has_optimizer:
        return dict(NO_STATE)
    groups: list[list[Parameter]] = [
        [each for each in parameters if each.decays],
        [each for each in parameters if not each.decays],
    ]
    described = [(_group(training, decays=decays), group) for decays, group in zip((True, False), groups, strict=True)]
    described = [(options, group) for options, group in described if group]
    state: dict[int, dict[str, torch.Tensor]] = {}
    param_groups = []
    for options, group in described:
        first = len(state)
        for parameter in group:
            state[len(state)] = {
                "step": torch.tensor(float(options.get("step", training.iteration))),
                "exp_avg": parameter.state("exp_avg"),
                "exp_avg_sq": parameter.state("exp_avg_sq"),
            }
        param_groups.append({**options, "params": list(range(first, len(state)))})
    adam = {"state": state, "param_groups": param_groups}
    masters = [[p.state("param") for p in group if p.weight.dtype != torch.float32] for _, group in described]
    return {"optimizer": adam, "fp32_from_fp16_params": masters} if any(masters) else adam


def schedule_state(training: Training | None) -> Mapping[str, Any] | None:
    """What stands under ``opt_param_scheduler``; None without moments, to which it belongs.

    Megatron's own is kept. Of another library's schedule only the place is known: Megatron-LM goes on from there with
    ``--override-opt_param-scheduler`` and a schedule on its command line.
    """
    if training is None or not training.has_optimizer:
        return None
    if training.lr_scheduler is not None and "num_steps" in training.lr_scheduler:
        return dict(training.lr_scheduler)
    group = _group(training, decays=True)
    rate, decay, samples = group.get("lr", 0.0), group.get("weight_decay", 0.0), training.consumed_samples or 0
    return {
        "max_lr": rate,
        "min_lr": rate,
        "lr_warmup_steps": 0,
        "num_steps": samples,
        "lr_decay_style": "constant",
        "lr_decay_steps": samples,
        "start_wd": decay,
        "end_wd": decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": samples,
    }


def _group(training: Training, *, decays: bool) -> dict[str, Any]:
    """The options of parameters that decay, or of those that do not."""
    kept = next((each for each in training.param_groups if (each.get("wd_mult", 1.0) != 0.0) == decays), None)
    if kept is None:  # all of the run's parameters were of the other kind
        kept = {**training.param_groups[0], **({"wd_mult": 1.0} if decays else {"wd_mult": 0.0, "weight_decay": 0.0})}
    # A max_lr of None is Megatron-Core's "as the schedule says" in its own checkpoints, and an error in its schedule.
    return {**_IDENTITY, **{name: value for name, value in kept.items() if name != "params" and value is not None}}
