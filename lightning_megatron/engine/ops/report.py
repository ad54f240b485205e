"""What implements each op of the engine on a device, and why: for the log of a run and for ``doctor``."""

from __future__ import annotations

from typing import Literal

from lightning_megatron.engine.ops.flash_attention_4 import has_flash_attention_4

DeviceType = Literal["cpu", "cuda"]


_ON_CPU = {
    "core attention": ("torch SDPA", "supports masks, biases and grouped-query attention"),
    "norm": ("torch", "supports sequence parallelism"),
    "weight gradient": ("torch addmm into fp32", "accumulates in the GEMM"),
    "Adam": ("torch fused kernel", "runs on the CPU"),
    "SGD": ("torch fused kernel", "clips while updating"),
    "Muon": ("torch batched products in bf16", "whole matrices, each on one rank"),
    "gradient norm": ("torch foreach", "no host synchronization"),
    "RoPE": ("eager", "runs on the CPU"),
    "SwiGLU": ("Megatron-Core", "runs on the CPU"),
    "GELU": ("torch", "runs on the CPU"),
    "cross-entropy": ("eager", "runs on the CPU"),
}
_ON_CUDA = {  # torch's wheels for CUDA bring Triton with them
    "core attention": (
        "torch SDPA, FlexAttention for masks",
        "supports masks, biases and grouped-query attention",
    ),
    "norm": ("Triton kernel fused with the residual addition, else torch", "one pass over memory"),
    "Adam": ("Triton kernel", "clips, updates and copies in one pass"),
    "RoPE": ("Triton kernel", "fused with the split into q, k and v"),
    "SwiGLU": ("Triton kernel", "recomputes in the backward pass"),
    "GELU": ("cuBLASLt in the products if by tanh at tp=1, else torch", "no passes of its own"),
    "cross-entropy": ("Triton kernels", "read and write the logits once"),
}


def ops_report(device_type: DeviceType) -> list[tuple[str, str, str]]:
    """Each op of the engine, its implementation on ``device_type``, and the reason for that choice."""
    ops = dict(_ON_CPU)
    if device_type == "cuda":
        ops |= _ON_CUDA
        if has_flash_attention_4():
            ops["core attention"] = (
                "FlashAttention-4 for causal heads of 128 on Hopper, torch SDPA, FlexAttention for masks",
                "the fastest for each kind of attention",
            )
    return [(op, *chosen) for op, chosen in ops.items()]
