"""Matrices of a model's layers, which the optimizer Muon orthogonalizes: pure arithmetic on a model's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_megatron.engine.ops.orthogonalize import iteration_flops
from lightning_megatron.engine.parallel import ParallelConfig
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.planning.parameters import layer_linears, mlp_matrices

SpreadOver = Literal["tp", "ep"]


@dataclass(frozen=True)
class MatrixShape:
    """Matrices of equal shape in a layer."""

    rows: int
    columns: int
    count: int
    spread_over: SpreadOver | None
    """Parts of each over tp, or whole ones over ep; None if each rank has all."""

    def num_on_rank(self, parallel: ParallelConfig) -> int:
        """Parameters of all of them that a rank has."""
        total = self.rows * self.columns * self.count
        if self.spread_over == "tp":
            return total // parallel.tp
        if self.spread_over == "ep":
            return total // parallel.ep
        return total

    @property
    def iteration_flops(self) -> int:
        """FLOPs of one iteration of all of them."""
        return self.count * iteration_flops(self.rows, self.columns)


def layer_matrices(model: ModelConfig, layer: int) -> list[MatrixShape]:
    """Matrices of a layer, counted from 0, a T5's decoder after its encoder."""
    linears = layer_linears(model)
    num_attentions = 1 + (layer >= model.num_layers)
    names = ["linear_qkv", "linear_proj"]
    if model.latent_attention is not None:
        names = [name for name in linears if name.startswith(("linear_q_", "linear_kv_"))]
        names.append("linear_proj")
    if model.has_linear_attention(layer):
        names = ["in_proj", "out_proj"]
    shapes = []
    for name in names:
        columns, rows_of_matrices = linears[name]
        spread_over: SpreadOver | None = "tp"
        if name.endswith("down_proj"):
            spread_over = None
        for rows in rows_of_matrices:
            shapes.append(MatrixShape(rows, columns, num_attentions, spread_over))
    width = model.ffn_hidden_size
    if model.experts is not None and model.has_experts(layer):
        experts = model.experts
        width = experts.shared_ffn_hidden_size
        shapes += _mlp(model, experts.ffn_hidden_size, experts.num_experts, "ep")
    shapes += _mlp(model, width, 1, "tp")
    return [shape for shape in shapes if shape.rows and shape.columns]


def _mlp(
    model: ModelConfig,
    width: int,
    count: int,
    spread_over: SpreadOver,
) -> list[MatrixShape]:
    h = model.hidden_size
    inputs = mlp_matrices(model) - 1
    return [
        MatrixShape(width, h, count * inputs, spread_over),
        MatrixShape(h, width, count, spread_over),
    ]
