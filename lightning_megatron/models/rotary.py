"""Frequencies and angles of rotary position embeddings, with the scalings of Hugging Face; pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch

from lightning_megatron.models.config import RopeScaling


def inverse_frequencies(
    width: int, base: float, scaling: RopeScaling | None, seq_length: int | None = None
) -> torch.Tensor:
    """Angles per position of the pairs that turn of one head: [width / 2], float32, radians, on the CPU.

    Source: Su et al. 2021, RoFormer (arXiv 2104.09864), eq. 15.

    Args:
        width: Numbers of a head that are rotated.
        base: Theta.
        scaling: How the frequencies are changed; None leaves them.
        seq_length: Tokens of the longest row, on which ``dynamic`` and ``longrope`` depend; None for no more than the
            original context. What an earlier, longer sequence does to Hugging Face's ``dynamic`` is not repeated.
    """
    if scaling is None:
        wavelengths: torch.Tensor = base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        return 1.0 / wavelengths
    return scaled_frequencies(asdict(scaling), width, base, scaling.original_max_position_embeddings, seq_length)[0]


def scaled_frequencies(
    rope: Mapping[str, Any], width: int, base: float, original: int, seq_length: int | None = None
) -> tuple[torch.Tensor, float]:
    """Frequencies, as ``inverse_frequencies``, and what sines and cosines are multiplied by, by transformers.

    Args:
        rope: ``rope_parameters`` of a config, with a factor.
        width: Numbers of a head that are rotated.
        base: Theta.
        original: Context of the first training, in tokens.
        seq_length: As there.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # takes long, and only scaled models need it

    fields = {**rope, "rope_theta": base, "partial_rotary_factor": 1.0, "original_max_position_embeddings": original}
    config: Any = SimpleNamespace(
        rope_parameters=fields,
        standardize_rope_params=lambda: None,
        max_position_embeddings=original,
        **{"head_dim": width, "hidden_size": width, "num_attention_heads": 1},
    )
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=seq_length)
    return frequencies, attention_factor


def rope_softmax_scale(softmax_scale: float | None, kv_channels: int, scaling: RopeScaling | None) -> float | None:
    """What scores are multiplied by so that sines and cosines need not be: yarn's and longrope's attention factor.

    The factor stands before the sines and cosines of queries and keys alike, so its square stands before the scores.

    Args:
        softmax_scale: Without the factor; None for 1 / sqrt(kv_channels).
        kv_channels: Width of a head; what is not rotated must be divided by the factor, in queries and keys alike.
        scaling: Where the factor is; None for none.

    Returns:
        The scale; None for 1 / sqrt(kv_channels).
    """
    if scaling is None or scaling.attention_factor == 1.0:
        return softmax_scale
    return (1.0 / math.sqrt(kv_channels) if softmax_scale is None else softmax_scale) * scaling.attention_factor**2


def angles_at(positions: torch.Tensor, frequencies: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """How far each pair of a head turns at each token's position, in Megatron's order.

    Args:
        positions: [b, s], integers.
        frequencies: [rotary_width / 2], or for each of two kinds of layers [2, rotary_width / 2], float32, radians per
            position.
        interleaved: Whether neighbours are pairs.

    Returns:
        [s, b, 1, (2 *) rotary_width], float32: the pairs' first halves, then their second halves, or pair by pair;
        those of the second kind of layers behind the others.
    """
    angles = positions.t()[:, :, None, None].float() * frequencies
    turned = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
    return turned.flatten(2)[:, :, None]
