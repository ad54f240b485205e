"""What does a model of any architecture read to give logits? Taken from a call or a batch, and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.errors import DataError
from lightning_megatron.generate.encoder_decoder import check_decoder_rows
from lightning_megatron.generate.passes import NextTokens
from lightning_megatron.generate.prompt_checks import check_rows
from lightning_megatron.models.config import ModelConfig
from lightning_megatron.steps.checks import check_integers, check_numbers, check_shape
from lightning_megatron.steps.t5 import shifted_right, visible_keys

_MEGATRON_NAMES = {
    "bert": {"text": "input_ids", "padding_mask": "attention_mask", "types": "token_type_ids"},
    "gpt": {"text": "input_ids"},
    "t5": {
        "text_enc": "input_ids",
        "enc_mask": "attention_mask",
        "text_dec": "decoder_input_ids",
        "dec_mask": "decoder_attention_mask",
    },
}
"""What Megatron's samples call what Hugging Face calls otherwise, by architecture."""

_READ = {
    "bert": ("input_ids", "attention_mask", "token_type_ids", "position_ids"),
    "gpt": ("input_ids", "attention_mask", "position_ids"),
    "t5": ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"),
}


@dataclass(frozen=True, kw_only=True)
class ModelRows:
    """Some rows, by Hugging Face's names; each tensor has one row per sample."""

    input_ids: Tensor
    """[b, s]."""
    attention_mask: Tensor | None = None
    """[b, s], 1 for tokens and 0 for padding (of a GPT also numbers of segments); None for no padding."""
    token_type_ids: Tensor | None = None
    """[b, s], of a BERT; None for 0 everywhere."""
    position_ids: Tensor | None = None
    """[b, s]; None for 0, 1, 2, ..."""
    decoder_input_ids: Tensor | None = None
    """[b, s_dec], what the decoder of a T5 reads; None for other models."""
    decoder_attention_mask: Tensor | None = None
    """[b, s_dec], 0 where the decoder shall not look; None for no padding."""

    def __len__(self) -> int:
        """Rows."""
        return len(self.input_ids)

    @property
    def tensors(self) -> list[Tensor | None]:
        """All of them, in one order."""
        return list(vars(self).values())

    @property
    def length(self) -> int:
        """Tokens per row of which there are logits."""
        return (self.input_ids if self.decoder_input_ids is None else self.decoder_input_ids).shape[1]

    def each(self, change: Callable[[Tensor], Tensor]) -> ModelRows:
        """The same with each tensor changed."""
        return replace(self, **{name: change(x) for name, x in vars(self).items() if isinstance(x, Tensor)})

    def next_tokens(self) -> NextTokens:
        """As a model without a cache reads them."""
        if self.decoder_input_ids is not None:
            return NextTokens(
                tokens=self.decoder_input_ids,
                positions=None,
                mask=self.decoder_attention_mask,
                longest=self.length,
                source=self.input_ids,
                source_mask=self.attention_mask,
            )
        positions = self.position_ids
        return NextTokens(
            tokens=self.input_ids,
            positions=positions,
            mask=self.attention_mask,
            longest=self.length if positions is None else int(positions.max()) + 1,
            token_types=self.token_type_ids,
        )


def rows_of_batch(batch: Mapping[str, Tensor], model: ModelConfig) -> ModelRows:
    """What ``model`` reads of a batch; labels and the like are left where they are.

    A T5's decoder reads ``decoder_input_ids`` or, without them, the labels shifted to the right by one. Megatron's
    samples (``text``, ``text_enc``, ...) are read as in training. Rows whose ``sample_mask`` is 0 are left out.

    Raises:
        DataError: If there are no tokens.
    """
    names, read = _MEGATRON_NAMES[model.architecture], _READ[model.architecture]
    found = {names.get(key, key): tensor for key, tensor in batch.items() if names.get(key, key) in read}
    if "input_ids" not in found:
        raise DataError(f"batch keys {', '.join(sorted(batch))} have no 'input_ids', which logits are of; add them")
    if model.architecture == "gpt" and "text" in batch:
        found["input_ids"] = batch["text"][:, :-1].clamp(min=0)
    if model.architecture == "t5":
        if "decoder_input_ids" not in found:
            if "labels" not in batch:
                raise DataError(
                    f"batch keys {', '.join(sorted(batch))} have neither 'decoder_input_ids' nor 'labels', one of "
                    f"which the decoder of {model.family} reads; add one"
                )
            found["decoder_input_ids"] = shifted_right(batch["labels"].long(), model)
        found = {name: visible_keys(x) if name.endswith("mask") else x for name, x in found.items()}
    rows = ModelRows(**found)
    return rows if "sample_mask" not in batch else rows.each(lambda tensor: tensor[batch["sample_mask"] != 0])


def check_model_rows(rows: ModelRows, model: ModelConfig) -> None:
    """Refuse what the model cannot read. Reads the tensors, which should be on the host.

    Raises:
        ConfigError: With the name, the value, the rule and the fix.
    """
    mask: Any = rows.attention_mask
    if model.architecture == "gpt" and isinstance(mask, Tensor):  # numbers of segments
        mask = (mask != 0).long()
    check_rows(rows.input_ids, mask, model)
    check_decoder_rows(rows.input_ids, rows.decoder_input_ids, model)
    shape = tuple(rows.input_ids.shape)
    limits = {
        "token_type_ids": (max(model.num_tokentypes, 1), "type_vocab_size"),
        "position_ids": (_longest_table(model), "max_position_embeddings"),
    }
    for name, (limit, rule) in limits.items():
        tensor = getattr(rows, name)
        if tensor is None:
            continue
        if name not in _READ[model.architecture]:
            raise DataError(f"{name} are nothing that {model.family} reads; leave them out")
        check_shape(name, tensor, shape, "as input_ids")
        check_integers(name, tensor, "they number rows of a table")
        check_numbers(name, tensor, limit, rule)
    if rows.decoder_attention_mask is not None and rows.decoder_input_ids is not None:
        check_rows(rows.decoder_input_ids, rows.decoder_attention_mask, model, name="decoder_input_ids")


def _longest_table(model: ModelConfig) -> int | None:
    return model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else None


def on_host(value: Any) -> Any:
    """A tensor on the CPU; what is none is left for the checks."""
    return value.cpu() if isinstance(value, torch.Tensor) else value
