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


def _group(training: Training, *, decays: bool) -> dict[str, Any]:
    """The options of parameters that decay, or of those that do not."""
    for group in training.param_groups:
        if (group.get("wd_mult", 1.0) != 0.0) == decays:
            return _plain(group)
    # All of the run's parameters were of the other kind; this rank's decide for themselves.
    return _plain(training.param_groups[0]) | ({"wd_mult": 1.0} if decays else {"wd_mult": 0.0, "weight_decay": 0.0})


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
