"""Attention whose values are narrower than its queries and keys, as in multi-head latent attention (192 and 128).

FlashAttention in torch wants one width. cuDNN has kernels for two on Hopper and newer GPUs; elsewhere values are padded
with zeros to the width of keys. The memory-efficient kernel, which torch would take, has two widths, too, but is slower
than either.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel


def attend_narrow(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """Attention without a mask: [b, np, sq, hv].

    Args:
        q: [b, np, sq, hn].
        k: [b, ng, sk, hn]; ng divides np.
        v: [b, ng, sk, hv]; hv is less than hn.
        causal: Whether later keys are hidden from a query; sq is sk.
        dropout: Probability of dropping a weight.
        scale: Factor of the scores; None for 1 / sqrt(hn).
    """
    grouped = q.shape[1] != k.shape[1]

    def attend(values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q,
            k,
            values,
            dropout_p=dropout,
            is_causal=causal,
            scale=scale,
            enable_gqa=grouped,
        )

    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return attend(v)
    if can_use_cudnn_attention(SDPAParams(q, k, v, None, dropout, causal, grouped)):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return attend(v)
    return attend(padded_values(v, q.shape[3]))[..., : v.shape[3]]


def padded_values(v: Tensor, width: int) -> Tensor:
    """Values with zeros up to ``width`` columns; ``v`` itself if it has them."""
    padding = width - v.shape[-1]
    if padding == 0:
        return v
    return F.pad(v, (0, padding))
