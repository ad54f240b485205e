"""Largest magnitude of what a kernel writes, for ``ops/magnitudes.py``: part of other kernels."""

# mypy: allow-untyped-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """Bits of the magnitudes of ``x``: ordered as the magnitudes are, NaN above infinity whatever its sign."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def raise_magnitude(amax, bits, out):
    """Raise ``amax`` to the largest of ``bits``, those of fp32 values, after rounding to the dtype that ``out`` has.

    Rounding keeps the order, so the largest is rounded instead of all.
    """
    largest = tl.max(bits).to(tl.float32, bitcast=True)
    rounded = largest.to(out.dtype.element_ty)
    tl.atomic_max(amax, magnitude_bits(rounded), sem="relaxed")
