"""Rules: how Megatron's tensors are made of Hugging Face's.

A ``Rule`` maps one Megatron tensor to Hugging Face tensors: a concatenation along the first axis, a permutation of
rows, a transposition, or one of several experts in a stack. Rules work in both directions, for weights and gradients,
and for any slice, so that a rank reads only its own rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_megatron.models.adapter_names import ADAPTER_SUFFIX
from lightning_megatron.models.config import Adapters

LAYER = "{layer}"
"""Placeholder for the layer index (from 0) in Hugging Face names."""
EXPERT = "{expert}"
"""Placeholder for the expert index (from 0) in Hugging Face names."""
POSITIONS = "embedding.position_embeddings.weight"
"""Megatron's learned position embeddings."""
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""Megatron's tensors with one row per token of the vocabulary, and vocabulary padding."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """Mapping of one Megatron tensor (of every layer, if it is in a layer) to Hugging Face tensors."""

    megatron: str
    """Key in Megatron's sharded state dict without layer index, e.g. ``decoder.layers.mlp.linear_fc1.weight``."""
    hugging_face: tuple[str, ...]
    """Names with ``LAYER`` and ``EXPERT`` placeholders, of the tensors to concatenate along the first axis. An empty
    name stands for zeros that no file stores."""
    rows: tuple[int, ...] = ()
    """Rows of each Hugging Face tensor; empty if there is only one."""
    order: torch.Tensor | None = None
    """[rows], int64: ``order[i]`` is the row of the concatenation that is Megatron's row i; None: the same order."""
    transposed: bool = False
    """Whether Hugging Face stores the transposed weight (GPT-2's Conv1D)."""
    stored_shape: tuple[int, ...] | None = None
    """Shape of a vector [rows] in Hugging Face's files, e.g. () or [1, rows]; None for that of Megatron's tensor."""
    num_stacked: int = 0
    """Experts that Hugging Face stores in one tensor, along its first axis; 0 for a tensor of each expert."""

    def names(
        self,
        layer: int | None,
        expert: int | None = None,
    ) -> tuple[str, ...]:
        """Hugging Face names in one layer, of one expert."""
        return tuple(
            name.replace(LAYER, str(layer)).replace(EXPERT, str(expert))
            for name in self.hugging_face
        )

    @property
    def modules(self) -> tuple[str, ...]:
        """Hugging Face names without ``.weight``."""
        return tuple(name.removesuffix(".weight") for name in self.hugging_face)

    def tensors(
        self,
        shape: tuple[int, ...],
        layer: int | None,
        expert: int | None,
    ) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the Hugging Face tensors that form a Megatron tensor of ``shape``."""
        rows = self.rows or (shape[0],)
        assert sum(rows) == shape[0], f"{self.megatron} has {shape[0]} rows, its rule {sum(rows)}"
        tensors = {}
        for name, length in zip(self.names(layer, expert), rows, strict=True):
            size = (length, *shape[1:])
            if self.stored_shape is not None:
                size = self.stored_shape
            if self.transposed:
                size = size[::-1]
            if self.num_stacked:
                size = (self.num_stacked, *size)
            if name:
                tensors[name] = size
        return tensors


def qkv_order(
    num_attention_heads: int,
    num_query_groups: int,
    kv_channels: int,
    *,
    has_gates: bool = False,
) -> torch.Tensor:
    """Row permutation from [all queries, all keys, all values] to Megatron's fused QKV, grouped by query group.

    In Megatron's order each group has its queries, then its key, then its value. Cross-attention, which has no queries
    here (0 heads), has each head's key, then its value. With gates Hugging Face has each head's gate after its query,
    and Megatron a group's gates after its queries.

    Returns:
        [(heads + 2 * groups) * kv_channels], int64, for ``Rule.order``; with gates 2 * heads.
    """
    per_group = num_attention_heads // num_query_groups
    queries = torch.arange(num_attention_heads).view(num_query_groups, per_group)
    num_rows = num_attention_heads
    if has_gates:
        queries = torch.cat([2 * queries, 2 * queries + 1], dim=1)
        num_rows *= 2
    keys = num_rows + torch.arange(num_query_groups)[:, None]
    values = keys + num_query_groups
    heads = torch.cat(
        [queries, keys, values],
        dim=1,
    ).flatten()
    return (heads[:, None] * kv_channels + torch.arange(kv_channels)).flatten()


def grouped_order(rows: Sequence[int], num_groups: int) -> torch.Tensor:
    """Row permutation from matrices one after the other to the first group's rows of each, the second's, and so on.

    Args:
        rows: Rows of each matrix, multiples of ``num_groups``.
        num_groups: Groups of consecutive rows in each.

    Returns:
        [sum of rows], int64, for ``Rule.order``.
    """
    matrices = torch.arange(sum(rows)).split(tuple(rows))
    groups = [matrix.view(num_groups, -1) for matrix in matrices]
    return torch.cat(groups, dim=1).flatten()


_LINEAR = re.compile(r"\w+\.layers\.\w+(\.shared_experts)?\.(linear_\w+|in_proj|out_proj)")
_EXPERTS = re.compile(r"\w+\.layers\.mlp\.experts\.experts\.(?P<linear>linear_\w+)")
FUSED_EXPERTS = {"linear_fc1": "mlp.experts.gate_up_proj", "linear_fc2": "mlp.experts.down_proj"}
"""Parameters of a layer of transformers 5 that hold a linear of all experts, where files on the hub hold each expert's,
by Megatron's name of the linear."""
PEFT_PREFIX = "base_model.model."
"""Of all names in ``peft``'s files."""


def linear_rules(rules: Sequence[Rule]) -> dict[str, Rule]:
    """Weight rules of the linear layers of attention, MLPs and shared experts, by Megatron's module name."""
    return {name: rule for name, rule in _weight_rules(rules).items() if _LINEAR.fullmatch(name)}


def expert_rules(rules: Sequence[Rule]) -> dict[str, Rule]:
    """Weight rules of the linears of routed experts, by Megatron's module name."""
    return {name: rule for name, rule in _weight_rules(rules).items() if _EXPERTS.fullmatch(name)}


def _weight_rules(rules: Sequence[Rule]) -> dict[str, Rule]:
    return {
        rule.megatron.removesuffix(".weight"): rule
        for rule in rules
        if rule.megatron.endswith(".weight")
    }


def fused_parameter(module: str, rule: Rule) -> str:
    """Name in transformers, with ``LAYER``, of the parameter that holds a linear of all routed experts of a layer.

    Args:
        module: Megatron's name of the linear.
        rule: Rule of its weight.
    """
    if rule.num_stacked:
        return rule.hugging_face[0]
    found = _EXPERTS.fullmatch(module)
    assert found is not None
    layers = rule.hugging_face[0].partition(LAYER)[0]
    return f"{layers}{LAYER}.{FUSED_EXPERTS[found['linear']]}"


def expert_adapter(parameter: str, kind: str) -> str:
    """Name of the matrix A or B of one expert, with ``LAYER`` and ``EXPERT``.

    No file has it: convert/expert_adapters.py reads and writes those of files by it.
    """
    return f"{PEFT_PREFIX}{parameter}.{EXPERT}.lora_{kind}.weight"


def adapter_rules(rules: Sequence[Rule], adapters: Adapters) -> list[Rule]:
    """Rules of the adapter weights, with the names in ``peft``'s files; of routed experts with ``expert_adapter``'s.

    For a linear layer that fuses several matrices, A concatenates their A along the first axis; B is split and ordered
    as the rows of the weight, and is zero for a matrix without adapter.
    """
    linears = linear_rules(rules)
    experts = expert_rules(rules)
    lora = []
    for name, parts in adapters.linears:
        if name in experts:
            lora += _rules_of_expert_adapters(name, experts[name])
            continue
        rule = linears[name]
        ingoing = []
        outgoing = []
        for module, is_adapted in zip(rule.modules, parts, strict=True):
            if is_adapted:
                ingoing.append(f"{PEFT_PREFIX}{module}.lora_A.weight")
            outgoing.append(f"{PEFT_PREFIX}{module}.lora_B.weight" if is_adapted else "")
        rule_of_a = Rule(
            megatron=f"{name}{ADAPTER_SUFFIX}.A",
            hugging_face=tuple(ingoing),
            rows=(adapters.rank_of(name),) * len(ingoing),
        )
        rule_of_b = Rule(
            megatron=f"{name}{ADAPTER_SUFFIX}.B",
            hugging_face=tuple(outgoing),
            rows=rule.rows,
            order=rule.order,
        )
        lora += [rule_of_a, rule_of_b]
    return lora


def _rules_of_expert_adapters(name: str, rule: Rule) -> list[Rule]:
    parameter = fused_parameter(name, rule)
    return [
        Rule(
            megatron=f"{name}{ADAPTER_SUFFIX}.A",
            hugging_face=(expert_adapter(parameter, "A"),),
        ),
        Rule(
            megatron=f"{name}{ADAPTER_SUFFIX}.B",
            hugging_face=(expert_adapter(parameter, "B"),),
            order=rule.order,
        ),
    ]
