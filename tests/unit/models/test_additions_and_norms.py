"""Which norm reads the sum of which addition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_megatron.engine.fillers.kernels import BiasDropoutAdd
from lightning_megatron.models.layers import join_additions_and_norms


def _layer(name: str, *, crosses: bool, recompute: str | None, modules: list[str] | None) -> Any:
    """What the function looks at, with names in place of norms."""
    return SimpleNamespace(
        config=SimpleNamespace(recompute_granularity=recompute, recompute_modules=modules),
        input_layernorm=f"{name} input",
        pre_cross_attn_layernorm=f"{name} cross",
        pre_mlp_layernorm=f"{name} mlp",
        self_attn_bda=BiasDropoutAdd(),
        cross_attn_bda=BiasDropoutAdd() if crosses else None,
        mlp_bda=BiasDropoutAdd(),
    )


@pytest.mark.parametrize(
    ("recompute", "modules", "crosses", "expected"),
    [
        (None, None, False, [("0 mlp", None, "1 input"), ("1 mlp", None, "last")]),
        (None, None, True, [("0 cross", "0 mlp", "1 input"), ("1 cross", "1 mlp", "last")]),
        ("selective", ["core_attn"], False, [("0 mlp", None, "1 input"), ("1 mlp", None, "last")]),
        ("selective", ["layernorm"], False, [(None, None, None)] * 2),  # each norm is made again from its input
        ("full", None, False, [("0 mlp", None, None), ("1 mlp", None, None)]),  # nothing leaves a recomputed layer
    ],
)
def test_each_sum_goes_to_the_norm_that_reads_it_next(
    recompute: str | None, modules: list[str] | None, crosses: bool, expected: list[tuple[str | None, ...]]
) -> None:
    layers = [_layer(str(n), crosses=crosses, recompute=recompute, modules=modules) for n in range(2)]
    join_additions_and_norms(layers, "last")  # type: ignore[arg-type]
    additions = [(layer.self_attn_bda, layer.cross_attn_bda, layer.mlp_bda) for layer in layers]
    assert [tuple(getattr(add, "norm", None) for add in of_layer) for of_layer in additions] == expected


def test_a_chunk_may_have_no_layer() -> None:
    join_additions_and_norms([], None)
