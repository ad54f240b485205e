"""AdamW, Adam and SGD on fused kernels, which clip gradients and skip non-finite steps without a host synchronization.

megatron-core 0.16.1 uses Transformer Engine's or Apex's Adam, with a pass before it that clips and one after it that
copies the weights, or else ``torch.optim.AdamW``, unfused. These optimizers keep Apex's conventions, which checkpoints
rely on: ``step`` is an integer of the parameter group, moments are called ``exp_avg`` and ``exp_avg_sq``. They are used
whatever is installed: on a GPU one kernel clips, updates and copies (``triton/adam.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_megatron.engine.host_state import HostState, StagedPiece, is_placeholder
from lightning_megatron.engine.ops.muon import MatrixState, MatrixUpdates


class KernelInputs(NamedTuple):
    """What a kernel updates, on the device: parameters of a group, or consecutive elements of them."""

    weights: list[Tensor]
    gradients: list[Tensor]
    moments: list[Mapping[str, Tensor]]
    lows: list[Tensor | None]
    """16-bit weights to be written, too; None where they are not known yet, or the masters are the weights."""


class MasterOptimizer(torch.optim.Optimizer):
    """Base class: clipping or skipping of the next step by tensors on the device, and the state that is saved."""

    state_names: tuple[str, ...]
    """Names of the per-parameter tensors, each of the parameter's shape and dtype."""
    matrices: MatrixUpdates | None = None
    """Updates of the parameters that consist of matrices, by Muon; None if all have the optimizer's own."""
    host: HostState | None = None
    """State of parameters that is in host memory; None if all is on the device."""
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

    # ---- its state ------------------------------------------------------------------------------------------------

    def materialize_state(self) -> None:
        """Create zero states for all parameters that have none."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)

    def keep_on_host(self, host: HostState) -> None:
        """Use the state of ``host`` for its parameters."""
        self.host = host
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in host:
                    self.state[parameter] = host.moments_of(parameter)

    def state_names_of(self, parameter: Tensor) -> tuple[str, ...]:
        """Names of one parameter's tensors: the momentum of matrices is called ``exp_avg``, as that of SGD."""
        if self._has_matrices(parameter):
            return ("exp_avg",)
        return self.state_names

    def master_of(self, parameter: Tensor) -> Tensor:
        """Master weights of one of its parameters: the parameter itself, or a tensor on the host."""
        if self.host is None or parameter not in self.host:
            return parameter
        return self.host.master_of(parameter)

    def _has_matrices(self, parameter: Tensor) -> bool:
        return self.matrices is not None and parameter in self.matrices

    def _is_on_host(self, parameter: Tensor) -> bool:
        return self.host is not None and parameter in self.host

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        for name in self.state_names_of(parameter):
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    # ---- a step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        self._count_step()
        for index, group in enumerate(self.param_groups):
            inputs = self._inputs_on_device(group)
            if inputs.weights:
                self._update(group, inputs, (index, None))
        if self.host is not None:
            self._update_from_host(self.host)
        if self.matrices is not None:
            self.matrices.step(
                self.param_groups,
                self._matrix_states(self.matrices),
                self.grad_scale,
                self.found_inf,
            )

    def _count_step(self) -> None:
        """Count a step in all groups, also empty ones, if the optimizer's update depends on it."""

    def _update(
        self,
        group: dict[str, Any],
        inputs: KernelInputs,
        number: tuple[int, int | None],
    ) -> None:
        """Update parameters of a group, or some elements of them.

        Args:
            group: The parameter group.
            inputs: They, on the device.
            number: Numbers of the group and of the bucket; None for the state that stays on the device.
        """
        raise NotImplementedError

    def _write_lows(self, weights: Sequence[Tensor], lows: Sequence[Tensor | None]) -> None:
        """Copy master weights into 16-bit weights, where there are some."""
        pairs = [(high, low) for high, low in zip(weights, lows, strict=True) if low is not None]
        copy([high for high, _ in pairs], [low for _, low in pairs])
        self.has_copied = self.model_params is not None

    def _inputs_on_device(self, group: dict[str, Any]) -> KernelInputs:
        model_params = self.model_params or {}
        inputs = KernelInputs([], [], [], [])
        for parameter in group["params"]:
            is_elsewhere = self._has_matrices(parameter) or self._is_on_host(parameter)
            if parameter.grad is None or is_elsewhere:
                continue
            inputs.weights.append(parameter)
            inputs.gradients.append(parameter.grad)
            inputs.moments.append(self._state_of(parameter))
            inputs.lows.append(model_params.get(parameter))
        return inputs

    def _update_from_host(self, host: HostState) -> None:
        group_of: dict[Tensor, int] = {}
        for index, group in enumerate(self.param_groups):
            group_of |= dict.fromkeys(group["params"], index)
        for number, pieces in enumerate(host.stage(host.buckets)):
            of_groups: dict[int, KernelInputs] = {}
            for piece in pieces:
                gradient = piece.gradient
                if gradient is None:
                    continue
                inputs = of_groups.setdefault(group_of[piece.master], KernelInputs([], [], [], []))
                inputs.weights.append(piece.weights)
                inputs.gradients.append(gradient)
                inputs.moments.append(piece.moments)
                inputs.lows.append(piece.low)
            for index, inputs in of_groups.items():
                self._update(self.param_groups[index], inputs, (index, number))

    def _matrix_states(self, matrices: MatrixUpdates) -> Iterator[Mapping[Tensor, MatrixState]]:
        """Master weights and momenta of each round's parameters on the device; afterwards copy to 16-bit weights."""
        rounds = matrices.rounds
        staged: Iterable[list[StagedPiece]] = [[] for _ in rounds]
        if self.host is not None:
            staged = self.host.stage(self.host.round_buckets)
        model_params = self.model_params or {}
        for masters, pieces in zip(rounds, staged, strict=True):
            states: dict[Tensor, MatrixState] = {}
            lows: dict[Tensor, Tensor] = {}
            for piece in pieces:
                states[piece.master] = MatrixState(piece.weights, piece.moments["exp_avg"])
                if piece.low is not None:
                    lows[piece.master] = piece.low
            for master in masters:
                if master in states:
                    continue
                momentum = self._state_of(master)["exp_avg"]
                states[master] = MatrixState(master.view(-1), momentum.view(-1))
                if self.has_copied and master in model_params:
                    # The kernel has copied its own parameters alone.
                    lows[master] = model_params[master].view(-1)
            yield states
            copy([states[master].weights for master in lows], list(lows.values()))


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
        self._tables: dict[tuple[int, int | None], Any] = {}
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

    def _count_step(self) -> None:
        for group in self.param_groups:
            group["step"] += 1

    def _update(
        self,
        group: dict[str, Any],
        inputs: KernelInputs,
        number: tuple[int, int | None],
    ) -> None:
        weights, gradients, moments, lows = inputs
        dtypes = (weights[0].dtype, gradients[0].dtype)
        if weights[0].is_cuda and dtypes == (torch.float32, torch.float32):
            self._update_by_triton(group, inputs, number)
            return
        # The kernel reads one step tensor per parameter and writes none, so all can be the same.
        step = torch.full(
            (),
            float(group["step"]),
            dtype=torch.float32,
            device=weights[0].device,
        )
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        kernel(
            weights,
            gradients,
            [state["exp_avg"] for state in moments],
            [state["exp_avg_sq"] for state in moments],
            [],
            [step] * len(weights),
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
        self._write_lows(weights, lows)

    def _update_by_triton(
        self,
        group: dict[str, Any],
        inputs: KernelInputs,
        number: tuple[int, int | None],
    ) -> None:
        # Imported here: Triton is on GPUs only.
        from lightning_megatron.engine.ops.triton.adam import adam_step, adam_table

        weights, gradients, states, lows = inputs
        moments = ([state[name] for state in states] for name in self.state_names)
        lists: tuple[Sequence[Tensor | None], ...] = (weights, gradients, *moments, lows)
        key = tuple(_addresses(tensors) for tensors in lists)
        known_key, table = self._tables.get(number, (None, None))
        if known_key != key:
            sizes = [each.numel() for each in weights]
            table = adam_table(key, sizes, weights[0].device)
            self._tables[number] = (key, table)
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

    def _update(
        self,
        group: dict[str, Any],
        inputs: KernelInputs,
        number: tuple[int, int | None],
    ) -> None:
        weights, gradients, moments, lows = inputs
        momenta = []
        if group["momentum"] != 0.0:
            momenta = [state["exp_avg"] for state in moments]
        torch._fused_sgd_(
            weights,
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
        self._write_lows(weights, lows)


# ---- patches of Megatron's optimizers --------------------------------------------------------------------------------


def with_leaf_shards(original: Callable[..., Any]) -> Any:
    """``_build_model_and_main_param_groups`` with leaf tensors as float32 shards, not nodes of an autograd graph."""
    return staticmethod(torch.no_grad()(original))


def copy(
    this: Sequence[Tensor],
    that: Sequence[Tensor],
    overflow_buf: Tensor | None = None,
) -> None:
    """Copy each tensor of ``this`` into its partner in ``that``; the dtypes may differ.

    A master weight whose memory is on the host is left out: its update has written the 16-bit weight.
    """
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    for source, target in zip(this, that, strict=True):
        if not is_placeholder(source):
            sources.append(source)
            targets.append(target)
    if sources:
        torch._foreach_copy_(targets, sources)


def keep_gradients(original: Callable[..., None]) -> Callable[..., None]:
    """``DistributedOptimizer.zero_grad`` that leaves gradients which are views of DDP's buffers where they are."""

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if not _has_views(self):
            original(self, set_to_none)

    return zero_grad


def use_kept_gradients(original: Callable[..., None]) -> Callable[..., None]:
    """``DistributedOptimizer._copy_model_grads_to_main_grads``, once for all steps if it makes views."""

    def copy_gradients(self: Any) -> None:
        if not _has_views(self):
            original(self)

    return copy_gradients


def _has_views(optimizer: Any) -> bool:
    """Whether the gradient of each master weight is a view of DDP's buffer, where each step writes it."""
    if optimizer.is_stub_optimizer or not optimizer.ddp_config.grad_reduce_in_fp32:
        return False
    groups = (*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups)
    return all(master.grad is not None for group in groups for master in group)


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
