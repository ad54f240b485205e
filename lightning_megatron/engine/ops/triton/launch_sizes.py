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
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 of a CPU, on which Triton's interpreter runs."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
