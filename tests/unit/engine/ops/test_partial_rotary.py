"""Rotation of the last dimensions of heads, beside multiplication of complex numbers."""

import pytest
import torch
from torch import Tensor

from lightning_megatron.engine.ops.partial_rotary import rotate_last

PLAIN = 10
WIDTH = 6
FACTOR = 1.3


def _heads(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(7, 2, 3, PLAIN + WIDTH, generator=generator).to(dtype)


def _angles(interleaved: bool) -> Tensor:
    """Angles of seven positions in two rows, as the model gives them: of each dimension."""
    pairs = torch.rand(7, 2, 1, WIDTH // 2, generator=torch.Generator().manual_seed(2)) * 6
    if interleaved:
        return pairs.repeat_interleave(2, dim=-1)
    return torch.cat((pairs, pairs), dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_are_multiplied_by_a_complex_number(interleaved: bool) -> None:
    heads = _heads().double()
    angles = _angles(interleaved)
    actual = rotate_last(heads, angles, factor=FACTOR, interleaved=interleaved)
    rotary = heads[..., PLAIN:]
    if interleaved:
        pairs = torch.complex(rotary[..., ::2], rotary[..., 1::2])
        turns = angles[..., ::2]
    else:
        pairs = torch.complex(*rotary.chunk(2, dim=-1))
        turns = angles.chunk(2, dim=-1)[0]
    expected = pairs * torch.polar(torch.full_like(turns, FACTOR), turns)
    assert actual[..., :PLAIN].equal(heads[..., :PLAIN])
    rotated = torch.cat((expected.real, expected.imag), dim=-1)
    torch.testing.assert_close(
        actual[..., PLAIN:],
        rotated,
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_rotation_equals_the_cpu(interleaved: bool, dtype: torch.dtype) -> None:
    results = []
    weight = torch.randn(_heads().shape, generator=torch.Generator().manual_seed(3))
    for device in ("cpu", "cuda"):
        heads = _heads(dtype).to(device).requires_grad_()
        angles = _angles(interleaved).to(device)
        rotated = rotate_last(heads, angles, factor=FACTOR, interleaved=interleaved)
        (gradient,) = torch.autograd.grad((rotated.float() * weight.to(device)).sum(), heads)
        results.append((rotated.detach().cpu(), gradient.cpu()))
    torch.testing.assert_close(*results)
