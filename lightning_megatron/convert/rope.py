"""Rotary embeddings: base and frequency scaling from the ``rope_parameters`` of a Hugging Face config."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from lightning_megatron.convert.model_fields import head_dim
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import RopeScaling
from lightning_megatron.models.rotary import scaled_frequencies

_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

_KEYS = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "high_freq_factor",
    "long_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "short_factor",
    "truncate",
    "type",
}
"""Keys read by any rope type of Hugging Face. A type ignores the keys of other types, here as there."""


def read_rope(
    hf: Any,
    rope_parameters: Mapping[str, Any] | None,
    *,
    partial_rotary: bool = False,
    others: Collection[str] = (),
) -> tuple[float, RopeScaling | None]:
    """Rotary base (theta) and frequency scaling of a Hugging Face config.

    Args:
        hf: A Hugging Face config object, which has validated that the required keys of the rope type exist.
        rope_parameters: ``rope_parameters`` of the config, or of one of its layer types.
        partial_rotary: Whether Hugging Face's model of the family reads ``partial_rotary_factor``.
        others: Further keys, which the caller reads.

    Raises:
        ConfigError: If a key or the type is not supported, or the number of longrope's factors does not fit the head.
    """
    # Hugging Face treats null as absent, except that a null ``truncate`` is false.
    rope = {
        name: value
        for name, value in (rope_parameters or {}).items()
        if value is not None or name == "truncate"
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _TYPES:
        raise ConfigError(
            f"rope_type={kind!r} of rope_parameters is not supported; use one of {', '.join(_TYPES)}"
        )
    for name in sorted(set(rope) - _KEYS - set(others)):
        raise ConfigError(
            f"{name}={rope[name]!r} of rope_parameters is not supported; the known keys are {', '.join(sorted(_KEYS))}"
        )
    percent = rope.get("partial_rotary_factor", 1.0)
    if percent != 1.0 and not partial_rotary:
        raise ConfigError(
            f"partial_rotary_factor={percent} of rope_parameters is not supported; Hugging Face's model of this family "
            "rotates whole heads, use 1.0"
        )
    base = float(rope.get("rope_theta", 10000.0))
    if kind == "default":
        return base, None
    width = int(head_dim(hf) * percent)
    return base, _scaling(hf, kind, rope, width, base)


def rotated_part(rope_parameters: Mapping[str, Any] | None) -> float:
    """Part of a head that is rotated, where Hugging Face's model reads ``partial_rotary_factor``: all without it."""
    percent = (rope_parameters or {}).get("partial_rotary_factor")
    return 1.0 if percent is None else float(percent)


def latent_softmax_scale(rope_parameters: Mapping[str, Any] | None, width: int) -> float | None:
    """Multiplier of scores in DeepSeek's latent attention, where ``mscale_all_dim`` scales queries and keys.

    Peng et al. 2023, YaRN (arXiv 2309.00071), section 3.4: softer scores in longer contexts, here in all dimensions.

    Args:
        rope_parameters: ``rope_parameters`` of the config.
        width: Dimensions of a head's queries and keys.

    Returns:
        The multiplier; None for 1 / sqrt(width).
    """
    rope = rope_parameters or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    all_dimensions = rope.get("mscale_all_dim")
    if kind == "default" or not all_dimensions:
        return None
    scale: float = width**-0.5
    factor = float(rope["factor"])
    if factor <= 1:
        return scale
    of_queries = 0.1 * float(all_dimensions) * math.log(factor) + 1.0
    return scale * of_queries**2


def _scaling(
    hf: Any,
    kind: Any,
    rope: Mapping[str, Any],
    width: int,
    base: float,
) -> RopeScaling:
    # Dynamic scaling starts from max_position_embeddings and ignores original_max_position_embeddings.
    longest = hf.max_position_embeddings
    original = longest
    if kind != "dynamic":
        original = int(rope.get("original_max_position_embeddings", longest))
    factor = float(rope.get("factor", longest / original))
    fields: dict[str, Any] = {}
    if kind == "llama3":
        fields = {name: float(rope[name]) for name in ("low_freq_factor", "high_freq_factor")}
    elif kind == "longrope":
        short = tuple(map(float, rope["short_factor"]))
        long = tuple(map(float, rope["long_factor"]))
        fields = {"short_factor": short, "long_factor": long}
        if len(short) != width // 2 or len(long) != width // 2:
            raise ConfigError(
                f"short_factor and long_factor of rope_parameters: expected {width // 2} values, one for each pair "
                f"of a head, got {len(short)} and {len(long)}; correct them"
            )
    elif kind == "yarn":
        # Hugging Face treats 0 as absent, too.
        fields = {
            "beta_fast": float(rope.get("beta_fast") or 32),
            "beta_slow": float(rope.get("beta_slow") or 1),
            "truncate": bool(rope.get("truncate", True)),
        }
    parameters = {**rope, **fields, "rope_type": kind, "factor": factor}
    _, attention_factor = scaled_frequencies(parameters, width, base, original)
    return RopeScaling(
        rope_type=kind,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=float(attention_factor),
        **fields,
    )
