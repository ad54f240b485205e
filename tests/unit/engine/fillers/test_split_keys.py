"""Split-K attention of one query per row beside attention to all keys at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_megatron.engine.fillers import attention
from lightning_megatron.engine.fillers.masks import MASKED_SCORE

ROWS, GROUPS, REPEATS, WIDTH, LENGTH = 2, 3, 4, 16, 512


def _case(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and values of a cache of which they are the first part, and scores that hide whole parts."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(ROWS, GROUPS, REPEATS, WIDTH, generator=generator)
    k, v = (torch.randn(ROWS, GROUPS, LENGTH + 128, WIDTH, generator=generator)[:, :, :LENGTH] for _ in range(2))
    scores = torch.zeros(ROWS, 1, 1, LENGTH)
    scores[0, ..., 300:] = scores[1, ..., :140] = MASKED_SCORE
    return [x.to(device, dtype) for x in (q, k, v, scores)]


def _expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: torch.Tensor, scale: float) -> torch.Tensor:
    """In fp64, as the formula says."""
    q, k, v, scores = (x.double().cpu() for x in (q, k, v, scores))
    return (q @ k.mT * scale + scores).softmax(-1) @ v


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_give_what_all_keys_give_at_once(parts: int, biases: bool) -> None:
    q, k, v, scores = _case("cpu", torch.float32)
    if biases:  # of each head, as ALiBi's
        scores = scores + torch.linspace(-3, 0, LENGTH) * torch.rand(1, GROUPS, REPEATS, 1)
    actual = attention.attend_in_parts(q, k, v, scores, parts, scale=0.3)
    torch.testing.assert_close(actual.double(), _expected(q, k, v, scores, 0.3), rtol=0.0, atol=1e-6)
    whole = F.scaled_dot_product_attention(q, k, v, scores)
    torch.testing.assert_close(
        attention.attend_in_parts(q, k, v, scores, parts, scale=None), whole, rtol=0.0, atol=1e-6
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_they_do_on_a_gpu_where_none_waits(dtype: torch.dtype, atol: float, rows: int) -> None:
    """In 16 bits the result of size 1 is rounded to 8 digits, twice."""
    q, k, v, scores = (x[:rows] for x in _case("cuda", dtype))
    parts = attention.num_key_parts(q, k)
    assert parts == LENGTH // attention.SMALLEST_PART
    attention.attend_in_parts(q, k, v, scores, parts, scale=0.3)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = attention.attend_in_parts(q, k, v, scores, parts, scale=0.3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(actual.double().cpu(), _expected(q, k, v, scores, 0.3), rtol=0.0, atol=atol)


@pytest.mark.parametrize(
    ("rows", "groups", "keys", "parts"),
    [
        (1, 8, 1024, 8),  # as many as are long enough
        (1, 8, 4096, 16),  # as many as keep 132 multiprocessors busy
        (8, 8, 4096, 2),
        (32, 8, 1024, 1),  # the rows do that alone
        (1, 8, 896, 7),
        (2, 8, 1664, 1),  # of thirteen times 128 keys no eight equal parts
        (1, 8, 1000, 1),
    ],
)
def test_keys_are_cut_where_rows_leave_a_device_idle(
    rows: int, groups: int, keys: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_num_multiprocessors", lambda device: 132)
    q: Any = SimpleNamespace(is_cuda=True, device="cuda", shape=(rows, groups, 4, 128))
    k: Any = SimpleNamespace(shape=(rows, groups, keys, 128))
    assert attention.num_key_parts(q, k) == parts
    assert attention.num_key_parts(torch.empty(rows, groups, 4, 128), torch.empty(rows, groups, keys, 128)) == 1
