"""Does SDPA attention compute what the softmax formula says, for every mask, bias and head layout?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from lightning_megatron.engine.fillers.attention import SDPAttention
from lightning_megatron.engine.runtime import emulated_cuda
from lightning_megatron.errors import ConfigError

HEADS, WIDTH = 4, 8


def _config(**fields: Any) -> TransformerConfig:
    defaults = {"num_layers": 1, "hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS, "attention_dropout": 0.0}
    return TransformerConfig(**{**defaults, **fields})


def _attention(mask_type: AttnMaskType, **fields: Any) -> SDPAttention:
    return SDPAttention(_config(**fields), 1, mask_type, "self")


def _formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Attention by its definition, in the input's dtype, heads repeated by indexing."""
    heads = [h * k.shape[2] // q.shape[2] for h in range(q.shape[2])]
    scores = torch.einsum("sbnh,tbnh->bnst", q, k[:, :, heads]) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    out = torch.einsum("bnst,tbnh->sbnh", scores.softmax(-1), v[:, :, heads])
    return out.flatten(2)


def _qkv(sq: int, sk: int, groups: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sq * 100 + sk + groups)
    shapes = [(sq, 2, HEADS, WIDTH), (sk, 2, groups, WIDTH), (sk, 2, groups, WIDTH)]
    return [torch.randn(*s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def _causal(sq: int, sk: int) -> torch.Tensor:
    return torch.ones(sq, sk, dtype=torch.bool).triu(1 + sk - sq)[None, None]


def _padding(sk: int) -> torch.Tensor:
    hidden = torch.zeros(2, 1, 1, sk, dtype=torch.bool)
    hidden[1, :, :, sk - 3 :] = True
    return hidden


CASES = {
    "causal": (AttnMaskType.causal, 6, 6, None, False, lambda: _causal(6, 6)),
    "no mask": (AttnMaskType.no_mask, 6, 5, None, False, lambda: None),
    "no mask ignores one": (AttnMaskType.no_mask, 6, 6, _padding(6), False, lambda: None),
    "padding": (AttnMaskType.padding, 6, 6, _padding(6), False, lambda: _padding(6)),
    "cross attention": (AttnMaskType.padding, 4, 7, _padding(7), False, lambda: _padding(7)),
    "causal and padding": (AttnMaskType.causal, 6, 6, _padding(6), False, lambda: _padding(6) | _causal(6, 6)),
    "padding_causal": (AttnMaskType.padding_causal, 6, 6, _padding(6), False, lambda: _padding(6) | _causal(6, 6)),
    "arbitrary": (AttnMaskType.arbitrary, 6, 6, _causal(6, 6), False, lambda: _causal(6, 6)),
    "bias": (AttnMaskType.padding, 6, 6, None, True, lambda: None),
    "bias and padding": (AttnMaskType.padding, 6, 6, _padding(6), True, lambda: _padding(6)),
    "bias and causal": (AttnMaskType.causal, 6, 6, None, True, lambda: _causal(6, 6)),
    "one new token": (AttnMaskType.causal, 1, 6, None, False, lambda: None),
    "two new tokens": (AttnMaskType.causal, 2, 6, None, False, lambda: _causal(2, 6)),
}


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_the_formula(case: str, groups: int) -> None:
    mask_type, sq, sk, mask, has_bias, hidden = CASES[case]
    inputs = _qkv(sq, sk, groups)
    if has_bias:
        inputs.append(torch.randn(1, HEADS, sq, sk).requires_grad_())
    bias = inputs[3] if has_bias else None
    got = _attention(mask_type, num_query_groups=groups)(*inputs[:3], mask, attention_bias=bias)
    expected = _formula(*inputs[:3], hidden(), bias)
    weight = torch.randn_like(expected)
    # Two float32 evaluations of the same sums of about ten terms.
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad((got * weight).sum(), inputs)
    for grad, reference in zip(grads, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, _padding(6)])
def test_half_precision_stays_within_its_rounding(dtype: torch.dtype, mask: torch.Tensor | None) -> None:
    q, k, v = _qkv(6, 6, 2, dtype)
    got = _attention(AttnMaskType.causal, num_query_groups=2)(q, k, v, mask)
    hidden = _causal(6, 6) if mask is None else mask | _causal(6, 6)
    expected = _formula(q.float(), k.float(), v.float(), hidden, None)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_a_query_without_any_key_gives_finite_numbers() -> None:
    q, k, v = _qkv(6, 6, 4)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    out = _attention(AttnMaskType.padding)(q, k, v, mask)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.isfinite(x).all() for x in (out, *grads))


def test_a_masked_key_stays_hidden_under_a_large_bias() -> None:
    q, k, v = _qkv(6, 6, 4)
    bias = torch.full((1, HEADS, 6, 6), 30000.0)
    bias[..., 0] = 0.0
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[..., 0] = False
    out = _attention(AttnMaskType.padding)(q, k, v, mask, attention_bias=bias)
    torch.testing.assert_close(out, v[:1].flatten(2).expand_as(out))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("scaling", [False, True])
def test_it_equals_the_engines_attention(scaling: bool) -> None:
    fields = {"apply_query_key_layer_scaling": scaling, "attention_softmax_in_fp32": True, "num_query_groups": 2}
    q, k, v = _qkv(6, 6, 2)
    ours = SDPAttention(_config(**fields), 3, AttnMaskType.causal, "self")
    theirs = DotProductAttention(_config(**fields), 3, AttnMaskType.causal, "self")
    torch.testing.assert_close(ours(q, k, v, None), theirs(q, k, v, None), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("one_rank")
def test_the_engines_attention_still_refuses_a_bias() -> None:
    theirs = DotProductAttention(_config(), 1, AttnMaskType.causal, "self")
    with pytest.raises(AssertionError, match="Attention bias is not supported"):
        theirs(*_qkv(6, 6, 4), None, attention_bias=torch.zeros(1, HEADS, 6, 6))


def test_dropout_is_drawn_in_training_only_and_keeps_the_mean() -> None:
    layer = _attention(AttnMaskType.no_mask, attention_dropout=0.5)
    q, k = torch.zeros(1, 2, HEADS, WIDTH), torch.zeros(4000, 2, HEADS, WIDTH)
    v = torch.ones_like(k)
    torch.manual_seed(1)
    out = layer(q, k, v, None)
    # A mean of 4000 draws of 0 or 2 has a standard deviation of 1/63.
    assert 0.0 < (out - 1.0).abs().max() < 0.1
    torch.testing.assert_close(layer.eval()(q, k, v, None), torch.ones(1, 2, HEADS * WIDTH))


@pytest.mark.parametrize(("tp", "sequence_parallel", "forks"), [(1, False, False), (2, False, True), (2, True, False)])
def test_tp_ranks_draw_from_the_tracked_stream(tp: int, sequence_parallel: bool, forks: bool) -> None:
    fields = {"tensor_model_parallel_size": tp, "sequence_parallel": sequence_parallel, "attention_dropout": 0.5}
    layer = _attention(AttnMaskType.causal, **fields)
    with emulated_cuda():
        model_parallel_cuda_manual_seed(3, force_reset_rng=True, tp_rank=0, ep_rank=0, etp_rank=0)
        default, tracked = torch.get_rng_state(), get_cuda_rng_tracker().get_states()["model-parallel-rng"]
        layer(*_qkv(6, 6, 4), None)
        default_unchanged = torch.equal(default, torch.get_rng_state())
        tracked_unchanged = torch.equal(tracked, get_cuda_rng_tracker().get_states()["model-parallel-rng"])
    assert (default_unchanged, tracked_unchanged) == (forks, not forks)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"window_size": (4, 0)}, "window_size"), ({"softmax_type": "off-by-one"}, "softmax_type")],
)
def test_an_attention_that_it_does_not_compute_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _attention(AttnMaskType.causal, **fields)


def test_packed_sequences_are_refused() -> None:
    with pytest.raises(ConfigError, match="packed"):
        _attention(AttnMaskType.causal)(*_qkv(6, 6, 4), None, packed_seq_params=object())


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [4, 1])
@pytest.mark.parametrize("sequence", [64, 192])  # 192 % 128 == 64: where cuDNN's backward with a mask returned NaN
@pytest.mark.parametrize("masked", [False, True])
def test_cuda_kernels_agree_with_the_formula(groups: int, sequence: int, masked: bool) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (
        torch.randn(sequence, 2, n, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
        for n in (HEADS, groups, groups)
    )
    hidden = torch.zeros(2, 1, 1, sequence, dtype=torch.bool, device="cuda")
    hidden[1, ..., -5:] = True
    layer = SDPAttention(_config(num_query_groups=groups, kv_channels=64), 1, AttnMaskType.causal, "self")
    out = layer(q, k, v, hidden if masked else None)
    causal = _causal(sequence, sequence).cuda()
    expected = _formula(q.float(), k.float(), v.float(), (hidden | causal) if masked else causal, None)
    weight = torch.randn_like(expected)
    # bfloat16 keeps eight bits; outputs and gradients are of order one to ten.
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    grads = torch.autograd.grad((out.float() * weight).sum(), (q, k, v))
    references = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for grad, reference in zip(grads, references, strict=True):
        torch.testing.assert_close(grad.float(), reference.float(), rtol=5e-2, atol=0.1)
