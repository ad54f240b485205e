"""fp8 product added to an fp32 matrix in cuBLASLt's epilogue, which ``torch._scaled_mm`` cannot: it has no beta.

Weight gradients of every microbatch but the first are added to ``main_grad``. As a product into a new tensor and an
addition this writes 4 bytes a parameter, then reads 8 and writes 4; here it reads 4 and writes 4, under the product.
H200, gradient of Llama-3-8B's qkv, [6144, 4096] of 8,192 tokens, us: 352 -> 296, the product alone 283.

By ctypes on the library that torch has loaded, with torch's handle: four calls, of an interface that is stable since
CUDA 11. nvmath-python has bindings of the same functions; its 5 MB and four further packages would save the
declarations below, not the rest. The algorithm is chosen once per shape, as torch does at each call.
"""

from __future__ import annotations

import ctypes
import functools
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
_DATA_TYPES = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29, torch.float32: _R_32F}
_COMPUTE_32F = 68
_OP_T = 1
_DESC_TRANSA = 3
_DESC_A_SCALE_POINTER = 17
_DESC_B_SCALE_POINTER = 18
_DESC_FAST_ACCUM = 25
_PREFERENCE_MAX_WORKSPACE_BYTES = 1


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


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


@functools.cache
def _plan(
    device: torch.device,
    m: int,
    n: int,
    k: int,
    a: torch.dtype,
    b: torch.dtype,
    fast: bool,
) -> _Plan | None:
    """Plan a product [n, k] x [m, k] -> [n, m]; None if cuBLASLt has no algorithm for it."""
    descriptor = c_void_p()
    _call("cublasLtMatmulDescCreate", byref(descriptor), _COMPUTE_32F, _R_32F)
    _set(descriptor, _DESC_TRANSA, c_int32(_OP_T))
    _set(descriptor, _DESC_FAST_ACCUM, c_int8(fast))
    # Any address: it says that there is a scale.
    _set(descriptor, _DESC_A_SCALE_POINTER, c_void_p(ALIGNMENT))
    _set(descriptor, _DESC_B_SCALE_POINTER, c_void_p(ALIGNMENT))
    layouts = (
        _layout(a, k, m),
        _layout(b, k, n),
        _layout(torch.float32, m, n),
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


_ONE = c_float(1.0)


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
    is_plain = total.dtype is torch.float32 and total.is_contiguous()
    if not total.is_cuda or not is_plain or _library() is None:
        return False
    operands = (columns.data_ptr(), rows.data_ptr(), total.data_ptr())
    if any(address % ALIGNMENT for address in operands):
        return False
    # Row by row what cuBLAS reads column by column: the transpose of everything.
    n, m = total.shape
    plan = _plan(total.device, m, n, rows.shape[1], columns.dtype, rows.dtype, fast)
    if plan is None:
        return False
    # Read at launch, as the scales are by the kernel.
    _set(plan.descriptor, _DESC_A_SCALE_POINTER, c_void_p(scales[1].data_ptr()))
    _set(plan.descriptor, _DESC_B_SCALE_POINTER, c_void_p(scales[0].data_ptr()))
    # From torch's allocator, so that it belongs to the stream, or to the graph that is being captured.
    workspace = torch.empty(plan.heuristic.workspace, dtype=torch.uint8, device=total.device)
    a, b, c = operands
    _call(
        "cublasLtMatmul",
        torch.cuda.current_blas_handle(),
        plan.descriptor,
        byref(_ONE),
        a,
        plan.a,
        b,
        plan.b,
        byref(_ONE),
        c,
        plan.c,
        c,
        plan.c,
        byref(plan.heuristic.algorithm),
        workspace.data_ptr(),
        plan.heuristic.workspace,
        torch.cuda.current_stream().cuda_stream,
    )
    return True
