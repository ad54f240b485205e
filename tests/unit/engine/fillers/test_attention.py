"""Core attention beside its formula in float64, Hugging Face's masks and biases, and the engine's own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon

from lightning_megatron.engine.fillers.attention import SDPAttention
from lightning_megatron.engine.fillers.kv_cache import KeyValueCache
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
Sees = Callable[[int, int, int], bool]
"""Whether, in a row, a query place sees a key place."""


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


def _visible(sees: Sees, queries: int = LENGTH, keys: int = LENGTH) -> torch.Tensor:
    """[b, 1, sq, sk]; the last query stands at the last key."""
    shift = keys - queries
    table = [[[sees(b, i + shift, j) for j in range(keys)] for i in range(queries)] for b in range(ROWS)]
    return torch.tensor(table)[:, None]


def _same_segment(segments: torch.Tensor) -> Sees:
    numbers = segments.tolist()
    return lambda b, i, j: i == j or (numbers[b][i] == numbers[b][j] != 0)


def _assert_equal(got: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # Float32 against float64, in sums of a dozen terms.
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad((got * weight).sum(), inputs)
    for grad, reference in zip(grads, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-5)


_HIDDEN = (SEGMENTS == 0)[:, None, None, :]
_FUTURE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]


@pytest.mark.parametrize("groups", [HEADS, 3])
@pytest.mark.parametrize(
    ("mask_type", "queries", "mask", "has_bias", "hidden"),
    [
        pytest.param(AttnMaskType.causal, LENGTH, None, False, _FUTURE, id="causal"),
        pytest.param(AttnMaskType.no_mask, 7, _HIDDEN, False, _HIDDEN & False, id="no mask ignores one"),
        pytest.param(AttnMaskType.padding, 7, _HIDDEN, False, _HIDDEN, id="padding"),
        pytest.param(AttnMaskType.arbitrary, LENGTH, _FUTURE, False, _FUTURE, id="arbitrary"),
        pytest.param(AttnMaskType.padding, LENGTH, _HIDDEN, True, _HIDDEN, id="bias and padding"),
        pytest.param(AttnMaskType.causal, LENGTH, None, True, _FUTURE, id="bias and causal"),
        pytest.param(AttnMaskType.causal, 2, None, False, _FUTURE[:, :, -2:], id="two new tokens"),
    ],
)
def test_dense_masks_and_biases(
    mask_type: AttnMaskType, queries: int, mask: torch.Tensor | None, has_bias: bool, hidden: torch.Tensor, groups: int
) -> None:
    inputs = _qkv(queries, groups=groups)
    if has_bias:
        inputs.append(torch.randn(1, HEADS, queries, LENGTH).requires_grad_())
    bias = inputs[3] if has_bias else None
    got = _layer(mask_type)(*inputs[:3], mask, attention_bias=bias)
    _assert_equal(got, _formula(inputs, ~hidden, 0.0 if bias is None else bias.double()), inputs)


@pytest.mark.parametrize(("causal", "dtype"), [(True, torch.int64), (False, torch.uint8)])
def test_tokens_see_their_own_segment(dtype: torch.dtype, causal: bool) -> None:
    qkv, same = _qkv(), _same_segment(SEGMENTS)
    expected = _formula(qkv, _visible(lambda b, i, j: same(b, i, j) and (j <= i or not causal)))
    layer = _layer(AttnMaskType.causal if causal else AttnMaskType.padding)
    _assert_equal(layer(*qkv, SEGMENTS.to(dtype)), expected, qkv)


@pytest.mark.parametrize("segments", [None, SEGMENTS])
@pytest.mark.parametrize("window", [1, 3, 40])
def test_a_window_is_that_of_hugging_face(window: int, segments: torch.Tensor | None) -> None:
    in_window: Any = sliding_window_causal_mask_function(window)

    def sees(b: int, i: int, j: int) -> bool:
        place = (torch.tensor(x) for x in (b, 0, i, j))
        return bool(in_window(*place)) and (segments is None or _same_segment(segments)(b, i, j))

    qkv = _qkv()
    _assert_equal(_layer(sliding_window=window)(*qkv, segments), _formula(qkv, _visible(sees)), qkv)


def test_in_cross_attention_every_number_but_zero_is_visible() -> None:
    qkv = _qkv(5)
    visible = (SEGMENTS != 0)[:, None, None].expand(-1, 1, 5, -1)
    _assert_equal(_layer(AttnMaskType.padding, "cross")(*qkv, SEGMENTS), _formula(qkv, visible), qkv)


def test_nothing_is_nan_where_a_row_is_all_padding() -> None:
    qkv, padding = _qkv(), AttnMaskType.padding
    layers = (_layer(), _layer(padding), _layer(padding, "cross"), _layer(alibi="bloom"), _layer(sliding_window=2))
    for mask in (torch.zeros_like(SEGMENTS), torch.ones(ROWS, 1, 1, LENGTH, dtype=torch.bool)):
        for layer in layers:
            out = layer(*qkv, mask)
            assert all(torch.isfinite(x).all() for x in (out, *torch.autograd.grad(out.sum(), qkv)))


def test_a_masked_key_stays_hidden_under_a_large_bias() -> None:
    q, k, v = _qkv(groups=HEADS)
    bias = torch.full((1, HEADS, LENGTH, LENGTH), 30000.0)
    bias[..., 0] = 0.0
    mask = torch.ones(ROWS, 1, 1, LENGTH, dtype=torch.bool)
    mask[..., 0] = False
    out = _layer(AttnMaskType.padding)(q, k, v, mask, attention_bias=bias)
    torch.testing.assert_close(out, v[:1].flatten(2).expand_as(out))


@pytest.mark.parametrize("mask", [None, (SEGMENTS != 0).long()], ids=["no mask", "padding"])
@pytest.mark.parametrize("kind", ["bloom", "falcon"])
def test_alibi_is_that_of_hugging_face(kind: str, mask: torch.Tensor | None) -> None:
    qkv, numbers = _qkv(), torch.ones_like(SEGMENTS) if mask is None else mask
    module: Any = modeling_bloom if kind == "bloom" else modeling_falcon
    theirs = module.build_alibi_tensor(numbers, HEADS, torch.float32).view(ROWS, HEADS, 1, -1).double()
    theirs = theirs if kind == "bloom" else theirs / WIDTH**0.5
    same = _same_segment(numbers)
    expected = _formula(qkv, _visible(lambda b, i, j: same(b, i, j) and j <= i), theirs)
    _assert_equal(_layer(alibi=kind)(*qkv, mask), expected, qkv)


def test_biases_of_near_keys_are_exact_in_bf16_however_long_the_row_is() -> None:
    q, k, v = (torch.randn(1000, 1, HEADS, WIDTH, generator=torch.Generator().manual_seed(2)) for _ in range(3))
    layer = _layer(alibi="bloom").eval()
    rounded = layer(q.bfloat16(), k.bfloat16(), v.bfloat16(), None).float()
    # Rounding q, k, v and the output; a bias rounded at position 1000 would be wrong by up to 1.
    assert (layer(q, k, v, None) - rounded).abs().mean() < 0.01


# ---- token by token -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"sliding_window": 3}, {"alibi": "bloom"}, {"alibi": "falcon"}], ids=str)
def test_token_by_token_equals_all_at_once(options: dict[str, Any]) -> None:
    mask = (SEGMENTS[:1] != 0).long().repeat(ROWS, 1)
    q, k, v = (x.detach() for x in _qkv(groups=1))
    layer = _layer(**options)
    whole = layer(q, k, v, mask)
    layer.kv_cache = KeyValueCache(LENGTH + 2)
    bounds = [(0, 8), (8, 9), (9, 10), (10, LENGTH)]
    parts = [layer(*(x[a:b] for x in (q, k, v)), mask[:, :b]) for a, b in bounds]
    real = mask.t() == 1
    # fp32, numbers of size 1, another order of additions.
    torch.testing.assert_close(torch.cat(parts)[real], whole[real], rtol=0.0, atol=1e-6)


# ---- beside the engine's --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
def test_it_equals_the_engines_attention_which_still_refuses_a_bias() -> None:
    config = _config(apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True, num_query_groups=3)
    ours, theirs = (kind(config, 3, AttnMaskType.causal, "self") for kind in (SDPAttention, DotProductAttention))
    torch.testing.assert_close(ours(*_qkv(), None), theirs(*_qkv(), None), rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="Attention bias is not supported"):
        theirs(*_qkv(), None, attention_bias=torch.zeros(1, HEADS, LENGTH, LENGTH))


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
