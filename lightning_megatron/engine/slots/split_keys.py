"""How is one query per head attended from fast where there are few heads? To parts of the keys at once, joined after.

A kernel gives each head of each row to one multiprocessor, which walks along all keys; with few rows most of a GPU is
idle. So the keys are cut into parts, as if each were a head of its own, and the parts' results are joined by their
softmax sums (Flash-Decoding: Dao, Haziza, Massa, Sizov 2023).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

SMALLEST_PART = 128
"""Keys: the memory-efficient kernel reads so many at once."""


def num_parts(q: Tensor, k: Tensor) -> int:
    """Into how many equal parts the keys are to be cut; 1 where that gains nothing, or they cannot be.

    Args:
        q: [b, ng, repeats, hn], of CUDA in a dtype and width that torch's memory-efficient kernel takes, or 1 is
            returned.
        k: [b, ng, sk, hn].
    """
    if not q.is_cuda or q.shape[3] % 8 != 0 or k.shape[2] % SMALLEST_PART != 0:
        return 1
    most = _num_multiprocessors(q.device) // (k.shape[0] * k.shape[1])
    blocks = k.shape[2] // SMALLEST_PART
    return max(parts for parts in range(1, max(most, 1) + 1) if blocks % parts == 0)


def attend(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, parts: int, scale: float | None) -> Tensor:
    """Weighted sums of the values: [b, ng, repeats, hn].

    Args:
        q: [b, ng, repeats, hn], the queries that share keys.
        k: [b, ng, sk, hn]; ``parts`` divides sk.
        v: [b, ng, sk, hn].
        scores: Added, [b or 1, ng or 1, repeats or 1, sk]; each part has finite ones.
        parts: How many.
        scale: What the scores are multiplied by; None for 1 / sqrt(hn).
    """
    rows, groups, repeats, width = q.shape
    keys, values = (x.unflatten(2, (parts, -1)).flatten(0, 1) for x in (k, v))
    queries = q.flatten(0, 1)[:, None].expand(-1, parts, -1, -1)
    added = scores.unflatten(3, (parts, -1)).transpose(2, 3)
    added = added.expand(rows, groups, parts, repeats, -1).flatten(0, 1)
    outputs, log_sums = _with_log_sums(queries, keys, values, added, scale)
    joined: Tensor = (_compiled(_joined) if q.is_cuda else _joined)(outputs, log_sums)
    return joined.view(rows, groups, repeats, width)


def _joined(outputs: Tensor, log_sums: Tensor) -> Tensor:
    """[n, repeats, hn], of the parts' outputs, [n, parts, repeats, hn], and log_sums, [n, parts, >= repeats] fp32."""
    weights = log_sums[:, :, : outputs.shape[2]].softmax(dim=1)
    return (outputs.float() * weights[..., None]).sum(dim=1).to(outputs.dtype)


def _with_log_sums(q: Tensor, k: Tensor, v: Tensor, added: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Outputs, and the logarithms of the softmaxes' denominators.

    By torch's own operators below scaled_dot_product_attention, which keeps the latter to itself.
    """
    if q.is_cuda:
        found = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, added, True, scale=scale)
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=added, scale=scale)
    return found[0], found[1]


@functools.cache
def _compiled(function: Any) -> Any:
    """Compiled once per process for all sizes: eagerly it is five kernels in each layer."""
    return torch.compile(function, dynamic=True)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
