"""Does a layer that remembers keys and values answer token by token what it answers to the whole rows?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from lightning_megatron.engine.fillers.attention import SDPAttention
from lightning_megatron.engine.fillers.kv_cache import KeyValueCache

LENGTH, ROWS, HEADS, WIDTH = 9, 3, 4, 8


def _qkv(groups: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(groups)
    return [torch.randn(LENGTH, ROWS, heads, WIDTH, generator=generator) for heads in (HEADS, groups, groups)]


def _attention(**options: Any) -> SDPAttention:
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, attention_dropout=0.0
    )
    return SDPAttention(config, 1, AttnMaskType.causal, "self", **options)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}, {"alibi": "bloom"}, {"alibi": "falcon"}], ids=str)
def test_token_by_token_equals_all_at_once(groups: int, is_padded: bool, options: dict[str, Any]) -> None:
    q, k, v = _qkv(groups)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, :2] = mask[2, :4] = 0
    layer, seen = _attention(**options), mask if is_padded else None
    whole = layer(q, k, v, seen)
    layer.kv_cache = KeyValueCache(LENGTH + 2)
    parts = []
    for first, stop in ((0, 5), (5, 6), (6, 7), (7, LENGTH)):
        part = slice(first, stop)
        parts.append(layer(q[part], k[part], v[part], None if seen is None else seen[:, :stop]))
    actual = torch.cat(parts)
    real = (mask.t() == 1) if is_padded else torch.ones(LENGTH, ROWS, dtype=torch.bool)
    # fp32, numbers of size 1, another order of additions.
    torch.testing.assert_close(actual[real], whole[real], rtol=0.0, atol=1e-6)


def test_selected_rows_go_on_as_what_they_were() -> None:
    q, k, v = _qkv(2)
    layer = _attention()
    whole = layer(q, k, v, None)
    layer.kv_cache = cache = KeyValueCache(LENGTH)
    layer(q[:5], k[:5], v[:5], None)
    rows = torch.tensor([2, 0, 0, 1])
    cache.select(rows)
    out = layer(q[5:6, rows], k[5:6, rows], v[5:6, rows], None)
    torch.testing.assert_close(out, whole[5:6, rows], rtol=0.0, atol=1e-6)
