"""Core attention where families and layouts do not reach: rows of padding, large biases, 16 bits, and refusals.

What it computes else is compared with Hugging Face's models in tests/families, and with one process in tests/parity.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from lightning_megatron.engine.fillers.attention import SDPAttention
from lightning_megatron.errors import ConfigError

HEADS, WIDTH, LENGTH = 6, 8, 12

SEGMENTS = torch.tensor(
    [
        [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 0],
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, 0, 1, 1, 0, 0, 1, 2, 2, 1, 2, 2],
    ]
)
ROWS = len(SEGMENTS)


def _config(**fields: Any) -> TransformerConfig:
    defaults = {"num_layers": 1, "hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS, "attention_dropout": 0.0}
    return TransformerConfig(**{**defaults, **fields})


def _layer(mask_type: AttnMaskType = AttnMaskType.causal, kind: str = "self", **options: Any) -> SDPAttention:
    return SDPAttention(_config(), 1, mask_type, kind, **options)


def _qkv(queries: int = LENGTH, keys: int = LENGTH, groups: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(queries * 100 + keys + groups)
    shapes = [(queries, ROWS, HEADS, WIDTH), (keys, ROWS, groups, WIDTH), (keys, ROWS, groups, WIDTH)]
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]


def _formula(qkv: list[torch.Tensor], visible: torch.Tensor, bias: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Attention by its definition in float64: visible and bias are [b, np or 1, sq, sk]."""
    q, k, v = (x.double() for x in qkv[:3])
    heads = [h * k.shape[2] // q.shape[2] for h in range(q.shape[2])]
    scores = torch.einsum("sbnh,tbnh->bnst", q, k[:, :, heads]) / q.shape[-1] ** 0.5 + bias
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("bnst,tbnh->sbnh", weights, v[:, :, heads]).flatten(2)


def test_nothing_is_nan_where_a_row_is_all_padding() -> None:
    qkv, padding = _qkv(), AttnMaskType.padding
    layers = (_layer(), _layer(padding), _layer(padding, "cross"), _layer(alibi="bloom"), _layer(sliding_window=2))
    for mask in (torch.zeros_like(SEGMENTS), torch.ones(ROWS, 1, 1, LENGTH, dtype=torch.bool)):
        for layer in layers:
            out = layer(*qkv, mask)
            assert all(torch.isfinite(x).all() for x in (out, *torch.autograd.grad(out.sum(), qkv)))


def test_biases_of_near_keys_are_exact_in_bf16_however_long_the_row_is() -> None:
    q, k, v = (torch.randn(1000, 1, HEADS, WIDTH, generator=torch.Generator().manual_seed(2)) for _ in range(3))
    layer = _layer(alibi="bloom").eval()
    rounded = layer(q.bfloat16(), k.bfloat16(), v.bfloat16(), None).float()
    # Rounding q, k, v and the output; a bias rounded at position 1000 would be wrong by up to 1.
    assert (layer(q, k, v, None) - rounded).abs().mean() < 0.01


def test_what_it_does_not_compute_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"attention_mask has the shape \[4, 11\].*\[4, 12\]"):
        _layer()(*_qkv(), SEGMENTS[:, 1:])
    with pytest.raises(ConfigError, match="sliding_window=0"):
        _layer(sliding_window=0)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [HEADS, 1])
@pytest.mark.parametrize("sequence", [64, 192])  # 192 % 128 == 64: where cuDNN's backward with a mask returned NaN
@pytest.mark.parametrize("masked", [False, True])
def test_cuda_kernels_agree_with_the_formula(groups: int, sequence: int, masked: bool) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    qkv = [
        torch.randn(sequence, 2, n, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
        for n in (HEADS, groups, groups)
    ]
    hidden = torch.zeros(2, 1, 1, sequence, dtype=torch.bool, device="cuda")
    hidden[1, ..., -5:] = masked
    layer = SDPAttention(_config(num_query_groups=groups, kv_channels=64), 1, AttnMaskType.causal, "self")
    out = layer(*qkv, hidden if masked else None)
    future = torch.ones(sequence, sequence, dtype=torch.bool, device="cuda").triu(1)
    expected = _formula(qkv, ~(hidden | future)).float()
    weight = torch.randn_like(expected)
    # bfloat16 keeps eight bits; outputs and gradients are of order one to ten.
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    grads = torch.autograd.grad((out.float() * weight).sum(), qkv)
    for grad, reference in zip(grads, torch.autograd.grad((expected * weight).sum(), qkv), strict=True):
        torch.testing.assert_close(grad.float(), reference.float(), rtol=5e-2, atol=0.1)
