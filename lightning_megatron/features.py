"""What is installed on this machine? The only optional imports of the package."""

from __future__ import annotations

import functools
import importlib
import importlib.util


def _imports(module: str, *names: str) -> bool:
    """Whether ``names`` can really be imported from ``module``.

    Looking for the module is not enough: the package called ``apex`` on PyPI is not NVIDIA's.
    """
    try:
        loaded = importlib.import_module(module)
    except Exception:  # a half-installed CUDA extension raises OSError, RuntimeError or worse
        return False
    return all(hasattr(loaded, name) for name in names)


@functools.cache
def has_transformer_engine() -> bool:
    """NVIDIA Transformer Engine with its PyTorch layers."""
    return _imports("transformer_engine.pytorch", "LayerNormLinear")


@functools.cache
def has_apex() -> bool:
    """NVIDIA's Apex, not the unrelated package of that name on PyPI."""
    return _imports("apex.optimizers", "FusedAdam") and _imports("amp_C", "multi_tensor_l2norm")


@functools.cache
def has_apex_wgrad() -> bool:
    """NVIDIA Apex's extension that accumulates weight gradients in the GEMM."""
    return _imports("fused_weight_gradient_mlp_cuda", "wgrad_gemm_accum_fp32")


@functools.cache
def has_liger() -> bool:
    """liger-kernel with its Megatron functions (Triton, needs a GPU to run)."""
    return importlib.util.find_spec("liger_kernel") is not None and _imports("liger_kernel.megatron")


@functools.cache
def has_matplotlib() -> bool:
    """matplotlib, for pictures of loss curves."""
    return importlib.util.find_spec("matplotlib") is not None
