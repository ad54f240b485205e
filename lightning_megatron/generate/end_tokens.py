"""Which tokens start, end and pad a model's texts? Its ``generation_config.json`` says so, else its config."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_megatron.convert.companions import GENERATION_CONFIG_FILE
from lightning_megatron.convert.registry import HFConfigLike, config_object
from lightning_megatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EndTokens:
    """What a model's own files say about the ends of a text."""

    eos: tuple[int, ...] = ()
    """Tokens that end it."""
    pad: int | None = None
    """What fills rows that ended before others."""
    start: int | None = None
    """What a decoder apart from an encoder reads first; None if only the model's config says so."""


def end_tokens(model: HFConfigLike) -> EndTokens:
    """Those that Hugging Face's ``generate`` takes where a call names none.

    Args:
        model: As for ``MegatronModule``.

    Raises:
        ConfigError: If a ``generation_config.json`` is no JSON object.
    """
    file = Path(model) / GENERATION_CONFIG_FILE if isinstance(model, (str, Path)) else None
    if file is not None and file.is_file():
        fields = _read(file)
        # In Hugging Face's order of precedence (transformers 5.23, generation/utils.py, _prepare_special_tokens).
        start = fields.get("decoder_start_token_id")
        start = fields.get("bos_token_id") if start is None else start
        return replace(_end_tokens(fields.get("eos_token_id"), fields.get("pad_token_id")), start=start)
    config = config_object(model)
    return _end_tokens(getattr(config, "eos_token_id", None), getattr(config, "pad_token_id", None))


def _end_tokens(eos: int | list[int] | None, pad: int | None) -> EndTokens:
    return EndTokens(eos=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos), pad=pad)


def _read(file: Path) -> dict[str, Any]:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}); correct the file") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{file} holds a {type(fields).__name__}, not an object; correct the file")
    return fields
