"""Products of cuBLASLt with what torch has no function for: a sum in fp32 of fp8 products, GELU and its derivative.

Each is a pass over memory less, as the epilogue of the product works on what is still in registers.

- Weight gradients in fp8 of every microbatch but the first are added to ``main_grad``; ``torch._scaled_mm`` has no
  beta. As a product into a new tensor and an addition this writes 4 bytes a parameter, then reads 8 and writes 4; here
  it reads 4 and writes 4, under the product. H200, gradient of Llama-3-8B's qkv, [6144, 4096] of 8,192 tokens, us:
  352 -> 296, the product alone 283.
- GELU (``gelu_mlp.py``). ``torch._addmm_activation`` has its epilogue, but does not return what it is the GELU of.
  H200, GPT-2 large, 12,288 tokens, us: linear and GELU 330 -> 307, gradients of both 364 -> 283.

Bias gradients can be summed in epilogues, too, but slowly: the product with GELU's derivative then takes 670 us, and a
weight gradient 12 % longer, which is the time of the sum. Second and third choices of algorithms for bf16 weight
gradients gain nothing: 23 shapes of five models are within 3 % of torch's.

By ctypes on the library that torch has loaded, with torch's handle: four calls, of an interface that is stable since
CUDA 11. nvmath-python has bindings of the same functions; its 5 MB and four further packages would save the
declarations below, not the rest. The algorithm is chosen once per shape, as torch does at each call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes to which cuBLAS assumes that matrices are aligned, as torch's allocations are, and Megatron's gradients."""

_WORKSPACE = 32 * 2**20
"""Bytes of scratch memory for a product, what torch gives cuBLASLt on Hopper."""

# cublasLt.h, library_types.h, cublas_api.h
_R_32F = 0
_DATA_TYPES = {
    torch.float32: _R_32F,
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALF = (torch.float16, torch.bfloat16)
_COMPUTE_32F = 68
_OP_T = 1
_DESC_TRANSA = 3
_DESC_EPILOGUE = 7
_DESC_BIAS_POINTER = 8
_DESC_EPILOGUE_AUX_POINTER = 11
_DESC_EPILOGUE_AUX_LD = 12
_DESC_A_SCALE_POINTER = 17
_DESC_B_SCALE_POINTER = 18
_DESC_FAST_ACCUM = 25
_PREFERENCE_MAX_WORKSPACE_BYTES = 1
_EPILOGUE_NONE = 1
_EPILOGUE_GELU_AUX_BIAS = 164
"""GELU, by tanh, of the product and a bias, and that sum itself into a second matrix."""
_EPILOGUE_DGELU = 192
"""Multiplication by the derivative of the same GELU at a second matrix."""


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Product(NamedTuple):
    """What a plan depends on: column by column, [m, n] = A [m, k] @ B [k, n]."""

    device: torch.device
    m: int
    n: int
    k: int
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    transposes_a: bool
    """Whether A lies in memory as its transpose, [k, m]."""
    epilogue: int = _EPILOGUE_NONE
    sums_fast: bool = False
    """Whether tensor cores sum fp8 products in their own registers."""


class _Plan(NamedTuple):
    """Product of one shape; the descriptors live as long as the process."""

    descriptor: c_void_p
    a: c_void_p
    b: c_void_p
    c: c_void_p
    heuristic: _Heuristic


@functools.cache
def _library() -> Any:
    """The library that torch has loaded; None if there is none."""
    major = (torch.version.cuda or "").partition(".")[0]
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{major}")
    except OSError:
        return None
    library.cublasLtMatmul.argtypes = [*[c_void_p] * 14, c_size_t, c_void_p]
    return library


def _call(name: str, *arguments: Any) -> None:
    """Call a function of cuBLASLt.

    Raises:
        RuntimeError: If it fails.
    """
    status = getattr(_library(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed with status {status}")


def _set(descriptor: c_void_p, attribute: int, value: Any) -> None:
    _call(
        "cublasLtMatmulDescSetAttribute",
        descriptor,
        attribute,
        byref(value),
        c_size_t(ctypes.sizeof(value)),
    )


def _layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
    """Layout of a matrix that is contiguous column by column."""
    layout = c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate",
        byref(layout),
        _DATA_TYPES[dtype],
        c_uint64(rows),
        c_uint64(columns),
        c_int64(rows),
    )
    return layout


def _set_pointer(descriptor: c_void_p, attribute: int, address: int) -> None:
    _set(descriptor, attribute, c_void_p(address))


@functools.cache
def _plan(product: _Product) -> _Plan | None:
    """Plan a product; None if cuBLASLt has no algorithm for it."""
    m, n, k = product.m, product.n, product.k
    descriptor = c_void_p()
    _call("cublasLtMatmulDescCreate", byref(descriptor), _COMPUTE_32F, _R_32F)
    if product.transposes_a:
        _set(descriptor, _DESC_TRANSA, c_int32(_OP_T))
    _set(descriptor, _DESC_EPILOGUE, c_int32(product.epilogue))
    # Any address: it says that there is one, and how it is aligned.
    if product.a in _FP8:
        _set(descriptor, _DESC_FAST_ACCUM, c_int8(product.sums_fast))
        _set_pointer(descriptor, _DESC_A_SCALE_POINTER, ALIGNMENT)
        _set_pointer(descriptor, _DESC_B_SCALE_POINTER, ALIGNMENT)
    if product.epilogue != _EPILOGUE_NONE:
        _set_pointer(descriptor, _DESC_EPILOGUE_AUX_POINTER, ALIGNMENT)
        _set(descriptor, _DESC_EPILOGUE_AUX_LD, c_int64(m))
    if product.epilogue == _EPILOGUE_GELU_AUX_BIAS:
        _set_pointer(descriptor, _DESC_BIAS_POINTER, ALIGNMENT)
    layouts = (
        _layout(product.a, k, m) if product.transposes_a else _layout(product.a, m, k),
        _layout(product.b, k, n),
        _layout(product.out, m, n),
    )
    preference = c_void_p()
    _call("cublasLtMatmulPreferenceCreate", byref(preference))
    _call(
        "cublasLtMatmulPreferenceSetAttribute",
        preference,
        _PREFERENCE_MAX_WORKSPACE_BYTES,
        byref(c_size_t(_WORKSPACE)),
        c_size_t(ctypes.sizeof(c_size_t)),
    )
    heuristic = _Heuristic()
    found = c_int(0)
    handle = c_void_p(torch.cuda.current_blas_handle())
    # A status other than success is "not supported".
    status = _library().cublasLtMatmulAlgoGetHeuristic(
        handle,
        descriptor,
        *layouts,
        layouts[-1],
        preference,
        1,
        byref(heuristic),
        byref(found),
    )
    _call("cublasLtMatmulPreferenceDestroy", preference)
    if status or not found.value:
        return None
    return _Plan(descriptor, *layouts, heuristic)


def _usable(matrices: Sequence[Tensor]) -> bool:
    """Whether cuBLASLt can read and write these."""
    if not matrices[0].is_cuda or _library() is None:
        return False
    return all(each.is_contiguous() and each.data_ptr() % ALIGNMENT == 0 for each in matrices)


_ONE = c_float(1.0)
_ZERO = c_float(0.0)


def _multiply(
    plan: _Plan,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    adds: bool = False,
) -> None:
    """Write the product to ``out``, or add it."""
    # From torch's allocator, so that it belongs to the stream, or to the graph that is being captured.
    workspace = torch.empty(plan.heuristic.workspace, dtype=torch.uint8, device=out.device)
    _call(
        "cublasLtMatmul",
        torch.cuda.current_blas_handle(),
        plan.descriptor,
        byref(_ONE),
        a.data_ptr(),
        plan.a,
        b.data_ptr(),
        plan.b,
        byref(_ONE if adds else _ZERO),
        out.data_ptr(),
        plan.c,
        out.data_ptr(),
        plan.c,
        byref(plan.heuristic.algorithm),
        workspace.data_ptr(),
        plan.heuristic.workspace,
        torch.cuda.current_stream().cuda_stream,
    )


# Row by row what cuBLAS reads column by column is the transpose of everything: each product below is A = the second
# operand, B = the first one.


def add_product(
    total: Tensor,
    rows: Tensor,
    columns: Tensor,
    scales: tuple[Tensor, Tensor],
    *,
    fast: bool,
) -> bool:
    """Add ``rows @ columns.t()``, scaled, to ``total`` in place, if cuBLASLt can.

    Args:
        total: [n, m], contiguous.
        rows: [n, k], contiguous, fp8; k is a multiple of 16.
        columns: [m, k], as ``rows``; one of the two in e4m3.
        scales: Factors of both, [1], fp32.
        fast: Whether tensor cores sum in their own registers.

    Returns:
        Whether it did; else nothing has been done: not on a GPU, ``total`` not in fp32 or not aligned, or unsupported.
    """
    if total.dtype is not torch.float32 or not _usable((total, rows, columns)):
        return False
    n, m = total.shape
    product = _Product(
        total.device,
        m,
        n,
        rows.shape[1],
        columns.dtype,
        rows.dtype,
        total.dtype,
        transposes_a=True,
        sums_fast=fast,
    )
    plan = _plan(product)
    if plan is None:
        return False
    # Read at launch, as the scales are by the kernel.
    _set_pointer(plan.descriptor, _DESC_A_SCALE_POINTER, scales[1].data_ptr())
    _set_pointer(plan.descriptor, _DESC_B_SCALE_POINTER, scales[0].data_ptr())
    _multiply(plan, columns, rows, total, adds=True)
    return True


def _half_plan(
    rows: Tensor,
    weight: Tensor,
    *,
    transposes_a: bool,
    epilogue: int,
) -> _Plan | None:
    """Plan ``rows @ weight.t()``, or without ``transposes_a`` ``rows @ weight``, of matrices in one 16-bit dtype."""
    tokens, width = rows.shape
    product = _Product(
        rows.device,
        weight.numel() // width,
        tokens,
        width,
        weight.dtype,
        rows.dtype,
        rows.dtype,
        transposes_a,
        epilogue,
    )
    return _plan(product)


def linear_and_gelu(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """``rows @ weight.t() + bias`` and its GELU by tanh, if cuBLASLt can.

    The GELU is that of the fp32 sum, not of what is returned beside it: it is rounded once instead of twice.

    Args:
        rows: [tokens, in], bf16 or fp16.
        weight: [out, in], in the dtype of ``rows``.
        bias: [out], as ``weight``.

    Returns:
        Both, [tokens, out]; None if not on a GPU, not contiguous or aligned, in another dtype, or unsupported.
    """
    if rows.dtype not in _HALF or not _usable((rows, weight, bias)):
        return None
    plan = _half_plan(rows, weight, transposes_a=True, epilogue=_EPILOGUE_GELU_AUX_BIAS)
    if plan is None:
        return None
    before, activated = (rows.new_empty(len(rows), len(weight)) for _ in range(2))
    _set_pointer(plan.descriptor, _DESC_BIAS_POINTER, bias.data_ptr())
    _set_pointer(plan.descriptor, _DESC_EPILOGUE_AUX_POINTER, before.data_ptr())
    _multiply(plan, weight, rows, activated)
    return before, activated


def gelu_gradient(
    gradient: Tensor,
    weight: Tensor,
    before: Tensor,
) -> Tensor | None:
    """Gradient of the input of a GELU by tanh whose output a linear without bias reads, if cuBLASLt can.

    Args:
        gradient: Gradient of the linear's output, [tokens, out], bf16 or fp16.
        weight: The linear's, [out, in], in the dtype of ``gradient``.
        before: Input of the GELU, [tokens, in], as ``weight``.

    Returns:
        [tokens, in]; None as for ``linear_and_gelu``.
    """
    if gradient.dtype not in _HALF or not _usable((gradient, weight, before)):
        return None
    plan = _half_plan(gradient, weight, transposes_a=False, epilogue=_EPILOGUE_DGELU)
    if plan is None:
        return None
    d_before = torch.empty_like(before)
    _set_pointer(plan.descriptor, _DESC_EPILOGUE_AUX_POINTER, before.data_ptr())
    _multiply(plan, weight, gradient, d_before)
    return d_before
