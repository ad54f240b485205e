"""A model's special tokens for generation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning_megatron.convert.companions import GENERATION_CONFIG_FILE
from lightning_megatron.convert.registry import HFConfigLike, config_object, read_json
from lightning_megatron.generate.options import as_tuple


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

    They are those of ``generation_config.json``, or without that file those of the config.

    Args:
        model: As for ``MegatronModule``.

    Raises:
        ConfigError: If a ``generation_config.json`` is not a JSON object.
    """
    file: Path | None = None
    if isinstance(model, (str, Path)):
        file = Path(model) / GENERATION_CONFIG_FILE
    start: int | None = None
    if file is not None and file.is_file():
        fields = read_json(file)
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
