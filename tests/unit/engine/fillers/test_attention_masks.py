"""Who sees whom through segments and windows, and is a mask made once, shared by all layers, and forgotten?"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon

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


def _layer(causal: bool = True, kind: str = "self", tp_rank: int = 0, tp: int = 1, **options: Any) -> SDPAttention:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=HEADS,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
    )
    groups: Any = SimpleNamespace(tp=SimpleNamespace(rank=lambda: tp_rank))
    mask_type = AttnMaskType.causal if causal else AttnMaskType.padding
    return SDPAttention(config, 1, mask_type, kind, pg_collection=groups, **options)


def _qkv(queries: int = LENGTH, keys: int = LENGTH, groups: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(queries * 100 + keys + groups)
    shapes = [(queries, ROWS, HEADS, WIDTH), (keys, ROWS, groups, WIDTH), (keys, ROWS, groups, WIDTH)]
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]


def _formula(qkv: list[torch.Tensor], visible: torch.Tensor, bias: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Attention by its definition in float64: visible and bias are [b, np or 1, sq, sk]."""
    q, k, v = (x.double() for x in qkv)
    heads = [h * k.shape[2] // q.shape[2] for h in range(q.shape[2])]
    scores = torch.einsum("sbnh,tbnh->bnst", q, k[:, :, heads]) / WIDTH**0.5 + bias
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("bnst,tbnh->sbnh", weights, v[:, :, heads]).flatten(2)


def _visible(sees: Callable[[int, int, int], bool], queries: int = LENGTH, keys: int = LENGTH) -> torch.Tensor:
    """[b, 1, sq, sk]; a token that is given nothing sees itself."""
    shift = keys - queries
    table = [[[sees(b, i + shift, j) for j in range(keys)] for i in range(queries)] for b in range(ROWS)]
    return torch.tensor(table)[:, None]


def _same_segment(segments: torch.Tensor) -> Callable[[int, int, int], bool]:
    numbers = segments.tolist()
    return lambda b, i, j: i == j or (numbers[b][i] == numbers[b][j] != 0)


def _assert_equal(got: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # Float32 against float64, in sums of a dozen terms.
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad((got * weight).sum(), inputs)
    for grad, reference in zip(grads, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [6, 3, 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_tokens_see_their_own_segment(dtype: torch.dtype, causal: bool, groups: int) -> None:
    qkv, same = _qkv(groups=groups), _same_segment(SEGMENTS)
    expected = _formula(qkv, _visible(lambda b, i, j: same(b, i, j) and (j <= i or not causal)))
    _assert_equal(_layer(causal)(*qkv, SEGMENTS.to(dtype)), expected, qkv)


@pytest.mark.parametrize("segments", [None, SEGMENTS])
@pytest.mark.parametrize("window", [1, 3, 11, 12, 40])
def test_a_window_is_that_of_hugging_face(window: int, segments: torch.Tensor | None) -> None:
    in_window: Any = sliding_window_causal_mask_function(window)

    def sees(b: int, i: int, j: int) -> bool:
        place = (torch.tensor(x) for x in (b, 0, i, j))
        return bool(in_window(*place)) and (segments is None or _same_segment(segments)(b, i, j))

    qkv = _qkv()
    _assert_equal(_layer(sliding_window=window)(*qkv, segments), _formula(qkv, _visible(sees)), qkv)


@pytest.mark.parametrize("queries", [1, 3])
def test_new_tokens_after_cached_ones_see_what_the_whole_row_would(queries: int) -> None:
    q, k, v = _qkv()
    for options in ({}, {"sliding_window": 4}, {"alibi": "bloom"}, {"alibi": "falcon", "sliding_window": 4}):
        for mask in (None, SEGMENTS):
            whole = _layer(**options)(q, k, v, mask)
            torch.testing.assert_close(_layer(**options)(q[-queries:], k, v, mask), whole[-queries:])


def test_in_cross_attention_every_number_but_zero_is_visible() -> None:
    qkv = _qkv(queries=5)
    visible = (SEGMENTS != 0)[:, None, None].expand(-1, 1, 5, -1)
    _assert_equal(_layer(causal=False, kind="cross")(*qkv, SEGMENTS), _formula(qkv, visible), qkv)
    square = _qkv()
    visible = (SEGMENTS != 0)[:, None, None].expand(-1, 1, LENGTH, -1)
    _assert_equal(_layer(causal=False, kind="cross")(*square, SEGMENTS), _formula(square, visible), square)


def test_nothing_is_nan_where_a_row_is_all_padding() -> None:
    qkv, empty = _qkv(), torch.zeros_like(SEGMENTS)
    for layer in (_layer(), _layer(False), _layer(False, "cross"), _layer(alibi="bloom"), _layer(sliding_window=2)):
        out = layer(*qkv, empty)
        grads = torch.autograd.grad(out.sum(), qkv)
        assert all(torch.isfinite(x).all() for x in (out, *grads))


def test_a_bias_is_added_where_segments_show_and_learns() -> None:
    qkv, same = _qkv(), _same_segment(SEGMENTS)
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, requires_grad=True)
    expected = _formula(qkv, _visible(lambda b, i, j: same(b, i, j)), bias.double())
    _assert_equal(_layer(False)(*qkv, SEGMENTS, attention_bias=bias), expected, [*qkv, bias])


def test_a_mask_of_another_length_and_a_window_of_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"attention_mask has the shape \[4, 11\].*\[4, 12\]"):
        _layer()(*_qkv(), SEGMENTS[:, 1:])
    with pytest.raises(ConfigError, match="sliding_window=0"):
        _layer(sliding_window=0)


# ---- ALiBi ----------------------------------------------------------------------------------------------------------


def _their_bias(kind: str, mask: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[b, np, 1, s]: what Hugging Face adds to the scaled scores."""
    module: Any = modeling_bloom if kind == "bloom" else modeling_falcon
    bias = module.build_alibi_tensor(mask, num_heads, torch.float32).view(len(mask), num_heads, 1, -1)
    return bias if kind == "bloom" else bias / WIDTH**0.5


@pytest.mark.parametrize("mask", [None, (SEGMENTS != 0).long()], ids=["no mask", "padding"])
@pytest.mark.parametrize("kind", ["bloom", "falcon"])
def test_alibi_is_that_of_hugging_face(kind: str, mask: torch.Tensor | None) -> None:
    qkv = _qkv()
    theirs = _their_bias(kind, torch.ones_like(SEGMENTS) if mask is None else mask, HEADS)
    same = _same_segment(torch.ones_like(SEGMENTS) if mask is None else mask)
    expected = _formula(qkv, _visible(lambda b, i, j: same(b, i, j) and j <= i), theirs.double())
    _assert_equal(_layer(alibi=kind)(*qkv, mask), expected, qkv)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 12, 16, 20, 71])
def test_slopes_are_those_of_hugging_face_for_any_number_of_heads(num_heads: int) -> None:
    from lightning_megatron.engine.fillers.masks import slopes

    theirs = modeling_bloom._get_alibi_slopes(num_heads, torch.device("cpu"))
    torch.testing.assert_close(slopes(num_heads), theirs, rtol=3e-7, atol=0)


@pytest.mark.parametrize("tp", [2, 3])
def test_each_tp_rank_has_the_slopes_of_its_own_heads(tp: int) -> None:
    q, k, v = _qkv(groups=HEADS)
    whole = _layer(alibi="bloom")(q, k, v, SEGMENTS)
    parts = [
        _layer(alibi="bloom", tp=tp, tp_rank=rank)(*(x.chunk(tp, dim=2)[rank] for x in (q, k, v)), SEGMENTS)
        for rank in range(tp)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=-1), whole)


def test_documents_of_a_row_get_the_biases_of_rows_of_their_own() -> None:
    q, k, v = (x[:, 1:2] for x in _qkv())
    packed = _layer(alibi="bloom")(q, k, v, SEGMENTS[1:2])
    alone = [_layer(alibi="bloom")(q[s], k[s], v[s], None) for s in (slice(0, 4), slice(4, 7), slice(7, 11))]
    torch.testing.assert_close(packed[:11], torch.cat(alone))


def test_biases_of_near_keys_are_exact_in_bf16_however_long_the_row_is() -> None:
    length = 1000
    q, k, v = (torch.randn(length, 1, HEADS, WIDTH, generator=torch.Generator().manual_seed(2)) for _ in range(3))
    layer = _layer(alibi="bloom").eval()
    exact = layer(q, k, v, None)
    rounded = layer(q.bfloat16(), k.bfloat16(), v.bfloat16(), None).float()
    # Rounding q, k, v and the output; a bias rounded at position 1000 would be wrong by up to 1.
    assert (exact - rounded).abs().mean() < 0.01


def test_a_masked_key_stays_hidden_beside_far_ones_that_are_worth_less() -> None:
    length = 24000  # at half a point per token: -12000, and a masked score is -10000
    q, k, v = (torch.randn(length, 1, HEADS, WIDTH, generator=torch.Generator().manual_seed(2)) for _ in range(3))
    segments = torch.ones(1, length, dtype=torch.int64)
    segments[0, -500:-1] = 2
    out = _layer(alibi="bloom")(q[-1:], k, v, segments)
    others = v.masked_fill((segments[0] == 2)[:, None, None, None], 100.0)
    assert torch.equal(_layer(alibi="bloom")(q[-1:], k, others, segments), out)


# ---- one mask for all layers ----------------------------------------------------------------------------------------
