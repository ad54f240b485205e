"""SwiGLU by liger-kernel's Triton kernel, if it is installed; between fp8 linears by one that measures what it writes.

liger-kernel 0.8's ``apply_liger_kernel_to_megatron`` patches the same function.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import Tensor

from lightning_megatron.engine.ops import magnitudes


@functools.cache
def has_liger() -> bool:
    """Whether liger-kernel with its Megatron functions is installed (Triton, needs a GPU to run)."""
    try:
        importlib.import_module("liger_kernel.megatron")
    except Exception:  # a half-installed CUDA extension raises OSError, RuntimeError or worse
        return False
    return True


def liger_swiglu(original: Any) -> type:
    """Replacement of the engine's autograd function, of which only ``apply`` is used."""
    # Imported here: the package is optional.
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    class LigerSwiGLU:
        """SwiGLU of [tokens, 2 * ffn] -> [tokens, ffn]."""

        @staticmethod
        def apply(
            input: Tensor,
            fp8_input_store: bool = False,
            cpu_offload_input: bool = False,
        ) -> Tensor:
            # Both change what the engine saves for backward.
            if fp8_input_store or cpu_offload_input:
                result: Tensor = original.apply(input, fp8_input_store, cpu_offload_input)
            elif magnitudes.is_marked(input):
                # Imported here: Triton is on GPUs only.
                from lightning_megatron.engine.ops.triton.swiglu import swiglu

                result = swiglu(input)
            else:
                result = LigerFusedGateUpSiLUMulFunction.apply(input, False)
            return result

    return LigerSwiGLU
