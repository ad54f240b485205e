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

_MAX_FLASH_WIDTH = 256
"""Maximum head width of FlashAttention; latents in generation are wider."""


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
    shape = (*q.shape[:3], v.shape[3])
    if q.shape[2] == 1:
        # Heads of a group become queries of one head, so no key is copied.
        q = q.reshape(len(q), k.shape[1], -1, q.shape[3])
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

    is_half = q.dtype in (torch.float16, torch.bfloat16)
    if not q.is_cuda or not is_half or q.shape[3] > _MAX_FLASH_WIDTH:
        return attend(v).reshape(shape)
    if can_use_cudnn_attention(SDPAParams(q, k, v, None, dropout, causal, grouped)):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return attend(v).reshape(shape)
    return attend(padded_values(v, q.shape[3]))[..., : v.shape[3]].reshape(shape)


def padded_values(v: Tensor, width: int) -> Tensor:
    """Values with zeros up to ``width`` columns; ``v`` itself if it has them."""
    padding = width - v.shape[-1]
    if padding == 0:
        return v
    return F.pad(v, (0, padding))
