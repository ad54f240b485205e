"""AdamW, Adam and SGD on fused kernels, which clip, and leave out a step that is not finite, without the host.

megatron-core 0.16.1 takes Transformer Engine's or Apex's Adam, behind a pass that clips and before one that copies the
weights, or without them ``torch.optim.AdamW``, unfused. These optimizers keep Apex's contract, which checkpoints are
written by: ``step`` is an integer of the parameter group, moments are called ``exp_avg`` and ``exp_avg_sq``. They are
used whatever is installed: on a GPU one kernel clips, updates and copies (``triton_kernels.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT


class MasterOptimizer(torch.optim.Optimizer):
    """Common part: what tells the next step to clip or to change nothing, and the state that is saved."""

    state_names: tuple[str, ...]
    """Of the per-parameter tensors, each in the parameter's shape and dtype."""
    grad_scale: Tensor | None = None
    """[] or [1], fp32: what the next step divides gradients by; as torch's GradScaler tells fused optimizers."""
    found_inf: Tensor | None = None
    """[1], fp32: not 0 for the next step to change nothing but its count."""
    low_copies: Mapping[Tensor, Tensor] | None = None
    """The 16-bit copies of parameters; None as long as they are not known."""
    has_copied = False
    """Whether the last step has updated these, too."""

    def uncount_step(self) -> None:
        """Take back the count of a step that ``found_inf`` has left out."""
        for group in self.param_groups:
            if "step" in group:
                group["step"] -= 1

    def materialize_state(self) -> None:
        """Create the state of every parameter that has none, as zeros."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        for name in self.state_names:
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _with_gradients(self, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], list[dict[str, Tensor]]]:
        parameters = [p for p in group["params"] if p.grad is not None]
        return parameters, [p.grad for p in parameters], [self._state_of(p) for p in parameters]


class FusedAdam(MasterOptimizer):
    """AdamW or Adam: all parameters of a group in a few kernels.

    Source: Kingma and Ba 2015; Loshchilov and Hutter 2019 for ``adam_w_mode``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        """Take what ``megatron.core.optimizer`` passes to Apex's FusedAdam.

        Args:
            params: Parameters or groups of them.
            lr: Learning rate.
            weight_decay: Fraction of a weight that is taken off per unit of learning rate.
            betas: Decay of the first and of the second moment.
            eps: Added to the root of the second moment.
            adam_w_mode: Whether the decay acts on the weight (AdamW) instead of on the gradient.
            capturable: False, as the engine's option for an optimizer in a CUDA graph is not offered here (0.19).
        """
        self.adam_w_mode = adam_w_mode
        self.state_names = ("exp_avg", "exp_avg_sq")
        self._tables: dict[int, Any] = {}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "step": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; ``step`` counts in all groups, also empty ones."""
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for group in self.param_groups:
            group["step"] += 1
            parameters, gradients, states = self._with_gradients(group)
            if not parameters:
                continue
            if parameters[0].is_cuda and parameters[0].dtype == gradients[0].dtype == torch.float32:
                self._step_in_one_pass(group, parameters, gradients, states)
                continue
            # The kernel reads one step per parameter and writes none of them, so all can be the same tensor.
            step = torch.full((), float(group["step"]), dtype=torch.float32, device=parameters[0].device)
            kernel(
                parameters,
                gradients,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [step] * len(parameters),
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )

    def _step_in_one_pass(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]]
    ) -> None:
        from lightning_megatron.engine.fillers import triton_kernels  # Triton is on GPUs only

        copies = self.low_copies or {}
        lows = [copies.get(parameter) for parameter in parameters]
        moments = ([state[name] for state in states] for name in self.state_names)
        lists: tuple[list[Any], ...] = (parameters, gradients, *moments, lows)
        key = tuple(tuple(0 if each is None else each.data_ptr() for each in tensors) for tensors in lists)
        if self._tables.get(id(group), ((), ()))[0] != key:
            table = triton_kernels.adam_table(key, [p.numel() for p in parameters], parameters[0].device)
            self._tables[id(group)] = key, table
        low = next((each.dtype for each in lows if each is not None), None)
        self.has_copied = self.low_copies is not None
        table = self._tables[id(group)][1]
        triton_kernels.adam_step(table, low, group, self.grad_scale, self.found_inf, decoupled=self.adam_w_mode)


class FusedSGD(MasterOptimizer):
    """SGD with momentum; the momentum is called ``exp_avg``, the only names that the engine's checkpoints know."""

    def __init__(self, params: ParamsT, lr: float = 1e-3, weight_decay: float = 0.0, momentum: float = 0.0) -> None:
        """Take what ``megatron.core.optimizer`` passes to torch's SGD.

        Args:
            params: Parameters or groups of them.
            lr: Learning rate.
            weight_decay: Times the weight, added to the gradient.
            momentum: Decay of the accumulated gradient; 0 keeps no state.
        """
        self.state_names = ("exp_avg",) if momentum != 0.0 else ()
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters, gradients, states = self._with_gradients(group)
            if not parameters:
                continue
            torch._fused_sgd_(
                parameters,
                gradients,
                [state["exp_avg"] for state in states] if group["momentum"] != 0.0 else [],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
                # A momentum of zeros makes the first step what torch's SGD makes of it.
                is_first_step=False,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )


# ---- what Megatron does around its optimizers, changed ---------------------------------------------------------------


def with_leaf_shards(original: Callable[..., Any]) -> Any:
    """``_build_model_and_main_param_groups`` whose float32 shards are leaf tensors, not nodes of an autograd graph."""
    return staticmethod(torch.no_grad()(original))
