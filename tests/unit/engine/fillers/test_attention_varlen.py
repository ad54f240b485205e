"""Variable-length FlashAttention beside dense masks, with dropout too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from lightning_megatron.engine.fillers import attention
from lightning_megatron.engine.fillers.attention import SDPAttention
from lightning_megatron.engine.fillers.masks import added_scores, hidden_keys, pattern_of


def test_runs_are_where_numbers_change_and_never_cross_a_row() -> None:
    found = attention.runs_of(torch.tensor([[1, 1, 2, 0], [0, 3, 3, 3], [3, 3, 3, 3]]))

    assert found is not None
    assert found.bounds.tolist() == [0, 2, 3, 4, 5, 8, 12]
    assert found.bounds.dtype == torch.int32
    assert found.longest == 4


def test_a_segment_in_pieces_is_left_to_dense_masks_and_padding_may_be_in_pieces() -> None:
    assert attention.runs_of(torch.tensor([[1, 2, 1, 0]])) is None
    found = attention.runs_of(torch.tensor([[0, 1, 0, 2]]))
    assert found is not None
    assert found.bounds.tolist() == [0, 1, 2, 3, 4]


def _segments(length: int) -> torch.Tensor:
    segments = torch.ones(4, length, dtype=torch.int64)
    segments[0, -length // 8 :] = 0
    segments[1, : length // 5] = 0
    segments[2, length // 3 :] = 2
    segments[2, length // 2 :] = 3
    return segments


def _tensors(length: int, groups: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((4, 4, length, 32), (4, groups, length, 32), (4, groups, length, 32))
    return [torch.randn(shape, generator=generator).cuda().to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "groups"), [(96, 4), (300, 2), (640, 1)])
def test_values_and_gradients_equal_those_of_a_dense_mask_in_float32(length: int, groups: int, causal: bool) -> None:
    segments, pattern = _segments(length).cuda(), pattern_of(length, length, causal=causal, window=None, cross=False)
    tokens = (segments != 0)[:, None, :, None]
    tensors = _tensors(length, groups)
    precise = [tensor.detach().float().requires_grad_() for tensor in tensors]
    repeated = [precise[0], *(tensor.repeat_interleave(4 // groups, dim=1) for tensor in precise[1:])]
    scores = added_scores(hidden_keys(segments, pattern, segments.device), None, torch.float32)
    expected = F.scaled_dot_product_attention(*repeated, scores)
    found = attention.runs_of(segments)
    assert found is not None
    assert attention.can_use_varlen(tensors[0], tensors[1], pattern)

    got = attention.attend_to_runs(*tensors, found, causal=causal, dropout=0.0, scale=None)

    upstream = torch.randn_like(expected) * tokens
    expected_gradients = torch.autograd.grad(expected, precise, upstream)
    gradients = torch.autograd.grad(got, tensors, upstream.to(got.dtype))
    # bf16 has 8 bits: half a percent of the largest value, as of any kernel that rounds once.
    assert _distance(got * tokens, expected * tokens) < 1e-2
    for mine, theirs in zip(gradients, expected_gradients, strict=True):
        assert _distance(mine, theirs) < 2e-2


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm())


@pytest.mark.gpu
def test_dropout_drops_as_often_as_asked_and_as_the_generator_says() -> None:
    q, k, _ = _tensors(128, 4)
    v = torch.ones_like(k)  # each output is then the sum of the weights that are left
    found = attention.runs_of(_segments(128).cuda())
    assert found is not None

    def attend(seed: int) -> torch.Tensor:
        torch.cuda.manual_seed(seed)
        return attention.attend_to_runs(q, k, v, found, causal=False, dropout=0.25, scale=None)

    assert torch.equal(attend(1), attend(1))
    assert not torch.equal(attend(1), attend(2))
    kept = torch.stack([attend(seed).float().mean() for seed in range(8)]).mean()
    assert float(kept) == pytest.approx(1.0, abs=0.01)  # what is left is scaled up by 1 / 0.75


@pytest.mark.gpu
@pytest.mark.parametrize("segments", ["runs", "pieces"])
def test_a_layer_with_dropout_goes_by_runs_unless_a_segment_is_in_pieces(
    segments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def note(name: str, function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return called

    monkeypatch.setattr(attention, "attend_to_runs", note("runs", attention.attend_to_runs))
    monkeypatch.setattr(attention, "_attend_with_mask", note("dense", attention._attend_with_mask))
    monkeypatch.setattr(attention, "attend_by_blocks", note("flex", attention.attend_by_blocks))
    config = TransformerConfig(num_layers=1, hidden_size=128, num_attention_heads=4, attention_dropout=0.1)
    layer = SDPAttention(config, 1, AttnMaskType.padding, "self").train()
    mask = _segments(640).cuda()
    if segments == "pieces":
        mask[3, 5] = 2
    q, k, v = (tensor.detach().permute(2, 0, 1, 3) for tensor in _tensors(640, 4))

    out = layer(q, k, v, mask)
    layer(q, k, v, mask)

    assert torch.isfinite(out).all()
    assert calls == [("runs" if segments == "runs" else "dense")] * 2
