"""Rotary position embeddings: frequencies, Hugging Face's scalings of them, and angles. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.models.config import RopeScaling


def inverse_frequencies(
    width: int,
    base: float,
    scaling: RopeScaling | None,
    seq_length: int | None = None,
) -> Tensor:
    """Rotary frequencies of a head's pairs: [width / 2], float32, radians per position, on the CPU.

    Source: Su et al. 2021, RoFormer (arXiv 2104.09864), eq. 15.

    Args:
        width: Rotated dimensions of a head.
        base: Theta.
        scaling: Scaling of the frequencies; None for none.
        seq_length: Length of the longest row, for ``dynamic`` and ``longrope``; None for at most the original context.
            Unlike Hugging Face's ``dynamic``, earlier, longer sequences have no effect.
    """
    if scaling is None:
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        wavelengths: Tensor = base**exponents
        return 1.0 / wavelengths
    return scaled_frequencies(
        asdict(scaling),
        width,
        base,
        scaling.original_max_position_embeddings,
        seq_length,
    )[0]


def scaled_frequencies(
    rope: Mapping[str, Any],
    width: int,
    base: float,
    original: int,
    seq_length: int | None = None,
) -> tuple[Tensor, float]:
    """Scaled frequencies, as ``inverse_frequencies``, and attention factor, computed by transformers.

    Args:
        rope: ``rope_parameters`` of a config, with a factor.
        width: Rotated dimensions of a head.
        base: Theta.
        original: Context length in pretraining, in tokens.
        seq_length: As for ``inverse_frequencies``.

    Returns:
        The frequencies, and the multiplier of sines and cosines.
    """
    # Imported here: it takes seconds, and only scaled models need it.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = {
        **rope,
        "rope_theta": base,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": original,
    }
    config: Any = SimpleNamespace(
        rope_parameters=fields,
        standardize_rope_params=lambda: None,
        max_position_embeddings=original,
        **{"head_dim": width, "hidden_size": width, "num_attention_heads": 1},
    )
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
        config, seq_len=seq_length
    )
    return frequencies, attention_factor


def rope_softmax_scale(
    softmax_scale: float | None,
    kv_channels: int,
    scaling: RopeScaling | None,
) -> float | None:
    """Softmax scale that includes the attention factor of yarn and longrope, instead of sines and cosines.

    The factor multiplies sines and cosines of both queries and keys, so its square multiplies the scores. Dimensions
    that are not rotated must be divided by the factor, in queries and keys.

    Args:
        softmax_scale: Scale without the factor; None for 1 / sqrt(kv_channels).
        kv_channels: Head dimension.
        scaling: Has the factor; None for none.

    Returns:
        The scale; None for 1 / sqrt(kv_channels).
    """
    if scaling is None or scaling.attention_factor == 1.0:
        return softmax_scale
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(kv_channels)
    return softmax_scale * scaling.attention_factor**2


def rotary_angles(
    positions: Tensor,
    frequencies: Tensor,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Rotary angles of each dimension at each token's position, in Megatron's order.

    Args:
        positions: [b, s], integers.
        frequencies: [rotary_width / 2], or for two types of layers [2, rotary_width / 2], float32, radians per
            position.
        interleaved: Whether rotated pairs are adjacent dimensions, instead of one from each half.

    Returns:
        [s, b, 1, rotary_width], float32; for two types of layers the angles of both in turn, twice the width.
    """
    angles = positions.t()[:, :, None, None].float() * frequencies
    if interleaved:
        doubled = angles.repeat_interleave(2, dim=-1)
    else:
        doubled = torch.cat((angles, angles), dim=-1)
    return doubled.flatten(2)[:, :, None]


def query_scales(positions: Tensor, beta: float, length: int) -> Tensor:
    """Multipliers of queries for long contexts: 1 + beta * log(1 + floor(position / length)).

    Source: Llama 4 (Meta 2025), after Nakanishi 2025 (arXiv 2501.19399).

    Args:
        positions: [b, s], integers.
        beta: Coefficient of the logarithm.
        length: Tokens from one value to the next.

    Returns:
        [s, b, 1, 1], float32.
    """
    steps = torch.div(positions, length, rounding_mode="floor").float()
    scales = 1.0 + beta * torch.log1p(steps)
    return scales.t()[:, :, None, None]
