"""Does the compiled rotation equal the eager one, and is it used only where it pays?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from lightning_megatron.engine.fillers.kernels import MAX_SHAPES, MAX_STEP_SHAPES, CompiledRope
from lightning_megatron.engine.patches import ROPE, active


def _case(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(6, 2, 3, 8, generator=generator)
    angles = torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.3, 0.1])  # the last two of eight channels stay
    return t.to(device).requires_grad_(), torch.cat([angles, angles], -1)[:, None, None].to(device)


def _formula(t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """Rotation as multiplication of complex numbers."""
    half = freqs.shape[-1] // 2
    turned = torch.complex(t[..., :half], t[..., half : 2 * half]) * torch.exp(1j * freqs[..., :half])
    return torch.cat([turned.real, turned.imag, t[..., 2 * half :]], -1)


def _check(device: str) -> None:
    t, freqs = _case(device)
    with active(ROPE):
        got = rope_utils._apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved=False)
    expected = _formula(t, freqs)
    weight = torch.randn_like(expected)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad((got * weight).sum(), t)
    (reference,) = torch.autograd.grad((expected * weight).sum(), t)
    torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-5)


def test_the_rotation_is_that_of_complex_numbers_on_the_cpu() -> None:
    _check("cpu")


@pytest.mark.gpu
def test_the_compiled_rotation_is_that_of_complex_numbers() -> None:
    _check("cuda")


class _Recorder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any) -> str:
        self.calls += 1
        return "called"


def _rope() -> tuple[CompiledRope, _Recorder, _Recorder, _Recorder]:
    rope = CompiledRope(_formula)
    eager, compiled, step = _Recorder(), _Recorder(), _Recorder()
    rope.eager, rope.compiled, rope.compiled_step = eager, compiled, step  # type: ignore[assignment]
    return rope, eager, compiled, step


def _fake(length: int, is_cuda: bool, rows: int = 1) -> Any:
    return SimpleNamespace(shape=torch.Size([length, rows, 1, 8]), dtype=torch.float32, is_cuda=is_cuda)


def test_many_prompts_are_not_all_compiled_and_use_up_neither_the_places_of_training_nor_those_of_steps() -> None:
    rope, eager, compiled, step = _rope()
    with torch.no_grad():
        for length in range(2, 40):
            rope(_fake(length, is_cuda=True), _fake(length, is_cuda=True))
        assert compiled.calls == MAX_SHAPES
        assert eager.calls == 38 - MAX_SHAPES
        for _ in range(2):
            for rows in range(20):
                rope(_fake(1, is_cuda=True, rows=rows), _fake(1, is_cuda=True))
        assert step.calls == 2 * MAX_STEP_SHAPES
    rope(_fake(64, is_cuda=True), _fake(64, is_cuda=True))
    rope(_fake(64, is_cuda=True), _fake(64, is_cuda=True))
    rope(_fake(1, is_cuda=True), _fake(1, is_cuda=True))
    assert compiled.calls == MAX_SHAPES + 3


@pytest.mark.gpu
def test_the_compiled_rotation_of_one_token_is_that_of_complex_numbers() -> None:
    t, freqs = _case("cuda")
    with active(ROPE), torch.no_grad():
        for rows in range(1, MAX_STEP_SHAPES + 3):
            token, angles = t[3:4, :1].expand(1, rows, 3, 8).contiguous(), freqs[3:4]
            got = rope_utils._apply_rotary_pos_emb_bshd(token, angles, rotary_interleaved=False)
            torch.testing.assert_close(got, _formula(token, angles), rtol=1e-5, atol=1e-5)


def test_the_engine_still_applies_an_eager_function() -> None:
    assert not hasattr(rope_utils._apply_rotary_pos_emb_bshd, "_torchdynamo_orig_callable")
