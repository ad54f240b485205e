"""At which frequencies do rotary position embeddings turn? Pure functions of the model description."""

from __future__ import annotations

import math

import torch

from lightning_megatron.models.config import RopeScaling


def inverse_frequencies(kv_channels: int, base: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Angles per position of the pairs of one head: [kv_channels / 2], float32, radians.

    Source: Su et al. 2021, RoFormer (arXiv 2104.09864), eq. 15.
    """
    exponents = torch.arange(0, kv_channels, 2, dtype=torch.float32) / kv_channels
    frequencies = 1.0 / (base**exponents)
    return frequencies if scaling is None else llama3_scaled(frequencies, scaling)


def angles_at(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """How far each pair of a head turns at each token's position, in Megatron's order.

    Args:
        positions: [b, s], integers.
        frequencies: [kv_channels / 2], float32, radians per position.

    Returns:
        [s, b, 1, kv_channels], float32: the pairs' first halves, then their second halves.
    """
    angles = positions.t()[:, :, None, None].float() * frequencies
    return torch.cat((angles, angles), dim=-1)


def llama3_scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow turns stretched by ``scaling.factor``, fast ones kept, those between blended.

    Source: Llama 3.1 (Grattafiori et al. 2024, arXiv 2407.21783), reference code, ``apply_scaling``.

    Args:
        frequencies: [kv_channels / 2], float32.
        scaling: The four numbers of the model's config.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)
