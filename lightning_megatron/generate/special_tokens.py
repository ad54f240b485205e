"""A model's special tokens for generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_megatron.convert.companions import GENERATION_CONFIG_FILE
from lightning_megatron.convert.registry import HFConfigLike, config_object, read_json
from lightning_megatron.generate.options import as_tuple
from lightning_megatron.rank_zero import rank_zero_warn

_WITHOUT_EFFECT: dict[str, Any] = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "repetition_penalty": 1,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
}
"""Fields of ``generation_config.json`` that change what transformers' ``generate`` returns also where nothing is
sampled, and the values with which they do nothing."""


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """A model's special tokens for generation, as its own files define them."""

    eos: tuple[int, ...] = ()
    """End-of-sequence tokens."""
    pad: int | None = None
    """Padding token."""
    start: int | None = None
    """First token of a T5's decoder; None for that of the model's config."""


def special_token_ids(model: HFConfigLike) -> SpecialTokens:
    """Special tokens that Hugging Face's ``generate`` uses by default.

    They are those of ``generation_config.json``, or without that file those of the config. Warns of fields beside them
    with which Hugging Face's ``generate`` would choose other tokens.

    Args:
        model: As for ``MegatronModule``.

    Raises:
        ConfigError: If a ``generation_config.json`` is not a JSON object.
    """
    start: int | None = None
    fields = _generation_config(model)
    if fields is not None:
        _warn_of_unused(fields)
        # In Hugging Face's order of precedence (transformers 5.23, generation/utils.py, _prepare_special_tokens).
        start = fields.get("decoder_start_token_id")
        if start is None:
            start = fields.get("bos_token_id")
    else:
        config = config_object(model)
        fields = {name: getattr(config, name, None) for name in ("eos_token_id", "pad_token_id")}
    return SpecialTokens(
        eos=as_tuple(fields.get("eos_token_id")),
        pad=fields.get("pad_token_id"),
        start=start,
    )


def with_own_ends(fields: dict[str, Any], model: HFConfigLike) -> dict[str, Any]:
    """Fields of a config with the end-of-sequence tokens of the ``generation_config.json`` beside it, if there are any.

    A checkpoint holds the config alone: without them, chats of some models would not end.

    Raises:
        ConfigError: If a ``generation_config.json`` is not a JSON object.
    """
    ends = (_generation_config(model) or {}).get("eos_token_id")
    if ends is None:
        return fields
    return {**fields, "eos_token_id": ends}


def _generation_config(model: HFConfigLike) -> dict[str, Any] | None:
    """Fields of the ``generation_config.json`` of a model's directory; None without one."""
    if not isinstance(model, (str, Path)):
        return None
    file = Path(model) / GENERATION_CONFIG_FILE
    return read_json(file) if file.is_file() else None


def _warn_of_unused(fields: Mapping[str, Any]) -> None:
    unused = []
    for name, without_effect in _WITHOUT_EFFECT.items():
        value = fields.get(name)
        if value not in (None, [], {}, without_effect):
            unused.append(f"{name}={value!r:.40}")
    if unused:
        rank_zero_warn(
            f"{GENERATION_CONFIG_FILE}: expected special tokens, got also {', '.join(unused)}, which transformers uses "
            "and generate does not unless it is among its own options; give it there"
        )
