"""How is SwiGLU computed? By liger-kernel's Triton kernel on CUDA, if it is installed.

The same place as liger-kernel 0.8's ``apply_liger_kernel_to_megatron`` patches, but as a row that can be undone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_megatron.engine.patching import Patch


def _liger_swiglu(original: Any) -> type:
    """A stand-in for the engine's autograd function: only its ``apply`` is ever used."""
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    class LigerSwiGLU:
        """SwiGLU of [tokens, 2 * ffn] -> [tokens, ffn]."""

        @staticmethod
        def apply(input: Tensor, fp8_input_store: bool = False, cpu_offload_input: bool = False) -> Tensor:
            if fp8_input_store or cpu_offload_input:  # both change what the engine keeps for the backward
                result: Tensor = original.apply(input, fp8_input_store, cpu_offload_input)
            else:
                result = LigerFusedGateUpSiLUMulFunction.apply(input, False)
            return result

    return LigerSwiGLU


SWIGLU_PATCHES: tuple[Patch, ...] = (
    Patch(
        module="megatron.core.fusions.fused_bias_swiglu",
        attribute="SwiGLUFunction",
        replacement=_liger_swiglu,
        engine="megatron-core 0.16.1",
        reason="one Triton kernel that recomputes silu in the backward is faster and keeps less than torch.compile's",
    ),
)
"""SwiGLU by liger-kernel; needs ``bias_activation_fusion=True`` and a MLP without biases."""
