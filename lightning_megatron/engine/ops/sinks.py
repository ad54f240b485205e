"""Attention with sinks: a learned score of each head, of no key, in the denominator of its softmax.

OpenAI 2025, gpt-oss (arXiv 2508.10925), section 2.2; after Xiao et al. 2023 (arXiv 2309.17453).

Torch's fused kernels have no sinks, but return the log-sum-exp L of a query's scores. With a sink t the log-sum-exp is
M = log(exp(L) + exp(t)), each weight exp(s - M), and the output that of the kernel times sigmoid(L - t). In the
backward pass kernels compute the weights again from the log-sum-exp, and the gradients of the scores from the output:
given M and the output with sinks, they return the gradients of attention with sinks. The gradient of t is that of a
score without a value: minus its weight, exp(t - M), times the product of the output and its gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor
from torch.nn.attention import SDPBackend

from lightning_megatron.engine.ops.compiled import compiled_for
from lightning_megatron.engine.ops.flex_attention import scale_by_sinks

SINKS = "softmax_offset"
"""Last part of the name of the sinks in checkpoints: Megatron-Core's."""
_MASK_ALIGNMENT = 16
"""The memory-efficient kernel reads masks whose rows begin at a multiple of it."""

_Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Gradients of queries, keys and values."""


def attend_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    added: Tensor | None,
    *,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention with sinks by a fused kernel: [b, np, sq, hn].

    Args:
        q: [b, np, sq, hn].
        k: [b, ng, sk, hn]; ng divides np.
        v: [b, ng, sk, hn].
        sinks: [np].
        added: Additive mask, [b or 1, 1, sq or 1, sk]; None for none.
        causal: Whether later keys are hidden from a query; without ``added``, and sq is sk.
        scale: Factor of the scores; None for 1 / sqrt(hn).
    """
    if scale is None:
        scale = q.shape[3] ** -0.5
    shape = q.shape
    groups = k.shape[1]
    sinks = sinks[:, None]
    if shape[2] == 1:
        # Heads of a group become queries of one head, so no key is copied.
        q = q.reshape(len(q), groups, -1, shape[3])
        sinks = sinks.reshape(groups, -1)
    kernel: _Kernel = _EfficientKernel(causal, scale)
    if not q.is_cuda:
        kernel = _CpuKernel(causal, scale)
    elif added is None:
        kernel = _kernel_without_mask(q, k, v, causal, scale)
    repeats = q.shape[1] // groups
    if repeats > 1 and not kernel.has_groups:
        k = k.repeat_interleave(repeats, dim=1)
        v = v.repeat_interleave(repeats, dim=1)
    output: Tensor = _Attention.apply(q, k, v, sinks, added, kernel)  # type: ignore[no-untyped-call]
    return output.reshape(shape)


def attend_with_sinks_and_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    added: Tensor | None,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """The same with dropout of the weights, and a tensor of all scores; ``dropout`` is the probability."""
    if scale is None:
        scale = q.shape[3] ** -0.5
    repeats = q.shape[1] // k.shape[1]
    keys = k.repeat_interleave(repeats, dim=1)
    values = v.repeat_interleave(repeats, dim=1)
    scores = torch.matmul(q, keys.transpose(2, 3)) * scale
    if added is not None:
        scores = scores + added
    of_sinks = sinks[:, None, None].expand(*scores.shape[:3], 1)
    with_sinks = torch.cat((scores, of_sinks.to(scores.dtype)), dim=-1)
    weights = torch.softmax(with_sinks, dim=-1, dtype=torch.float32)[..., :-1].to(v.dtype)
    return torch.matmul(F.dropout(weights, dropout), values)


class Sinks(torch.nn.Module):
    """Sinks of a layer's heads: parameter ``scores``, [np/tp]; in checkpoints by Megatron-Core's name."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        num_heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.scores = torch.nn.Parameter(torch.zeros(num_heads, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.scores, True, 0, 1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Any = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The scores, split over tp; ``prefix`` ends with the name of this module."""
        parent = prefix.removesuffix("sinks.")
        shard = make_tp_sharded_tensor_for_checkpoint(
            self.scores,
            parent + SINKS,
            prepend_offsets=sharded_offsets,
        )
        return {f"{prefix}scores": shard}


class _Kernel(ABC):
    """A fused kernel of torch: attention without sinks, its log-sum-exps, and gradients from these."""

    has_groups = False
    """Whether several heads of queries may share one of keys."""

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        added: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Output [b, np, sq, hn], log-sum-exps [b, np, sq or more], fp32, and what ``backward`` needs."""

    @abstractmethod
    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        added: Tensor | None,
        results: tuple[Tensor, ...],
    ) -> _Gradients:
        """Gradients from those of the output; ``results`` are those of ``forward``."""


@dataclass(frozen=True)
class _CpuKernel(_Kernel):
    causal: bool
    scale: float

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        added: Tensor | None,
    ) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...]
        results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q,
            k,
            v,
            0.0,
            self.causal,
            attn_mask=added,
            scale=self.scale,
        )
        return results

    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        added: Tensor | None,
        results: tuple[Tensor, ...],
    ) -> _Gradients:
        gradients: _Gradients
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient,
            *inputs,
            *results,
            0.0,
            self.causal,
            attn_mask=added,
            scale=self.scale,
        )
        return gradients


@dataclass(frozen=True)
class _FlashKernel(_Kernel):
    """FlashAttention, for 16-bit tensors without a mask."""

    causal: bool
    scale: float
    has_groups = True

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        added: Tensor | None,
    ) -> tuple[Tensor, ...]:
        output, log_sums, _, _, _, _, seed, offset, _ = (
            torch.ops.aten._scaled_dot_product_flash_attention(
                q,
                k,
                v,
                0.0,
                self.causal,
                False,
                scale=self.scale,
            )
        )
        return output, log_sums, seed, offset

    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        added: Tensor | None,
        results: tuple[Tensor, ...],
    ) -> _Gradients:
        output, log_sums, seed, offset = results
        q, k, _ = inputs
        gradients: _Gradients
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient,
            *inputs,
            output,
            log_sums,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            self.causal,
            seed,
            offset,
            scale=self.scale,
        )
        return gradients


@dataclass(frozen=True)
class _CudnnKernel(_Kernel):
    """cuDNN's attention, for 16-bit tensors without a mask; its log-sum-exps are [b, np, sq, 1]."""

    causal: bool
    scale: float
    has_groups = True

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        added: Tensor | None,
    ) -> tuple[Tensor, ...]:
        output, log_sums, _, _, _, _, seed, offset, _ = (
            torch.ops.aten._scaled_dot_product_cudnn_attention(
                q,
                k,
                v,
                None,
                True,
                0.0,
                self.causal,
                False,
                scale=self.scale,
            )
        )
        return output, log_sums.squeeze(3), seed, offset

    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        added: Tensor | None,
        results: tuple[Tensor, ...],
    ) -> _Gradients:
        output, log_sums, seed, offset = results
        q, k, _ = inputs
        gradients: _Gradients
        gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            gradient,
            *inputs,
            output,
            log_sums.unsqueeze(3),
            seed,
            offset,
            None,
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            self.causal,
            scale=self.scale,
        )
        return gradients


@dataclass(frozen=True)
class _EfficientKernel(_Kernel):
    """Memory-efficient attention (xFormers), for any dtype and mask."""

    causal: bool
    scale: float

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        added: Tensor | None,
    ) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...]
        results = torch.ops.aten._scaled_dot_product_efficient_attention(
            q,
            k,
            v,
            _aligned(added, q),
            True,
            0.0,
            self.causal,
            scale=self.scale,
        )
        return results

    def backward(
        self,
        gradient: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        added: Tensor | None,
        results: tuple[Tensor, ...],
    ) -> _Gradients:
        output, log_sums, seed, offset = results
        *gradients, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            gradient,
            *inputs,
            _aligned(added, inputs[0]),
            output,
            log_sums,
            seed,
            offset,
            0.0,
            [True, True, True, False],
            self.causal,
            scale=self.scale,
        )
        d_q, d_k, d_v = gradients
        return d_q, d_k, d_v


def _kernel_without_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
) -> _Kernel:
    """The kernel that torch's scaled_dot_product_attention would take on a GPU."""
    choice = torch._fused_sdp_choice(
        q,
        k,
        v,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    has_whole_vectors = q.shape[3] % 8 == 0
    if choice == SDPBackend.CUDNN_ATTENTION.value:
        return _CudnnKernel(causal, scale)
    if choice == SDPBackend.FLASH_ATTENTION.value and has_whole_vectors:
        return _FlashKernel(causal, scale)
    return _EfficientKernel(causal, scale)


def _aligned(added: Tensor | None, q: Tensor) -> Tensor | None:
    """Mask as the memory-efficient kernel reads it: [b, np, sq, sk], of the dtype of ``q``."""
    if added is None:
        return None
    keys = added.shape[3]
    padded = F.pad(added.to(q.dtype), (0, -keys % _MASK_ALIGNMENT))
    return padded[..., :keys].expand(*q.shape[:3], keys)


class _Attention(torch.autograd.Function):
    """Attention with sinks by a kernel without."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor,
        added: Tensor | None,
        kernel: _Kernel,
    ) -> Tensor:
        without, log_sums, *others = kernel.forward(q, k, v, added)
        output: Tensor
        # Eagerly it is several kernels in fp32.
        compute = compiled_for(q, _forward_with_sinks, is_dynamic=True)
        output, log_sums = compute(without, log_sums, sinks)
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, sinks, added, output, log_sums, *others)
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None]:
        q, k, v, sinks, added, output, log_sums, *others = ctx.saved_tensors
        (gradient,) = upstream
        results = (output, log_sums, *others)
        d_q, d_k, d_v = ctx.kernel.backward(gradient.contiguous(), (q, k, v), added, results)
        compute = compiled_for(q, _gradient_of_sinks, is_dynamic=True)
        d_sinks = compute(gradient, output, log_sums, sinks)
        return d_q, d_k, d_v, d_sinks, None, None


def _forward_with_sinks(
    output: Tensor,
    log_sums: Tensor,
    sinks: Tensor,
) -> tuple[Tensor, Tensor]:
    """Output, [b, np, sq, hn], and log-sum-exps with sinks, [b, np, sq or more]: a kernel may pad them."""
    queries = output.shape[2]
    scaled = scale_by_sinks(output, log_sums[..., :queries], sinks)
    with_sinks = torch.logaddexp(log_sums[..., :queries], sinks.float())
    padding = log_sums[..., queries:]
    return scaled, torch.cat((with_sinks, padding), dim=-1)


def _gradient_of_sinks(
    gradient: Tensor,
    output: Tensor,
    log_sums: Tensor,
    sinks: Tensor,
) -> Tensor:
    """Gradient of the sinks, [np, sq or 1]; arguments as for ``_forward_with_sinks``, but with sinks."""
    weights = torch.exp(sinks.float() - log_sums[..., : output.shape[2]])
    products = (gradient.float() * output.float()).sum(dim=-1)
    gradients = -(weights * products).sum(dim=0)
    if sinks.shape[1] == 1:
        gradients = gradients.sum(dim=1, keepdim=True)
    return gradients.to(sinks.dtype)
