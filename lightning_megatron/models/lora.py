"""Low-rank adapters (LoRA) of frozen column- and row-parallel linears, in any layout.

Hu et al. 2021 (arXiv 2106.09685): a frozen linear's output ``x W^T`` becomes ``x W^T + alpha / r * x A^T B^T``.

- Sharded over tp like the linear: of a column-parallel one, A is replicated and B has the shard's rows of W; of a
  row-parallel one, A has the shard's columns of W and B is replicated; of a replicated one, both are. Ranks exchange
  r values per token and adapter, not h.
- A linear that fuses several matrices (q, k, v; gate and up) has one adapter per matrix, as in ``peft``: their A are
  stacked ([n r, in], one matmul), and B has the rows of W, each of which reads only the r values of its own matrix. So
  B is sharded, ordered, converted and saved exactly like the rows of W. Rows of a matrix without an adapter stay zero.
- A forward hook adds the adapter's output: bias, fp8, recomputation and CUDA graphs of the linear are not affected.
- An adapter is a sibling of its linear, not a submodule: a linear's ``sharded_state_dict`` includes all submodules.
- Each routed expert has adapters of its own: two grouped products for each of the two grouped products of the experts.
  Gate and up have one adapter together, as in ``peft``, to which they are one parameter. Experts are not split over tp,
  so neither are A and B: their gradients are summed over the ranks that have the same experts, as those of experts are.

Rejected: a separate B for each fused matrix (three matmuls and a concatenation in Megatron's order of heads for each
linear), and merging adapters into a copy of W before each step (memory of W, and rounding in bf16).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from lightning_megatron.engine.ops.experts import (
    GroupedExperts,
    grouped_matmul,
    mark_as_of_experts,
)
from lightning_megatron.engine.ops.random_state import forked
from lightning_megatron.engine.ops.replicated_linear import ReplicatedLinear
from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.models.adapter_names import (
    ADAPTER_SUFFIX,
    is_trained_with_lora,
    module_of_matrices,
)
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.models.matrices import matrix_of_rows, num_fused

_LAYER = re.compile(r"(\blayers)\.\d+\.")
_ROW_BYTES = 16
"""``grouped_mm`` multiplies matrices whose rows are multiples of this."""


def without_layer(name: str) -> str:
    """Name of a module or weight without the number of its layer."""
    return _LAYER.sub(r"\1.", name)


class LowRank(torch.nn.Module):
    """Base of adapters: what merging them, and computing without them, needs."""

    def __init__(self, scale: float) -> None:
        """Create it without weights.

        Args:
            scale: Factor of the output.
        """
        super().__init__()
        self.scale = scale
        self.is_off = False
        """Whether the base alone computes, as within ``adapters_off``."""

    @property
    def weight(self) -> torch.nn.Parameter:
        """This rank's shard of the frozen weight."""
        raise NotImplementedError

    def delta(self) -> Tensor:
        """Weight update that merging adds to ``weight``, in its shape, fp32."""
        raise NotImplementedError


class Adapter(LowRank):
    """The adapters of one linear.

    Attributes:
        A: [n r, in] for n adapted matrices, or [n r, in/tp] for a row-parallel linear.
        B: [out/tp, r], or [out, r] for a row-parallel or a replicated linear; initially zero.
    """

    def __init__(
        self,
        linear: ColumnParallelLinear | RowParallelLinear | ReplicatedLinear,
        name: str,
        parts: tuple[bool, ...],
        rank: int,
        model: ModelConfig,
    ) -> None:
        """Create uninitialized adapters, and hook them to ``linear``.

        Args:
            linear: The base linear; its output includes the adapters from now on.
            name: Name of the linear, e.g. ``linear_qkv``.
            parts: Which of its fused matrices have an adapter, as in ``Adapters.linears``.
            rank: Their rank.
            model: The model's config.
        """
        assert model.lora is not None
        super().__init__(model.lora.scale)
        self.rank = rank
        self.dropout = model.lora_dropout
        self.base = (linear,)  # in a tuple, so that it is no submodule
        self.is_row = isinstance(linear, RowParallelLinear)
        self.is_gated = name == "linear_fc1" and model.gated_linear_unit
        base = linear.weight
        rows, columns = base.shape
        self.A = torch.nn.Parameter(base.new_empty(sum(parts) * self.rank, columns))
        self.B = torch.nn.Parameter(base.new_empty(rows, self.rank))
        self.is_replicated = isinstance(linear, ReplicatedLinear)
        shard = self.A if self.is_row else self.B
        full = [self.B if self.is_row else self.A]
        if self.is_replicated:
            full.append(shard)
        else:
            set_tensor_model_parallel_attributes(shard, True, int(self.is_row), 1)
        # Megatron sums its gradients over the tp group, whose ranks have seen a shard of the sequence each.
        is_split = linear.config.sequence_parallel and linear.tp_group.size() > 1
        for weight in full:
            weight.sequence_parallel = is_split  # type: ignore[attr-defined]
        self.owners: Tensor | None
        self.register_buffer("owners", None, persistent=False)
        """[out/tp, n], 1 for the matrix that a row of B belongs to; None for a linear with one matrix."""
        if len(parts) > 1:
            adapted = torch.eye(len(parts), dtype=base.dtype)[:, list(parts)]
            numbers = matrix_of_rows(name, linear)
            modules = module_of_matrices(num_fused(name, linear.config), len(parts))
            owners = adapted[torch.tensor(modules)[numbers]]
            self.owners = owners.to(base.device)
        # Before hooks that need the sum, e.g. norms.
        linear.register_forward_hook(self._add, prepend=True)

    def _add(
        self,
        linear: Any,
        inputs: tuple[Tensor, ...],
        output: tuple[Tensor, Any],
    ) -> tuple[Tensor, Any]:
        if self.is_off:
            return output
        # Called as a module: with overlapped parameter all-gathers, module hooks wait for the parameters.
        return self(inputs[0], output[0]), output[1]

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        """Add the adapters' output to the base's.

        Args:
            x: Input of the base: [s, b, in] or [s/tp, b, in]; row-parallel [s, b, in/tp].
            output: Output of the base: [s, b, out/tp]; row-parallel or replicated [s, b, out] or [s/tp, b, out].

        Returns:
            Their sum, in ``output``'s shape.
        """
        (linear,) = self.base
        low = self._project_down(x)
        if linear.tp_group.size() > 1 and not self.is_replicated:
            # Column-parallel: the gradient of ``low`` is summed over ranks, as each uses it for its rows of B.
            # Row-parallel: ``low`` itself is summed, as each rank computes it from its columns of A.
            if self.is_row and linear.sequence_parallel:
                communicate = reduce_scatter_to_sequence_parallel_region
            elif self.is_row:
                communicate = reduce_from_tensor_model_parallel_region
            elif linear.sequence_parallel:
                communicate = gather_from_sequence_parallel_region
            else:
                communicate = copy_to_tensor_model_parallel_region
            low = communicate(low, group=linear.tp_group)
        flat = output.reshape(-1, output.shape[-1])
        low = low.reshape(len(flat), -1)
        total = torch.addmm(flat, low, self._expanded_b().t(), alpha=self.scale)
        return total.view_as(output)

    def _project_down(self, x: Tensor) -> Tensor:
        """Multiply the input with A, [..., n r]; dropout is independent for each adapter."""
        if not (self.training and self.dropout > 0.0):
            return F.linear(x, self.A)
        (linear,) = self.base
        # Each rank has different columns; with sequence parallelism the entire layer already runs in the RNG fork.
        forks = self.is_row and linear.tp_group.size() > 1 and not linear.sequence_parallel
        with forked(forks):
            projected = [
                F.linear(F.dropout(x, self.dropout), of_adapter)
                for of_adapter in self.A.split(self.rank)
            ]
        return torch.cat(projected, dim=-1)

    def _expanded_b(self) -> Tensor:
        """[out/tp, n r]: B with each row in the columns of its matrix, and zeros elsewhere."""
        if self.owners is None:
            return self.B
        expanded = self.owners[:, :, None] * self.B[:, None, :]
        return expanded.flatten(1)

    @property
    def weight(self) -> torch.nn.Parameter:
        """Weight of the linear: [out/tp, in], or [out, in/tp] of a row-parallel one."""
        (linear,) = self.base
        return linear.weight

    @property
    def num_unused(self) -> int:
        """Elements of B in rows of matrices without an adapter, which stay zero."""
        if self.owners is None:
            return 0
        is_unused = self.owners.sum(dim=1) == 0
        return int(is_unused.sum()) * self.rank

    def delta(self) -> Tensor:
        """See ``LowRank``."""
        product = self._expanded_b().float() @ self.A.float()
        return self.scale * product

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Any = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sharded state dict of A and B."""
        (linear,) = self.base
        axes = {"A": 1} if self.is_row else {"B": 0}
        if self.is_replicated:
            axes = {}
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            axes,
            sharded_offsets,
            tp_group=linear.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        if self.is_gated:
            state[f"{prefix}B"] = apply_swiglu_sharded_factory(state[f"{prefix}B"], sharded_offsets)
        return state


class ExpertAdapter(LowRank):
    """The adapters of one linear of all experts of a rank, which ``GroupedExperts`` calls.

    Attributes:
        A: [experts/ep, r, in].
        B: [experts/ep, out, r]; initially zero.
    """

    def __init__(
        self,
        experts: GroupedExperts,
        name: str,
        rank: int,
        model: ModelConfig,
    ) -> None:
        """Create uninitialized adapters.

        Args:
            experts: The experts.
            name: Name of their linear, ``linear_fc1`` or ``linear_fc2``.
            rank: Rank of the adapters.
            model: The model's config.
        """
        assert model.lora is not None
        super().__init__(model.lora.scale)
        self.dropout = model.lora_dropout
        self.base = (experts, name)  # in a tuple, so that it is no submodule
        count, rows, columns = self.weight.shape
        self.A = torch.nn.Parameter(self.weight.new_empty(count, rank, columns))
        self.B = torch.nn.Parameter(self.weight.new_empty(count, rows, rank))
        for weight in (self.A, self.B):
            mark_as_of_experts(weight)

    @property
    def weight(self) -> torch.nn.Parameter:
        """Weights of the experts' linear, [experts/ep, out, in]."""
        experts, name = self.base
        weight: torch.nn.Parameter = experts.get_parameter(name)
        return weight

    def forward(
        self,
        tokens: Tensor,
        output: Tensor,
        ends: Tensor,
    ) -> Tensor:
        """Add the adapters' output to that of the experts' linear.

        Args:
            tokens: Input of the linear, [n, in], sorted by expert.
            output: Its output, [n, out].
            ends: [experts/ep], int32: end of each expert's tokens.

        Returns:
            Their sum, [n, out].
        """
        if self.is_off:
            return output
        if self.training and self.dropout > 0.0:
            # Each tp rank has tokens of its own, and with sequence parallelism, which experts need there, the entire
            # layer already runs in the RNG fork.
            tokens = F.dropout(tokens, self.dropout)
        # A rank that has no such size is filled up with zeros.
        missing = -self.A.shape[1] % (_ROW_BYTES // self.A.element_size())
        a: Tensor = self.A
        b: Tensor = self.B
        if missing:
            a = F.pad(a, (0, 0, 0, missing))
            b = F.pad(b, (0, missing))
        low = grouped_matmul(tokens, a, ends)
        return torch.add(output, grouped_matmul(low, b, ends), alpha=self.scale)

    def delta(self) -> Tensor:
        """See ``LowRank``."""
        return self.scale * torch.bmm(self.B.float(), self.A.float())


def add_adapters(chunk: torch.nn.Module, model: ModelConfig) -> None:
    """Add LoRA adapters to the linears of ``chunk`` and freeze all other weights, if ``model.lora`` is set."""
    if model.lora is None:
        return
    parts_by_linear = dict(model.lora.linears)
    for path, module in list(chunk.named_modules()):
        key = without_layer(path)
        if isinstance(module, GroupedExperts):
            _add_to_experts(module, key, model)
        elif key in parts_by_linear:
            parent, _, name = path.rpartition(".")
            rank = model.lora.rank_of(key)
            adapter = Adapter(module, name, parts_by_linear[key], rank, model)
            chunk.get_submodule(parent).add_module(name + ADAPTER_SUFFIX, adapter)
    freeze_base(chunk)


def _add_to_experts(experts: GroupedExperts, key: str, model: ModelConfig) -> None:
    assert model.lora is not None
    adapted = dict(model.lora.linears)
    for name in ("linear_fc1", "linear_fc2"):
        linear = f"{key}.experts.{name}"
        if linear in adapted:
            adapter = ExpertAdapter(experts, name, model.lora.rank_of(linear), model)
            experts.add_module(name + ADAPTER_SUFFIX, adapter)


def freeze_base(chunk: torch.nn.Module) -> None:
    """Freeze all weights but adapters and a classification head."""
    for name, weight in chunk.named_parameters():
        weight.requires_grad_(is_trained_with_lora(name))


@contextlib.contextmanager
def adapters_off(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within the context, the model computes without its adapters."""
    adapters = [
        module for chunk in chunks for module in chunk.modules() if isinstance(module, LowRank)
    ]
    for adapter in adapters:
        adapter.is_off = True
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_off = False


@contextlib.contextmanager
def merged(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within the context, replace adapters by merged weights ``W + alpha / r * B A``, rounded to the weights' dtype.

    Each rank merges its own shard, without communication. Needs memory for a second copy of the adapted weights.
    """
    replaced: list[tuple[torch.nn.Module, str, LowRank, Tensor]] = []
    for chunk in chunks:
        for parent in unwrap(chunk).modules():
            for name, child in parent.named_children():
                if isinstance(child, LowRank):
                    replaced.append((parent, name, child, child.weight.data))
    with torch.no_grad():
        for parent, name, child, weight in replaced:
            delattr(parent, name)
            updated = weight.float() + child.delta()
            child.weight.data = updated.to(weight.dtype)
    try:
        yield
    finally:
        for parent, name, child, weight in replaced:
            parent.add_module(name, child)
            child.weight.data = weight
