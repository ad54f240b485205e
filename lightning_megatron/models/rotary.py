"""Frequencies and angles of rotary position embeddings, with every scaling of Hugging Face; pure functions."""

from __future__ import annotations

import math

import torch

from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import RopeScaling


def inverse_frequencies(
    kv_channels: int, base: float, scaling: RopeScaling | None, seq_length: int | None = None
) -> torch.Tensor:
    """Angles per position of the pairs that turn of one head: [kv_channels / 2], float32, radians, on the CPU.

    Source: Su et al. 2021, RoFormer (arXiv 2104.09864), eq. 15.

    Args:
        kv_channels: Width of what is rotated of a head.
        base: Theta.
        scaling: How the frequencies are changed; None leaves them.
        seq_length: Tokens of the longest row, on which ``dynamic`` and ``longrope`` depend; None for no more than the
            original context. What an earlier, longer sequence does to Hugging Face's ``dynamic`` is not repeated.

    Raises:
        ConfigError: If longrope's factors do not fit the head.
    """
    if scaling is None:
        return _frequencies(kv_channels, base)
    if scaling.rope_type == "linear":
        # Source: kaiokendev 2023, Things I'm learning while training SuperHOT; Chen et al. 2023 (arXiv 2306.15595).
        return _frequencies(kv_channels, base) / scaling.factor
    if scaling.rope_type == "dynamic":
        return _frequencies(kv_channels, _stretched_base(kv_channels, base, scaling, seq_length))
    if scaling.rope_type == "yarn":
        return _yarn(kv_channels, base, scaling)
    if scaling.rope_type == "longrope":
        return _longrope(kv_channels, base, scaling, seq_length)
    return _llama3(_frequencies(kv_channels, base), scaling)


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


def _wavelengths(kv_channels: int, base: float) -> torch.Tensor:
    """Positions per radian of each pair: [kv_channels / 2], float32."""
    exponents = torch.arange(0, kv_channels, 2, dtype=torch.float32) / kv_channels
    wavelengths: torch.Tensor = base**exponents
    return wavelengths


def _frequencies(kv_channels: int, base: float) -> torch.Tensor:
    return 1.0 / _wavelengths(kv_channels, base)


def _stretched_base(kv_channels: int, base: float, scaling: RopeScaling, seq_length: int | None) -> float:
    """A greater base for a longer sequence: fast pairs stay, slow ones are stretched.

    Source: emozilla 2023, Dynamically scaled RoPE; Peng et al. 2023, YaRN (arXiv 2309.00071), eq. 18 and appendix B.1.
    """
    stretch = max(seq_length or 0, scaling.original_max_position_embeddings) / scaling.original_max_position_embeddings
    ratio = scaling.factor * stretch - (scaling.factor - 1.0)
    return float(base * ratio ** (kv_channels / (kv_channels - 2)))


def _yarn(kv_channels: int, base: float, scaling: RopeScaling) -> torch.Tensor:
    """Slow pairs divided by ``factor``, fast ones kept, those between blended along the pairs' numbers.

    Source: Peng et al. 2023, YaRN (arXiv 2309.00071), section 3.2, and its reference code, which blends by pair.
    """

    def pair_that_turns(times: float) -> float:
        """Twice the number of the pair, as a real one, that turns so often over the original context."""
        context = scaling.original_max_position_embeddings
        return kv_channels * math.log(context / (times * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, kv_channels - 1)
    # A blend over no pairs is a step.
    width = last - first if last != first else 0.001
    divided = ((torch.arange(kv_channels // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    wavelengths = _wavelengths(kv_channels, base)
    return (1.0 - divided) / wavelengths + divided / (scaling.factor * wavelengths)


def _longrope(kv_channels: int, base: float, scaling: RopeScaling, seq_length: int | None) -> torch.Tensor:
    """Each pair divided by a number of its own; other numbers beyond the original context.

    Source: Ding et al. 2024, LongRoPE (arXiv 2402.13753), eq. 3.
    """
    is_long = (seq_length or 0) > scaling.original_max_position_embeddings
    name, factors = ("long_factor", scaling.long_factor) if is_long else ("short_factor", scaling.short_factor)
    if len(factors) != kv_channels // 2:
        raise ConfigError(
            f"{name} of rope_parameters has {len(factors)} numbers; longrope needs one for each of the "
            f"{kv_channels // 2} pairs of a head"
        )
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _wavelengths(kv_channels, base))


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
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
