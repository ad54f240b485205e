"""Sizes of launches, computed once for each width and device: each time takes microseconds of the host."""

from __future__ import annotations

import functools

import torch
import triton


@functools.cache
def power_of_two(width: int) -> int:
    """Smallest power of two that is not below ``width``; Triton's own function takes 4 us."""
    power: int = triton.next_power_of_2(width)
    return power


@functools.cache
def warps_of_columns(columns: int) -> int:
    """Warps of a program that holds tiles of some rows and ``columns`` in registers: 4 up to 128, 16 from 512 on.

    Measured for 128. For more, the fewest with which registers suffice (Triton 3.6 and 3.7, sm_90): with 4 each thread
    of the router's kernels keeps 0.7 kB in memory at 512 columns, and of the sort of rows 1 kB at 256.
    """
    return max(4, min(16, columns // 32))


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 of a CPU, on which Triton's interpreter runs."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
