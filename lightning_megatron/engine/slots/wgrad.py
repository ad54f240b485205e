"""How do weight gradients reach the fp32 main gradient? One GEMM that multiplies and adds, without an extra pass.

Stands in for Apex's extension ``fused_weight_gradient_mlp_cuda``, which megatron-core 0.16.1
(tensor_parallel/layers.py) needs for ``gradient_accumulation_fusion``; without it every gradient is written in bf16 and
then added to the fp32 buffer by another kernel. On CPU the product is accumulated in the same place, so that a laptop
runs the same path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_megatron.engine.patching import Patch

_LAYERS = "megatron.core.tensor_parallel.layers"
_ENGINE = "megatron-core 0.16.1"


def accumulate_weight_gradient(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Add ``grad_output.t() @ total_input`` to ``main_grad`` in place.

    Args:
        total_input: The layer's input, [s * b, in].
        grad_output: Gradient of its output, [s * b, out], in the dtype of ``total_input``.
        main_grad: [out, in], in the same dtype or float32.
    """
    if main_grad.dtype == total_input.dtype:
        main_grad.addmm_(grad_output.t(), total_input)
    elif main_grad.is_cuda:
        # torch >= 2.10: a float32 sum of half-precision products, in the GEMM's epilogue.
        torch.addmm(main_grad, grad_output.t(), total_input, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.addmm_(grad_output.t().to(main_grad.dtype), total_input.to(main_grad.dtype))


class WeightGradient:
    """The two functions of Apex's extension that the engine calls."""

    wgrad_gemm_accum_fp32 = staticmethod(accumulate_weight_gradient)
    wgrad_gemm_accum_fp16 = staticmethod(accumulate_weight_gradient)


def _stand_in(original: Any) -> type[WeightGradient]:
    return WeightGradient


def _available(original: Any) -> bool:
    return True


WGRAD_PATCHES: tuple[Patch, ...] = (
    Patch(
        module=_LAYERS,
        attribute="fused_weight_gradient_mlp_cuda",
        replacement=_stand_in,
        engine=_ENGINE,
        reason="the backward of parallel linears calls Apex's extension by this name",
    ),
    Patch(
        module=_LAYERS,
        attribute="_grad_accum_fusion_available",
        replacement=_available,
        engine=_ENGINE,
        reason="ColumnParallelLinear refuses gradient_accumulation_fusion without Apex's extension",
    ),
)
"""Let ``gradient_accumulation_fusion=True`` work without Apex."""
