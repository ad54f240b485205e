"""AdamW, Adam and SGD on fused kernels, which clip gradients and skip non-finite steps without a host synchronization.

megatron-core 0.16.1 uses Transformer Engine's or Apex's Adam, with a pass before it that clips and one after it that
copies the weights, or else ``torch.optim.AdamW``, unfused. These optimizers keep Apex's conventions, which checkpoints
rely on: ``step`` is an integer of the parameter group, moments are called ``exp_avg`` and ``exp_avg_sq``. They are used
whatever is installed: on a GPU one kernel clips, updates and copies (``triton/adam.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_megatron.engine.ops.muon import MatrixUpdates

_KernelInputs: TypeAlias = tuple[list[Tensor], list[Tensor], list[dict[str, Tensor]]]
"""Parameters, their gradients and their states."""


class MasterOptimizer(torch.optim.Optimizer):
    """Base class: clipping or skipping of the next step by tensors on the device, and the state that is saved."""

    state_names: tuple[str, ...]
    """Names of the per-parameter tensors, each of the parameter's shape and dtype."""
    matrices: MatrixUpdates | None = None
    """Updates of the parameters that consist of matrices, by Muon; None if all have the optimizer's own."""
    grad_scale: Tensor | None = None
    """[] or [1], fp32: divisor of the gradients in the next step; torch's GradScaler sets it on fused optimizers."""
    found_inf: Tensor | None = None
    """[1], fp32: if not 0, the next step changes nothing but its count."""
    model_params: Mapping[Tensor, Tensor] | None = None
    """16-bit model parameter of each main parameter; None until they are known."""
    has_copied = False
    """Whether the last step has updated ``model_params``, too."""

    def uncount_step(self) -> None:
        """Decrement the step count after a step that ``found_inf`` skipped."""
        for group in self.param_groups:
            if "step" in group:
                group["step"] -= 1

    def materialize_state(self) -> None:
        """Create zero states for all parameters that have none."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)

    def state_names_of(self, parameter: Tensor) -> tuple[str, ...]:
        """Names of one parameter's tensors: the momentum of matrices is called ``exp_avg``, as that of SGD."""
        if self._has_matrices(parameter):
            return ("exp_avg",)
        return self.state_names

    def _has_matrices(self, parameter: Tensor) -> bool:
        return self.matrices is not None and parameter in self.matrices

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        for name in self.state_names_of(parameter):
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _kernel_inputs(self, group: dict[str, Any]) -> _KernelInputs:
        parameters = [
            parameter
            for parameter in group["params"]
            if parameter.grad is not None and not self._has_matrices(parameter)
        ]
        gradients = [parameter.grad for parameter in parameters]
        states = [self._state_of(parameter) for parameter in parameters]
        return parameters, gradients, states


class FusedAdam(MasterOptimizer):
    """AdamW or Adam, with a few kernels for all parameters of a group.

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
        """Accept the arguments that ``megatron.core.optimizer`` passes to Apex's FusedAdam.

        Args:
            params: Parameters or parameter groups.
            lr: Learning rate.
            weight_decay: Decay coefficient; see ``adam_w_mode``.
            betas: Decay of the first and of the second moment.
            eps: Added to the square root of the second moment.
            adam_w_mode: Whether the decay acts on the weight (AdamW) instead of the gradient.
            capturable: Always False, as the engine's option for an optimizer in a CUDA graph (0.19) is not offered.
        """
        self.adam_w_mode = adam_w_mode
        self.state_names = ("exp_avg", "exp_avg_sq")
        self._tables: dict[int, Any] = {}
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "betas": betas,
                "eps": eps,
                "step": 0,
            },
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; ``step`` is incremented in all groups, also empty ones."""
        self._step_adam()
        if self.matrices is None:
            return
        momenta = {master: self._state_of(master)["exp_avg"] for master in self.matrices.masters}
        self.matrices.step(self.param_groups, momenta, self.grad_scale, self.found_inf)
        if self.has_copied:
            # The kernel has copied its own parameters alone.
            model_params = self.model_params or {}
            masters = [master for master in self.matrices.masters if master in model_params]
            copy(masters, [model_params[master] for master in masters])

    def _step_adam(self) -> None:
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for group in self.param_groups:
            group["step"] += 1
            parameters, gradients, states = self._kernel_inputs(group)
            if not parameters:
                continue
            dtypes = (parameters[0].dtype, gradients[0].dtype)
            if parameters[0].is_cuda and dtypes == (torch.float32, torch.float32):
                self._step_triton(group, parameters, gradients, states)
                continue
            # The kernel reads one step tensor per parameter and writes none, so all can be the same.
            step = torch.full(
                (),
                float(group["step"]),
                dtype=torch.float32,
                device=parameters[0].device,
            )
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

    def _step_triton(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
    ) -> None:
        # Imported here: Triton is on GPUs only.
        from lightning_megatron.engine.ops.triton.adam import adam_step, adam_table

        model_params = self.model_params or {}
        lows = [model_params.get(parameter) for parameter in parameters]
        moments = ([state[name] for state in states] for name in self.state_names)
        lists: tuple[Sequence[Tensor | None], ...] = (parameters, gradients, *moments, lows)
        key = tuple(_addresses(tensors) for tensors in lists)
        known_key, table = self._tables.get(id(group), (None, None))
        if known_key != key:
            sizes = [parameter.numel() for parameter in parameters]
            table = adam_table(key, sizes, parameters[0].device)
            self._tables[id(group)] = (key, table)
        low_dtypes = [low.dtype for low in lows if low is not None]
        self.has_copied = self.model_params is not None
        adam_step(
            table,
            low_dtypes[0] if low_dtypes else None,
            group,
            self.grad_scale,
            self.found_inf,
            decoupled=self.adam_w_mode,
        )


def _addresses(tensors: Iterable[Tensor | None]) -> tuple[int, ...]:
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)


class FusedSGD(MasterOptimizer):
    """SGD with momentum, which is stored as ``exp_avg``: the engine's checkpoints know only Adam's names."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
    ) -> None:
        """Accept the arguments that ``megatron.core.optimizer`` passes to torch's SGD.

        Args:
            params: Parameters or parameter groups.
            lr: Learning rate.
            weight_decay: Multiple of the weight that is added to the gradient.
            momentum: Decay of the accumulated gradient; 0 keeps no state.
        """
        self.state_names = ("exp_avg",) if momentum != 0.0 else ()
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
            },
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters, gradients, states = self._kernel_inputs(group)
            if not parameters:
                continue
            momenta = []
            if group["momentum"] != 0.0:
                momenta = [state["exp_avg"] for state in states]
            torch._fused_sgd_(
                parameters,
                gradients,
                momenta,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
                # With a momentum of zeros the first step equals that of torch's SGD.
                is_first_step=False,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )


# ---- patches of Megatron's optimizers --------------------------------------------------------------------------------


def with_leaf_shards(original: Callable[..., Any]) -> Any:
    """``_build_model_and_main_param_groups`` with leaf tensors as float32 shards, not nodes of an autograd graph."""
    return staticmethod(torch.no_grad()(original))


def copy(
    this: Sequence[Tensor],
    that: Sequence[Tensor],
    overflow_buf: Tensor | None = None,
) -> None:
    """Copy each tensor of ``this`` into its partner in ``that``; the dtypes may differ."""
    if this:
        torch._foreach_copy_(list(that), list(this))


def _shard_in_buffer(optimizer: Any, parameter: Tensor) -> Tensor:
    buffer_index, _, bucket_index = optimizer.model_param_gbuf_map[parameter]
    shard = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
    bucket: Tensor = optimizer.buffers[buffer_index].buckets[bucket_index].param_data
    return bucket.view(-1)[shard.start : shard.end]


@torch.no_grad()
def copy_shards(self: Any) -> None:
    """``DistributedOptimizer._copy_main_params_to_model_params`` with one copy of all updated shards.

    Shards of float32 weights are views of the weights' buffer and need no copy.
    """
    if self.is_stub_optimizer:
        return
    masters: MasterOptimizer = self.optimizer
    if masters.model_params is None:  # built once: the GPU may be idle while the host is here
        masters.model_params = {
            main: _shard_in_buffer(self, parameter)
            for pair in zip(
                self.shard_fp32_from_float16_groups, self.model_float16_groups, strict=True
            )
            for main, parameter in zip(*pair, strict=True)
        }
    if not masters.has_copied:
        copy(list(masters.model_params), list(masters.model_params.values()))
    masters.has_copied = False
