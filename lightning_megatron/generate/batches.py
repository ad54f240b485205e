"""Which rows of a batch are to be continued? Prompts by Hugging Face's names, and a T5's by Megatron's, too."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lightning_megatron.errors import ConfigError
from lightning_megatron.generate.prompts import Given
from lightning_megatron.models.config import ModelConfig

_MEGATRONS = {
    "input_ids": "text_enc",
    "attention_mask": "enc_mask",
    "decoder_input_ids": "text_dec",
    "decoder_attention_mask": "dec_mask",
}
_OF_DECODER = ("decoder_input_ids", "decoder_attention_mask")


def given_in(batch: Mapping[str, Tensor], model: ModelConfig) -> Given:
    """The prompts of ``batch``, without the rows that fill it up (``sample_mask`` is 0).

    What the decoder of a T5 is given to learn from answers the prompt: with ``labels`` in the batch it is left out,
    and without them it is what the decoder continues.

    Args:
        batch: ``input_ids`` [b, s] and, if rows are padded, ``attention_mask``; of a T5 perhaps ``decoder_input_ids``
            and ``decoder_attention_mask``, or Megatron's ``text_enc``, ``enc_mask`` ([b, s] or [b, queries, s]),
            ``text_dec`` and ``dec_mask``. Other keys say nothing about prompts.
        model: What shall continue them.

    Raises:
        ConfigError: If there are no prompts.
    """
    is_t5 = model.architecture == "t5"
    names = {name: name for name in ("input_ids", "attention_mask")}
    if is_t5:
        names = _MEGATRONS if "text_enc" in batch and "input_ids" not in batch else {x: x for x in _MEGATRONS}
        if "labels" in batch:
            names = {name: theirs for name, theirs in names.items() if name not in _OF_DECODER}
    rows = {name: batch[theirs] for name, theirs in names.items() if theirs in batch}
    if "input_ids" not in rows:
        raise ConfigError(
            f"batch keys {', '.join(sorted(batch))} have no 'input_ids'{_or_megatrons(is_t5)}, which predict "
            "continues; add them"
        )
    if "sample_mask" in batch:
        rows = {name: tensor[batch["sample_mask"] != 0] for name, tensor in rows.items()}
    return Given(**{name: _of_keys(name, tensor) for name, tensor in rows.items()})


def _of_keys(name: str, tensor: Tensor) -> Tensor:
    """Of a mask [b, queries, keys] which keys any query sees."""
    return (tensor != 0).any(dim=1).long() if name.endswith("mask") and tensor.dim() == 3 else tensor


def _or_megatrons(is_t5: bool) -> str:
    return " (or 'text_enc')" if is_t5 else ""
