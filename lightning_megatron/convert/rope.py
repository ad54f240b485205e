"""Rotary position settings from Hugging Face's ``rope_parameters``, for all families that have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import RopeScaling

_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

_NEEDED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}

_KNOWN = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "short_factor",
    "long_factor",
    "low_freq_factor",
    "high_freq_factor",
    "partial_rotary_factor",
}
"""Some type of Hugging Face's reads them. A type that does not read one ignores it, and so do we."""


def read_rope(
    rope_parameters: Mapping[str, Any] | None, max_position_embeddings: int
) -> tuple[float, RopeScaling | None]:
    """Theta and the scaling of the frequencies.

    Args:
        rope_parameters: As a Hugging Face config object has them.
        max_position_embeddings: The config's.

    Raises:
        ConfigError: If a key or the type is not honoured.
    """
    # Hugging Face takes null for absent, except that a null ``truncate`` is false.
    rope = {k: v for k, v in (rope_parameters or {}).items() if v is not None or k == "truncate"}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _TYPES:
        raise ConfigError(f"rope_type={kind!r} of rope_parameters is not supported; use one of {', '.join(_TYPES)}")
    unknown = sorted(set(rope) - _KNOWN)
    if unknown:
        raise ConfigError(
            f"{unknown[0]}={rope[unknown[0]]!r} of rope_parameters is not supported; the known keys are "
            f"{', '.join(sorted(_KNOWN))}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"partial_rotary_factor={rope['partial_rotary_factor']} of rope_parameters is not supported; only whole "
            "heads are rotated, use 1.0"
        )
    base = float(rope.get("rope_theta", 10000.0))
    return base, None if kind == "default" else _scaling(kind, rope, max_position_embeddings)


def _scaling(kind: Any, rope: Mapping[str, Any], max_position_embeddings: int) -> RopeScaling:
    for name in _NEEDED.get(kind, ()):
        if name not in rope:
            raise ConfigError(f"rope_parameters of the type {kind!r} have no {name!r}; add it")
    # The config's own length is what dynamic scaling starts from, whatever else the parameters say.
    original = max_position_embeddings if kind == "dynamic" else rope.get("original_max_position_embeddings")
    original = max_position_embeddings if original is None else int(original)
    factor = float(rope.get("factor", max_position_embeddings / original))
    fields: dict[str, Any] = {}
    if kind == "llama3":
        fields = {name: float(rope[name]) for name in ("low_freq_factor", "high_freq_factor")}
    elif kind == "longrope":
        fields = {name: tuple(float(x) for x in rope[name]) for name in ("short_factor", "long_factor")}
        fields["attention_factor"] = float(rope.get("attention_factor", _longrope_attention_factor(factor, original)))
    elif kind == "yarn":
        # Hugging Face takes 0 for absent, too.
        fields = {"beta_fast": float(rope.get("beta_fast") or 32), "beta_slow": float(rope.get("beta_slow") or 1)}
        fields["truncate"] = bool(rope.get("truncate", True))
        fields["attention_factor"] = float(rope.get("attention_factor", _yarn_attention_factor(factor, rope)))
    return RopeScaling(rope_type=kind, factor=factor, original_max_position_embeddings=original, **fields)


def _longrope_attention_factor(factor: float, original: int) -> float:
    """Source: Ding et al. 2024, LongRoPE (arXiv 2402.13753), and Phi-3's code."""
    return math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0


def _yarn_attention_factor(factor: float, rope: Mapping[str, Any]) -> float:
    """Source: Peng et al. 2023, YaRN (arXiv 2309.00071), eq. 22; the two mscales are DeepSeek's."""

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope["mscale"]) / grown(rope["mscale_all_dim"])
    return grown(1.0)
