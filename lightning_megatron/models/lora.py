"""Low-rank adapters (LoRA) beside the frozen column- and row-parallel linears of layers, at any layout.

Hu et al. 2021 (arXiv 2106.09685): a frozen linear's output ``x W^T`` becomes ``x W^T + alpha / r * x A^T B^T``.

- Split over tp as the linear is: column-parallel has A whole on every rank and the rows of B that belong to its rows of
  W; row-parallel has its columns of A, and B whole. What crosses ranks is r numbers a token and adapter, not h.
- A linear that fuses several matrices (q, k, v; gate and up) has the adapters of each, as ``peft`` has them: their A
  one below the other ([n r, in], one product), and B with the rows of W, each of which reads only the r numbers of its
  own matrix. So the weights of B are cut, ordered, converted and saved exactly as the rows of W are. Rows of a matrix
  without an adapter stay zero.
- A forward hook adds to what the linear gives: bias, fp8, recomputation and CUDA graphs are the linear's own affair.
- Beside the base, not under it in the tree of modules: a linear's ``sharded_state_dict`` takes all that is below it.

Rejected: B with a separate weight for each fused matrix (three products and a concatenation in Megatron's order of
heads for each linear), and adapters merged into a copy of W before each step (memory of W, and rounding in bf16).
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
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from lightning_megatron.engine.adapter_names import ADAPTER_SUFFIX, is_adapter
from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.models.config import ModelConfig

_LAYER = re.compile(r"(\blayers)\.\d+\.")


class Adapter(torch.nn.Module):
    """The adapters of one linear.

    Attributes:
        A: [n r, in] for n adapted matrices, or [n r, in/tp] beside a row-parallel linear.
        B: [out/tp, r], or [out, r] beside a row-parallel linear; zero at first.
    """

    def __init__(
        self, linear: ColumnParallelLinear | RowParallelLinear, name: str, parts: tuple[bool, ...], model: ModelConfig
    ) -> None:
        """Create the adapters, not yet filled.

        Args:
            linear: The base, whose forward pass adds this from now on.
            name: Its own, e.g. ``linear_qkv``.
            parts: As ``Adapters.linears``.
            model: The description.
        """
        super().__init__()
        assert model.lora is not None
        self.rank, self.scale, self.dropout = model.lora.rank, model.lora.alpha / model.lora.rank, model.lora_dropout
        self.base = (linear,)  # no sub-module
        self.is_row = isinstance(linear, RowParallelLinear)
        self.is_gated = name == "linear_fc1" and model.gated_linear_unit
        weight, config = linear.weight, linear.config
        make = {"dtype": weight.dtype, "device": weight.device}
        self.A = torch.nn.Parameter(torch.empty(sum(parts) * self.rank, weight.shape[1], **make))
        self.B = torch.nn.Parameter(torch.empty(weight.shape[0], self.rank, **make))
        split, whole = (self.A, self.B) if self.is_row else (self.B, self.A)
        set_tensor_model_parallel_attributes(split, True, int(self.is_row), 1)
        # Megatron then adds up the gradients of the ranks, which have seen a part of the sequence each.
        whole.sequence_parallel = config.sequence_parallel and linear.tp_group.size() > 1  # type: ignore[attr-defined]
        self.owners: Tensor | None
        self.register_buffer("owners", None, persistent=False)
        """[out/tp, n], 1 for the matrix that a row of B belongs to; None if there is one matrix."""
        if len(parts) > 1:
            adapted = torch.eye(len(parts), dtype=weight.dtype)[:, list(parts)]
            self.owners = adapted[_part_of_rows(linear, name, model)].to(weight.device)
        linear.register_forward_hook(self._add, prepend=True)  # before what is done with the sum: norms, caps

    def _add(self, linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        # Called as a module: where parameters are gathered late, hooks of modules wait for them.
        return self(inputs[0], output[0]), output[1]

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        """What the base gives, and its adapters.

        Args:
            x: What the base reads: [s, b, in] or [s/tp, b, in], of row-parallel ones [s, b, in/tp].
            output: [s, b, out/tp], or of row-parallel ones [s, b, out] or [s/tp, b, out].

        Returns:
            Of ``output``'s shape.
        """
        (linear,) = self.base
        group, is_split = linear.tp_group, linear.sequence_parallel
        low = self._low(x)
        if group.size() > 1:
            # Beside a column-parallel linear the gradient of ``low`` is summed over the ranks, each of which has used
            # it for its rows; beside a row-parallel one ``low`` itself is, of which each has seen its columns.
            scatter, gather = reduce_scatter_to_sequence_parallel_region, gather_from_sequence_parallel_region
            add, copy = reduce_from_tensor_model_parallel_region, copy_to_tensor_model_parallel_region
            cross = (scatter if is_split else add) if self.is_row else (gather if is_split else copy)
            low = cross(low, group=group)
        flat = output.reshape(-1, output.shape[-1])
        return torch.addmm(flat, low.reshape(len(flat), -1), self._wide_b().t(), alpha=self.scale).view_as(output)

    def _low(self, x: Tensor) -> Tensor:
        """[..., n r]: each adapter drops numbers of its own."""
        if not (self.training and self.dropout > 0.0):
            return F.linear(x, self.A)
        (linear,) = self.base
        # Each rank has other columns; with sequence parallelism the whole layer already runs in the fork.
        forks = self.is_row and linear.tp_group.size() > 1 and not linear.sequence_parallel
        with get_cuda_rng_tracker().fork() if forks else contextlib.nullcontext():
            return torch.cat([F.linear(F.dropout(x, self.dropout), a) for a in self.A.split(self.rank)], dim=-1)

    def _wide_b(self) -> Tensor:
        """[out/tp, n r]: B with each row in the columns of its matrix, and zeros elsewhere."""
        if self.owners is None:
            return self.B
        return (self.owners[:, :, None] * self.B[:, None, :]).flatten(1)

    def delta(self) -> Tensor:
        """[out/tp, in] or [out, in/tp], fp32: what merging adds to this rank's part of the base."""
        return self.scale * (self._wide_b().float() @ self.A.float())

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Where A and B lie in the whole model."""
        (linear,) = self.base
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"A": 1} if self.is_row else {"B": 0},
            sharded_offsets,
            tp_group=linear.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        if self.is_gated:
            state[f"{prefix}B"] = apply_swiglu_sharded_factory(state[f"{prefix}B"], sharded_offsets)
        return state


def _part_of_rows(linear: ColumnParallelLinear, name: str, model: ModelConfig) -> Tensor:
    """[out/tp], int64: which of the matrices that a linear fuses each of this rank's rows is of."""
    if name == "linear_fc1":
        return torch.arange(2).repeat_interleave(linear.output_size_per_partition // 2)
    per_group = model.num_attention_heads // model.num_query_groups
    of_group = torch.tensor([0] * per_group + [1, 2] if name == "linear_qkv" else [0, 1])
    rows = of_group.repeat_interleave(model.kv_channels).repeat(model.num_query_groups)
    mine: Tensor = rows.chunk(linear.tp_group.size())[linear.tp_group.rank()]
    return mine


def add_adapters(chunk: torch.nn.Module, model: ModelConfig) -> None:
    """Freeze ``chunk`` and put adapters beside its linears, if ``model`` says so."""
    if model.lora is None:
        return
    wanted = dict(model.lora.linears)
    for path, linear in list(chunk.named_modules()):
        parts = wanted.get(_LAYER.sub(r"\1.", path))
        if parts is not None:
            parent, _, name = path.rpartition(".")
            chunk.get_submodule(parent).add_module(name + ADAPTER_SUFFIX, Adapter(linear, name, parts, model))
    freeze_base(chunk)


def freeze_base(chunk: torch.nn.Module) -> None:
    """Have only adapters trained."""
    for name, weight in chunk.named_parameters():
        weight.requires_grad_(is_adapter(name))


@contextlib.contextmanager
def merged(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within it chunks have no adapters, and weights that compute the same: ``W + alpha / r * B A``, rounded.

    Each rank merges its own part; no communication. Needs the memory of the adapted weights once more.
    """
    modules = [module for chunk in chunks for module in unwrap(chunk).modules()]
    found = [
        (parent, name, child)
        for parent in modules
        for name, child in parent.named_children()
        if isinstance(child, Adapter)
    ]
    before = [child.base[0].weight.data for _, _, child in found]
    with torch.no_grad():
        for (parent, name, child), weight in zip(found, before, strict=True):
            delattr(parent, name)
            child.base[0].weight.data = (weight.float() + child.delta()).to(weight.dtype)
    try:
        yield
    finally:
        for (parent, name, child), weight in zip(found, before, strict=True):
            parent.add_module(name, child)
            child.base[0].weight.data = weight
