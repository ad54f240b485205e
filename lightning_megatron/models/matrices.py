"""Which parameters of a model consist of matrices, as optimizers such as Muon want them, and of which."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from lightning_megatron.engine.ops.causal_convolution import CausalConvolution
from lightning_megatron.engine.ops.experts import ExpertBias, GroupedExperts
from lightning_megatron.engine.ops.matrix_shards import Matrices
from lightning_megatron.engine.ops.norms import Norm, NormOfAllHeads
from lightning_megatron.engine.ops.replicated_linear import ReplicatedLinear
from lightning_megatron.engine.ops.router import Router
from lightning_megatron.engine.wrap import unwrap
from lightning_megatron.errors import ConfigError, type_of
from lightning_megatron.models.config import ModelConfig

_IN_LAYER = re.compile(r"(^|\.)layers\.\d+\.")

_NO_MATRICES = (CausalConvolution, ExpertBias, Norm, NormOfAllHeads, Router, SharedExpertMLP)
"""Modules whose own parameters are biases, scales, a filter for each channel, or rows of scores of experts (those of a
gate)."""


def matrices_of(chunks: Iterable[torch.nn.Module]) -> dict[torch.nn.Parameter, Matrices]:
    """Weights of the linears of all layers: of attention, MLPs and experts.

    Queries, keys and values are matrices of their own, as are gate and up, the matrices of each expert, gates of
    attention, and rates and decays of linear attention. Not among them are embeddings, tables of positions, output
    layers and heads, routers, convolutions, norms and biases.

    Raises:
        ConfigError: If a layer has a weight of two or more axes of a kind that is unknown here.
    """
    found: dict[torch.nn.Parameter, Matrices] = {}
    for chunk in chunks:
        for path, module in unwrap(chunk).named_modules():
            if not _IN_LAYER.search(path):
                continue
            if isinstance(module, GroupedExperts):
                for weight in (module.linear_fc1, module.linear_fc2):
                    found[weight] = _of_experts(weight, module)
            elif isinstance(module, (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)):
                found[module.weight] = _of_linear(path.rpartition(".")[2], module)
            elif not isinstance(module, _NO_MATRICES):
                _check_known(path, module)
    return found


def check_matrices(model: ModelConfig) -> None:
    """Refuse models whose matrices are not to be orthogonalized.

    Raises:
        ConfigError: If the model has LoRA adapters.
    """
    if model.lora is not None:
        raise ConfigError(
            "optimizer muon: expected a model without adapters, got lora; use adamw: of the product of A and B, which "
            "is the change of the weight, an orthogonal step of each is no orthogonal step"
        )


def _check_known(path: str, module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() > 1:
            raise ConfigError(
                f"optimizer muon: expected linears of Megatron-Core or of this package in a layer, got {path}.{name} "
                f"of {type_of(module)}, which may be a matrix or not; use adamw"
            )


def _of_experts(weight: torch.nn.Parameter, module: GroupedExperts) -> Matrices:
    num_experts, rows, columns = weight.shape
    count = num_experts
    if module.config.gated_linear_unit and weight is module.linear_fc1:
        count *= 2
        rows //= 2
    # Not split over tp.
    blocks = tuple((number, rows) for number in range(count))
    return Matrices(columns=columns, blocks=blocks, count=count, axis=None)


def _of_linear(
    name: str,
    module: ColumnParallelLinear | RowParallelLinear | ReplicatedLinear,
) -> Matrices:
    rows, columns = module.weight.shape
    if isinstance(module, RowParallelLinear):
        return Matrices(columns=columns, blocks=((0, rows),), count=1, axis=1)
    if isinstance(module, ReplicatedLinear):
        return Matrices(columns=columns, blocks=((0, rows),), count=1, axis=None)
    of_rows = matrix_of_rows(name, module)
    numbers, counts = torch.unique_consecutive(of_rows, return_counts=True)
    return Matrices(
        columns=columns,
        blocks=tuple(zip(numbers.tolist(), counts.tolist(), strict=True)),
        count=num_fused(name, module.config),
        axis=0,
    )


def num_fused(name: str, config: TransformerConfig) -> int:
    """How many matrices a column-parallel linear of this name fuses."""
    if name == "linear_fc1" and config.gated_linear_unit:
        return 2
    if name == "linear_qkv" and config.attention_output_gate:
        return 4
    return {"linear_qkv": 3, "linear_kv": 2, "in_proj": 6}.get(name, 1)


def matrix_of_rows(name: str, linear: ColumnParallelLinear) -> torch.Tensor:
    """[out/tp], int64: number of the fused matrix that each of this rank's rows belongs to."""
    config = linear.config
    rows: int = linear.output_size_per_partition
    count = num_fused(name, config)
    if count == 1:
        return torch.zeros(rows, dtype=torch.int64)
    if name == "linear_fc1":
        return torch.arange(count).repeat_interleave(rows // count)
    of_group = [0, 1]
    if name == "linear_qkv":
        per_group = config.num_attention_heads // config.num_query_groups
        of_group = [0] * per_group + [1, 2]
        if config.attention_output_gate:
            of_group = [0] * per_group + [1] * per_group + [2, 3]
    of_heads = torch.tensor(of_group).repeat_interleave(config.kv_channels)
    of_all: torch.Tensor = of_heads.repeat(config.num_query_groups)
    if name == "in_proj":
        of_all = _of_linear_attention(config)
    assert len(of_all) == linear.output_size, name
    # Key/value heads are split even if there are fewer than ranks.
    shard: torch.Tensor = of_all.chunk(linear.tp_group.size())[linear.tp_group.rank()]
    return shard


def _of_linear_attention(config: TransformerConfig) -> torch.Tensor:
    """[out], int64: the same of all rows of the projection of linear attention, by key head."""
    values_per_key = config.linear_num_value_heads // config.linear_num_key_heads
    values = values_per_key * config.linear_value_head_dim
    keys = config.linear_key_head_dim
    rows = torch.tensor((keys, keys, values, values, values_per_key, values_per_key))
    of_head = torch.arange(len(rows)).repeat_interleave(rows)
    return of_head.repeat(config.linear_num_key_heads)
